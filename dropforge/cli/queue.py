"""`dropforge queue`: the runs that wait, for what and how long, and holding them back or moving them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dropforge import layout, tracking
from dropforge.cli.connect import StateOption
from dropforge.cli.etas import Etas
from dropforge.cli.gangs import Gang, api_client, asking_cluster, gangs_of, place, places
from dropforge.cli.listing import Output, OutputOption, print_table, print_values
from dropforge.cli.named import RunArgument
from dropforge.cli.waits import Wait, duration, in_airflow, rank
from dropforge.client.airflow import FINETUNE
from dropforge.client.comparing.find import Row, newest_rows, tags_of
from dropforge.client.connection import Connection, connect
from dropforge.client.named import Named, find
from dropforge.client.patience import asking_rest
from dropforge.client.progress import Stage, read_stages
from dropforge.errors import DataError, DropforgeError
from dropforge.json_objects import UNREADABLE, read_object
from dropforge.rest import Rest
from dropforge.stages import JOBS
from dropforge.terminal import Console, Text

if TYPE_CHECKING:
    from kubeflow_training.jobs.local.standing import Waiting, Working

_LIMIT = 100  # runs
console = Console(soft_wrap=True)
app = typer.Typer(invoke_without_command=True, no_args_is_help=False)


@app.callback()
def queue(
    context: typer.Context,
    output: OutputOption = Output.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="As `-o json`.", hidden=True)] = False,
    state: StateOption = None,
) -> None:
    """List the runs that wait: for a machine, for Airflow, for their family's turn, or for approval.

    A run that waits for a machine can be held back, released, and given a priority: the highest goes first.
    """
    if context.invoked_subcommand is not None:
        return
    found = waiting(connect(state))
    if as_json or output is not Output.TABLE:
        names = tuple(one.name for one in fields(Wait))
        print_values([wait.plain() for wait in found], names, Output.JSON if as_json else output)
        return
    if not found:
        console.print("No run waits.")
        return
    rows = [
        (
            wait.run or wait.dag_run,
            wait.stage or "-",
            f"{wait.place} {'held' if wait.held else wait.position or ''}".rstrip(),
            str(wait.priority),
            duration(wait.eta),
            wait.reason,
        )
        for wait in found
    ]
    print_table(("run", "stage", "place", "prio", "starts in", "waits for"), rows, console)


@app.command("hold")
def hold(run: RunArgument, state: StateOption = None) -> None:
    """Hold a waiting run back: those behind it go first, until it is released."""
    named = _stand(run, state, held=True)
    console.print(Text(f"{named.title} is held back. `dropforge queue release {named.title}` lets it go"))


@app.command("release")
def release(run: RunArgument, state: StateOption = None) -> None:
    """Release a run that was held back; it keeps its place in the queue."""
    named = _stand(run, state, held=False)
    console.print(Text(f"{named.title} is released"))


@app.command("priority")
def priority(
    run: RunArgument,
    number: Annotated[int, typer.Argument(help="The highest goes first; 0 by default.", metavar="N")],
    state: StateOption = None,
) -> None:
    """Give a waiting run a priority. It applies to its current job: the run's next job begins with 0 again."""
    named = _stand(run, state, priority=number)
    console.print(Text(f"{named.title} has priority {number}"))


def _stand(run: str, state: Any, *, held: bool | None = None, priority: int | None = None) -> Named:
    """:raises DropforgeError: if it does not wait where somebody can be moved."""
    connection = connect(state)
    named = find(connection, run)
    gang = gangs_of(named).newest() if named.row is not None else None
    if gang is None or not gang.there or gang.seen.phase.value != "queued":
        doing = f"its job is {gang.seen.phase.value}" if gang is not None and gang.there else "it has no job now"
        mend = f"See what waits with `dropforge queue`; `dropforge stop {named.title}` ends what runs"
        raise DataError(f"run {named.title}", f"it waits in no queue: {doing}", mend)
    with asking_cluster():
        if named.params.get("compute.backend") == "local":
            from kubeflow_training.jobs.local import LocalCluster

            cluster = place("local")
            assert isinstance(cluster, LocalCluster)
            cluster.stand(gang.name, gang.namespace, gang.snapshot.uid, held=held, priority=priority)
        else:
            from kubeflow_training.jobs.kubernetes.standing import Standings

            Standings(api_client()).stand(gang.snapshot.job, held=held, priority=priority)
    return named


