"""Metrics and tags into the MLflow run that the DAG opened; the run itself is never started, ended or changed.

A thread sends them in the order they came. Whatever the server does, the training neither fails nor waits for it:

- away (no connection, no answer, 5xx, 429): kept, and tried again after up to 15 seconds;
- not allowed (401, 403, 404 and the like): kept, and tried again after up to five minutes: a person may mend it;
- a value that the server does not take (400): halved until that value is found, which alone is left out;
- more than `_ROOM` metrics wait: the longest curve gets thinner, its ends stay, and how many are left out is said.

A run that goes on from a checkpoint repeats steps: what MLflow has of them already is not sent twice.
Over HTTP the trainer speaks MLflow's REST interface itself; other addresses go through `MlflowClient`, which, unlike
mlflow's own API of runs, has no exit hook that would mark a crashed run as finished.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from dropforge.rest import DeniedError, RefusedError, Rest, reached, speaks_rest
from dropforge.run import Tracking

_METRICS: Final = 900  # of one request; the server takes 1000
_TAGS: Final = 90
_ROOM: Final = 50_000  # metrics that wait, about 20 MB
_PAUSE: Final = 1.0  # seconds between batches
_AWAY: Final = 15.0  # longest pause before the next try
_DENIED: Final = 300.0
_SLOW: Final = 0.5  # seconds that a checkpoint waits for the metrics before it
_TAGS_WAIT: Final = 10.0  # seconds that a launcher's last tags may take
_LAST_TRY: Final = 3.0  # seconds that the end waits for a server that has not answered before

Row = dict[str, Any]


class Sender(Protocol):
    """Writes to one run.

    :raises RefusedError: if the server does not take this content. :raises DeniedError: if it takes none.
        Any other error is temporary.
    """

    def send(self, metrics: list[Row], tags: list[dict[str, str]]) -> None:
        """Write one batch."""

    def last_steps(self) -> Mapping[str, int]:
        """The last step that the run has of each metric."""


class Task(Protocol):
    """Other work with the server, done by the tracker's thread when the metrics are sent."""

    def waits(self) -> bool:
        """Whether there is something to do."""

    def work(self) -> None:
        """Do it. :raises Exception: as `Sender`; it is tried again."""


