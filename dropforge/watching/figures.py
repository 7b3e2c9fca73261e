"""The log steps of a training and what its GPUs told, from MLflow by REST, as its verdict needs them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import mean
from typing import Final
from urllib.parse import urlencode

from dropforge.rest import Rest, real, speaks_rest
from dropforge.watching.health import Figures, Verdict, judge

_MOST: Final = 2500  # points of a metric that the server gives at once; of more it picks evenly
_LAST: Final = 2**31 - 1
_GPUS: Final = 64  # whose samples are read, each with a request
_SLOWED: Final = re.compile(r"system/((?:[^/]+/)?gpu_\d+)_throttled_percentage")


def verdict_of(tracking_uri: str, run_id: str) -> Verdict | None:
    """What held a run's training back; None where MLflow speaks no REST. :raises Exception: as `Rest.call`."""
    return judge(read_figures(Rest(tracking_uri), run_id)) if speaks_rest(tracking_uri) else None


def read_figures(rest: Rest, run_id: str) -> Figures:
    """What MLflow has of a run's log steps. :raises Exception: as `Rest.call`."""
    data = rest.call("GET", f"runs/get?{urlencode({'run_id': run_id})}")["run"]["data"]
    known = {str(one["key"]) for one in data.get("metrics", [])}

    def points(name: str) -> Mapping[int, float]:
        return _history(rest, run_id, name) if name in known else {}

    gpus = {match[1]: key for key in sorted(known) if (match := _SLOWED.fullmatch(key))}
    slowed = {name: points(key) for name, key in list(gpus.items())[:_GPUS]}
    return Figures(
        seconds=points("train/step_seconds"),
        data=points("train/data_wait_seconds"),
        gradients=points("train/gradient_wait_seconds"),
        collective=points("train/collective_wait_seconds"),
        speed=points("train/tokens_per_second"),
        spread=points("train/rank_spread"),
        slowest=points("train/slowest_rank"),
        slowed={name: mean(values.values()) / 100 for name, values in slowed.items() if values},
    )


def _history(rest: Rest, run_id: str, name: str) -> dict[int, float]:
    query = {"run_ids": run_id, "metric_key": name, "start_step": 0, "end_step": _LAST, "max_results": _MOST}
    found = rest.call("GET", f"metrics/get-history-bulk-interval?{urlencode(query)}").get("metrics", [])
    values = {int(point.get("step", 0)): real(point["value"]) for point in found}
    return {step: value for step, value in values.items() if math.isfinite(value)}
