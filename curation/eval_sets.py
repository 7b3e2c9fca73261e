"""Evaluation sets whose items must not be trained on: their files, their texts, and what was found of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from curation import shapes
from curation.canonical import Row, canonical
from curation.decontaminate import FOUND, LEAST_WORDS, VERSION, VERSION_WITH_C4, Decontamination, Index, build
from curation.dialect import Quotes
from curation.encodings import Fallback
from curation.extras import EVERY
from curation.formats import sniff
from curation.readers import read
from curation.reasons import RejectError
from curation.records import Blank, Fault, Split
from curation.stage import Refusal, put_through
from curation.stages import make_stages
from curation.streams import STEP, Limits
from curation.task import Rules
from dropforge.errors import DataError, DropforgeError
from dropforge.recipe_data import Decontaminate
from dropforge.store import Store, written_by_others

_HEAD: Final = 200
#: One item in so many is more than a few.
_FEW: Final = 20
#: Items are held in memory.
_MOST_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class Item:
    """A row of an evaluation set. :param number: over all sets, from 0. :param position: its place in the file."""

    number: int
    set: str
    position: int
    texts: tuple[str, ...]


@dataclass(frozen=True)
class EvalSets:
    """What is looked for, and what it is called.

    :param path: where workers find the index. :param looks: what sets look like that are read as text, by their names.
    """

    items: tuple[Item, ...]
    index: Index
    path: Path
    looks: Mapping[str, str]

    def warnings(self) -> list[str]:
        """A line for each set that looks like something else, or has many items of which no text can be looked for."""
        lines = [f"evaluation set {name}: {what.replace('learned', 'read', 1)}" for name, what in self.looks.items()]
        for name, own in self.summary({}).items():
            if own["not_sought"] * _FEW >= own["items"]:
                items = f"{own['not_sought']:,} of {own['items']:,} items have no text of {LEAST_WORDS} words or more"
                lines.append(f"evaluation set {name}: {items} that can be looked for")
        return lines

    def summary(self, counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """By set: items, those of which no text can be looked for, those that were found, and rows of the drop that
        held one. :param counts: the stage's."""
        told: dict[str, dict[str, int]] = {}
        sought = {int(item) for item, total in zip(self.index.item, self.index.total, strict=True) if total}
        for item in self.items:
            own = told.setdefault(item.set, {"items": 0, "not_sought": 0, "found": 0, "rows": 0})
            rows = counts.get(f"{FOUND}{item.number}", 0)
            own["items"] += 1
            own["not_sought"] += item.number not in sought
            own["found"] += rows > 0
            own["rows"] += rows
        return told

    def report(self, counts: Mapping[str, int], path: Path) -> list[dict[str, Any]]:
        """Write each item with the rows that held it as a JSON line. Returns those that were found, most rows first."""
        sought = {int(item) for item, total in zip(self.index.item, self.index.total, strict=True) if total}
        found = []
        with path.open("w", encoding="utf-8") as target:
            for item in self.items:
                rows = counts.get(f"{FOUND}{item.number}", 0)
                text = max(item.texts, key=len, default="")[:_HEAD]
                line = {"item": item.number + 1, "set": item.set, "position": item.position}
                line |= {"sought": item.number in sought, "rows": rows, "text": text}
                target.write(json.dumps(line, ensure_ascii=False) + "\n")
                found += [line] if rows else []
        return sorted(found, key=lambda line: (-line["rows"], line["item"]))


