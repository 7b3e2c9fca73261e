"""`dropforge resume`: a run that failed or was stopped goes on where it ended, as after a clear in the UI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from dropforge import aside, layout, sweeps, tracking
from dropforge.cli.connect import StateOption
from dropforge.cli.named import RunArgument
from dropforge.cli.result import follow_to_end
from dropforge.cli.stop import wait_gone
from dropforge.client.airflow import FINETUNE
from dropforge.client.connection import Connection, connect
from dropforge.client.named import Named, find
from dropforge.client.progress import ENDED, Stage, read_stages
from dropforge.errors import DataError, DropforgeError
from dropforge.run import RunSpec
from dropforge.stages import STAGES
from dropforge.store import Store, open_store
from dropforge.terminal import Console, Text

_DONE = frozenset({"success"})
console = Console(soft_wrap=True)


def resume(
    run: RunArgument,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from", help="A complete checkpoint, as step-40; newer ones are set aside.", show_default="the newest"
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--follow", help="Follow it to its end.")] = False,
    state: StateOption = None,
) -> None:
    """Resume a run that failed or was stopped, in the same MLflow run.

    The first stage that did not succeed runs again, and those after it. A training resumes from its newest complete
    checkpoint. With --from it resumes from an older one: the newer ones stay where they are, but no resume uses them
    until you name one of them with --from, and the training replaces them when it reaches their steps. A trial that its
    sweep has stopped is refused.
    """
    step = None if begin is None else _step(begin)
    connection = connect(state)
    named = find(connection, run)
    asked = connection.airflow.dag_run(FINETUNE, named.dag_run)
    went, conf = str(asked["state"]), asked.get("conf") or {}
    if went not in ENDED:
        raise DropforgeError(
            f"run {named.title}",
            f"it is {went}, so there is nothing to resume",
            f"Follow it with `dropforge follow {named.title}`, or stop it first",
        )
    sweeps.refuse_stopped(connection.store, str(conf.get("family")), sweeps.member(conf.get("sweep")))
    stages = read_stages(connection.airflow, named.dag_run)
    stage = first_unfinished(named.title, went, stages)
    wait_gone(connection, named, told=False)  # two gangs must never write the same checkpoints
    if stage == "train" or step is not None:
        _choose(connection, named, step)
        stage = min(stage, "train", key=STAGES.index)
    connection.airflow.clear(FINETUNE, named.dag_run, stage)
    console.print(Text(f"Run {named.title} resumes at {stage}: {connection.airflow.page(FINETUNE, named.dag_run)}"))
    if watch:
        raise typer.Exit(follow_to_end(connection, named.dag_run, named.title, console))


def first_unfinished(title: str, went: str, stages: Sequence[Stage]) -> str:
    """The stage from which a run goes on; a pure function.

    :param went: the run's own state. :raises DataError: if it has succeeded, or another run has its data.
    """
    left = [stage for stage in stages if stage.state not in _DONE]
    if went == "success" and left and left[0].name in {"plan", "open_run"}:
        raise DataError(
            f"run {title}",
            "another run has its data, or had the same rows and recipe, so it did nothing",
            "Look for that run with `dropforge runs`, or train once more with `dropforge submit --again`",
        )
    if went == "success" or not left:
        raise DataError(
            f"run {title}",
            "it has succeeded",
            "To continue training from its checkpoints, start a new run with `base.start: runs/RUN/step-N`",
        )
    return left[0].name


def _choose(connection: Connection, named: Named, step: int | None) -> None:
    """Settle, and tell, which checkpoint the training goes on from."""
    if not layout.is_run(named.run):
        raise DataError(f"run {named.title}", "it was not opened, so it has no checkpoint", "Leave out --from")
    spec = RunSpec.read(connection.store, layout.run_key(named.run), named.tags.get(tracking.TAG_RUN_DIGEST))
    store = open_store(spec.checkpoints_root)
    if step is not None:
        _set_aside(connection, named, spec, store, step)
    left = aside.newest(there := aside.sealed(store), aside.known(store))
    passed = [item for item in there if left is None or item.step > left.step]
    kept = f"; {aside.listed(passed)} {'are' if len(passed) > 1 else 'is'} set aside" if passed else ""
    where = f"from checkpoint step-{left.step}" if left else "from its beginning: there is no checkpoint to resume from"
    console.print(Text(f"The training resumes {where}{kept}"))


def _set_aside(connection: Connection, named: Named, spec: RunSpec, store: Store, step: int) -> None:
    """:raises DataError: if a training cannot begin anew at this step."""
    version = named.tags.get(tracking.TAG_VERSION)
    instead = f"Start a new run with `base.start: runs/{named.run}/step-{step}`, which takes over the weights"
    if connection.store.stat(layout.report_key(named.run)) is not None:
        raise DataError(f"run {named.title}", "its training is done, and is not resumed", instead)
    if version:
        raise DataError(f"run {named.title}", f"its model is registered as version {version}", instead)
    if (spec.recipe.get("train") or {}).get("fast_checkpoints"):
        cause = "with `train.fast_checkpoints` newer ones may be on disks of its nodes, which cannot be read from here"
        raise DataError(f"run {named.title}", cause, f"Leave out --from. {instead}")
    aside.set_aside(store, aside.sealed(store), step)


def _step(text: str) -> int:
    number = text.removeprefix("step-")
    if not number.isdecimal():
        raise typer.BadParameter("write it as step-40", param_hint="--from")
    return int(number)
