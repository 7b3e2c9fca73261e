"""Pieces of the card's page, and how its values are written."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any


def section(title: str, body: str, lead: str = "") -> str:
    if not body:
        return ""
    first = f'<p class="lead">{lead}</p>' if lead else ""
    return f"<section><h2>{title}</h2>{first}{body}</section>"


def legend(colours: Mapping[str, str]) -> str:
    """What the colours of a plot mean. :param colours: by CSS variable."""
    parts = (f'<span><i style="background:var({colour})"></i>{name}</span> ' for colour, name in colours.items())
    return f'<p class="legend">{"".join(parts)}</p>'


def visible(text: str) -> str:
    """Control, reordering and unseen characters as codes, so that an example cannot fool its reader."""
    return "".join(
        char
        if char == " " or unicodedata.category(char) not in {"Cc", "Cf", "Zl", "Zp", "Co"}
        else f"\\u{ord(char):04x}"
        for char in text
    )


def first_of(lines: Sequence[str], most: int, rest: str) -> list[str]:
    """The first lines, and in one more line how many there are beyond them. :param rest: what those are."""
    return [*lines[:most], *([f"and {len(lines) - most:,} more {rest}"] if len(lines) > most else [])]


def share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0%"


def size_text(size: int) -> str:
    for limit, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= limit:
            return f"{size / limit:.1f} {unit}"
    return f"{size} B"


def place_text(file: str, position: int, line: int | None) -> str:
    """Where a row begins: a text file's line with the byte beside it, or a table's row."""
    return f"{file} @ {position:,}" if line is None else f"{file}:{line}, byte {position:,}"


def place_cell(item: Mapping[str, Any]) -> str:
    """A row's `file`, `position` and `line`, if it has one, as `place_text` has them."""
    file, line = escape(item["file"]), item.get("line")
    if line is None:
        return f"<code>{file}</code> @ {item['position']:,}"
    return f"<code>{file}:{line}</code>, byte {item['position']:,}"