class Tracker:
    """Collects metrics and tags; does nothing without an MLflow run.

    :param say: where a notice goes when the server is away.
    """

    def __init__(self, sender: Sender | None, say: Callable[[str], None]) -> None:
        self._sender = sender
        self._say = say
        self._metrics: list[Row] = []
        self._sending: list[Row] = []
        self._tags: dict[str, str] = {}
        self._tasks: list[Task] = []
        self._resumed: int | None = None
        self._known: Mapping[str, int] = {}
        self._dropped = 0
        self._refused: set[str] = set()
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._closing = False
        self._trouble = ""  # "away" or "denied"
        self._slow = False
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        if sender is not None:
            self._thread.start()

    def resume(self, step: int) -> None:
        """Leave out what an earlier attempt has logged behind this step; call it before any metric.

        :param step: where this attempt begins; 0 where nothing was kept of the one before.
        """
        self._resumed = step

    def metrics(self, values: Mapping[str, float], step: int, at: float | None = None) -> None:
        """Add finite values at an optimizer step. :param at: when it was, in seconds since 1970; now, if not given."""
        if self._sender is None:
            return
        now = int((time.time() if at is None else at) * 1000)
        rows = [
            {"key": key, "value": float(value), "timestamp": now, "step": step}
            for key, value in values.items()
            if math.isfinite(value)
        ]
        with self._changed:
            self._metrics += rows
            if len(self._metrics) > _ROOM:
                before, self._metrics = len(self._metrics), thinned(self._metrics)
                if not self._dropped:
                    self._say(
                        f"MLflow has not taken {before} metrics; of the longest curves every second point is left out"
                    )
                self._dropped += before - len(self._metrics)

    def tags(self, values: Mapping[str, str]) -> None:
        """Set tags; a later value of the same tag wins."""
        if self._sender is not None:
            with self._changed:
                self._tags |= values

    def add(self, task: Task) -> None:
        """Have the tracker's thread do this as well."""
        self._tasks.append(task)

    def wake(self) -> None:
        """Send soon what there is."""
        self._wake.set()

    def flush(self, seconds: float = _SLOW) -> bool:
        """Have everything sent that was collected, before a checkpoint: what comes before it is never logged again.

        Waits no longer than `seconds`, and not at all for a server that was slower the last time, or does not answer.
        """
        self._wake.set()
        end = time.monotonic() + seconds
        with self._changed:
            while self._unsent():
                left = end - time.monotonic()
                if self._trouble or self._slow or left <= 0:
                    self._slow = True
                    return False
                self._changed.wait(left)
            return True

    def close(self, seconds: float = 15.0) -> list[Row]:
        """Send what is left and return the metrics that could not be sent in time; `unsent_tags` has the tags."""
        if self._sender is None:
            return []
        self._closing = True
        self._wake.set()
        # A server that has not answered so far gets a last chance, not the time that the end of a grace has.
        self._thread.join(min(seconds, _LAST_TRY) if self._trouble else seconds)
        with self._changed:
            if self._dropped:
                self._say(f"{self._dropped} metrics were left out while MLflow did not take them")
            return [*self._sending, *self._metrics]

    def unsent_tags(self) -> dict[str, str]:
        """The tags that wait to be sent; after `close`, those that MLflow never took."""
        with self._changed:
            return dict(self._tags)

    def _unsent(self) -> bool:
        return self._sender is not None and bool(self._sending or self._metrics or self._tags)

    def _run(self) -> None:
        wait = _PAUSE
        while True:
            self._wake.wait(wait)
            self._wake.clear()
            wait = self._round(wait)
            if self._closing and not self._unsent() and not any(task.waits() for task in self._tasks):
                return

    def _round(self, wait: float) -> float:
        """Send all there is; seconds until the next round."""
        began = time.monotonic()
        try:
            self._send_all()
            for task in self._tasks:
                while task.waits():
                    task.work()
        except DeniedError as error:
            self._note("denied", f"MLflow takes nothing from this run ({error}); it is kept, and tried now and then")
            return 0.5 if self._closing else min(_DENIED, max(10.0, 2 * wait))
        except Exception as error:  # whatever it is, it must not end the training
            self._note("away", f"MLflow is away ({error}); metrics are kept and sent later")
            return 0.5 if self._closing else min(_AWAY, 2 * wait)
        self._note("", "MLflow is back", slow=time.monotonic() - began > _SLOW)
        return _PAUSE

    def _note(self, trouble: str, text: str, slow: bool = True) -> None:
        with self._changed:
            changed, self._trouble = trouble != self._trouble, trouble
            self._slow = slow
            self._changed.notify_all()
        if changed:
            self._say(text)

    def _send_all(self) -> None:
        assert self._sender is not None
        if self._resumed is not None:
            self._known, self._resumed = self._sender.last_steps(), None
        while self._unsent():
            with self._changed:
                if not self._sending:
                    rows, self._metrics = self._metrics[:_METRICS], self._metrics[_METRICS:]
                    self._sending = [row for row in rows if row["step"] > self._known.get(row["key"], -1)]
                tags = dict(list(self._tags.items())[:_TAGS])
            self._send(self._sending, [{"key": key, "value": value} for key, value in tags.items()])
            with self._changed:
                self._sending = []
                self._tags = {key: value for key, value in self._tags.items() if tags.get(key) != value}
                self._changed.notify_all()

    def _send(self, metrics: list[Row], tags: list[dict[str, str]]) -> None:
        """Write a batch; what the server refuses is halved until the value is found that it does not take."""
        assert self._sender is not None
        if not metrics and not tags:
            return
        try:
            self._sender.send(metrics, tags)
        except RefusedError as error:
            try:
                self._sender.send([], [])
            except RefusedError as whole:  # not the content: a run that was deleted takes nothing
                raise DeniedError(str(whole)) from None
            self._halve(metrics, tags, error)

    def _halve(self, metrics: list[Row], tags: list[dict[str, str]], error: RefusedError) -> None:
        assert self._sender is not None
        if len(metrics) + len(tags) == 1:
            what = metrics[0]["key"] if metrics else tags[0]["key"]
            if what not in self._refused:
                self._say(f"MLflow refuses {what} ({error}); it is left out")
                self._refused.add(what)
            return
        parts: list[tuple[list[Row], list[dict[str, str]]]]
        if metrics and tags:
            parts = [(metrics, []), ([], tags)]
        elif metrics:
            parts = [(metrics[: len(metrics) // 2], []), (metrics[len(metrics) // 2 :], [])]
        else:
            parts = [([], tags[: len(tags) // 2]), ([], tags[len(tags) // 2 :])]
        for rows, words in parts:
            try:
                self._sender.send(rows, words)
            except RefusedError as again:
                self._halve(rows, words, again)


def thinned(rows: list[Row]) -> list[Row]:
    """Rows with about half of the points of the metric that has most of them, evenly over its steps.

    Its ends stay, and what was thinned before is not thinned again until the rest is as thin.
    """
    key, count = Counter(row["key"] for row in rows).most_common(1)[0]
    points = [row for row in rows if row["key"] == key]
    gap = max(1, -(-2 * (points[-1]["step"] - points[0]["step"]) // count))  # twice the mean
    kept, last = [], points[0]["step"] - gap
    for row in rows:
        if row["key"] == key and row is not points[-1]:
            if row["step"] - last < gap:
                continue
            last = row["step"]
        kept.append(row)
    return kept


class RestSender:
    """`runs/log-batch` of an MLflow server."""

    def __init__(self, tracking: Tracking) -> None:
        self._rest = Rest(tracking.uri)
        self._run_id = tracking.run_id

    def send(self, metrics: list[Row], tags: list[dict[str, str]]) -> None:
        try:
            self._rest.call("POST", "runs/log-batch", {"run_id": self._run_id, "metrics": metrics, "tags": tags})
        except ValueError:
            return  # it was taken, whatever the answer looks like

    def last_steps(self) -> Mapping[str, int]:
        found = self._rest.call("GET", f"runs/get?run_id={self._run_id}")
        rows = found.get("run", {}).get("data", {}).get("metrics", [])
        return {row["key"]: int(row.get("step", 0)) for row in rows}


class ClientSender:
    """Any other tracking address, through mlflow's client."""

    def __init__(self, tracking: Tracking) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking.uri)
        self._run_id = tracking.run_id

    def send(self, metrics: list[Row], tags: list[dict[str, str]]) -> None:
        from mlflow.entities import Metric, RunTag
        from mlflow.exceptions import MlflowException

        rows = [Metric(**row) for row in metrics]
        try:
            self._client.log_batch(self._run_id, rows, (), [RunTag(**tag) for tag in tags])
        except MlflowException as error:
            if error.error_code == "INVALID_PARAMETER_VALUE":
                raise RefusedError(str(error)) from error
            raise

    def last_steps(self) -> Mapping[str, int]:
        keys = self._client.get_run(self._run_id).data.metrics
        histories = {key: self._client.get_metric_history(self._run_id, key) for key in keys}
        return {key: max(point.step for point in points) for key, points in histories.items() if points}


def make_tracker(tracking: Tracking | None, say: Callable[[str], None]) -> Tracker:
    """The tracker for rank 0; without an MLflow run it does nothing."""
    if tracking is None:
        return Tracker(None, say)
    tracking = reached(tracking)
    return Tracker(RestSender(tracking) if speaks_rest(tracking.uri) else ClientSender(tracking), say)


def tag_run(tracking: Tracking | None, tags: Mapping[str, str], seconds: float) -> None:
    """Set tags on the run now, by whoever is no rank; for so many seconds at most, and no longer than needed."""
    tracker = make_tracker(tracking, lambda _: None)
    tracker.tags(tags)
    tracker.close(max(0.0, min(_TAGS_WAIT, seconds)))
