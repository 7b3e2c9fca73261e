"""What a recipe asks for against the instance that it names: what cannot be had there is refused with its mend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dropforge.errors import DropforgeError, RecipeError
from dropforge.placement import catalogue
from dropforge.placement.catalogue import Instance, pod_room
from dropforge.placement.pods import FOLLOWING, GIB, labels, sized
from dropforge.recipe import Compute
from dropforge.text import counted

KEY = "recipe key `compute.instance`"
#: Keys of GPUs, which a recipe without any has no use for.
_OF_GPUS: Final = ("gpu_memory_gb", "gpu_tflops", "idle", "fabric")
#: Keys of pods, of which the local cluster has none.
_OF_PODS: Final = (
    "instance",
    "node_selector",
    "tolerations",
    "annotations",
    "image_pull_secrets",
    "priority_class",
    "ephemeral_storage_gb",
    "shared_memory_gb",
)
_LEAST: Final = 0.1  # of a node's cores and memory, for a pod that has all its GPUs: nobody else could use the rest


def fill_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's plain values with the sizes of its pods, where it names an instance.

    :raises RecipeError: if the catalogue has none of that name, or cannot be read.
    """
    compute = values.get("compute")
    name = compute.get("instance") if isinstance(compute, Mapping) else None
    if not isinstance(name, str) or not isinstance(compute, Mapping):
        return dict(values)
    return {**values, "compute": sized(compute, instance_of(name))}


