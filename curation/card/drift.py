"""The card's section on drift: this version beside the one before."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, Final

from curation.page import legend
from curation.plots import outline, pairs
from curation.statistics import EDGES

_NAMES: Final = {
    "chars": "characters a row",
    "words": "words a row",
    "languages": "languages",
    "labels": "labels",
    "ends": "where rows went",
}
#: Names of an aspect that are shown, the most frequent ones.
_SHOWN: Final = 12


def section(card: Mapping[str, Any]) -> str:
    """The section's body, or nothing for the first version of a family."""
    drift = card.get("drift")
    if drift is None:
        return ""
    parent = f'<code title="{escape(drift["parent"])}">{escape(drift["parent"][:16])}</code>'
    if not drift["found"]:
        return f"<p>The card of the version before, {parent}, cannot be read.</p>"
    rows = "".join(
        f"<tr><td>{_NAMES[name]}</td><td class=n>{item['distance'] / 1000:.3f}</td>"
        f"<td class=n>{item['chance'] / 1000:.3f}</td></tr>"
        for name, item in _in_order(drift["found"])
    )
    rules = ", ".join(f"<code>{escape(name)}</code>" for name in drift["rules"])
    return (
        f"<p>Against version {parent}, the newest one before: how far the rows are from its rows, from 0, the same"
        " shares, to 1, nothing in common (Jensen-Shannon distance), and how far they would be if both were drawn from"
        " one population."
        f"{f' Other rules than then: {rules}.' if rules else ''}</p>"
        '<div class="scroll"><table class="narrow"><thead><tr><th>what</th><th class=n>distance</th>'
        f"<th class=n>by chance, about</th></tr></thead><tbody>{rows}</tbody></table></div>"
        f"{_lengths(drift['found'])}{legend({'--before': 'version before', '--train': 'this one'})}"
        + "".join(_shares(name, item) for name, item in _in_order(drift["found"]) if name not in {"chars", "words"})
    )


def _in_order(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, found[name]) for name in _NAMES if name in found]


def _lengths(found: Mapping[str, Any]) -> str:
    """Both histograms over each other."""
    plots = [
        (_NAMES[name].capitalize(), [[item[side].get(str(low), 0) for low in (0, *EDGES)] for side in _SIDES])
        for name, item in _in_order(found)
        if name in {"chars", "words"}
    ]
    cells = "".join(
        f"<div><h3>{title}</h3><figure>{outline(before, after, EDGES, title)}</figure></div>"
        for title, (before, after) in plots
    )
    return f'<div class="two">{cells}</div>' if cells else ""


_SIDES: Final = ("before", "after")


def _shares(aspect: str, item: Mapping[str, Mapping[str, int]]) -> str:
    """For each name its shares before and now."""
    before, after = (item[side] for side in _SIDES)
    shares = {
        name: (before.get(name, 0) / max(1, sum(before.values())), after.get(name, 0) / max(1, sum(after.values())))
        for name in {*before, *after}
    }
    most = sorted((name for name in shares if any(shares[name])), key=lambda name: (-max(shares[name]), name))
    plot = pairs([(name, shares[name][0], shares[name][1]) for name in most[:_SHOWN]], _NAMES[aspect].capitalize())
    more = f"<p>and {len(most) - _SHOWN} more</p>" if len(most) > _SHOWN else ""
    return f"<h3>{_NAMES[aspect].capitalize()}</h3><figure>{plot}</figure>{more}"
