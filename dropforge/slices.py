"""Slices of the evaluation rows: parts by where a row came from, its label or a column kept with it.

Which rows belong together follows from the rows alone, so candidate and champion are measured on the same ones.
Values come from outside, and go into names of metrics, tables and pages: only `named` makes a name of one.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

OWN: Final = ("source", "label")  # what rows have by themselves; else a column that `data.keep_columns` keeps
NONE: Final = "(none)"
REST: Final = "(rest)"
PREFIX: Final = "slice/"
_LONGEST: Final = 60
_WORDS: Final = {NONE: "no value", REST: "the rest"}


@dataclass(frozen=True)
class Cut:
    """How rows are cut into slices.

    :param by: see `OWN`. :param top: the slices of most rows; what remains is one together.
    :param min_rows: of fewer nothing is told.
    """

    by: str
    top: int
    min_rows: int


@dataclass(frozen=True)
class Slice:
    """:param name: see `named`. :param places: of its rows, in their order."""

    by: str
    name: str
    places: tuple[int, ...]


def cuts_of(promote: Mapping[str, Any]) -> tuple[Cut, ...]:
    """Those that a recipe's `promote` section asks for."""
    return tuple(Cut(str(one["by"]), int(one["top"]), int(one["min_rows"])) for one in promote.get("slices") or ())


def cut(by: Cut, values: Sequence[str | None]) -> list[Slice]:
    """The slices of some rows, the largest first. :param values: what each row has; None where it has nothing."""
    rows: dict[str | None, list[int]] = {}
    for place, value in enumerate(values):
        rows.setdefault(value, []).append(place)
    counts = Counter({value: len(places) for value, places in rows.items()})
    order = sorted(counts, key=lambda value: (-counts[value], value is None, value or ""))
    found = [Slice(by.by, named(value), tuple(rows[value])) for value in order[: by.top]]
    rest = sorted(place for value in order[by.top :] for place in rows[value])
    return [*found, Slice(by.by, REST, tuple(rest))] if rest else found


def named(value: str | None) -> str:
    """A value as a name for people and for MLflow: letters, digits and `_.-` of any script, and no two alike.

    What had to be changed or cut has a digest of the value behind it.
    """
    if value is None:
        return NONE
    plain = re.sub(r"[^\w.-]+", "_", unicodedata.normalize("NFC", value))[:_LONGEST]
    if plain == value and plain.strip("."):
        return plain
    return f"{plain.strip('._')}~{hashlib.sha256(value.encode('utf-8', 'surrogatepass')).hexdigest()[:6]}"


def metric_name(side: str, by: str, name: str, metric: str) -> str:
    """The name in MLflow of a slice's figure. :param side: which model. :param name: see `named`."""
    return f"{side}/{PREFIX}{_ascii(named(by))}/{_ascii(name)}/{metric.removeprefix('eval/')}"


def _ascii(name: str) -> str:
    """MLflow takes no `~` and no parentheses, and databases differ in which letters they tell apart."""
    if name in _WORDS:
        return _WORDS[name]
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "", name.partition("~")[0])
    digest = name.partition("~")[2] or ("" if name.isascii() else hashlib.sha256(name.encode()).hexdigest()[:6])
    return f"{plain} {digest}".strip()  # no name has a space otherwise


def kept_value(extras: str, column: str) -> str | None:
    """What a row has in a column that was kept with it; None where it has nothing, or nothing that names a slice."""
    try:
        value = json.loads(extras).get(column) if extras else None
    except (ValueError, AttributeError):
        return None
    if isinstance(value, bool) or (value is not None and not isinstance(value, str | int | float)):
        return json.dumps(value) if isinstance(value, bool) else None
    if isinstance(value, float) and value.is_integer():  # pandas makes floats of a column where one is missing
        value = int(value)
    text = "" if value is None else str(value).strip()
    if text.lower() in _TRUTHS:
        return text.lower()
    return (whole[1] if (whole := _WHOLE.fullmatch(text)) else text) or None


#: As JSON has them; Python and Excel write them in capitals.
_TRUTHS: Final = frozenset({"true", "false"})
#: As pandas writes its floats in CSV, and databases decimals; 1.2.0 is none.
_WHOLE: Final = re.compile(r"(-?\d+)\.0+", re.ASCII)
