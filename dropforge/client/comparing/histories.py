"""The course of metrics in many runs: one question for each metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlencode

from dropforge.comparison import ComparedRun, History, history_names
from dropforge.rest import DeniedError, Rest, real

_PAGES: Final = "/ajax-api/2.0/mlflow/"  # what MLflow's own pages ask
_WHOLE: Final = 25_000  # values of a metric in all runs: the server's limit for one answer
_POINTS: Final = 5_000  # of those that it picks where there are more; they cost it more
_FEWEST, _MOST = 60, 2500  # of one run; the server's own limit


def with_histories(rest: Rest, runs: list[ComparedRun], steps: Mapping[str, int], pool: Executor) -> list[ComparedRun]:
    """:param steps: the last step of each metric in any run."""
    names = history_names(runs)
    found: dict[str, dict[str, History]] = {run.run_id: {} for run in runs}
    read = pool.map(lambda name: _histories(rest, runs, name, steps.get(name, 0)), names)
    for name, histories in zip(names, read, strict=True):
        for run_id, history in histories.items():
            found[run_id][name] = history
    return [replace(run, histories=found[run.run_id]) for run in runs]


def _histories(rest: Rest, runs: Sequence[ComparedRun], name: str, last: int) -> dict[str, History]:
    """The course of a metric in all runs that have it. Of a step that was logged again the last value counts."""
    ids = [run.run_id for run in runs if name in run.metrics]
    if not ids:
        return {}
    points: dict[str, dict[int, float]] = {run_id: {} for run_id in ids}
    counts = dict.fromkeys(ids, 0)
    many = name.startswith("train/") and len(ids) * last > _WHOLE
    rows = None if many else _whole(rest, ids, name)
    picked = rows is None
    for item in _picked(rest, ids, name) if rows is None else rows:  # in order of step or time
        points[item["run_id"]][int(item.get("step", 0))] = real(item.get("value", 0))
        counts[item["run_id"]] += 1
    most = _most(ids) if picked else _WHOLE
    return {run_id: History(tuple(sorted(points[run_id].items())), counts[run_id] < most) for run_id in ids}


def _whole(rest: Rest, ids: Sequence[str], name: str) -> list[dict[str, Any]] | None:
    """All values, by one statement of the server's database; None if there are too many for one answer."""
    query = urlencode({"run_id": ids, "metric_key": name, "max_results": _WHOLE}, doseq=True)
    try:
        rows = list(rest.call("GET", f"{_PAGES}metrics/get-history-bulk?{query}").get("metrics", []))
    except DeniedError:  # a server without MLflow's pages
        return None
    return rows if len(rows) < _WHOLE else None


def _picked(rest: Rest, ids: Sequence[str], name: str) -> list[dict[str, Any]]:
    """Values that the server picks evenly, by three statements for each run."""
    query = urlencode({"run_ids": ids, "metric_key": name, "max_results": _most(ids)}, doseq=True)
    return list(rest.call("GET", f"metrics/get-history-bulk-interval?{query}").get("metrics", []))


def _most(ids: Sequence[str]) -> int:
    return max(_FEWEST, min(_MOST, _POINTS // len(ids)))
