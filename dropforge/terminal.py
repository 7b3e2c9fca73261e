"""The one way in which commands print: names, rows and errors from outside steer no terminal.

A drop's file names, rows, recipes and a registry's texts are written by strangers. An escape sequence in them could
retitle the terminal, move its cursor over what stands there, or fill its clipboard. Every text passes here, and its
control characters are spelled out; the colours are ours, and come later. Ruff refuses rich's own console elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self, cast

from rich import console, text
from rich.segment import Segment

from dropforge.text import escape


class Text(text.Text):  # noqa: TID251 - the one place
    """rich's text, whose control characters are spelled out before its width is measured."""

    def __init__(self, text: str = "", *args: Any, **options: Any) -> None:
        super().__init__(escape(text), *args, **options)

    @classmethod
    def assemble(cls, *parts: Any, **options: Any) -> Self:
        """Put strings, texts and (string, style) pairs together."""
        return cast(Self, super().assemble(*parts, **options))

    def append(self, text: Any, style: Any = None) -> Any:
        """Add a string, or a text that is harmless already."""
        return super().append(escape(text) if isinstance(text, str) else text, style)


class Console(console.Console):  # noqa: TID251 - the one place
    """rich's console, on which control characters of what is printed are seen and do nothing."""

    def render_str(self, text: str, **options: Any) -> Any:
        """Make a text of a string, as for a cell of a table."""
        return super().render_str(escape(text), **options)

    def render(self, renderable: Any, options: console.ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of anything that can be printed, made harmless."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
                continue
            style = segment.style
            if style is not None and style.link is not None and not style.link.isprintable():
                style = style.update_link(None)
            yield Segment(escape(segment.text), style)
