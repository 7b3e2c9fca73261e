"""`dropforge checkpoints`: a run's checkpoints as MLflow knows them, and asking for something to be done with one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from dropforge import checkpoints as kept
from dropforge.cli.connect import StateOption
from dropforge.cli.listing import Cell, Output, OutputOption, print_table, print_values
from dropforge.cli.named import RunArgument
from dropforge.client.connection import connect
from dropforge.client.named import find_row
from dropforge.client.patience import asking_rest
from dropforge.errors import DataError
from dropforge.rest import Rest
from dropforge.terminal import Console, Text

console = Console()


def checkpoints(
    run: RunArgument,
    step: Annotated[str | None, typer.Argument(help="A step, or best or last.", show_default=False)] = None,
    verb: Annotated[str | None, typer.Argument(help="evaluate, export or register it.", show_default=False)] = None,
    output: OutputOption = Output.TABLE,
    state: StateOption = None,
) -> None:
    """List a run's checkpoints, or have one evaluated, exported or registered."""
    if step is not None and verb not in kept.VERBS:
        raise typer.BadParameter(f"choose one of {', '.join(kept.VERBS)}", param_hint="VERB")
    connection = connect(state)
    rest, row = Rest(connection.settings.tracking_uri), find_row(connection, run)
    with asking_rest(connection.settings.tracking_uri):
        found = kept.checkpoints(rest, str(row["info"]["experiment_id"]), str(row["info"]["run_id"]))
        if step is None or verb is None:
            if output is not Output.TABLE:
                print_values([_values(item) for item in found], _NAMES, output)
                return
            _show(run, found)
            return
        try:
            order = kept.read(kept.Ask("", f"{step} {verb}", ""), found)
            kept.check(order, row, connection.store, connection.settings.root)
        except kept.BadAskError as error:
            raise DataError(
                f"checkpoint {step} of {run}", str(error), f"List them with `dropforge checkpoints {run}`"
            ) from None
        kept.ask_for(rest, order.checkpoint, verb)
    console.print(
        f"Asked for: {verb} step-{order.checkpoint.step}. Airflow's DAG dropforge_checkpoints looks every "
        f"15 seconds and begins once its run before is over; `dropforge checkpoints {run}` shows the answer.",
        soft_wrap=True,
    )


def _show(run: str, found: Sequence[kept.Checkpoint]) -> None:
    if not found:
        told = f"MLflow shows no checkpoint of {run} yet. The first one comes after `train.checkpoint_every`."
        console.print(Text(told))
        return
    rows = [
        (
            str(item.step),
            f"{item.tokens:,}",
            "-" if item.eval_loss is None else f"{item.eval_loss:.4f}",
            f"{item.bytes / 1e6:.1f}",
            "deleted" if item.deleted else _kept(item) or "yes",
            item.uri,
            f"{item.ask} …" if item.ask else item.answer or "-",
        )
        for item in found
    ]
    print_table(("step", "tokens", "eval loss", "MB", "kept", "address", "asked"), rows, console)


_NAMES: Final = ("step", "tokens", "eval_loss", "bytes", "kept", "deleted", "address", "asked", "answer")


def _values(item: kept.Checkpoint) -> dict[str, Cell]:
    """What programs get."""
    marks = _kept(item) or None, item.deleted
    found = item.step, item.tokens, item.eval_loss, item.bytes, *marks, item.uri, item.ask or None, item.answer or None
    return dict(zip(_NAMES, found, strict=True))


def _kept(item: kept.Checkpoint) -> str:
    return ", ".join(word for word, holds in (("best", item.best), ("last", item.last)) if holds)
