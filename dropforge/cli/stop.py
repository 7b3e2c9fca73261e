"""`dropforge stop`: cancel a run as the UI does, and wait until nothing of it runs any more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from dropforge.cli.connect import StateOption
from dropforge.cli.gangs import Gang, Gangs, gangs_of
from dropforge.cli.named import RunArgument
from dropforge.client.airflow import FINETUNE
from dropforge.client.connection import Connection, connect
from dropforge.client.named import Named, find
from dropforge.client.patience import LIMIT, Patience
from dropforge.client.progress import ENDED, Stage, read_stages
from dropforge.errors import DropforgeError
from dropforge.terminal import Console, Text

OVER = frozenset({"success", "failed", "skipped", "upstream_failed", "removed", ""})
_LOOK = 0.5  # seconds
console = Console(soft_wrap=True)


def stop(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    state: StateOption = None,
) -> None:
    """Cancel a run, and wait until its processes are gone.

    The ranks get SIGTERM and, within `compute.grace_seconds`, save a checkpoint; `dropforge resume RUN` resumes from
    it. Nothing is deleted. Ends with 0 once none of its processes runs, also if it had ended before; with 1 if you
    answer no, or if it cannot be checked from here whether its processes are gone.
    """
    connection = connect(state)
    named = find(connection, run)
    airflow = connection.airflow
    begun = state_of(connection, named)
    if begun not in ENDED:
        console.print(Text(f"Run {named.title} is {begun}, {_doing(read_stages(airflow, named.dag_run))}"))
        if not yes and not typer.confirm("Stop it?"):
            raise typer.Exit(1)
        begun = state_of(connection, named)  # it may have come to its end before the answer
    if begun in ENDED:
        console.print(Text(f"Run {named.title} is over: {begun}. Nothing to stop"))
    else:
        airflow.fail_run(FINETUNE, named.dag_run)
    raise typer.Exit(wait_gone(connection, named, told=begun not in ENDED))


def state_of(connection: Connection, named: Named) -> str:
    """Of the run in Airflow: queued, running, success or failed."""
    return str(connection.airflow.dag_run(FINETUNE, named.dag_run)["state"])


def wait_gone(connection: Connection, named: Named, *, told: bool = True) -> int:
    """Wait until Airflow is done with the run and its jobs are gone; the exit code.

    :param told: whether to say how it went if there was nothing to wait for.
    :raises DropforgeError: if it takes much longer than the pods' grace.
    """
    patience = Patience(connection.stack, f"dropforge stop {named.title}")
    gangs: Gangs | None = None
    unseen = ""
    if named.row is not None:
        try:
            gangs = gangs_of(named)
        except DropforgeError as error:
            unseen = f"{error.thing}: {error.cause}. {error.mend}"
    grace = float(named.params.get("compute.grace_seconds") or 60)
    end, began = time.monotonic() + grace + LIMIT, time.monotonic()
    with console.status("Waiting until its processes are gone"):
        while True:
            left: Sequence[object] = ()
            try:
                left = at_work(connection, named.dag_run)
                left = [*left, *(gang for gang in gangs.find() if gang.there)] if gangs else left
                patience.answered()
            except DropforgeError as error:
                patience.check_stack()
                patience.bear(error)
                left = ["?"]
            if not left:
                break
            if time.monotonic() > end:
                raise DropforgeError(
                    f"run {named.title}",
                    f"it does not end: after {time.monotonic() - began:.0f} s there is still {_names(left)}",
                    f"Look at {connection.airflow.page(FINETUNE, named.dag_run)}, and at the node of its pods",
                )
            time.sleep(_LOOK)
    if unseen:
        console.print(Text(f"Airflow has ended it. Whether its pods are gone cannot be seen from here: {unseen}"))
        return 1
    if told:
        console.print(Text("It is stopped, and nothing of it runs any more", style="green"))
        console.print(Text(f"`dropforge resume {named.title}` resumes it"))
    return 0


def at_work(connection: Connection, dag_run: str) -> list[str]:
    """What Airflow still does for a run: tasks that have not ended, the one that tidies up among them."""
    state = str(connection.airflow.dag_run(FINETUNE, dag_run)["state"])
    tasks = connection.airflow.task_states(FINETUNE, dag_run)
    busy = [f"task {task['task_id']}" for task in tasks if str(task["state"] or "") not in OVER]
    return busy or ([] if state in ENDED else [f"a run that is {state}"])


def _doing(stages: Sequence[Stage]) -> str:
    busy = next((stage for stage in stages if stage.state and stage.state not in OVER), None)
    return f"at {busy.name} ({busy.state})" if busy else "between two stages"


def _names(left: Sequence[object]) -> str:
    return ", ".join(f"job {one.namespace}/{one.name}" if isinstance(one, Gang) else str(one) for one in left)
