"""The comparison as JSON. Its keys are stable: programs read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dropforge.comparison import ComparedRun, Comparison, MetricRow, TextRow, thin


def as_json(comparison: Comparison, link: str, *, every: bool = False, most: int = 500) -> dict[str, Any]:
    """The comparison as JSON values: lists are in the order of `runs`, a value that a run has not is null.

    :param link: address of MLflow's compare view. :param every: equal values too. :param most: points of a curve.
    """
    groups: dict[str, Sequence[TextRow | MetricRow]] = {
        "params": comparison.params,
        "tags": comparison.tags,
        "metrics": comparison.metrics,
    }
    return {
        "mlflow": link,
        "families": comparison.families,
        "runs": [_run_json(run, sign) for run, sign in zip(comparison.runs, comparison.letters, strict=True)],
        "same": {name: sum(row.same for row in rows) for name, rows in groups.items()},
        **{name: {row.name: _row_json(row) for row in rows if every or not row.same} for name, rows in groups.items()},
        "curves": {
            curve.name: {
                "unit": curve.unit,
                "points": [[[step, number(value)] for step, value in thin(line, most)] for line in curve.lines],
            }
            for curve in comparison.curves
        },
    }


def number(value: float | None) -> float | str | None:
    """As a JSON value: JSON has no NaN and nothing infinite, so these are texts."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _run_json(run: ComparedRun, sign: str) -> dict[str, Any]:
    names = ("name", "asked", "family", "version", "status", "verdict", "champion", "run_id", "experiment", "began")
    return {
        "letter": sign,
        **{name: getattr(run, name) for name in names},
        "checks": [vars(check) for check in run.checks],
        "notes": list(run.notes),
    }


def _row_json(row: TextRow | MetricRow) -> Any:
    if isinstance(row, TextRow):
        return list(row.values)
    best = [item and {"value": number(item.value), "step": item.step, "whole": item.whole} for item in row.best]
    changes = [item and {"absolute": number(item.absolute), "percent": number(item.percent)} for item in row.changes]
    return {"better": row.better, "last": [number(value) for value in row.last], "best": best, "change": changes}