def waiting(connection: Connection) -> list[Wait]:
    """Everything that waits now. :raises DropforgeError: if Airflow or MLflow does not answer."""
    airflow = connection.airflow
    queued = sorted(airflow.newest_runs(FINETUNE, _LIMIT, state="queued"), key=lambda run: str(run["run_after"]))
    paused = bool(queued) and airflow.is_paused(FINETUNE)
    why = "a user who unpauses the DAG" if paused else "Airflow, where earlier runs are running"
    uri = connection.settings.tracking_uri
    with asking_rest(uri):
        rows = newest_rows(Rest(uri), 3 * _LIMIT)
    known = {tags_of(row).get(tracking.TAG_DAG_RUN, ""): row for row in reversed(rows)}
    found = [
        Wait(_name(known.get(name := str(run["dag_run_id"]))), name, "", "airflow", why, position)
        for position, run in enumerate(queued, 1)
    ]
    look = Look(connection, known, rows)
    for run in airflow.newest_runs(FINETUNE, _LIMIT, state="running"):
        name = str(run["dag_run_id"])
        wait = look.at(Named(_name(known.get(name)) or name, name, known.get(name)), read_stages(airflow, name))
        found += [wait] if wait else []
    return rank(look.timed(found))


@dataclass
class Look:
    """One look at the runs that are under way. :param known: MLflow's rows by DAG run. :param rows: all of them."""

    connection: Connection
    known: Mapping[str, Row]
    rows: Sequence[Row]
    _gangs: dict[str, Gang] = field(default_factory=dict, init=False)

    def at(self, named: Named, stages: Sequence[Stage]) -> Wait | None:
        """What a run waits for; None if it does not wait."""
        stage = next((one for one in stages if one.state and one.state not in {"success", "skipped"}), None)
        if stage is None:
            return None
        wait = Wait(named.run, named.dag_run, stage.name, "airflow", "")
        if stage.state == "awaiting_input":
            said = named.tags.get(tracking.TAG_APPROVAL, "") if stage.name == "approve" else ""
            reason = f"awaiting approval: dropforge approve {named.title}{f' ({said})' if said else ''}"
            return replace(wait, place="person", reason=reason)
        if stage.name == "champion" and stage.state == "up_for_reschedule":
            return replace(wait, place="family", reason=self._holder(named))
        if stage.name in JOBS and stage.state == "deferred":
            return self._job(named, wait)
        reason = in_airflow(stage.state)
        return replace(wait, reason=reason) if reason else None

    def _holder(self, named: Named) -> str:
        family = named.tags.get(tracking.TAG_FAMILY, "")
        try:
            owner = str(read_object(self.connection.store, layout.turn_key(family))["owner"])
        except UNREADABLE:
            return "its family's turn"
        return f"run {_name(self.known.get(owner)) or owner}, which its family compares now"

    def _job(self, named: Named, wait: Wait) -> Wait | None:
        try:
            gang = gangs_of(named).newest()
        except DropforgeError as error:
            return replace(wait, place="cluster", reason=f"unknown: {error.thing}, {error.cause}")
        if gang is None or gang.seen.phase.value != "queued":
            return None
        self._gangs[named.dag_run] = gang
        seen = gang.seen
        if named.params.get("compute.backend") != "local":
            said = _of_workload(gang)
            return replace(wait, place=seen.queue or "cluster", reason=seen.message, position=seen.position, **said)
        own = next((item for item in self._local[0] if item.uid == gang.snapshot.uid), None)
        if own is None:
            return None  # it has just started
        standing = own.standing
        return replace(
            wait,
            place="machine",
            reason=own.why,
            position=own.position,
            held=standing.held,
            priority=standing.priority,
        )

    @cached_property
    def _local(self) -> tuple[list[Waiting], list[Working]]:
        """The jobs that wait for this machine, and those that use it."""
        queued, working = _cluster().queue()
        return queued, working

    def timed(self, waits: Sequence[Wait]) -> list[Wait]:
        """With the time until each starts, for those whose jobs wait."""
        etas, found = Etas(self.known, self.rows), dict[str, float | None]()
        if any(wait.place == "machine" and not wait.held for wait in waits):
            found |= etas.on_machine(_cluster(), *self._local)
        lines: dict[tuple[str, str], list[Gang]] = {}
        for gang in self._gangs.values():
            if gang.seen.queue and gang.seen.position:
                lines.setdefault((gang.namespace, gang.seen.queue), []).append(gang)
        for (_, queue), gangs in lines.items():
            with suppress(DropforgeError):  # the list is worth having without it
                found |= etas.in_queue(places("kubernetes"), queue, gangs)
        of = {run: gang.snapshot.uid for run, gang in self._gangs.items()}
        return [replace(wait, eta=found.get(of.get(wait.dag_run, ""))) for wait in waits]


def _of_workload(gang: Gang) -> dict[str, Any]:
    """Whether somebody has taken the job out of its queue on a cluster, and its priority there."""
    from kubeflow_training.jobs.observation.kueue import workload_in
    from kubeflow_training.jobs.shapes import mapping, whole

    spec = mapping((workload_in(gang.snapshot.events) or {}).get("spec"))
    return {"held": spec.get("active") is False, "priority": whole(spec.get("priority")) or 0}


def _cluster() -> Any:
    return place("local")


def _name(row: Row | None) -> str:
    return tags_of(row).get(tracking.TAG_RUN, "") if row else ""
