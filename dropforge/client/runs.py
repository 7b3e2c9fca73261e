"""The runs that MLflow has, and those that failed too early for that, which only Airflow knows."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from dropforge import layout, sweep_tracking, tracking
from dropforge.client.airflow import FINETUNE
from dropforge.client.connection import Connection
from dropforge.client.history import read_points
from dropforge.client.named import asked_for, is_trial
from dropforge.client.patience import asking_mlflow
from dropforge.client.progress import read_stages, why_failed
from dropforge.errors import DropforgeError

if TYPE_CHECKING:
    from mlflow.entities import Run

_REASON = 300  # characters


class ListedRun(NamedTuple):
    """A run of the list; None and empty texts for what is not known, or not known yet.

    :param began: seconds since 1970. :param seconds: how long it took. :param drop: FAMILY/DROP, or what else it read.
    :param loss: of the evaluation set, before and after. :param tries: of its training, or the trials of a sweep.
    """

    began: float
    run: str
    status: str
    seconds: float | None = None
    drop: str = ""
    base: str = ""
    version: str = ""
    loss: tuple[float, ...] = ()
    tries: str = ""
    verdict: str = ""

    def values(self) -> dict[str, str | float | None]:
        """Return what programs get, by the names of the columns."""
        before, after = (self.loss[0], self.loss[-1]) if self.loss else (None, None)
        return {
            "run": self.run,
            "status": self.status,
            "started": f"{datetime.fromtimestamp(self.began, UTC):%FT%TZ}",
            "seconds": None if self.seconds is None else round(self.seconds),
            "drop": self.drop or None,
            "base": self.base or None,
            "version": self.version or None,
            "loss_before": before,
            "loss_after": after,
            "tries": self.tries or None,
            "verdict": self.verdict or None,
        }


class ListedRuns(NamedTuple):
    """Runs, the newest first. :param missing: why those that failed before training are not among them; empty else."""

    runs: list[ListedRun]
    missing: str = ""


def list_runs(connection: Connection, family: str | None, limit: int, *, trials: bool = False) -> ListedRuns:
    """List the newest runs.

    :param family: of this one alone. :param trials: the trials of sweeps, too.
    :raises DropforgeError: if MLflow does not answer.
    """
    with asking_mlflow(connection.settings.tracking_uri):
        found, opened = _tracked(connection, family, limit, trials=trials)
    missing = ""
    try:
        # Behind a full list only what is newer than its last row is of interest.
        since = found[-1].began if len(found) == limit else 0.0
        found += _untracked(connection, family, limit, since, opened, trials=trials)
    except DropforgeError as error:
        missing = f"{error.thing}, {error.cause}"
    return ListedRuns(sorted(found, key=lambda row: row.began, reverse=True)[:limit], missing)


def _tracked(
    connection: Connection, family: str | None, limit: int, *, trials: bool
) -> tuple[list[ListedRun], set[str]]:
    """The runs that MLflow has, and the DAG runs that opened them."""
    uri = connection.settings.tracking_uri
    search = partial(tracking.search, tracking.client(uri), family=family, limit=limit)
    items = search(tracking.TAG_SWEEP)
    for also in ("",) if trials else (sweep_tracking.NO_TRIAL, sweep_tracking.CANDIDATE):
        items += search(tracking.TAG_RUN, also=also)
    items = sorted(items, key=lambda item: item.info.start_time, reverse=True)[:limit]
    rows = [_swept(item) if tracking.TAG_SWEEP in item.data.tags else _run(uri, item) for item in items]
    return rows, {item.data.tags.get(tracking.TAG_DAG_RUN, "") for item in items}


def _run(uri: str, item: Run) -> ListedRun:
    tags = item.data.tags
    points = list(read_points(uri, item.info.run_id, "eval/loss", most=2).values())  # the first and the last
    return _opened(
        item,
        tags.get(tracking.TAG_RUN, ""),
        drop=_drop_of(tags.get(tracking.TAG_SOURCE, "")),
        base=item.data.params.get("base.model", ""),
        loss=tuple(points),
        tries=tags.get(tracking.TAG_ATTEMPT, ""),
        verdict=tags.get(tracking.TAG_VERDICT, ""),
    )


def _swept(item: Run) -> ListedRun:
    tags, loss = item.data.tags, item.data.metrics.get("eval/loss")
    best = tags.get(tracking.TAG_BEST)
    return _opened(
        item,
        tags[tracking.TAG_SWEEP],
        loss=() if loss is None else (loss,),
        tries=f"{item.data.params.get('trials', '?')} trials",
        verdict=f"the best is {best}" if best else "",
    )


def _opened(item: Run, name: str, **more: Any) -> ListedRun:
    """The row of a run that MLflow has."""
    info = item.info
    seconds = None if info.end_time is None else max(0.0, (info.end_time - info.start_time) / 1000)
    version = item.data.tags.get(tracking.TAG_VERSION, "")
    began = tracking.moment(info.start_time)
    return ListedRun(began.timestamp() if began else 0.0, name, info.status, seconds, version=version, **more)


def _drop_of(source: str) -> str:
    """FAMILY/DROP of a drop's address, or the source as it is named."""
    key = urlsplit(source).path.strip("/")
    found = layout.parse_drop_key(f"{key}/{layout.SUCCESS}")
    return f"{found[0].family}/{found[0].drop}" if found else source


def _untracked(
    connection: Connection, family: str | None, limit: int, since: float, opened: set[str], *, trials: bool
) -> Iterator[ListedRun]:
    """The newest runs that failed before they opened a run in MLflow. :raises DropforgeError: if Airflow is away."""
    airflow = connection.airflow
    for run in airflow.newest_runs(FINETUNE, 100, state="failed"):
        name, began = run["dag_run_id"], datetime.fromisoformat(run["start_date"] or run["run_after"]).timestamp()
        if name in opened or began < since or (is_trial(run) and not trials):
            continue
        of, drop = asked_for(connection, run)
        if family not in {None, of}:
            continue
        stages = read_stages(airflow, name)
        if any(stage.name == "open_run" and stage.state == "success" for stage in stages):
            continue  # beyond the limit, or deleted in MLflow
        stage, cause = why_failed(airflow, name, stages) or ("it", f"see {airflow.page(FINETUNE, name)}")
        verdict = f"{stage} failed: {textwrap.shorten(cause, _REASON, placeholder=' …')}"
        yield ListedRun(began, drop or name, "FAILED", drop=drop, verdict=verdict)
        limit -= 1
        if not limit:
            return
