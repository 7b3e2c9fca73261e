"""`dropforge approve`: answer the question of a run that waits for a person, with the user's rights in Airflow."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.markdown import Markdown

from dropforge.cli.connect import StateOption
from dropforge.cli.named import OptionalRunArgument
from dropforge.client.airflow import FINETUNE
from dropforge.client.connection import connect
from dropforge.client.named import find_dag_run
from dropforge.errors import DropforgeError
from dropforge.terminal import Console, Text

#: Tasks that ask a person, and the recipe key without which they never do.
ASKING: Final = {"confirm": "compute.limits.ask_above", "approve": "promote.approval"}
console = Console(soft_wrap=True)


def approve(
    run: OptionalRunArgument = None,
    yes: Annotated[
        bool | None, typer.Option("--yes/--no", help="The answer.", show_default="the terminal asks")
    ] = None,
    state: StateOption = None,
) -> None:
    """Answer a run that awaits approval: whether it may begin, or whether its model becomes champion."""
    connection = connect(state)
    dag_run, title = find_dag_run(connection, run)
    airflow = connection.airflow
    states = {task["task_id"]: task["state"] for task in airflow.task_states(FINETUNE, dag_run)}
    waiting = next((task for task in ASKING if states.get(task) == "awaiting_input"), None)
    if waiting is None:
        told = ", ".join(f"task {task} is {states.get(task) or 'not begun'}" for task in ASKING)
        keys = " or ".join(f"`{key}`" for key in ASKING.values())
        raise DropforgeError(
            f"run {title}",
            f"it awaits no approval: {told}",
            f"Look at {airflow.page(FINETUNE, dag_run)}; a run asks only if its recipe has {keys}",
        )
    question = airflow.question(FINETUNE, dag_run, waiting)
    console.print(Text(str(question["subject"]), style="bold"))
    # A table for a terminal; in a pipe the Markdown itself, which can be read and searched.
    console.print(
        Markdown(str(question["body"]), hyperlinks=False) if console.is_terminal else Text(str(question["body"]))
    )
    agree, refuse = question["options"]
    if yes is None:
        yes = typer.confirm(f"{agree}?")
    airflow.answer(FINETUNE, dag_run, waiting, agree if yes else refuse)
    said = f"Answered: {agree if yes else refuse}."
    try:
        taken = airflow.see_taken(FINETUNE, dag_run, waiting)
    except DropforgeError as error:
        taken, said = False, f"{said} Then Airflow failed ({error.cause})."
    if not taken:
        said += " Whether the task has taken it is not seen yet."
    console.print(Text(f"{said} Follow it with `dropforge follow {title}`"))
