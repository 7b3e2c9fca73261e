"""Files of which no row can be read: a table in another shape, or none at all, however few rows it seems to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from curation.reasons import Filtered, quarantined

#: Files that are named.
_SHOWN: Final = 3


def lost(files: Sequence[str], ends: Sequence[Mapping[str, int]]) -> dict[str, Any] | None:
    """How many files gave no row, and the first ones with their rows and their most frequent reason; None for none.

    Where nearly all files hold one row each, a file is a row, which another rule judges.

    :param ends: per file the number of rows of each end.
    """
    rows = [sum(counts.values()) - counts.get(Filtered.FORGOTTEN, 0) for counts in ends]
    bad = [quarantined(counts) for counts in ends]
    sound = [held for held, gone in zip(rows, bad, strict=True) if held > sum(gone.values())]
    alone = bool(sound) and 10 * sound.count(1) >= 9 * len(sound)
    found = [
        [name, held, next(iter(gone))]
        for name, held, gone in zip(files, rows, bad, strict=True)
        if gone and held == sum(gone.values()) and not (alone and held == 1)
    ]
    return {"files": len(found), "of": len(files), "first": found[:_SHOWN]} if found else None
