"""What pods ask for on an instance: sizes that a recipe leaves out, the nodes that fit, devices of the fabric. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dropforge.placement.catalogue import ANY, Instance, Needs, Room, missing, pod_room, size
from dropforge.recipe import Compute

FOLLOWING: Final = ("gpus", "gpu_memory_gb", "processes_per_node", "cpus", "memory_gb", "fabric")
"""Keys of a recipe's `compute` that follow from its `instance`."""
TYPE: Final = "node.kubernetes.io/instance-type"
ARCH: Final = "kubernetes.io/arch"
ZONE: Final = "topology.kubernetes.io/zone"
GIB: Final = 2**30 / 1e9
"""Gigabytes in a GiB: recipes count in the one, catalogues in the other."""
EFA: Final = "vpc.amazonaws.com/efa"
GPU_TAINT: Final = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
"""What pods bear that may run on nodes with GPUs."""
_NAMED: Final = 3  # of those that have room
_JOB: Final = "training.kubeflow.org/job-name"
#: Labels of AWS for what nodes have in common of the network, the nearest first, and how much each is worth.
_NEAR: Final = tuple(
    (f"topology.k8s.aws/network-node-layer-{layer}", weight) for layer, weight in ((3, 100), (2, 50), (1, 25))
)


def sized(compute: Mapping[str, Any], on: Instance) -> dict[str, Any]:
    """A recipe's `compute` with the sizes that it leaves out: those of a pod that has the instance for itself.

    One that asks for fewer GPUs gets their share of cores and memory. A GPU's memory is read as gigabytes, which is a
    little less than it has. A price of the catalogue comes to that of a GPU, or without GPUs of a core.
    """
    asked = compute.get("gpus", on.gpus)
    gpus = asked if isinstance(asked, int) else on.gpus  # what is no number is refused with the recipe's other values
    room = share(on, gpus)
    found: dict[str, Any] = {"cpus": room.cpus, "memory_gb": _tenths(room.memory_gib * GIB)}
    if gpus:
        found |= {"gpus": gpus, "processes_per_node": gpus}
    if gpus and on.gpus:
        found["gpu_memory_gb"] = on.gpu_memory_gib
        if isinstance(nodes := compute.get("nodes", 1), int) and nodes > 1:
            found["fabric"] = on.fabric if _device(on) else "tcp"
    if on.price_hour:
        each = {"gpu_hour": on.price_hour / on.gpus} if on.gpus else {"core_hour": on.price_hour / room.cpus}
        found["price"] = {**each, "currency": on.currency}
    return {**found, **compute}


def share(of: Instance, gpus: int) -> Room:
    """Cores and memory of a pod with so many of an instance's GPUs."""
    room = pod_room(of)
    if not 0 < gpus < of.gpus:
        return room
    return Room(cpus=_tenths(room.cpus * gpus / of.gpus), memory_gib=_tenths(room.memory_gib * gpus / of.gpus))


def ahead(compute: Compute) -> tuple[float, float]:
    """Cores and memory of the pod that tokenises: it has no GPU, and one GPU's share fits on the training's nodes."""
    part = compute.gpus if compute.instance and compute.gpus else 1
    return compute.cpus / part, compute.memory_gb / part


def labels(on: Instance) -> dict[str, str]:
    """Labels of its nodes; nobody knows what machines of any cloud are called."""
    return {**({} if on.cloud == ANY else {TYPE: on.name}), ARCH: on.arch}


def placed(on: Instance, *, job: str, nodes: int, gpus: int, fabric: str | None = None) -> dict[str, Any]:
    """Arguments of the job's builder that bring its pods to such nodes, and if there are several, near to each other.

    :param job: its name. :param gpus: of a pod. :param fabric: `tcp` does without its devices.
    """
    found: dict[str, Any] = {"node_selector": labels(on)}
    if on.gpus:
        found["tolerations"] = [GPU_TAINT]
    if nodes > 1:
        found["spread"] = "one_per_node"
        found["affinity"] = {"podAffinity": _near(on, job)}
        if fabric != "tcp" and (resources := devices(on, gpus)):
            found["resources"] = resources
    return found


def devices(on: Instance, gpus: int) -> dict[str, str]:
    """What a pod asks for to reach others over the fabric; nothing without GPUs, as gloo knows TCP alone.

    No huge pages: libfabric does without (`FI_EFA_USE_HUGE_PAGE`), and a node that has none set aside would be none.
    """
    name, count = _device(on), _adapters(on, gpus)
    return {name: str(count)} if name and count else {}


def rated_gbps(on: Instance, gpus: int) -> float:
    """Rated speed in Gbit/s of the adapters that a pod with so many GPUs gets; that of the machine if it gets none."""
    count = _adapters(on, gpus)
    return on.network_gbps * count / on.adapters if count else on.network_gbps


def _adapters(on: Instance, gpus: int) -> int:
    return max(1, on.adapters * gpus // on.gpus) if gpus and on.gpus and on.adapters else 0


def _device(on: Instance) -> str:
    return on.device or (EFA if on.fabric == "efa" else "")


def told(compute: Compute, among: Mapping[str, Instance]) -> str:
    """For people: where the pods go, or which instances have room for them."""
    if compute.instance is None:
        needs = Needs(
            gpus=compute.gpus,
            gpu_memory_gib=(compute.gpu_memory_gb or 0) / GIB,
            cpus=compute.cpus,
            memory_gib=compute.memory_gb / GIB,
        )
        real = (one for one in among.values() if one.cloud != ANY)
        fit = sorted((one for one in real if not missing(needs, one)), key=size)
        more = f" and {len(fit) - _NAMED} larger ones" if len(fit) > _NAMED else ""
        names = ", ".join(one.name for one in fit[:_NAMED])
        return f"{names}{more} have room for a pod" if fit else "none of the catalogue has room for such a pod"
    on = among[compute.instance]
    gpus = (
        f" ({on.gpus} x {on.gpu} {on.gpu_memory_gib:g} GiB{f', {on.gpu_link}' if on.gpu_link else ''})"
        if on.gpus
        else ""
    )
    if compute.nodes == 1:
        return f"{on.name}{gpus}"
    asked = devices(on, compute.gpus) if compute.fabric != "tcp" else {}
    reach = next((f"{count} {name} each" for name, count in asked.items()), "TCP")
    if on.gpus and on.fabric == "infiniband" and not _device(on):
        reach = f"TCP: no `device` in the catalogue says how pods ask for its {on.adapters} InfiniBand adapters"
    return f"{on.name}{gpus}, one pod on each, that reach each other over {reach}"


def _near(on: Instance, job: str) -> dict[str, Any]:
    """In one zone: EFA ends there, and other networks are slow and paid beyond it.

    It is required only where every node has that label, as a pod whose nodes lack it would wait for ever.
    """

    def term(key: str) -> dict[str, Any]:
        return {"labelSelector": {"matchLabels": {_JOB: job}}, "topologyKey": key}

    wishes = list(_NEAR) if on.cloud == "aws" else []
    required = on.fabric == "efa"
    if not required:
        wishes.append((ZONE, 100))
    found: dict[str, Any] = {}
    if required:
        found["requiredDuringSchedulingIgnoredDuringExecution"] = [term(ZONE)]
    if wishes:
        found["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": weight, "podAffinityTerm": term(key)} for key, weight in wishes
        ]
    return found


def _tenths(value: float) -> float:
    return int(value * 10) / 10
