"""`dropforge stop`: cancel a run or a sweep as the UI does, and wait until nothing of it runs any more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from dropforge import sweeps
from dropforge.cli.connect import StateOption
from dropforge.cli.gangs import Gang, Gangs, gangs_of
from dropforge.cli.named import RUN_HELP, complete_run
from dropforge.client.airflow import FINETUNE, SWEEP, NoSuchRunError
from dropforge.client.connection import Connection, connect
from dropforge.client.named import Named, find
from dropforge.client.patience import LIMIT, Patience
from dropforge.client.progress import ENDED, read_stages
from dropforge.errors import DropforgeError
from dropforge.sweep import build_sweep
from dropforge.terminal import Console, Text

OVER = frozenset({"success", "failed", "skipped", "upstream_failed", "removed", ""})
_LOOK = 0.5  # seconds
StoppedArgument = Annotated[
    str,
    typer.Argument(help=f"{RUN_HELP} Or a sweep, by its id in Airflow.", autocompletion=complete_run, metavar="RUN"),
]
console = Console(soft_wrap=True)


def stop(
    run: StoppedArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    state: StateOption = None,
) -> None:
    """Cancel a run or a sweep, and wait until its processes are gone.

    The ranks get SIGTERM and, within `compute.grace_seconds`, save a checkpoint; `dropforge resume RUN` resumes from
    it. Of a sweep all trials end so. Nothing is deleted. Ends with 0 once none of its processes runs, also if it had
    ended before; with 1 if you answer no, or if it cannot be checked from here whether its processes are gone.
    """
    connection = connect(state)
    named = _sweep(connection, run) or find(connection, run)
    what = f"{'Sweep' if named.dag == SWEEP else 'Run'} {named.title}"
    begun = state_of(connection, named)
    if begun not in ENDED:
        console.print(Text(f"{what} is {begun}, {_doing(connection, named)}"))
        if not yes and not typer.confirm("Stop it?"):
            raise typer.Exit(1)
        begun = state_of(connection, named)  # it may have come to its end before the answer
    if begun in ENDED:
        console.print(Text(f"{what} is over: {begun}. Nothing to stop"))
    else:
        connection.airflow.fail_run(named.dag, named.dag_run)
    raise typer.Exit(wait_gone(connection, named, told=begun not in ENDED))


def _sweep(connection: Connection, word: str) -> Named | None:
    """The sweep of this id in Airflow; None if it is no id, a fine-tune run's, or nobody's."""
    if "__" not in word:
        return None
    for dag in (FINETUNE, SWEEP):
        with suppress(NoSuchRunError):
            connection.airflow.dag_run(dag, word)
            return Named(word, word, dag=SWEEP) if dag == SWEEP else None
    return None


def state_of(connection: Connection, named: Named) -> str:
    """Of the run in Airflow: queued, running, success or failed."""
    return str(connection.airflow.dag_run(named.dag, named.dag_run)["state"])


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
    grace = _grace_of_trials(connection, named) if named.dag == SWEEP else named.params.get("compute.grace_seconds")
    end, began = time.monotonic() + float(grace or 60) + LIMIT, time.monotonic()
    with console.status("Waiting until its processes are gone"):
        while True:
            left: Sequence[object] = ()
            try:
                left = at_work(connection, named)
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
                    f"{'sweep' if named.dag == SWEEP else 'run'} {named.title}",
                    f"it does not end: after {time.monotonic() - began:.0f} s there is still {_names(left)}",
                    f"Look at {connection.airflow.page(named.dag, named.dag_run)}, and at the node of its pods",
                )
            time.sleep(_LOOK)
    if unseen:
        console.print(Text(f"Airflow has ended it. Whether its pods are gone cannot be seen from here: {unseen}"))
        return 1
    if told:
        console.print(Text("It is stopped, and nothing of it runs any more", style="green"))
        console.print(Text(_resumed_by(connection, named)))
    return 0


def _resumed_by(connection: Connection, named: Named) -> str:
    if named.dag == FINETUNE:
        return f"`dropforge resume {named.title}` resumes it"
    told = f"Clear `trial` at {connection.airflow.page(SWEEP, named.dag_run)} to resume it"
    for state in ("queued", "running"):
        for run in connection.airflow.newest_runs(FINETUNE, 100, state=state):
            if (name := str(run["dag_run_id"])).startswith(sweeps.candidate_run(named.dag_run)):
                told += f"\nThe run of its best trial is {state}, and is stopped by itself: `dropforge stop {name}`"
    return told


def _grace_of_trials(connection: Connection, named: Named) -> float | None:
    """Of the trial that may take longest to save, in seconds; None if Airflow's run says nothing that can be used."""
    conf = connection.airflow.dag_run(SWEEP, named.dag_run).get("conf") or {}
    try:
        asked = build_sweep(conf.get("sweep") or {})
        return max(float(asked.whole(trial).compute.grace_seconds) for trial in asked.made())
    except DropforgeError:
        return None


def at_work(connection: Connection, named: Named) -> list[str]:
    """What Airflow still does for a run: tasks that have not ended, the one that tidies up among them."""
    state = state_of(connection, named)
    tasks = connection.airflow.task_states(named.dag, named.dag_run)
    busy = [f"task {task['task_id']}" for task in tasks if str(task["state"] or "") not in OVER]
    return busy or ([] if state in ENDED else [f"a run that is {state}"])


def _doing(connection: Connection, named: Named) -> str:
    if named.dag == SWEEP:
        states = connection.airflow.mapped_states(SWEEP, named.dag_run, "trial")
        left = sum(state not in OVER - {""} for state in states.values())
        return f"with {left} of {len(states)} trials that run or wait"
    stages = read_stages(connection.airflow, named.dag_run)
    busy = next((stage for stage in stages if stage.state and stage.state not in OVER), None)
    return f"at {busy.name} ({busy.state})" if busy else "between two stages"


def _names(left: Sequence[object]) -> str:
    return ", ".join(f"job {one.namespace}/{one.name}" if isinstance(one, Gang) else str(one) for one in left)
