"""One name for one value of a label, source or group, whichever program wrote it: 1, 1.0 and their texts are `1`.

`curation.canonical` names the values of each row here, the gate asks whether truth values have several spellings.
Only texts that a program writes for a number become another text, so two values never become one.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from curation.shapes import texts

#: What pandas writes for a missing value.
_MISSING: Final = frozenset({"nan", "NaN", "<NA>"})
_LONGEST: Final = 24  # characters of a float


def value_name(value: Any) -> str | None:
    """Return the name of a value; None if it is missing, as NaN is."""
    if isinstance(value, str):
        # Most are words, which these three tell at once.
        if value[-2:] == ".0" or "e+" in value[-5:] or value in _MISSING:
            return _of_text(value)
        return value
    if isinstance(value, bytes) and isinstance(text := texts(value), str):
        return value_name(text)
    if value is None:
        return None
    if isinstance(value, float):
        return _of_float(value)
    if isinstance(value, Decimal):
        written = format(value, "f")
        short = written.rstrip("0").rstrip(".") if "." in written else written
        return "0" if short == "-0" else short
    if isinstance(value, bool | int | dict | list):
        return json.dumps(texts(value), sort_keys=True, ensure_ascii=False, default=str)
    return str(value)


def _of_text(text: str) -> str | None:
    if text in _MISSING:
        return None
    try:
        number = float(text) if len(text) <= _LONGEST else math.inf
    except ValueError:
        return text
    return _of_float(number) if repr(number) == text else text


def _of_float(number: float) -> str | None:
    if math.isnan(number):
        return None
    return str(int(number)) if number.is_integer() else repr(number)


def names_so_far(group: str) -> list[str]:
    """Return the name that a group has, and the one that it may have in older versions, where 1 and 1.0 were two."""
    now = value_name(group) or group
    return [now, f"{now}.0"] if now.removeprefix("-").isdecimal() else [now]


def mixed_truths(rows: Mapping[str, int]) -> dict[str, int]:
    """Return the truth values among labels, with their rows, where they are spelled in several ways; else nothing.

    :param rows: of each label; numbers are truth values only beside words.
    """
    ways = {label: _way(label) for label in rows}
    found = {label: rows[label] for label, way in ways.items() if way}
    return found if len({ways[label] for label in found}) > 1 else {}


def alike(rows: Mapping[str, int]) -> list[dict[str, int]]:
    """Return labels that differ in case, outer spaces, the way a number is written or brackets of a list of one alone,
    with their rows: one value or several, nobody can tell for sure. :param rows: of each label."""
    found: dict[str, dict[str, int]] = {}
    for label, count in rows.items():
        found.setdefault(_folded(label), {})[label] = count
    return [group for group in found.values() if len(group) > 1 and not mixed_truths(group)]


def unset(rows: Mapping[str, int]) -> dict[str, int]:
    """Return labels that programs write for a missing value, with their rows. :param rows: of each label."""
    return {label: count for label, count in rows.items() if is_unset(label)}


def is_unset(text: str) -> bool:
    """Return whether programs write the text for a missing value."""
    return len(text) <= LONGEST_UNSET and text.strip().lower() in _UNSET


#: Of pandas, SQL, Hive, R, Excel, Python and JavaScript, in small letters.
_UNSET: Final = frozenset(
    {
        *("\\n", "null", "none", "na", "n/a", "<na>", "nan", "-nan", "nat", "undefined"),
        *("#n/a", "#n/a n/a", "#na", "#ref!", "#name?", "#value!", "#div/0!", "#num!", "#null!"),
    }
)
#: Characters of the longest one, with a few spaces around.
LONGEST_UNSET: Final = max(map(len, _UNSET)) + 4


def _folded(label: str) -> str:
    text = unicodedata.normalize("NFKC", label).strip().casefold()
    if text[:2] in {"['", '["'} and text[-2:] in {"']", '"]'}:
        text = text[2:-2].strip()
    try:
        number = float(text.replace(",", ".")) if len(text) <= _LONGEST else math.nan
    except ValueError:
        return text
    return repr(number + 0) if math.isfinite(number) else text


def _way(label: str) -> str:
    """How a truth value is spelled; empty for what is none."""
    if label in {"0", "1"}:
        return "number"
    if label.lower() not in {"true", "false"}:
        return ""
    return "small" if label.islower() else "capital" if label.isupper() else "mixed"
