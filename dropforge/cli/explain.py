"""`dropforge explain`: what became of a row of a drop, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from dropforge import layout
from dropforge.cli.connect import StateOption, connect
from dropforge.dataset import Manifest
from dropforge.errors import DataError, DropforgeError
from dropforge.run import RunSpec
from dropforge.store import Store, open_store
from dropforge.terminal import Console, Text

console = Console(soft_wrap=True)


def explain(
    dataset: Annotated[str, typer.Argument(help="A run, or FAMILY/DIGEST; the digest's first digits do.")],
    row: Annotated[str, typer.Argument(help="FILE@POSITION, as the card names it, or a content key.")],
    store: Annotated[str | None, typer.Option(help="Where datasets lie.", show_default="the stack's bucket")] = None,
    state: StateOption = None,
) -> None:
    """Say what became of a row of the data, and why."""
    try:
        from curation.explain import explain as ends_of
    except ImportError:
        raise DropforgeError("explain", "curation is not installed", "Install `dropforge[curation]`") from None
    place = connect(state).store if store is None else open_store(store)
    manifest = find(place, dataset)
    for fate in ends_of(place, manifest, row):
        console.print(Text.assemble((f"{fate.file}@{fate.position}", "bold"), f"  {fate.end}"))
        console.print(Text(fate.why))
        if fate.key:
            console.print(Text(f"content key {fate.key}", "dim"))
        if fate.head:
            console.print(Text(fate.head, "dim"))


def find(store: Store, dataset: str) -> Manifest:
    """The dataset version of a run, or of a family by its digest.

    :raises DataError: if there is none, or several begin so.
    """
    family, slash, digest = dataset.partition("/")
    if not slash:
        if not dataset or store.stat(layout.run_key(dataset)) is None:
            mend = "List runs with `dropforge runs`, or give FAMILY/DIGEST as on the card"
            raise DataError(f"run {dataset!r}", "there is no such run", mend)
        spec = RunSpec.read(store, layout.run_key(dataset))
        return Manifest.from_json(store.get(layout.manifest_key(spec.family, spec.dataset_digest)))
    prefix = f"datasets/{family}/{digest}"
    keys = [item.key for item in store.list(f"datasets/{family}/") if item.key.startswith(prefix)]
    found = [key for key in keys if layout.is_manifest(key)]
    if len(found) != 1:
        cause = "there is none that begins so" if not found else f"{len(found)} begin so"
        raise DataError(f"dataset {dataset!r}", cause, "Give the digest as on the card")
    return Manifest.from_json(store.get(found[0]))
