"""`dropforge explain`: what became of a row of a drop, and why."""

from __future__ import annotations

import re
from typing import Annotated, Final

import typer

from dropforge import layout
from dropforge.cli.connect import StateOption
from dropforge.cli.named import RUN_HELP
from dropforge.client.connection import connect
from dropforge.client.named import find_name
from dropforge.dataset import Manifest, read_manifest
from dropforge.errors import DataError, DropforgeError
from dropforge.run import RunSpec
from dropforge.store import Store, open_store
from dropforge.terminal import Console, Text

_DIGEST: Final = re.compile(r"[0-9a-f]{4,64}")
console = Console(soft_wrap=True)


def explain(
    dataset: Annotated[
        str, typer.Argument(help=f"{RUN_HELP} Or a dataset: FAMILY/DIGEST; its first digits are enough.")
    ],
    row: Annotated[str, typer.Argument(help="FILE:LINE, FILE@POSITION of the ledger, or a content key.")],
    store: Annotated[str | None, typer.Option(help="Where datasets are.", show_default="the stack's bucket")] = None,
    state: StateOption = None,
) -> None:
    """Show what happened to a row of the data, and why."""
    try:
        from curation.explain import explain as ends_of
    except ImportError:
        raise DropforgeError("explain", "curation is not installed", "Install `dropforge[curation]`") from None
    if store is None:
        connection = connect(state)
        place = connection.store
        manifest, prefix = _of_digest(place, dataset), None
        if manifest is None:
            manifest, prefix = _of_run(place, find_name(connection, dataset))
    else:
        place = open_store(store)
        manifest, prefix = find(place, dataset)
    for fate in ends_of(place, manifest, row, prefix):
        line = "" if fate.line is None else f" (line {fate.line:,})"
        console.print(Text.assemble((f"{fate.file}@{fate.position}", "bold"), f"{line}  {fate.end}"))
        console.print(Text(fate.why))
        if fate.key:
            console.print(Text(f"content key {fate.key}", "dim"))
        if fate.head:
            console.print(Text(fate.head, "dim"))


def find(store: Store, dataset: str) -> tuple[Manifest, str | None]:
    """The dataset version of a run, by the run's own name, and where its drop lies; or of a family by the first digits
    of its digest.

    :raises DataError: if there is none, or several begin so.
    """
    found = _of_digest(store, dataset)
    return _of_run(store, dataset) if found is None else (found, None)


def _of_digest(store: Store, dataset: str) -> Manifest | None:
    """The one dataset version of a family whose digest begins so; None if no digest is written, or none begins so.

    :raises DataError: if several begin so.
    """
    family, _, digest = dataset.partition("/")
    if not _DIGEST.fullmatch(digest):
        return None
    prefix = f"datasets/{family}/{digest}"
    keys = [item.key for item in store.list(f"datasets/{family}/") if item.key.startswith(prefix)]
    found = [key for key in keys if layout.is_manifest(key)]
    if len(found) > 1:
        raise DataError(f"dataset {dataset!r}", f"{len(found)} begin so", "Give the digest as on the card")
    return read_manifest(store, found[0]) if found else None


def _of_run(store: Store, run: str) -> tuple[Manifest, str | None]:
    """The dataset version that a run reads, and where its drop lies. :raises DataError: if there is no such run."""
    if not layout.is_run(run) or store.stat(layout.run_key(run)) is None:
        mend = "List runs with `dropforge runs`, or give FAMILY/DIGEST as on the card"
        raise DataError(f"run {run!r}", "there is no such run", mend)
    spec = RunSpec.read(store, layout.run_key(run))
    manifest = read_manifest(store, layout.manifest_key(spec.family, spec.dataset_digest))
    return manifest, spec.drop.get("prefix")
