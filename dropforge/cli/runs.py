"""`dropforge runs`: the runs that MLflow has, and those that failed too early for that, which only Airflow knows."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dropforge import layout, sweep_tracking, tracking
from dropforge.cli.airflow import FINETUNE
from dropforge.cli.connect import Connection, StateOption, connect
from dropforge.cli.history import read_points
from dropforge.cli.listing import Cell, Output, OutputOption, print_table, print_values
from dropforge.cli.named import asked_for
from dropforge.cli.patience import asking_mlflow
from dropforge.cli.watch import read_stages, why_failed
from dropforge.errors import DropforgeError
from dropforge.terminal import Console, Text

if TYPE_CHECKING:
    from mlflow.entities import Run

_REASON = 300  # characters
console = Console()


class Row(NamedTuple):
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

    def values(self) -> dict[str, Cell]:
        """Return what programs get."""
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

    def cells(self) -> tuple[str, ...]:
        """Return what people see, in the order of `_COLUMNS`."""
        loss = " → ".join(f"{value:.3f}" for value in dict.fromkeys(self.loss))
        started = f"{datetime.fromtimestamp(self.began).astimezone():%m-%d %H:%M}"
        found = (
            started,
            _took(self.seconds),
            self.drop,
            self.base,
            self.version,
            loss,
            self.tries,
            _short(self.verdict),
        )
        return self.run, self.status, *(cell or "-" for cell in found)


_COLUMNS = "run", "status", "started", "took", "drop", "base", "version", "eval loss", "tries", "verdict"


def runs(
    family: Annotated[str | None, typer.Option("--family", "-f", help="Only this family.")] = None,
    limit: Annotated[int, typer.Option(help="How many.", min=1)] = 20,
    trials: Annotated[bool, typer.Option("--trials", help="The trials of sweeps, too.")] = False,
    output: OutputOption = Output.TABLE,
    state: StateOption = None,
) -> None:
    """List runs, the newest first. A sweep is one line, and its best trial another one once it is a candidate."""
    connection = connect(state)
    with asking_mlflow(connection.settings.tracking_uri):
        found, opened = _tracked(connection, family, limit, trials=trials)
    try:
        # Behind a full list only what is newer than its last row is of interest.
        since = found[-1].began if len(found) == limit else 0.0
        found += _untracked(connection, family, limit, since, opened, trials=trials)
        missing = ""
    except DropforgeError as error:
        missing = f"Runs that failed before training are not listed: {error.thing}, {error.cause}."
    newest = sorted(found, key=lambda row: row.began, reverse=True)[:limit]
    if output is not Output.TABLE:
        print_values([row.values() for row in newest], tuple(Row(0.0, "", "").values()), output)
    elif newest:
        print_table(_COLUMNS, [row.cells() for row in newest], console)
    else:
        of = f" of family {family}" if family else ""
        console.print(Text(f"There are no runs{of} yet. Start one with `dropforge drop PATH --family NAME`."))
    if missing:
        told = Console(stderr=True, soft_wrap=True) if output is not Output.TABLE else console
        told.print(Text(missing, "yellow"))


def _tracked(connection: Connection, family: str | None, limit: int, *, trials: bool) -> tuple[list[Row], set[str]]:
    """The runs that MLflow has, and the DAG runs that opened them."""
    uri = connection.settings.tracking_uri
    search = partial(tracking.search, tracking.client(uri), family=family, limit=limit)
    items = search(tracking.TAG_SWEEP)
    for also in ("",) if trials else (sweep_tracking.NO_TRIAL, sweep_tracking.CANDIDATE):
        items += search(tracking.TAG_RUN, also=also)
    items = sorted(items, key=lambda item: item.info.start_time, reverse=True)[:limit]
    rows = [_swept(item) if tracking.TAG_SWEEP in item.data.tags else _run(uri, item) for item in items]
    return rows, {item.data.tags.get(tracking.TAG_DAG_RUN, "") for item in items}


def _run(uri: str, item: Run) -> Row:
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


def _swept(item: Run) -> Row:
    tags, loss = item.data.tags, item.data.metrics.get("eval/loss")
    best = tags.get(tracking.TAG_BEST)
    return _opened(
        item,
        tags[tracking.TAG_SWEEP],
        loss=() if loss is None else (loss,),
        tries=f"{item.data.params.get('trials', '?')} trials",
        verdict=f"the best is {best}" if best else "",
    )


def _opened(item: Run, name: str, **more: Any) -> Row:
    """The row of a run that MLflow has."""
    info = item.info
    seconds = None if info.end_time is None else max(0.0, (info.end_time - info.start_time) / 1000)
    version = item.data.tags.get(tracking.TAG_VERSION, "")
    began = tracking.moment(info.start_time)
    return Row(began.timestamp() if began else 0.0, name, info.status, seconds, version=version, **more)


def _drop_of(source: str) -> str:
    """FAMILY/DROP of a drop's prefix, or the source as it is named."""
    found = layout.parse_drop_key(f"{source.rstrip('/')}/{layout.SUCCESS}")
    return f"{found[0].family}/{found[0].drop}" if found else source


def _untracked(
    connection: Connection, family: str | None, limit: int, since: float, opened: set[str], *, trials: bool
) -> Iterator[Row]:
    """The newest runs that failed before they opened a run in MLflow. :raises DropforgeError: if Airflow is away."""
    airflow = connection.airflow
    for run in airflow.newest_runs(FINETUNE, 100, state="failed"):
        name, began = run["dag_run_id"], datetime.fromisoformat(run["start_date"] or run["run_after"]).timestamp()
        if name in opened or began < since or (_is_trial(run) and not trials):
            continue
        of, drop = asked_for(connection, run)
        if family not in {None, of}:
            continue
        stages = read_stages(airflow, name)
        if any(stage.name == "open_run" and stage.state == "success" for stage in stages):
            continue  # beyond the limit, or deleted in MLflow
        stage, cause = why_failed(airflow, name, stages) or ("it", f"see {airflow.page(FINETUNE, name)}")
        verdict = f"{stage} failed: {textwrap.shorten(cause, _REASON, placeholder=' …')}"
        yield Row(began, drop or name, "FAILED", drop=drop, verdict=verdict)
        limit -= 1
        if not limit:
            return


def _is_trial(run: Mapping[str, Any]) -> bool:
    sweep = (run.get("conf") or {}).get("sweep")
    return isinstance(sweep, Mapping) and sweep.get("candidate") is not True


def _took(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def _short(verdict: str) -> str:
    """Why a model was held back; that it beat everybody needs no words."""
    return "promote" if verdict.startswith("promote:") else verdict
