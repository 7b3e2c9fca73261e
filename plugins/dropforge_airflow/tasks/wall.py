"""Where the whole time of a training went: what Airflow and the cluster know, and what the trainer counted. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dropforge.text import as_cell, as_line, markdown_table

_OWN: Final = ("began", "seconds")  # of the trainer's record: no phases


def whole_wall(
    opened_at: float | None, trained: Mapping[str, Any] | None, wall: Mapping[str, float]
) -> dict[str, float]:
    """Seconds by phase, from the opening of the run to its report, in their order; `seconds` is their whole time.

    The pull is that of the first gang. Later ones wait while the trainer counts their time as lost to restarts.

    :param opened_at: Unix time; None for a run of an older version. :param trained: the result of the training's task.
    :param wall: `wall` of `report.json`.
    """
    if not wall:
        return {}
    waits: dict[str, float] = {}
    seconds = float(wall["seconds"])
    if opened_at is not None:
        waited = max(0.0, float(wall["began"]) - opened_at)
        pulled = (trained or {}).get("durations", {}).get("pulled") if (trained or {}).get("gang") == 1 else None
        pull = min(waited, float(pulled)) if pulled is not None else None
        waits = {"queue": waited - (pull or 0.0)} | ({} if pull is None else {"pull": pull})
        seconds += waited
    phases = waits | {name: float(value) for name, value in wall.items() if name not in _OWN}
    return {"seconds": round(seconds, 3)} | {name: round(value, 3) for name, value in phases.items()}


def wall_lines(wall: Mapping[str, float]) -> list[str]:
    """A table in Markdown; nothing for a run that did not tell."""
    if not wall:
        return []
    rows = [
        (as_cell(as_line(name)), f"{value:.1f}", f"{value / max(1e-9, wall['seconds']):.0%}")
        for name, value in wall.items()
    ]
    whole = ("**in total**", f"{wall['seconds']:.1f}", "")
    return markdown_table(("wall time", "seconds", "share"), [*rows[1:], whole], {"seconds", "share"}).split("\n")
