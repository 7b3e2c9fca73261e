"""`dropforge submit`: start a run of a recipe as the form in the UI does, with the user's rights in Airflow."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dropforge.cli.connect import StateOption
from dropforge.cli.recipes import FamilyOption, RecipeArgument
from dropforge.cli.result import follow_to_end
from dropforge.client.airflow import FINETUNE
from dropforge.client.connection import Connection, connect
from dropforge.client.named import opened
from dropforge.client.patience import LIMIT, Patience
from dropforge.client.progress import ENDED, Stage, read_stages, why_failed
from dropforge.data_names import read_name
from dropforge.drop import is_id
from dropforge.errors import DataError, DropforgeError, RecipeError
from dropforge.estimate import check_length, check_memory, estimate
from dropforge.job import check_requested_disk
from dropforge.layout import check_family
from dropforge.recipe import Recipe
from dropforge.recipes.load import (
    UnfitValueError,
    build_recipe,
    extended,
    merge,
    presets,
    read_named,
    read_yaml,
    resolve,
)
from dropforge.recipes.rules import check_startable
from dropforge.terminal import Console, Text

OTHER: Final = "hub:OWNER/NAME, dataset:FAMILY/DIGEST, prefix:KEY/PREFIX/ or drops:ID,ID"
_LOOK: Final = 0.5  # seconds
console = Console(soft_wrap=True)


def submit(
    recipe: RecipeArgument,
    family: FamilyOption,
    drop: Annotated[
        str | None, typer.Option(help="An uploaded drop: FAMILY/DROP, its name, or its id in the ledger.")
    ] = None,
    data: Annotated[str | None, typer.Option(help=f"Other data: {OTHER}.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="A recipe key, as train.max_steps=40.", metavar="KEY=VALUE")
    ] = None,
    again: Annotated[bool, typer.Option(help="Train again on data that was trained on before.")] = False,
    watch: Annotated[bool, typer.Option("--follow", help="Follow the run to its end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print where the run is as JSON.")] = False,
    state: StateOption = None,
) -> None:
    """Start a run of a recipe on data that already exist; `dropforge drop` uploads data.

    What is wrong with the recipe is reported before anything starts, as by `dropforge plan`. The recipe overrides a
    recipe.yaml of the drop. Waits until the run's plan is made, and reports if that fails.
    """
    preset, over = asked(recipe, change or (), data)
    loaded = build_recipe(merge(resolve({"extends": preset}), over))
    check(loaded, drop)
    conf: dict[str, Any] = {"preset": preset, "family": check_family(family), "again": again}
    conf |= {"drop": _drop(drop, family)} if drop else {}
    conf |= {"overrides": over} if over else {}
    connection = connect(state)
    airflow = connection.airflow
    paused = airflow.is_paused(FINETUNE)
    dag_run = airflow.trigger(FINETUNE, conf)
    page = airflow.page(FINETUNE, dag_run)
    if not as_json:
        console.print(Text(f"Run {dag_run}: {page}"))
    if paused:
        tell_paused(FINETUNE, "run")
    stages = () if paused else wait_planned(connection, dag_run)
    named = opened(connection, dag_run, dag_run)
    mlflow = named.mlflow_page(connection.settings.tracking_uri)
    if as_json:
        found = {"dag_run": dag_run, "page": page, "run": named.run or None, "mlflow": mlflow or None}
        typer.echo(json.dumps(found, indent=1))
    elif mlflow:
        console.print(Text(f"MLflow: {mlflow}"))
    failed = why_failed(airflow, dag_run, stages)
    if failed is not None:
        raise DropforgeError(f"run {dag_run}", f"{failed[0]} failed: {failed[1]}", "Fix that, and submit it again")
    if stages and stages[0].state == "skipped":
        raise DataError(f"run {dag_run}", "another run has these data", "Use --again to insist")
    if watch:
        raise typer.Exit(follow_to_end(connection, dag_run, named.run or dag_run, console))
    if not as_json:
        console.print(Text(f"Follow it with `dropforge follow {dag_run}`"))


def tell_paused(dag: str, what: str) -> None:
    """Say that what was started waits."""
    told = f"DAG {dag} is paused: the {what} begins once a user unpauses it"
    Console(stderr=True, soft_wrap=True).print(Text(told, style="yellow"))


def asked(recipe: str, changes: Sequence[str], data: str | None) -> tuple[str, dict[str, Any]]:
    """The preset that the form is told, and the values over it.

    :param recipe: a preset's name or a file. :raises RecipeError: for what is neither, and for what cannot be sent.
    """
    over: dict[str, Any] = {}
    preset = recipe
    if recipe not in presets():
        values = read_named(recipe)
        preset = extended(values) or ""
        if not preset:
            raise RecipeError(
                f"recipe {recipe}",
                "it extends no preset, and the form always starts from one",
                f"Begin it with `extends: NAME`. Presets: {', '.join(presets())}",
            )
        resolve({"extends": values["extends"]})  # a preset that is not there is named
        over = {key: value for key, value in values.items() if key != "extends"}
    if data is not None:
        over = merge(over, {"data": {"source": source(data)}})
    for change in changes:
        over = merge(over, parse_change(change))
    return preset, over


def check(recipe: Recipe, drop: str | None) -> None:
    """What the run would refuse. :raises DropforgeError: with the cause and the mend."""
    check_startable(recipe)
    check_length(recipe)
    check_memory(recipe, estimate(recipe))
    check_requested_disk(recipe)
    if drop is None and recipe.data.source is None:
        raise DataError(
            "the data",
            "none are named",
            "Give --drop FAMILY/DROP, --data hub:OWNER/NAME or `data.source` in the recipe; "
            "`dropforge drop PATH` uploads files",
        )
    if drop is not None and recipe.data.source is not None:
        raise DataError("option --drop", "the recipe names data, too (`data.source`)", "Leave one of them out")


def parse_change(text: str) -> dict[str, Any]:
    """`train.max_steps=40` as nested values. :raises RecipeError: if it is none."""
    key, equals, value = text.partition("=")
    if not equals or not all(part.isidentifier() for part in key.strip().split(".")):
        raise RecipeError(f"option --set {text!r}", "it is not KEY=VALUE", "Write it as --set train.max_steps=40")
    try:
        nested: Any = read_yaml(f"value: {value}")["value"]
    except UnfitValueError as error:
        raise RecipeError(f"option --set {text!r:.200}", error.cause, error.mend) from None
    except (RecipeError, KeyError):
        raise RecipeError(f"option --set {text!r}", "its value is no YAML", "Put text into quotes") from None
    for part in reversed(key.strip().split(".")):
        nested = {part: nested}
    return dict(nested)


def source(text: str) -> dict[str, Any]:
    """`hub:OWNER/NAME` and the like, as the form reads them, as `data.source`. :raises DataError: if it is none."""
    thing = f"option --data {text!r}"
    if text.startswith("s3://"):
        raise DataError(thing, "it is an address", "Write `prefix:KEY/PREFIX/`, of a prefix in the bucket of the runs")
    try:
        found = read_name(text, bucket="").source
    except DataError as error:
        raise DataError(thing, error.cause, error.mend) from None
    if found is None:
        there = "files of this machine have to be uploaded first" if Path(text).exists() else "it names no source"
        raise DataError(thing, there, f"Write {OTHER}; a drop is --drop, and `dropforge drop PATH` uploads files")
    return found


def wait_planned(connection: Connection, dag_run: str) -> tuple[Stage, ...]:
    """Wait until the plan is made, or the run is over; after a minute, whatever there is."""
    patience, end = Patience(connection.stack, f"dropforge follow {dag_run}"), time.monotonic() + LIMIT
    stages: tuple[Stage, ...] = ()
    with Console(stderr=True).status("Waiting for its plan"):
        while time.monotonic() < end:
            try:
                stages = read_stages(connection.airflow, dag_run)
                over = str(connection.airflow.dag_run(FINETUNE, dag_run)["state"]) in ENDED
                patience.answered()
            except DropforgeError as error:
                patience.check_stack()
                patience.bear(error)
                continue
            if over or stages[0].state in {"success", "failed", "skipped"}:
                break
            time.sleep(_LOOK)
    return stages


def _drop(text: str, family: str) -> str:
    return text if "/" in text or is_id(text) else f"{family}/{text}"