def prepare(store: Store, asked: Decontaminate, rules: Rules, folder: Path, limits: Limits) -> tuple[Rules, EvalSets]:
    """Fetch the sets, make their index, and say in the rules what is looked for.

    :raises DataError: if a set is not there, or a row of it cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: _fetch(store, name, key, folder) for name, key in sorted(asked.sets.items())}
    own = Decontamination(
        tuple((name, path.name) for name, path in paths.items()),
        asked.words,
        round(asked.threshold * 1_000_000),
        version=VERSION_WITH_C4 if rules.quality is not None and rules.quality.c4 is not None else VERSION,
    )
    items: list[Item] = []
    looks: dict[str, str] = {}
    for name, path in paths.items():
        split = Split(path, sniff(path, asked.sets[name], _encoding(rules)))
        items += _items(name, asked.sets[name], split, len(items), rules, limits)
        if split.format.looks is not None:
            looks[name] = split.format.looks
    # What is masked and mended in rows is so in items too, or they would not be the same.
    items = _as_rows(items, replace(rules, language=None, quality=None))
    texts = [(text, item.number) for item in items for text in item.texts]
    index = build([text for text, _ in texts], [number for _, number in texts], own)
    path = folder / f"{hashlib.sha256(repr((own, rules)).encode()).hexdigest()[:32]}.npz"
    index.save(path)
    return replace(rules, decontamination=own), EvalSets(tuple(items), index, path, looks)


def _fetch(store: Store, name: str, key: str, folder: Path) -> Path:
    """Copy a set's file; the copy is called by its SHA-256."""
    state, size = hashlib.sha256(), 0
    temporary = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.part"
    try:
        with written_by_others(f"evaluation set {name!r} ({key})"):
            opened = store.open(key)
        with opened as source, temporary.open("wb") as target:
            while piece := source.read(STEP):
                size += len(piece)
                if size > _MOST_BYTES:
                    cause = f"it has more than {_MOST_BYTES >> 20} MiB"
                    raise DataError(f"evaluation set {name!r} ({key})", cause, "Split it into several sets")
                state.update(piece)
                target.write(piece)
    except DataError:
        raise
    except DropforgeError as error:
        mend = "Put its file there, or change `curation.decontaminate.sets`"
        raise DataError(f"evaluation set {name!r} ({key})", error.cause, mend) from error
    return temporary.replace(folder / state.hexdigest())


def _encoding(rules: Rules) -> str:
    # UTF-16 shows itself.
    return "auto" if rules.encoding == "utf-8" else rules.encoding


def _items(name: str, key: str, split: Split, first: int, rules: Rules, limits: Limits) -> Iterator[Item]:
    # Every column may hold what is asked.
    encoding = _encoding(rules)
    fallback = None if encoding == "auto" else Fallback(encoding)
    number, quotes = first, Quotes(rules.quotes)
    how: dict[str, Any] = {"wanted": EVERY, "limits": limits, "fallback": fallback, "quotes": quotes}
    for record in read(split, max_row_bytes=rules.max_row_bytes, **how):
        if isinstance(record, Blank):
            continue
        if isinstance(record, Fault):
            cause = f"its row at {record.position} cannot be read: {record.reason}, {record.detail}"
            raise DataError(f"evaluation set {name!r} ({key})", cause, "Fix the row: no item may be skipped")
        yield Item(number, name, record.position, tuple(_leaves(record.fields)))
        number += 1
    if number == first:
        raise DataError(f"evaluation set {name!r} ({key})", "it holds no item", "Give a file with a row for each item")


def _leaves(value: Any) -> Iterator[str]:
    """All texts of an item, wherever they stand."""
    if isinstance(value, bytes):
        value = shapes.texts(value)
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _leaves(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)


def _as_rows(items: Sequence[Item], rules: Rules) -> list[Item]:
    """The items as rows with these texts would come out of the stages before."""
    rows: list[Row] = []
    owners: list[int] = []
    for at, item in enumerate(items):
        for text in item.texts:
            try:
                rows.append(canonical({"text": text}))
                owners.append(at)
            except RejectError:
                continue  # no words
    done, _ = put_through(rows, make_stages(rules))
    texts: dict[int, list[str]] = {}
    for at, row in zip(owners, done, strict=True):
        texts.setdefault(at, []).append(row.text if isinstance(row, Refusal) else row.text or "")
    return [replace(item, texts=tuple(texts.get(at, ()))) for at, item in enumerate(items)]
