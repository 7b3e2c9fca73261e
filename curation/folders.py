"""What the names of folders and files say of their rows and no row does: it is not read, and told."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from pathlib import PurePosixPath
from typing import Final

_SHOWN: Final = 3
_KEPT: Final = re.compile(r"(^|[^a-z])(test|valid|validation|val|dev|eval|holdout|heldout)([^a-z]|$)", re.IGNORECASE)
_TRAIN: Final = re.compile(r"(^|[^a-z])train([^a-z]|$)", re.IGNORECASE)


def said(names: Sequence[str], columns: Container[str]) -> list[str]:
    """Return a line for each column whose values are names of folders, as Spark and Hive partition tables, and one for
    files that are called as those that nobody trains on.

    :param names: of the files that are read, with their folders. :param columns: that rows have.
    """
    values: dict[str, dict[str, None]] = {}
    for name in names:
        for folder in PurePosixPath(name).parts[:-1]:
            column, equals, value = folder.partition("=")
            if column and equals and column not in columns:
                values.setdefault(column, {})[value] = None
    lines = [
        f"folders hold the values of a column `{column}` ({_first(list(found))}) that no row has: write it there"
        for column, found in values.items()
    ]
    kept = [name for name in names if _KEPT.search(name) and not _TRAIN.search(name)]
    if kept and any(map(_TRAIN.search, names)):
        lines.append(f"{_first(kept)}: named as rows that are kept for tests, and learned as all others are")
    return lines


def _first(found: Sequence[str]) -> str:
    return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
