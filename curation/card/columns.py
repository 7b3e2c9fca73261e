"""The card's section on the input's columns: what changed, and how many rows have which one with which type."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, Final

from curation.page import visible

_SHOWN: Final = 40


def section(card: Mapping[str, Any]) -> str:
    """The section's body, or nothing if no column is known."""
    changed = card["columns"]["changed"]
    notes = "".join(f"<li>{escape(visible(line))}</li>" for line in changed[:_SHOWN])
    notes += f"<li>and {len(changed) - _SHOWN:,} more changes</li>" if len(changed) > _SHOWN else ""
    rows = [
        f"<tr><td>{escape(label)}</td><td><code>{escape(visible(name))}</code></td>"
        f"<td>{', '.join(f'{kind} in {count:,}' for kind, count in sorted(kinds.items()))}</td></tr>"
        for label, columns in card["columns"]["seen"].items()
        for name, kinds in columns.items()
    ]
    if not rows:
        return ""
    more = f"<p>and {len(rows) - _SHOWN:,} more columns</p>" if len(rows) > _SHOWN else ""
    return (
        (f"<ul>{notes}</ul>" if notes else "")
        + '<div class="scroll"><table><thead><tr><th>format</th><th>column</th><th>rows by type</th></tr></thead>'
        f"<tbody>{''.join(rows[:_SHOWN])}</tbody></table></div>{more}"
    )
