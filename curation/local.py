"""Curation outside Airflow: of a file or folder on this machine, or of a drop as it lies in the bucket."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from curation.gate import Check, checks
from curation.notes import NoUsableRowError
from curation.pipeline import Progress, curate
from curation.sample import Told, whole_seconds
from dropforge import layout
from dropforge.dataset import Manifest
from dropforge.drop import Drop, DropFile, identity
from dropforge.errors import DataError
from dropforge.folder_files import files_of
from dropforge.recipe import Recipe
from dropforge.store import FolderStore, Store

#: Rules of the gate that say nothing about a sample, unless it is all rows.
_OF_ALL_ROWS = frozenset({"enough rows", "enough words", "both splits have rows"})
#: Those of them that need more than the rows: where each file's are, and an earlier version.
_OF_THE_WHOLE = frozenset({"every file gives rows", "little drift"})


class Layered(FolderStore):
    """A folder that takes what is written; what it does not hold is read from other stores.

    :param under: (prefix, store): keys that begin so are read there, without the prefix; the first one that fits.
    """

    def __init__(self, root: Path, under: Sequence[tuple[str, Store]]) -> None:
        super().__init__(root)
        self.under = tuple(under)

    def open(self, key: str, etag: str | None = None, version: str | None = None) -> BinaryIO:
        if not self._path(key).is_file():
            for prefix, store in self.under:
                if key.startswith(prefix):
                    return store.open(key.removeprefix(prefix), etag, version)
        return super().open(key, etag, version)


def folder_of(data: Path) -> Path:
    """The folder whose store holds the files of `local_drop`: the data's own, or where the one file is."""
    return data if data.is_dir() else data.parent


def check_out(data: Path, out: Path) -> None:
    """Refuse a folder for dataset versions that lies among the data: what is written there would be read next time.

    :raises DataError: then. A hidden folder may lie there, as its files are not read.
    """
    root, place = data.resolve(), out.resolve()
    if not data.is_dir() or not place.is_relative_to(root):
        return
    if not any(part.startswith(".") for part in place.relative_to(root).parts):
        raise DataError(
            f"option --out {out}",
            f"it is within {data}, whose files are read",
            "Give a folder outside, or a hidden one",
        )


def local_drop(
    data: Path,
    family: str,
    name: str = "local",
    on_skip: Callable[[Path, str], None] = lambda _path, _why: None,
) -> Drop:
    """A folder's files, or one file, as a drop; their keys are relative to `folder_of`.

    :param on_skip: as of `files_below`. :raises DataError: if there are none.
    """
    if not data.exists():
        raise DataError(
            f"path {data}", "it is not there", "Give a JSONL, CSV, Parquet or text file, or a folder of them"
        )
    infos = map(FolderStore(folder_of(data)).stat, files_of(data, on_skip))
    found = [info for info in infos if info is not None and info.key != layout.SUCCESS]
    files = tuple(DropFile(key=i.key, size=i.size, content=f"etag:{i.etag}", etag=i.etag) for i in found)
    drop = Drop(family=family, drop=name, id=identity(files), bucket="", files=files)
    if not drop.data_files:
        raise DataError(f"path {data}", "it holds no data file", "Give a JSONL, CSV, Parquet or text file, or a folder")
    layout.drop_prefix(family, name)
    return drop


@dataclass(frozen=True)
class Look:
    """What a sample of a drop became.

    :param card: the facts. :param page: the card as HTML. :param checks: the gate's rules that hold for a sample too.
    :param seconds: how long the whole would take here, at least and at most. :param refusal: why no row can be used.
    """

    card: dict[str, Any]
    page: bytes
    checks: tuple[Check, ...]
    seconds: tuple[float, float]
    refusal: NoUsableRowError | None


def look(
    under: Sequence[tuple[str, Store]],
    drop: Drop,
    recipe: Recipe,
    rows: int,
    *,
    progress: Progress,
    say: Callable[[str], None] | None = None,
) -> Look:
    """Curate about so many rows, chosen over all files, and publish nothing.

    :param under: where the drop and the evaluation sets lie, see `Layered`.
    :raises DropforgeError: as `curate`.
    """
    began: dict[str, float] = {}

    def watched(stage: str, done: int, total: int, read: int) -> None:
        began.setdefault(stage, time.monotonic())
        progress(stage, done, total, read)

    with tempfile.TemporaryDirectory(prefix="curation-") as work:
        store = Layered(Path(work) / "bucket", under)
        refusal: NoUsableRowError | None = None
        try:
            manifest = curate(store, drop, recipe, workdir=Path(work), progress=watched, say=say, sample=rows)
        except NoUsableRowError as error:
            if error.manifest is None:
                raise
            manifest, refusal = error.manifest, error
        card, page = card_of(store, manifest), store.get(manifest.files["card_html"])
    ends = [*list(began.values())[1:], time.monotonic()]
    stages = {name: end - start for (name, start), end in zip(began.items(), ends, strict=True)}
    told = Told(**card["sample"])
    rules = tuple(rule for rule in checks(manifest, recipe) if _holds(rule, told, recipe))
    return Look(card, page, rules, whole_seconds(told, stages), refusal)


def _holds(rule: Check, told: Told, recipe: Recipe) -> bool:
    """Whether a rule is about a sample too. Earlier drops of a family, which may add rows, are not looked at."""
    if rule.name in _OF_THE_WHOLE:
        return False
    if rule.name not in _OF_ALL_ROWS:
        return True
    too_few = rule.name == "enough rows" and told.seen < recipe.curation.min_rows
    return recipe.curation.scope == "drop" and (told.whole or too_few)


def card_of(store: Store, manifest: Manifest) -> dict[str, Any]:
    """The facts of a dataset version's card."""
    card: dict[str, Any] = json.loads(store.get(manifest.files["card_json"]))
    return card
