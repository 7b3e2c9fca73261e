"""What ranks are told about their network: a few variables, each with its reason, and the floor that a preflight holds.

Pure, and of the standard library alone. NCCL, gloo and libfabric find most by themselves, so a variable is here only if
leaving it out is known to cost something; `LEFT_ALONE` tells of those that other systems set. What a recipe sets itself
(`compute.network_env`) wins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final, Literal

Fabric = Literal["tcp", "efa", "infiniband"]
Link = Literal["pcie", "nvlink"]
PREFLIGHT: Final = "DROPFORGE_PREFLIGHT"
"""The variable that tells the ranks what to hold in the preflight; without it there is none."""
_SHARE: Final = 0.1  # of an RDMA network's rated speed; that of sockets is a burst's, and of several interfaces


@dataclass(frozen=True)
class Variable:
    """One variable of the environment, and in one line why it is set, or why not."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Network:
    """What is known of the places where the ranks will run.

    :param gpus: of a pod; without any, ranks speak over gloo. :param fabric: between nodes; None if nobody has said.
    :param link: between the GPUs of a node. :param gbps: rated speed of a pod's adapters in Gbit/s, 0 if unknown.
    """

    nodes: int
    gpus: int
    fabric: Fabric | None = None
    link: Link | None = None
    gbps: float = 0

    @property
    def name(self) -> str:
        """The fabric that the ranks' collectives wait for."""
        if not self.gpus:
            return "gloo"
        return (self.fabric or "unknown") if self.nodes > 1 else (self.link or "unknown")


@dataclass(frozen=True)
class Preflight:
    """What ranks must show before anything is fetched.

    :param fabric: as `Network.name`. :param gb_per_second: least bus bandwidth of an all-reduce; 0 takes any.
    :param milliseconds: most that a small all-reduce may take; 0 takes any. :param seconds: most for all of it.
    """

    fabric: str
    gb_per_second: float
    milliseconds: float
    seconds: float

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Preflight:
        """:raises ValueError: if the text is no preflight."""
        try:
            values = json.loads(text)
            return cls(
                str(values["fabric"]),
                float(values["gb_per_second"]),
                float(values["milliseconds"]),
                float(values["seconds"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{PREFLIGHT} is no preflight ({error!r})") from error


_WARN: Final = Variable("NCCL_DEBUG", "WARN", "NCCL's warnings go to the log; INFO is hundreds of lines per rank")
HUGE_PAGES: Final = "FI_EFA_USE_HUGE_PAGE"
_HUGE: Final = Variable(
    HUGE_PAGES,
    "0",
    "with huge pages, processes that ranks start fail with `Cannot allocate memory`; pods ask for none",
)
_SOCKET: Final = Variable(
    "NCCL_NET", "Socket", "no rank takes an RDMA device that only some of the nodes have: they would never connect"
)

LEFT_ALONE: Final = (
    Variable("FI_PROVIDER", "efa", "aws-ofi-nccl chooses by itself since 1.6; the preflight looks whether it did"),
    Variable(
        "NCCL_PROTO", "simple", "only for aws-ofi-nccl up to 1.5; later versions tune it, and this would undo that"
    ),
    Variable("FI_EFA_USE_DEVICE_RDMA", "1", "only for libfabric before 1.18; later ones know what the device can do"),
    Variable("FI_EFA_FORK_SAFE", "1", "only for kernels before 5.15"),
    Variable("FI_EFA_ENABLE_SHM_TRANSFER", "1", "has no effect: it is the default"),
    Variable("FI_EFA_SET_CUDA_SYNC_MEMOPS", "0", "only for old EFA installers with a newer NCCL"),
    Variable("RDMAV_FORK_SAFE", "1", "never: it breaks EFA's memory registration"),
    Variable("NCCL_NETWORK_TIMEOUT", "", "no version of NCCL reads it"),
    Variable("NCCL_SOCKET_IFNAME", "^lo", "NCCL leaves lo and docker out by itself; a wrong name ends every run"),
    Variable("GLOO_SOCKET_IFNAME", "eth0", "gloo takes the interface of the pod's own name, whatever it is called"),
    Variable("NCCL_IB_HCA", "mlx5", "NCCL takes all ports that are up; set it where a storage network is among them"),
    Variable("NCCL_IB_GID_INDEX", "3", "for RoCE alone, and since NCCL 2.21 chosen there by itself"),
    Variable("NCCL_NET_GDR_LEVEL", "PHB", "follows from the machine's topology, which NCCL reads"),
    Variable(
        "NCCL_SHM_USE_CUDA_MEMCPY", "1", "said to help GPUs that share PCIe; not measured here, so try it yourself"
    ),
    Variable("NCCL_P2P_DISABLE", "1", "hides a broken link at a great cost; the preflight names it instead"),
    Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "the default of torch is the better one"),
    Variable("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "adds a check to every collective"),
)
"""What other systems set, with their value, and why it is not set here."""

NO_HUGE_PAGES: Final = ("0", "false", "no", "off")
"""Values of `HUGE_PAGES` that a recipe may set: its pods have no such pages."""
USELESS: Final = ("FI_EFA_ENABLE_SHM_TRANSFER", "NCCL_NETWORK_TIMEOUT")
"""Variables that a recipe may not set because they do nothing."""


def variables(network: Network) -> tuple[Variable, ...]:
    """What the pods' environment says about such a network, each with its reason."""
    if not network.gpus:
        return ()  # gloo needs to be told nothing
    if network.nodes == 1:
        return (_WARN,)
    return (_WARN, *{"efa": (_HUGE,), "tcp": (_SOCKET,)}.get(network.fabric or "", ()))


def environment(network: Network, own: Mapping[str, str]) -> dict[str, str]:
    """The variables as the pods get them. :param own: the recipe's, which win."""
    return {**{one.name: one.value for one in variables(network)}, **own}


_BETWEEN: Final[Mapping[str, tuple[float, float]]] = {
    "tcp": (0.1, 20.0),
    "efa": (1.0, 10.0),
    "infiniband": (2.0, 5.0),
    "unknown": (0.05, 50.0),
}
_WITHIN: Final[Mapping[str, tuple[float, float]]] = {"nvlink": (20.0, 5.0), "pcie": (1.0, 5.0), "unknown": (0.5, 10.0)}


def preflight(
    network: Network, *, floor: float | None = None, latency: float | None = None, seconds: float = 60
) -> Preflight:
    """What the ranks on such a network must show: little enough that a sound one always does, and a broken one never.

    :param floor: gigabytes a second that are asked for instead. :param latency: milliseconds, the same.
    """
    name = network.name
    if name == "gloo":
        least, most = 0.0, 0.0  # a CPU that is busy says nothing about the network
    elif network.nodes > 1:
        least, most = _BETWEEN[name]
        if network.gbps and name in ("efa", "infiniband"):
            least = network.gbps / 8 * _SHARE
    else:
        least, most = _WITHIN[name]
    return Preflight(
        name, round(least if floor is None else floor, 3), most if latency is None else latency, float(seconds)
    )
