"""What MLflow says of runs. All of them are read once, and from then on those that run or have ended since."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from dropforge import costs, tracking
from dropforge.rest import Rest, real

State = Literal["running", "asked", "finished", "failed", "killed"]
"""`asked`: it waits for a person's word."""
STATES: Final[tuple[State, ...]] = ("running", "asked", "finished", "failed", "killed")
_PAGE: Final = 200  # runs in one answer, each with its parameters and last metrics
_OVERLAP: Final = 600.0  # seconds that are read again: an end may be told late, and clocks differ
_ANEW: Final = 6 * 3600.0  # seconds until all are read anew, without those that were deleted
_STATES: Final[dict[str, State]] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "killed"}
_TRAIN: Final = "train/"
_OURS: Final = f"tags.`{tracking.TAG_RUN}` LIKE '%'"


@dataclass(frozen=True)
class Seen:
    """A run as MLflow has it; times are in seconds since 1970.

    :param task, reason: what ended a run that failed or was killed, and why its job did; empty where nobody said.
    :param gate: `promote` or `keep`; empty while it was not judged. :param health: the first words of the tag.
    :param figures: the last values of `train/...` and of `eval/loss`, without the prefix of the former.
    :param stepped: when the last log step was told. :param steps: of the whole training; 0 if nobody said.
    """

    run: str
    family: str
    state: State
    began: float
    ended: float | None
    task: str
    reason: str
    gate: str
    health: str
    attempts: int
    steps: int
    step: int
    stepped: float | None
    queue_seconds: float | None
    gpu_seconds: float
    core_seconds: float
    figures: Mapping[str, float]

    @property
    def open(self) -> bool:
        return self.state in ("running", "asked")


class Runs:
    """The runs of MLflow's server, kept between looks."""

    def __init__(self, rest: Rest, now: Callable[[], float] = time.time) -> None:
        self._rest, self._now = rest, now
        self._known: dict[str, Seen] = {}
        self._read: float | None = None
        self._anew = 0.0

    def read(self) -> Collection[Seen]:
        """All runs as they are now. :raises Exception: as `Rest.call`; then what was known stays."""
        now = self._now()
        experiments = list(self._experiments())
        if self._read is None or now >= self._anew or now < self._read:  # or the clock was set back
            found = dict(self._search(experiments, _OURS))
            self._known, self._anew = found, now + _ANEW
        else:
            since = int((self._read - _OVERLAP) * 1000)
            # In this order: a run that ends in between is seen by the second search.
            found = dict(self._search(experiments, f"{_OURS} AND attributes.status = 'RUNNING'"))
            found |= dict(self._search(experiments, f"{_OURS} AND attributes.end_time > {since}"))
            # What was open and is in neither answer was deleted.
            ended = {key: seen for key, seen in self._known.items() if not seen.open}
            self._known = ended | found
        self._read = now
        return self._known.values()

    def _experiments(self) -> Iterator[str]:
        for row in self._rest.pages("experiments/search", {"max_results": 1000}, "experiments"):
            yield str(row["experiment_id"])

    def _search(self, experiments: list[str], condition: str) -> Iterator[tuple[str, Seen]]:
        if not experiments:
            return
        body = {"experiment_ids": experiments, "filter": condition, "max_results": _PAGE}
        for row in self._rest.pages("runs/search", body, "runs"):
            if (seen := read_run(row)) is not None:
                yield str(row["info"]["run_id"]), seen


def read_run(row: Mapping[str, Any]) -> Seen | None:
    """A run of MLflow's answer; None if it is none of Dropforge's. A pure function: anybody may write tags."""
    info, data = row.get("info", {}), row.get("data", {})
    tags = {str(tag["key"]): str(tag["value"]) for tag in data.get("tags", [])}
    metrics = {str(one["key"]): one for one in data.get("metrics", []) if math.isfinite(real(one["value"]))}
    run, family = tags.get(tracking.TAG_RUN, ""), tags.get(tracking.TAG_FAMILY, "")
    if not run or not family:
        return None
    state = _STATES.get(str(info.get("status")), "running")
    if state == "running" and _asked(tags):
        state = "asked"
    badly = state in ("failed", "killed")
    values = {key: real(one["value"]) for key, one in metrics.items()}
    last = metrics.get("train/tokens_per_second", {})
    return Seen(
        run=run,
        family=family,
        state=state,
        began=int(info.get("start_time") or 0) / 1000,
        ended=int(info["end_time"]) / 1000 if info.get("end_time") and state in _STATES.values() else None,
        task=tags.get(tracking.TAG_ENDED_BY, "") if badly else "",
        reason=tags.get(tracking.TAG_REASON, "") if badly else "",
        gate=_gate(tags.get(tracking.TAG_VERDICT, "")),
        health=tags.get(tracking.TAG_HEALTH, "").partition(":")[0] if state == "finished" else "",
        attempts=_number(tags.get(tracking.TAG_ATTEMPT)),
        steps=_number(tags.get(tracking.TAG_STEPS)),
        step=int(last.get("step") or 0),
        stepped=int(last["timestamp"]) / 1000 if last.get("timestamp") else None,
        queue_seconds=values.get("wall/queue_seconds"),
        gpu_seconds=3600 * values.get(costs.METRIC_GPU_HOURS, 0.0),
        core_seconds=3600 * values.get(costs.METRIC_CORE_HOURS, 0.0),
        figures={
            key.removeprefix(_TRAIN): value
            for key, value in values.items()
            if key.startswith(_TRAIN) or key == "eval/loss"
        },
    )


def _asked(tags: Mapping[str, str]) -> bool:
    return any(tags.get(tag, "").startswith("asked until ") for tag in (tracking.TAG_CONFIRMED, tracking.TAG_APPROVAL))


def _gate(verdict: str) -> str:
    return {"promote": "promote", "keep champion": "keep", "not promoted": "keep"}.get(verdict.partition(":")[0], "")


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 10 else 0
