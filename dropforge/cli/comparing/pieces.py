"""Pieces of the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from dropforge.cli.comparing.plot import colour
from dropforge.cli.comparing.texts import excerpts, visible


def section(title: str, body: str, lead: str = "") -> str:
    if not body:
        return ""
    first = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{title}</h2>{first}{body}</section>"


def table(heads: Sequence[str], rows: Sequence[str], kind: str = "", cell: str = "") -> str:
    """:param heads: as HTML, and :param rows: too. :param cell: the class of all heads but the first."""
    own = f' class="{cell}"' if cell else ""
    head = "".join(f"<th{own if place else ''}>{name}</th>" for place, name in enumerate(heads))
    of = f' class="{kind}"' if kind else ""
    return f'<div class="scroll"><table{of}><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def chip(place: int, sign: str) -> str:
    """The letter of a run, with its colour."""
    return f'<span class="run" style="--c:{colour(place)}"><i></i>{sign}</span>'


def text(value: str) -> str:
    """A text from outside, on one line."""
    return escape(visible(value), quote=True)


def name(value: str) -> str:
    """A dotted name, which may break where its parts do."""
    return re.sub(r"([._/-])(?=\w)", r"\1<wbr>", text(value))


def cut(value: str, most: int, part: str | None = None) -> str:
    """A text from outside; a long one is folded. :param part: what is shown of it in the place of its beginning."""
    if not value:
        return '<span class="none">empty</span>'
    whole = escape(visible(value, keep=" \n\t"), quote=True)
    if len(value) <= most:
        return whole
    shown = part if part is not None else excerpts([value], most)[0] or ""
    return f'<details><summary>{text(shown)}</summary><div class="whole">{whole}</div></details>'
