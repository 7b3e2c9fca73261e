"""The card's section on a version that holds several drops: how much came of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from curation.reasons import filtered, quarantined

_SHOWN: Final = 50


def section(card: Mapping[str, Any]) -> str:
    """A row for each of the last drops, and one for all; nothing where a version holds one drop alone."""
    version = card.get("version")
    if not version:
        return ""
    steps = version["drops"]
    rows = [_row(escape(step["name"]), step["counts"]) for step in steps[-_SHOWN:]]
    rows.append(_row("<b>the whole version</b>", version["counts"]))
    head = "".join(
        f"<th class=n>{name}</th>" for name in ("rows", "train", "eval", "copies", "quarantined", "filtered")
    )
    more = f"<p>{len(steps) - _SHOWN:,} earlier drops are not shown.</p>" if len(steps) > _SHOWN else ""
    return (
        f'{more}<div class="scroll"><table><thead><tr><th>drop</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(name: str, counts: Mapping[str, int]) -> str:
    numbers: Sequence[int] = (
        counts["input"],
        counts["train"],
        counts["eval"],
        counts.get("duplicate", 0) + counts.get("near_duplicate", 0),
        sum(quarantined(counts).values()),
        sum(filtered(counts).values()),
    )
    return f"<tr><td>{name}</td>" + "".join(f"<td class=n>{number:,}</td>" for number in numbers) + "</tr>"
