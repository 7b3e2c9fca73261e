"""A family's own evaluation set: a dataset version outside its drops, on which candidate and champion are measured as
well.

Whoever uploads a drop chooses its evaluation rows with it; these rows only the owner of the family chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dropforge import layout
from dropforge.dataset import SPLITS, Manifest, read_manifest
from dropforge.errors import DataError
from dropforge.store import MissingObjectError, Store

PREFIX: Final = "holdout/"  # of the names of its figures


def holdout_of(recipe: Mapping[str, Any]) -> str | None:
    """The dataset version that a resolved recipe names, in the form `FAMILY/DIGEST`; runs of before name none."""
    named = (recipe.get("evaluate") or {}).get("holdout")
    return None if named is None else str(named)


def named_as(metric: str) -> str:
    """The name of a figure on these rows. :param metric: its name on the drop's own rows, as `eval/loss`."""
    return PREFIX + metric.removeprefix("eval/")


def find_holdout(store: Store, named: str) -> Manifest:
    """The manifest of the dataset version. :raises DataError: if it is not there, or another one."""
    family, _, digest = named.partition("/")
    thing = f"recipe key `evaluate.holdout`, dataset version {named}"
    mend = (
        "Name one of the bucket as FAMILY/DIGEST, with all 64 digits: `dropforge curate` makes one, and shows its name"
    )
    try:
        manifest = read_manifest(store, layout.manifest_key(family, digest))
    except MissingObjectError:
        raise DataError(thing, "it is not there", mend) from None
    if (manifest.family, manifest.digest) != (family, digest):
        raise DataError(thing, f"its manifest is that of {manifest.family}/{manifest.digest[:12]}", mend)
    if not sum(manifest.rows(split) for split in SPLITS):
        raise DataError(thing, "it holds no rows", mend)
    return manifest
