"""What became of a row, and why: read from a dataset version's ledger and quarantine."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow.compute as pc
import pyarrow.parquet as pq

from curation.reasons import MENDS, mend
from dropforge.dataset import Manifest
from dropforge.errors import DataError
from dropforge.store import Store

_KEY_DIGITS: Final = 32
_MOST: Final = 50
#: Ends of rows that could be used and were wanted.
_ENDS: Final = frozenset({"train", "eval", "duplicate", "near_duplicate"})


@dataclass(frozen=True)
class Fate:
    """A row's one end.

    :param position: of its first byte, or its number in a Parquet file. :param key: of its content, if it has one.
    :param kept: the row that stayed for it, if it went for another. :param shared: shingles that both have, of those
        that `either` has. :param copies: how many rows went for it.
    :param detail: what was found, of a row that was not kept. :param head: its first bytes, as text.
    """

    file: str
    position: int
    end: str
    key: str = ""
    kept: tuple[str, int] | None = None
    shared: int | None = None
    either: int | None = None
    copies: int = 0
    detail: str = ""
    head: str = ""

    @property
    def why(self) -> str:
        """In a sentence."""
        if self.end in {"train", "eval"}:
            side = "is trained on" if self.end == "train" else "is evaluated with, and never trained on"
            return f"It {side}." + (f" {self.copies:,} other rows went for its sake." if self.copies else "")
        stayed = f"{self.kept[0]}@{self.kept[1]}" if self.kept else "another row"
        if self.end == "duplicate":
            return f"It says the same as {stayed}, or as a row that went for it; that one stayed."
        if self.end == "near_duplicate":
            share = (
                f", with {self.shared:,} of {self.either:,} shingles the same" if self.shared and self.either else ""
            )
            return f"It says nearly the same as {stayed}, which stayed{share}."
        kind = "It cannot be used" if self.end in set(MENDS) else "A rule of the recipe took it out"
        return f"{kind}: {self.detail or self.end}. {mend(self.end)}."


def explain(store: Store, manifest: Manifest, row: str) -> list[Fate]:
    """The ends of a row, or of all rows with the same content.

    :param row: `FILE@POSITION`, as card, ledger and quarantine have it, or a content key (32 hexadecimal digits).
    :raises DataError: if there is no such row, or it is not named so.
    """
    file, at, position = row.rpartition("@")
    by_key = not at and len(row) == _KEY_DIGITS and set(row.lower()) <= set("0123456789abcdef")
    if not by_key and not (file and position.replace(",", "").strip().isdigit()):
        raise DataError(f"row {row!r}", "this names no row", "Give FILE@POSITION as on the card, or a content key")
    with tempfile.TemporaryDirectory(prefix="explain-") as folder:
        ledger = Path(folder) / "ledger.parquet"
        store.download(manifest.files["ledger"], ledger)
        wanted = (
            pc.field("key") == bytes.fromhex(row)
            if by_key
            else (pc.field("position") == int(position.replace(",", ""))) & (pc.field("file") == file.strip())
        )
        found = pq.read_table(ledger, filters=wanted).slice(0, _MOST).to_pylist()
        if not found:
            raise _unknown(manifest, row, file.strip())
        fates = [_fate(entry) for entry in found]
        fates = [_with_copies(fate, ledger) for fate in fates]
    return _with_details(fates, store, manifest) if any(fate.end not in _ENDS for fate in fates) else fates


def _fate(entry: dict[str, Any]) -> Fate:
    kept = entry["duplicate_of_file"]
    return Fate(
        entry["file"],
        entry["position"],
        entry["end"],
        entry["key"].hex() if entry["key"] else "",
        (kept, entry["duplicate_of_position"]) if kept is not None else None,
        entry["shared"],
        entry["either"],
    )


def _with_copies(fate: Fate, ledger: Path) -> Fate:
    if fate.end not in {"train", "eval"}:
        return fate
    of = (pc.field("duplicate_of_position") == fate.position) & (pc.field("duplicate_of_file") == fate.file)
    return Fate(**{**fate.__dict__, "copies": pq.read_table(ledger, columns=["end"], filters=of).num_rows})


def _with_details(fates: Sequence[Fate], store: Store, manifest: Manifest) -> list[Fate]:
    """What quarantine says of the rows that are in it."""
    places = {(fate.file, fate.position): fate for fate in fates}
    with store.open(manifest.files["quarantine"]) as stream:
        for line in stream:
            entry = json.loads(line)
            place = entry["file"], entry["position"]
            if place in places:
                more = {"detail": entry["detail"], "head": entry["head"]}
                places[place] = Fate(**{**places[place].__dict__, **more})
    return list(places.values())


def _unknown(manifest: Manifest, row: str, file: str) -> DataError:
    names = [str(item["key"]) for item in manifest.inputs]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    cause = f"dataset {manifest.digest[:12]} has no such row"
    if file and file not in names:
        cause += f", and no file {file!r}: it was made of {shown}"
    return DataError(f"row {row!r}", cause, "Name it by the byte at which its line begins, as card and quarantine do")
