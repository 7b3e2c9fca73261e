"""Further lines of names below a table's first one, as programs for surveys and statistics write them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal

#: Qualtrics: the questions' texts, then where each was imported from.
_IMPORTED: Final = '{"ImportId"'
_IMPORTED_LINE: Final = re.compile(rb'\s*"?\{"{1,2}ImportId"')
#: SurveyMonkey: what a question takes, and nothing below the columns of its own.
_TAKEN: Final = frozenset({"Response", "Open-Ended Response"})
#: Orange: types of columns, where one may list its values instead, then their roles; either may be written short.
_TYPES: Final = frozenset({"continuous", "discrete", "string", "time", "numeric", "text", "c", "d", "s", "t"})
#: ClickHouse: `...WithNamesAndTypes` has the types of all columns in one line.
_CLICKHOUSE: Final = re.compile(
    r"String|U?Int\d{1,3}|Float\d\d|Bool|UUID|Date(?:32)?|DateTime(?:64)?(?:\(.*\))?"
    r"|(?:Nullable|LowCardinality|Array|Map|Tuple|Enum8|Enum16|FixedString|Decimal\d*)\(.*\)"
)
_ROLES: Final = frozenset({"class", "meta", "ignore", "i", "m", "c"})


Further = Literal["", "types", "names"]


def further_line(cells: Sequence[str], following: bytes, mark: str, above: Further) -> Further:
    """What a line below one of names says of the columns; empty for a row.

    :param following: the line below it. :param mark: what separates cells. :param above: what the line above it said.
    """
    filled = [cell for cell in cells if cell.strip()]
    if not filled:
        return ""
    if all(cell.startswith(_IMPORTED) for cell in filled) or _IMPORTED_LINE.match(following):
        return "names"
    if len(cells) > 1 and all(map(_CLICKHOUSE.fullmatch, cells)):
        return "names"
    if not cells[0].strip() and _TAKEN.intersection(filled):
        return "names"
    if _is_typed(cells, following, mark):
        return "types"
    return "names" if above == "types" and _ROLES.issuperset(filled) else ""


def _is_typed(cells: Sequence[str], following: bytes, mark: str) -> bool:
    """Tell whether a line says the columns' types, and the one below it their roles."""
    roles = [role for role in following.decode("utf-8", "replace").strip("\r\n").split(mark) if role]
    if not roles:  # of columns without any the third line is blank
        return len(cells) > 1 and _TYPES.issuperset(cells)
    return not _TYPES.isdisjoint(cells) and len(roles) <= len(cells) and _ROLES.issuperset(roles)
