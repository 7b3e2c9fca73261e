"""Which network NCCL has taken, read from its debug lines; pure.

NCCL says it nowhere else: a fabric whose plugin cannot be loaded ends, without a word above INFO, in sockets.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from trainer.preflight.verdict import Kind

DEBUG: Final = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
_NETWORK: Final = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.M)
_PROVIDER: Final = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w;:.-]+?)(?=[,\s(]|$)", re.M)
_NO_PLUGIN: Final = re.compile(
    r"NET/Plugin.{0,40}?(?:No plugin found|Could not find|Failed to find|Failed to open)", re.I
)


def network(log: str) -> str | None:
    """As `Socket`, `IB` or `AWS Libfabric (efa)`; None if the log does not say."""
    found = _NETWORK.search(log)
    if found is None:
        return None
    provider = _PROVIDER.search(log)
    name = found[1]
    return f"{name} ({provider[1]})" if provider is not None and "libfabric" in name.lower() else name


def carried(log: str, cuda: bool, nodes: int) -> str:
    """What carried the collectives, for people."""
    if not cuda:
        return "gloo"
    within = "NCCL within the node"
    return (network(log) or within) if nodes > 1 else within


_RIGHT: Final[dict[str, Callable[[str], bool]]] = {
    "efa": lambda name: "libfabric" in name.lower() and "(efa" in name,
    "infiniband": lambda name: name.upper().startswith("IB"),
    "tcp": lambda name: name == "Socket",
}


def wrong(fabric: str, log: str, devices: bool) -> tuple[Kind, str] | None:
    """Whose fault it is that another network than the recipe's is in use, and the sentence; None if it is that one.

    :param devices: whether this node shows RDMA devices to the pod.
    """
    right, name = _RIGHT.get(fabric), network(log)
    if right is None or (name is not None and right(name)):
        return None
    said = "does not say which network it took" if name is None else f"took {name}"
    thing = f"NCCL {said}, and `compute.fabric` is {fabric}"
    if fabric == "tcp":
        return "recipe", f"{thing}. Remove NCCL_NET from `compute.network_env`, or name the fabric that is there"
    if not devices:
        mend = "Have pods ask for the devices (vpc.amazonaws.com/efa)" if fabric == "efa" else "Give pods the devices"
        return "recipe", f"{thing}: the pod has no /dev/infiniband. {mend}, or set `compute.fabric: tcp`"
    if fabric == "efa" and _NO_PLUGIN.search(log) and "NET/OFI" not in log:
        return "recipe", f"{thing}: the image has no aws-ofi-nccl. Take one that has, or set `compute.fabric: tcp`"
    return "node", f"{thing}, though the pod has its devices. Look at the node's driver, and `python -m trainer doctor`"
