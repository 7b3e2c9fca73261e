"""What became of a row, and why: read from a dataset version's ledger and quarantine."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from curation.formats import sniff
from curation.increments import last_drop, step_drop
from curation.places import bounds, has_lines
from curation.plan import fetch
from curation.reasons import MENDS, mend
from dropforge.dataset import SPLITS, Manifest
from dropforge.drop import Drop
from dropforge.errors import DataError
from dropforge.json_objects import UNREADABLE, parse_object
from dropforge.store import MissingObjectError, Store
from dropforge.text import counted, has_surrogates

_KEY_DIGITS: Final = 32
_MOST: Final = 50
#: A place has no more than 64 bits.
_PLACE: Final = re.compile(r"(.+)([@:])\s*([0-9](?:,?[0-9]){0,17})\s*", re.DOTALL)
#: Ends of rows that go for the sake of another.
_FOR_ANOTHER: Final = frozenset({"duplicate", "near_duplicate", "label_conflict"})
#: Ends of rows that could be used and were wanted.
_ENDS: Final = frozenset({"train", "eval", "duplicate", "near_duplicate"})


@dataclass(frozen=True)
class Fate:
    """A row's one end.

    :param position: of its first byte, or its number in a Parquet file. :param line: that it was asked for by.
    :param key: of its content, if it has one.
    :param kept: the row that it went for, if it went for another. :param kept_end: that one's end, which is no side if
        it went later itself: over a cap, or because it ties both sides.
    :param shared: shingles that both have, of those that `either` has. :param copies: how many rows went for it.
    :param detail: what was found, of a row that was not kept. :param head: its first bytes, as text.
    """

    file: str
    position: int
    end: str
    key: str = ""
    kept: tuple[str, int] | None = None
    kept_end: str = ""
    shared: int | None = None
    either: int | None = None
    copies: int = 0
    detail: str = ""
    head: str = ""
    line: int | None = None

    @property
    def why(self) -> str:
        """In a sentence."""
        if self.end in {"train", "eval"}:
            side = "is trained on" if self.end == "train" else "is evaluated with, and never trained on"
            copies = f" Removed as copies of it: {counted(self.copies, 'row')}." if self.copies else ""
            return f"It {side}.{copies}"
        stayed = f"{self.kept[0]}@{self.kept[1]}" if self.kept else "another row"
        if self.kept_end and self.kept_end not in SPLITS and self.end in _FOR_ANOTHER:
            said = {"duplicate": "says the same", "near_duplicate": "says nearly the same"}.get(
                self.end, "asks the same"
            )
            return f"It {said} as {stayed}, which went itself: {self.kept_end}. {mend(self.kept_end)}."
        if self.end == "duplicate":
            return f"It says the same as {stayed}, or as a row that went for it; that one stayed."
        if self.end == "near_duplicate":
            share = (
                f", with {self.shared:,} of {self.either:,} shingles the same" if self.shared and self.either else ""
            )
            return f"It says nearly the same as {stayed}, which stayed{share}."
        if self.end == "label_conflict":
            other = f"{stayed}, which stayed" if self.kept else "others"
            return f"It asks the same as {other}, and answers otherwise. {mend(self.end)}."
        kind = "It cannot be used" if self.end in set(MENDS) else "A rule of the recipe took it out"
        return f"{kind}: {self.detail or self.end}. {mend(self.end)}."


def explain(store: Store, manifest: Manifest, row: str, prefix: str | None = None) -> list[Fate]:
    """The ends of a row, or of all rows with the same content.

    :param row: `FILE:LINE`, as the card has it, `FILE@POSITION`, as ledger and quarantine have it, or a content key (32
        hexadecimal digits). In a version of several drops FILE is looked for in all of them, or is the object key of
        one.
    :param prefix: where the files of a version of one drop lie, if that is known: a line is looked for in them.
    :raises DataError: if there is no such row, or it is not named so.
    """
    named = named_row(row)
    file = "" if isinstance(named, bytes) else named.file
    parts = _parts(store, manifest, prefix)
    fates: list[Fate] = []
    with tempfile.TemporaryDirectory(prefix="explain-") as folder:
        ledgers = _Ledgers(store, Path(folder))
        for part in parts:
            if isinstance(named, bytes):
                wanted = pc.field("key") == named
            elif part.prefix and part.local(file) not in part.inputs:
                continue
            else:
                places = ledgers.places(part, named)
                wanted = (pc.field("file") == part.local(file)) & pc.field("position").isin(places)
            found = ledgers.rows(part, wanted).slice(0, _MOST).to_pylist()
            line = None if isinstance(named, bytes) else named.line
            told = [replace(_fate(entry, part), line=line) for entry in found]
            fates += _with_details(told, store, part) if any(fate.end not in _ENDS for fate in told) else told
        if not fates:
            raise _unknown(manifest, row, file)
        return [_with_kept(_with_copies(fate, ledgers, parts), ledgers, parts) for fate in fates[:_MOST]]


class Place(NamedTuple):
    """A row's file, and its place there: one of both. :param line: from 1, of a text file."""

    file: str
    position: int | None
    line: int | None


