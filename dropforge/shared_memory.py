"""What a training puts into a pod's /dev/shm, and whether there is room. Pure.

Pods have half of their memory there, as a part of it (`kubeflow_training.jobs.spec`). No rows go through it: each rank
reads and packs its own in its own process, without loader workers, and gloo opens no file there. What is left:

- NCCL, between GPUs of a pod that do not reach each other directly: for each peer and channel one segment of its
  protocols' buffers, of which the largest alone is NCCL_BUFFSIZE, 4 MiB (`shmRecvSetup` in
  https://github.com/NVIDIA/nccl/blob/master/src/transport/shm.cc). Where the driver allocates host memory for it, none.
- `train.fast_checkpoints`, if its folder is there: `keep` and the one that is being written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dropforge.errors import RecipeError

if TYPE_CHECKING:
    from dropforge.recipe import Recipe  # heavy, and the trainer's commands need none to be told of

RANK: Final = 64 << 20
"""Bytes that NCCL may take for one rank: several peers' and channels' segments."""
_FOLDER: Final = "/dev/shm"  # noqa: S108 - the mount, not a temporary file


def least_bytes(recipe: Recipe, checkpoint: int | None) -> dict[str, int]:
    """What the fullest pod's /dev/shm holds at the least, by what it is for.

    :param checkpoint: bytes of a whole one; None if nobody knows.
    """
    compute, fast = recipe.compute, recipe.train.fast_checkpoints
    found = {}
    if compute.gpus and compute.processes_per_node > 1:
        found[f"NCCL of {compute.processes_per_node} ranks"] = RANK * compute.processes_per_node
    if fast is not None and checkpoint and f"{fast.folder.rstrip('/')}/".startswith(f"{_FOLDER}/"):
        # Nodes may share one among them, or one node hold it all: one of them has at least its part.
        found[f"{fast.keep + 1} checkpoints"] = (fast.keep + 1) * checkpoint // compute.nodes
    return found


def check_shared_memory(recipe: Recipe, checkpoint: int | None) -> None:
    """:raises RecipeError: if the pods' /dev/shm is clearly too small, before a job fails by a bus error."""
    compute = recipe.compute
    parts = least_bytes(recipe, checkpoint)
    own = any(volume.path.rstrip("/") == _FOLDER for volume in compute.volumes)
    room, least = int(compute.memory_gb * 1e9 / 2), sum(parts.values())
    if compute.backend == "local" or own or least <= room:
        return
    told = ", ".join(f"{what} {size / 1e9:.3g} GB" for what, size in parts.items())
    mend = f"Set it to {-(-2 * least // 10**9)} or more"
    if any("checkpoints" in what for what in parts):
        mend += ", or have `train.fast_checkpoints.folder` on a disk of the nodes"
    raise RecipeError(
        "recipe key `compute.memory_gb`",
        f"half of a pod's {compute.memory_gb:g} GB is its /dev/shm, which has to hold {told}",
        mend,
    )