def without_sizes(under: Mapping[str, Any], over: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Of merged values: where `over` names another instance, the sizes of `under` were not meant for it."""
    above, below, merged = (values.get("compute") for values in (over, under, result))
    if not isinstance(above, Mapping) or not isinstance(merged, dict):
        return result
    name, before = above.get("instance"), below.get("instance") if isinstance(below, Mapping) else None
    if name is None or name == before:
        return result
    return {**result, "compute": {key: item for key, item in merged.items() if key not in FOLLOWING or key in above}}


def without_gpus(under: Mapping[str, Any], over: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Of merged values: where `over` changes `gpus`, what `under` says of ranks and GPUs was meant for other ones."""
    above, below, merged = (values.get("compute") for values in (over, under, result))
    if not isinstance(above, Mapping) or not isinstance(merged, dict) or not isinstance(gpus := above.get("gpus"), int):
        return result
    before = below.get("gpus", 0) if isinstance(below, Mapping) else 0
    if gpus == before:
        return result
    compute = {key: item for key, item in merged.items() if gpus or key not in _OF_GPUS or key in above}
    ranks = below.get("processes_per_node", 1) if isinstance(below, Mapping) else 1
    if "processes_per_node" not in above and ranks == (before or 1):  # it followed from the GPUs below
        compute["processes_per_node"] = gpus or 1
    return {**result, "compute": compute}


def instance_of(name: str) -> Instance:
    """The instance that a recipe names. :raises RecipeError: with the nearest, if there is none."""
    try:
        return catalogue.find(name, catalogue.read())
    except DropforgeError as error:
        raise RecipeError(KEY, f"{error.thing}: {error.cause}", error.mend) from error


def check_place(compute: Compute) -> None:
    """:raises RecipeError: if no node of the instance could take such a pod, or the gang is laid out badly on it."""
    key = next((key for key in _OF_PODS if getattr(compute, key)), None)
    if compute.backend == "local" and key is not None:
        raise RecipeError(
            f"recipe key `compute.{key}`",
            "the local backend runs on this machine alone",
            "Remove it, or use `backend: kubernetes`",
        )
    if compute.instance is None:
        return
    on = instance_of(compute.instance)
    _check_gpus(compute, on)
    _check_topology(compute, on)
    if compute.fabric not in (None, "tcp", on.fabric):
        raise RecipeError(
            "recipe key `compute.fabric`",
            f"{on.name} has {on.fabric}, not {compute.fabric}",
            "Leave it out: `compute.instance` says it",
        )
    room = pod_room(on)
    for key, asked, most, unit in (
        ("cpus", compute.cpus, room.cpus, "cores"),
        ("memory_gb", compute.memory_gb, room.memory_gib * GIB, "GB"),
    ):
        if asked > most:
            raise RecipeError(
                f"recipe key `compute.{key}`",
                f"{on.name} leaves a pod {most:.1f} {unit}, not {asked:g}",
                "Leave it out, which asks for all of that, or name a larger instance",
            )
        if on.gpus and compute.gpus == on.gpus and asked < most * _LEAST:
            raise RecipeError(
                f"recipe key `compute.{key}`",
                f"with all GPUs of {on.name} a pod has {asked:g} of {most:.1f} {unit}, and the GPUs would wait for it",
                "Leave out `cpus`, `memory_gb` and `processes_per_node`: `compute.instance` says them",
            )
    if compute.ephemeral_storage_gb is not None:
        check_disk(on, "recipe key `compute.ephemeral_storage_gb`", compute.ephemeral_storage_gb, "Ask for less")
    for label, value in labels(on).items():
        if (compute.node_selector or {}).get(label, value) != value:
            raise RecipeError(
                "recipe key `compute.node_selector`",
                f"no {on.name} has the label {label}={compute.node_selector[label]}",  # type: ignore[index]
                f"Remove it: `compute.instance` says {value}",
            )


def check_disk(on: Instance, thing: str, gigabytes: float, mend: str) -> None:
    """Whether a pod's disk fits on the instance's own disks, where it has some.

    :raises RecipeError: naming `thing` and `mend`, and the file in which nodes with other disks are named.
    """
    if on.nvme_gb and gigabytes > on.nvme_gb:
        raise RecipeError(
            thing,
            f"{on.name} has disks of {on.nvme_gb} GB, not {gigabytes:g} GB",
            f"{mend}, or name a larger instance; if your nodes of it have another disk, say its GB as `nvme_gb` in the "
            f"file of {catalogue.VARIABLE}",
        )


def _check_topology(compute: Compute, on: Instance) -> None:
    """Kueue fills a node before it takes another; a gang on an instance has its pods on nodes of their own."""
    room = pod_room(on)
    half = compute.gpus * 2 <= on.gpus if on.gpus else compute.cpus * 2 <= room.cpus
    if compute.topology and compute.nodes > 1 and half and compute.memory_gb * 2 <= room.memory_gib * GIB:
        raise RecipeError(
            "recipe key `compute.topology`",
            f"two pods would fit on one {on.name}, and Kueue would put them there, where they may not be together",
            "Ask for whole instances, or remove it",
        )


def _check_gpus(compute: Compute, on: Instance) -> None:
    if on.gpus and not compute.gpus:
        raise RecipeError(
            KEY,
            f"{on.name} has {on.gpus} {on.gpu}, and `compute.gpus` is 0: they would be paid for nothing",
            "Remove `compute.gpus`, or name an instance without GPUs",
        )
    if compute.gpus > on.gpus:
        raise RecipeError(
            "recipe key `compute.gpus`",
            f"{on.name} has {on.gpus or 'none'}, not {compute.gpus}",
            "Ask for fewer in more `compute.nodes`, or name another instance: `dropforge instances --gpus "
            f"{compute.gpus}` lists them",
        )
    if compute.gpu_memory_gb is not None and compute.gpu_memory_gb > on.gpu_memory_gib * GIB:
        raise RecipeError(
            "recipe key `compute.gpu_memory_gb`",
            f"each {on.gpu} of {on.name} has {on.gpu_memory_gib:g} GiB, not {compute.gpu_memory_gb:g} GB",
            "Leave it out, or name an instance with larger GPUs",
        )
    if compute.nodes > 1 and compute.gpus and compute.nodes * compute.gpus <= on.gpus:
        raise RecipeError(
            "recipe keys `compute.nodes` and `compute.gpus`",
            f"{compute.nodes} pods of {counted(compute.gpus, 'GPU')} are no more than one {on.name} has, and GPUs of "
            "one pod reach each other faster: four such pods took 2.4 to 3.4 times as long over EFA, and 4.9 over TCP",
            f"Use `nodes: 1` with `gpus: {compute.nodes * compute.gpus}`",
        )