def named_row(row: str) -> bytes | Place:
    """What a person names a row by: its content key, or its file and the place in it, of no more than 64 bits.

    :raises DataError: if the text is neither.
    """
    if len(row) == _KEY_DIGITS and set(row.lower()) <= set("0123456789abcdef"):
        return bytes.fromhex(row)
    if (match := _PLACE.fullmatch(row)) is None or has_surrogates(row):
        raise DataError(f"row {row!r}", "this names no row", "Give FILE:LINE, FILE@POSITION or a content key")
    file, mark, digits = match.groups()
    number = int(digits.replace(",", ""))
    if mark == "@":
        return Place(file.strip(), number, None)
    if not number:
        raise DataError(f"row {row!r}", "lines are counted from 1", "Give another line")
    return Place(file.strip(), None, number)


@dataclass(frozen=True)
class _Part:
    """A drop of a version.

    :param files: object keys of its ledger and quarantine. :param drop: its files, if it is known where they lie.
    :param prefix: in a version of several drops, that of the object keys of its files, `inputs`, which are then named
        by them. :param encoding: `data.encoding` of the recipe.
    """

    files: Mapping[str, str]
    drop: Callable[[], Drop] | None
    prefix: str = ""
    inputs: frozenset[str] = frozenset()
    encoding: str = "utf-8"

    def local(self, file: str) -> str:
        """A file's name in the ledger."""
        return file.removeprefix(self.prefix)

    def named(self, file: str) -> str:
        """A file of the ledger as it is told; those of other drops have their object keys there already."""
        return self.prefix + file if file in self.inputs else file


def _parts(store: Store, manifest: Manifest, prefix: str | None) -> list[_Part]:
    encoding = manifest.rules.get("encoding", "utf-8")
    if not manifest.steps:
        drop = None if prefix is None else partial(last_drop, manifest, prefix)
        return [_Part(manifest.files, drop, encoding=encoding)]
    return [
        _Part(one.files, partial(step_drop, store, manifest.family, one), one.prefix, frozenset(one.inputs), encoding)
        for one in manifest.steps
    ]


@contextmanager
def _readable(what: str, part: _Part) -> Iterator[None]:
    """:raises DataError: naming a ledger or quarantine that is torn, or of another shape."""
    try:
        yield
    except MissingObjectError:
        raise
    except (*UNREADABLE, pa.ArrowException) as error:
        cause = f"it cannot be read ({error!r})"
        raise DataError(f"{what} {part.files.get(what)}", cause, "Curate the drop again") from error


