"""`dropforge approve`: answer the question of a run that waits for a person, with the user's rights in Airflow."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from dropforge.cli.airflow import FINETUNE
from dropforge.cli.connect import StateOption, connect
from dropforge.cli.drops import find_dag_run
from dropforge.errors import DropforgeError

TASK = "approve"
console = Console(soft_wrap=True)


def approve(
    run: Annotated[
        str | None, typer.Argument(help="A run, FAMILY/DROP or an Airflow run id.", show_default="the newest run")
    ] = None,
    yes: Annotated[
        bool | None, typer.Option("--yes/--no", help="The answer.", show_default="the terminal asks")
    ] = None,
    state: StateOption = None,
) -> None:
    """Say whether the model of a run becomes champion, where its recipe asks a person."""
    connection = connect(state)
    dag_run, title = find_dag_run(connection, run)
    airflow = connection.airflow
    states = {task["task_id"]: task["state"] for task in airflow.task_states(FINETUNE, dag_run)}
    if states.get(TASK) != "awaiting_input":
        raise DropforgeError(
            f"run {title}",
            f"nobody is asked: task {TASK} is {states.get(TASK) or 'not begun'}",
            f"Look at {airflow.page(FINETUNE, dag_run)}; a run asks only if its recipe has `promote.approval`",
        )
    question = airflow.question(FINETUNE, dag_run, TASK)
    console.print(Text(str(question["subject"]), style="bold"))
    # A table for a terminal; in a pipe the Markdown itself, which can be read and searched.
    console.print(Markdown(str(question["body"])) if console.is_terminal else Text(str(question["body"])))
    promote, keep = question["options"]
    if yes is None:
        yes = typer.confirm(f"{promote}?")
    airflow.answer(FINETUNE, dag_run, TASK, promote if yes else keep)
    console.print(Text(f"Answered: {promote if yes else keep}. Follow it with `dropforge follow {title}`"))
