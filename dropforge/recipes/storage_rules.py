"""What a recipe would do with its volumes against what they stand on: refused before any pod waits for them."""

from __future__ import annotations

from dropforge.errors import RecipeError
from dropforge.placement.storages import STORAGES
from dropforge.recipe import Recipe
from dropforge.volumes import nearest

_SHARED = ", ".join(f"`{one.kind}`" for one in STORAGES.values() if one.shared)


def check_storage(recipe: Recipe) -> None:
    """:raises RecipeError: for the first volume that the gang cannot use as asked."""
    compute, train = recipe.compute, recipe.train
    for volume in compute.volumes:
        if volume.storage == "disk" and compute.nodes > 1:
            raise RecipeError(
                "recipe key `compute.volumes`",
                f"{volume.claim} is a disk of one node (ReadWriteOnce), and {compute.nodes} nodes would mount it",
                f"Claim a filesystem that nodes share ({_SHARED}) or each node's own disk (`node`), or use one node",
            )
    _check_claims(recipe)
    held = nearest(train.checkpoints, compute.volumes) if train.checkpoints else None
    if held is not None and held.storage == "node":
        raise RecipeError(
            "recipe key `train.checkpoints`",
            f"{held.claim} is each node's own disk: the next attempt may be on another node, which has none of them",
            f"Leave it out, which keeps them in S3, or name a folder of a shared filesystem ({_SHARED}); "
            "`train.fast_checkpoints` is for disks of nodes",
        )
    cache = nearest(compute.data_cache, compute.volumes) if compute.data_cache else None
    if cache is not None and cache.storage == "virtiofs" and compute.backend == "kubernetes":
        raise RecipeError(
            "recipe key `compute.data_cache`",
            f"{cache.claim} is virtiofs, whose locks may hold within a node only: another could remove what is read",
            "Name a folder of each node's own disk (`storage: node`), or put the model there and name it in `base`",
        )


def _check_claims(recipe: Recipe) -> None:
    """A claim that is mounted twice stands on one thing."""
    known: dict[str, str] = {}
    for volume in recipe.compute.volumes:
        if volume.storage is None:
            continue
        if known.setdefault(volume.claim, volume.storage) != volume.storage:
            raise RecipeError(
                "recipe key `compute.volumes`",
                f"{volume.claim} is said to be `{known[volume.claim]}` and `{volume.storage}`",
                "Say the same of it in each place",
            )
