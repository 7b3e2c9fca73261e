"""`dropforge top`: the ranks of a run that is at work, from what is recorded of it, again and again."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from dropforge import tracking
from dropforge.cli.connect import StateOption
from dropforge.cli.gangs import Gang, gangs_of
from dropforge.cli.named import RunArgument
from dropforge.cli.ranks import Pod, Point, Rank, Use, ranks_of, use
from dropforge.cli.stop import OVER, state_of
from dropforge.client.connection import Connection, connect
from dropforge.client.named import Named, find, opened
from dropforge.client.patience import Patience
from dropforge.client.progress import ENDED, read_stages
from dropforge.errors import DropforgeError
from dropforge.rest import real
from dropforge.terminal import Console, Text
from dropforge.text import read_count

_MOMENT = 0.5  # seconds between two looks at processes, where only one picture is wanted
_SILENT = 60.0  # seconds without a sign of life that are worth a colour
console = Console()


@dataclass(frozen=True)
class Picture:
    """One look at a run. :param at: Unix time. :param note: what could not be seen, and why."""

    title: str
    run: str
    dag_run: str
    state: str
    stage: str
    at: float
    job: Mapping[str, Any] | None = None
    figures: Mapping[str, float | int | None] = field(default_factory=dict)
    ranks: Sequence[Rank] = ()
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "run": self.run or None,
            "dag_run": self.dag_run,
            "state": self.state,
            "stage": self.stage or None,
            "job": self.job,
            **self.figures,
            "ranks": [rank.plain(self.at) for rank in self.ranks],
            "note": self.note or None,
        }


def top(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One snapshot as JSON.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two snapshots.", min=0.5)] = 2.0,
    state: StateOption = None,
) -> None:
    """Show each rank of a run: pod, phase, node, CPU, memory, GPU and last heartbeat; step, tokens/s and loss.

    Ends with the run, or with Ctrl-C. If the output is not a terminal, one snapshot is printed.
    """
    connection = connect(state)
    watcher = Watcher(connection, find(connection, run))
    if once or as_json or not console.is_terminal:
        watcher.look()
        time.sleep(_MOMENT)
        picture = watcher.look()
        if as_json:
            typer.echo(json.dumps(picture.plain(), indent=1))
        else:
            console.print(draw(picture))
        return
    patience, picture = Patience(connection.stack, f"dropforge top {run}"), watcher.look()
    with Live(draw(picture), console=console, auto_refresh=False) as live:
        while picture.state not in ENDED:
            time.sleep(every)
            try:
                picture = watcher.look()
            except DropforgeError as error:
                patience.check_stack()
                patience.bear(error)
                continue
            patience.answered()
            live.update(draw(picture), refresh=True)


@dataclass
class Watcher:
    """Looks at one run; what processes use follows from two looks."""

    connection: Connection
    named: Named
    _spent: dict[int, tuple[float, int]] = field(default_factory=dict, init=False)
    _looked: float = field(default=0.0, init=False)

    def look(self) -> Picture:
        """:raises DropforgeError: if Airflow or MLflow does not answer."""
        named = self.named = opened(self.connection, self.named.dag_run, self.named.title)
        state = state_of(self.connection, named)
        stages = read_stages(self.connection.airflow, named.dag_run)
        stage = next((stage.name for stage in stages if stage.state and stage.state not in OVER), "")
        picture = Picture(named.title, named.run, named.dag_run, state, stage, time.time())
        if named.row is None:
            return picture
        metrics = newest(named)
        gang, note = self._gang(named) if state not in ENDED else (None, "")
        each, pods = layout_of(gang, named)
        begun = gang.snapshot.job["metadata"].get("creationTimestamp") if gang else None
        used = self._used(gang) if gang else {}
        over = state in ENDED or (gang is not None and not gang.there)
        ranks = [] if over else ranks_of(pods, each, metrics, used, _unix(begun))
        return Picture(
            named.title,
            named.run,
            named.dag_run,
            state,
            stage,
            time.time(),
            job_of(gang),
            figures(metrics, named.tags),
            ranks,
            note,
        )

    def _gang(self, named: Named) -> tuple[Gang | None, str]:
        try:
            return gangs_of(named).newest(), ""
        except DropforgeError as error:
            return None, f"{error.thing}: {error.cause}. {error.mend}"

    def _used(self, gang: Gang) -> dict[int, Use]:
        from kubeflow_training.jobs.kinds import kind_seen
        from kubeflow_training.jobs.local.usage import processes_of

        if self.named.params.get("compute.backend") != "local":
            return {}
        each, kind = ranks_each(gang), kind_seen(gang.snapshot.job)
        spent: dict[int, tuple[float, int]] = {}
        for pod in gang.snapshot.pods:
            found = processes_of(str(pod["metadata"]["uid"]))
            of_ranks = [process for process in found if process.rank is not None]
            first = kind.node_rank(pod, gang.snapshot.job) * each
            for process in of_ranks or found:  # a job without ranks is one process and what it starts
                rank = first if process.rank is None else process.rank
                seconds, memory = spent.get(rank, (0.0, 0))
                spent[rank] = (seconds + process.cpu_seconds, memory + process.memory)
        now = time.monotonic()
        used = use(self._spent, spent, now - self._looked)
        self._spent, self._looked = spent, now
        return used


def newest(named: Named) -> dict[str, Point]:
    """The newest value of each metric of an opened run."""
    rows = named.row["data"].get("metrics", []) if named.row else []
    return {
        str(row["key"]): Point(real(row["value"]), int(row.get("timestamp", 0)) / 1000, int(row.get("step", 0)))
        for row in rows
    }


def layout_of(gang: Gang | None, named: Named) -> tuple[int, list[Pod]]:
    """Ranks in a pod, and the pods; as the recipe has them where the job cannot be seen."""
    if gang is None:
        nodes, each = (int(named.params.get(f"compute.{key}") or 1) for key in ("nodes", "processes_per_node"))
        return each, [Pod("", node, "", "") for node in range(nodes)]
    from kubeflow_training.jobs.kinds import kind_seen

    kind = kind_seen(gang.snapshot.job)
    return ranks_each(gang), [
        Pod(
            str(pod["metadata"]["name"]),
            kind.node_rank(pod, gang.snapshot.job),
            str((pod.get("status") or {}).get("phase") or ""),
            str((pod.get("spec") or {}).get("nodeName") or ""),
        )
        for pod in gang.snapshot.pods
    ]


def ranks_each(gang: Gang) -> int:
    """Ranks in one pod of a gang."""
    from kubeflow_training.jobs.kinds import kind_seen

    return kind_seen(gang.snapshot.job).processes(gang.snapshot.job)


def job_of(gang: Gang | None) -> dict[str, Any] | None:
    """What is told of the job."""
    if gang is None:
        return None
    seen = gang.seen
    return {
        "name": gang.name,
        "namespace": gang.namespace,
        "purpose": gang.purpose,
        "phase": seen.phase.value,
        "reason": seen.reason.value if seen.reason else None,
        "message": seen.message or None,
        "queue": seen.queue,
        "position": seen.position,
    }


def figures(metrics: Mapping[str, Point], tags: Mapping[str, str]) -> dict[str, float | int | None]:
    """How far the training is, and how well it goes; None for what is not known."""

    def value(name: str) -> float | None:
        point = metrics.get(name)
        return point.value if point is not None and math.isfinite(point.value) else None

    def whole(name: str) -> int | None:
        return read_count(tags.get(name, ""))

    return {
        "step": metrics["train/tokens"].step if "train/tokens" in metrics else None,
        "steps": whole(tracking.TAG_STEPS),
        "loss": value("train/loss"),
        "eval_loss": value("eval/loss"),
        "tokens_per_second": value("train/tokens_per_second"),
        "attempt": whole(tracking.TAG_ATTEMPT),
        "resumed_from": whole(tracking.TAG_RESUMED),
    }


def draw(picture: Picture) -> RenderableType:
    """The picture of one look."""
    told = picture.figures
    head = Text.assemble((picture.title, "bold"), f"  {picture.state}", f"  {picture.stage}" if picture.stage else "")
    lines: list[RenderableType] = [head]
    words = [
        ("step", "step {:,}" + (f"/{told['steps']:,}" if told.get("steps") else "")),
        ("loss", "loss {:.4f}"),
        ("eval_loss", "eval loss {:.4f}"),
        ("tokens_per_second", "{:,.0f} tok/s"),
        ("attempt", "attempt {}"),
        ("resumed_from", "resumed from step {}"),
    ]
    lines.append(Text("  ".join(form.format(told[key]) for key, form in words if told.get(key) is not None)))
    if picture.job:
        lines.append(Text(f"{picture.job['phase']}: {picture.job['message'] or picture.job['name']}", style="dim"))
    if picture.note:
        lines.append(Text(picture.note, style="yellow"))
    if picture.ranks:
        lines.append(_table(picture))
    return Group(*lines)


def _table(picture: Picture) -> Table:
    table = Table(box=None, header_style="bold")
    for name in ("rank", "pod", "phase", "node", "CPU", "memory", "GPU", "last sign"):
        right = name in {"rank", "CPU", "memory", "GPU", "last sign"}
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for rank in picture.ranks:
        node = " of node" if rank.of == "node" else ""
        since = None if rank.seen is None else max(0.0, picture.at - rank.seen)
        gpu = "" if rank.gpu_memory is None else f"  {rank.gpu_memory / 1e9:.1f} GB"
        table.add_row(
            str(rank.rank),
            Text(rank.pod.removeprefix(f"{(picture.job or {}).get('name')}-") or "-"),
            Text(rank.phase or "-"),
            Text(rank.node or "-"),
            "-" if rank.cpu is None else f"{rank.cpu:.0f} %{node}",
            "-" if rank.memory is None else f"{rank.memory / 1e9:.2f} GB{node}",
            "-" if rank.gpu is None else f"{rank.gpu:.0f} %{gpu}",
            Text("-" if since is None else f"{since:.0f} s", style="yellow" if (since or 0) > _SILENT else ""),
        )
    return table


def _unix(text: str | None) -> float:
    from kubeflow_training.jobs.shapes import moment

    at = moment(text)
    return at.timestamp() if at else 0.0
