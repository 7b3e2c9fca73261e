"""`dropforge family`: the recipe that a family's drops are trained with, and who set it."""

from __future__ import annotations

import getpass
import json
import os
import socket
from dataclasses import asdict
from typing import Annotated

import typer
import yaml

from dropforge import family_recipe
from dropforge.cli.connect import StateOption
from dropforge.cli.recipes import complete_recipe
from dropforge.client.connection import connect
from dropforge.errors import RecipeError
from dropforge.layout import check_family
from dropforge.recipes.drop_rules import differences
from dropforge.recipes.load import build_recipe, default_preset, merge, preset_values, read_named, resolve
from dropforge.recipes.rules import check_startable
from dropforge.settings import Settings
from dropforge.terminal import Console, Text

_SHOWN = 40  # changed keys
app = typer.Typer(help="Show or set the recipe that a family's drops are trained with.", no_args_is_help=True)
console = Console(soft_wrap=True)
FamilyArgument = Annotated[str, typer.Argument(help="Name of the model family.", metavar="FAMILY")]


@app.command("show")
def show(
    family: FamilyArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the recipe, and who set it, as JSON.")] = False,
    state: StateOption = None,
) -> None:
    """Show a family's recipe, and who set it.

    A recipe in the family's file, `families/FAMILY.yaml` where Airflow runs, comes before it.
    """
    connection = connect(state)
    kept = family_recipe.read(connection.store, check_family(family))
    if as_json:
        typer.echo(json.dumps(None if kept is None else asdict(kept), indent=1))
        return
    if kept is None:
        console.print(Text(_none(family, connection.settings)))
        return
    console.print(Text(f"# {kept.told}" + (f", over preset {kept.preset}" if kept.preset else ""), "dim"))
    console.print(Text(yaml.safe_dump(kept.recipe, sort_keys=False, allow_unicode=True).rstrip()))


@app.command("set")
def set_recipe(
    family: FamilyArgument,
    recipe: Annotated[
        str,
        typer.Option("--recipe", help="A preset's name or a recipe file.", autocompletion=complete_recipe),
    ],
    state: StateOption = None,
) -> None:
    """Set the recipe that a family's drops are trained with from now on.

    It is merged over the preset of DROPFORGE_PRESET here, if that is set. Runs that have begun keep theirs, but for
    the people who approve.
    """
    values = read_named(recipe)
    preset = default_preset()
    after = check_startable(build_recipe(merge(preset_values(preset), resolve(values)))).plain()
    connection = connect(state)
    before = family_recipe.write(connection.store, check_family(family), values, preset, _person())
    if before is None:
        console.print(Text(f"Family {family} has its recipe from now on: {recipe}"))
        return
    console.print(Text(f"Family {family} has the recipe {recipe} from now on. Before: {before.told}"))
    try:
        old = build_recipe(before.resolved()).plain()
    except RecipeError:
        return  # the one before could not be used any more
    changed = list(differences(old, after))
    for path, one, other in changed[:_SHOWN]:
        console.print(Text(f"  {path}: {json.dumps(one)} -> {json.dumps(other)}"))
    if not changed:
        console.print(Text("  It says the same."))
    elif len(changed) > _SHOWN:
        console.print(Text(f"  and {len(changed) - _SHOWN} more"))


def _none(family: str, settings: Settings) -> str:
    preset = default_preset()
    if settings.self_service:
        over = f", over preset {preset}" if preset else ""
        return f"Family {family} has no recipe yet: its first drop whose task `plan` succeeds sets it{over}"
    holds = f"preset {preset} holds, and its drops may only describe their rows" if preset else "its drops are refused"
    return (
        f"Family {family} has no recipe of its own: {holds}. `dropforge family set {family} --recipe FILE` gives it one"
    )


def _person() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # as a cluster's user of any number, for whom the image has no name
        name = f"user {os.getuid()}"
    return f"{name} on {socket.gethostname()}"
