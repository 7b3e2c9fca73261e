"""`dropforge`: the one command and its subcommands."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from dropforge.cli import demo, drops, recipes, services
from dropforge.errors import DropforgeError

app = typer.Typer(
    name="dropforge",
    help="Drop data into S3; get back a fine-tuned, evaluated, registered model.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command("demo")(demo.demo)
app.command("up")(services.up)
app.command("down")(services.down)
app.command("doctor")(services.doctor)
app.command("drop")(drops.drop_command)
app.command("follow")(drops.follow_command)
app.command("runs")(drops.runs)
app.command("render")(recipes.render)
app.command("plan")(recipes.plan)


def main() -> None:
    """Run the command; an error that a person can mend is told in one paragraph, without a traceback."""
    try:
        app()
    except DropforgeError as error:
        Console(stderr=True).print(f"[red]error:[/red] {error.thing}: {error.cause}.\n{error.mend}.", highlight=False)
        sys.exit(2)
