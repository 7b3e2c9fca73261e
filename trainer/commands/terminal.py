"""Text for a terminal: colour only where it is seen, and nothing from outside that could steer the terminal."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import IO, Final

from dropforge.text import escape

_CODES: Final = {"red": "31", "green": "32", "magenta": "35;1", "dim": "2", "bold": "1"}
_COLOUR: Final = re.compile(rf"(\x1b\[(?:{'|'.join(_CODES.values())}|0)m)")


@dataclass(frozen=True)
class Paint:
    """Colours text, or leaves it as it is."""

    colour: bool = False

    @classmethod
    def of(cls, stream: IO[str], plain: bool = False) -> Paint:
        """For a stream: no colour where nobody sees it, or where NO_COLOR (https://no-color.org) is set."""
        dull = plain or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        return cls(not dull and stream.isatty())

    def __call__(self, text: str, style: str) -> str:
        # A colour that spans lines confuses pagers: each line has its own.
        if not self.colour or not text:
            return text
        return "\n".join(f"\x1b[{_CODES[style]}m{line}\x1b[0m" if line else line for line in text.split("\n"))


def tell(text: str) -> None:
    """Print a line of progress beside the result, on stderr."""
    print(escape(text), file=sys.stderr)


def table(rows: list[tuple[str, str]]) -> str:
    """Names and values in two columns; further lines of a value stand below its first. Of what steers a terminal only
    the colours of `Paint` are left."""
    width = max(len(name) for name, _ in rows)
    lines = []
    for name, value in rows:
        first, *rest = _harmless(value).split("\n")
        lines += [f"{name:<{width}}  {first}", *(f"{'':<{width}}  {line}" for line in rest)]
    return "\n".join(lines)


def _harmless(text: str) -> str:
    return "".join(part if _COLOUR.fullmatch(part) else escape(part) for part in _COLOUR.split(text))