@dataclass(frozen=True)
class _Ledgers:
    """Ledgers on this machine, fetched once."""

    store: Store
    folder: Path

    def of(self, part: _Part) -> Path:
        path = self.folder / hashlib.sha256(part.files["ledger"].encode()).hexdigest()
        if not path.is_file():
            self.store.download(part.files["ledger"], path)
        return path

    def rows(self, part: _Part, wanted: pc.Expression, columns: list[str] | None = None) -> pa.Table:
        """Rows of a drop's ledger. :raises DataError: if it cannot be read."""
        with _readable("ledger", part):
            return pq.read_table(self.of(part), columns=columns, filters=wanted)

    def places(self, part: _Part, named: Place) -> list[int]:
        """Where a row may begin that is named so. :raises DataError: if its line cannot be found."""
        if named.line is None:
            return [] if named.position is None else [named.position]
        file = part.local(named.file)
        thing = f"row '{named.file}:{named.line}'"
        if part.drop is None:
            cause = "a dataset version does not say where its drop's files are, and lines are counted in them"
            raise DataError(thing, cause, "Name it by its run instead of the digest, or as FILE@POSITION")
        drop = part.drop()
        found = [each for each in drop.files if each.key == file]
        if not found:
            return []
        (path,) = fetch(self.store, drop, found, self.folder, lambda *_: None)
        format = sniff(path, file, part.encoding)
        if not has_lines(format):
            raise DataError(thing, "the file has no lines", "Name the row by its number, from 0: FILE@NUMBER")
        if (found_line := bounds(path, format, named.line)) is None:
            raise DataError(thing, "the file has fewer lines", "Count them from 1")
        begin, end = found_line
        within = (pc.field("file") == file) & (pc.field("position") < end)
        if format.kind == "jsonl":  # no row goes over several lines
            within &= pc.field("position") >= begin
        last = pc.max(self.rows(part, within, ["position"])["position"]).as_py()
        if last is None:
            raise DataError(thing, "there is no row", "A blank line and names of columns are none")
        return [last]


def _fate(entry: dict[str, Any], part: _Part) -> Fate:
    kept = entry["duplicate_of_file"]
    return Fate(
        part.named(entry["file"]),
        entry["position"],
        entry["end"],
        entry["key"].hex() if entry["key"] else "",
        (part.named(kept), entry["duplicate_of_position"]) if kept is not None else None,
        shared=entry["shared"],
        either=entry["either"],
    )


def _with_kept(fate: Fate, ledgers: _Ledgers, parts: Sequence[_Part]) -> Fate:
    """What became of the row that it went for; a copy of one that went for no other is looked for by its content."""
    if fate.end not in _FOR_ANOTHER or (fate.kept is None and not (fate.end == "duplicate" and fate.key)):
        return fate
    for part in parts:
        if fate.kept is None:
            wanted = (pc.field("key") == bytes.fromhex(fate.key)) & (pc.field("end") != "duplicate")
        elif part.inputs and part.local(fate.kept[0]) not in part.inputs:
            continue
        else:
            wanted = (pc.field("file") == part.local(fate.kept[0])) & (pc.field("position") == fate.kept[1])
        for entry in ledgers.rows(part, wanted).slice(0, 1).to_pylist():
            return replace(fate, kept=(part.named(entry["file"]), entry["position"]), kept_end=entry["end"])
    return fate


def _with_copies(fate: Fate, ledgers: _Ledgers, parts: Sequence[_Part]) -> Fate:
    if fate.end not in {"train", "eval"}:
        return fate
    copies = 0
    for part in parts:
        here = pc.field("duplicate_of_file") == part.local(fate.file)
        of = here & (pc.field("duplicate_of_position") == fate.position)
        copies += ledgers.rows(part, of, ["end"]).num_rows
    return Fate(**{**fate.__dict__, "copies": copies})


def _with_details(fates: Sequence[Fate], store: Store, part: _Part) -> list[Fate]:
    """What quarantine says of the rows that are in it."""
    places = {(fate.file, fate.position): fate for fate in fates}
    with _readable("quarantine", part), store.open(part.files["quarantine"]) as stream:
        for line in stream:
            entry = parse_object(line, "row")
            place = part.named(entry["file"]), entry["position"]
            if place in places:
                more = {"detail": entry["detail"], "head": entry["head"]}
                places[place] = Fate(**{**places[place].__dict__, **more})
    return list(places.values())


def _unknown(manifest: Manifest, row: str, file: str) -> DataError:
    names = [key for step in manifest.steps for key in step.keys] or [str(item["key"]) for item in manifest.inputs]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    cause = f"dataset {manifest.digest[:12]} has no such row"
    if file and file not in names and not any(file in step.inputs for step in manifest.steps):
        cause += f", and no file {file!r}: it was made of {shown}"
    return DataError(f"row {row!r}", cause, "Name it by its line, or as card and quarantine do")
