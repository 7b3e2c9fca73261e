"""`dropforge queues`: what Kueue needs of a file of teams, whether a cluster has it, and whether a recipe fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from dropforge.cli.kube import Cluster, UnknownKindError
from dropforge.cli.recipes import RecipeArgument, example_run
from dropforge.errors import DropforgeError
from dropforge.job import train_job
from dropforge.placement.admission import differences, room_for
from dropforge.placement.queues import LABELS, folder_of, path_of, render
from dropforge.placement.teams import FILE, Teams
from dropforge.placement.teams_file import read_teams
from dropforge.recipes import load_recipe
from dropforge.terminal import Console, Text

app = typer.Typer(no_args_is_help=True, help="Queues of teams: Kueue's objects from one small file.")
FileArgument = Annotated[Path, typer.Argument(help="The file of teams.", metavar="[FILE]")]
console = Console(soft_wrap=True)


@app.command("render")
def render_command(file: FileArgument = Path(FILE)) -> None:
    """Print the objects of Kueue for `| kubectl apply --server-side -f -`: flavors, priorities, cohorts and queues."""
    teams = read_teams(file)
    _warn_of_racks(teams)
    typer.echo(yaml.safe_dump_all(render(teams), sort_keys=False), nl=False)


@app.command("fits")
def fits(recipe: RecipeArgument, file: FileArgument = Path(FILE)) -> None:
    """Show which flavors have room for a recipe's pods in its team's queue. Fails if none can ever have it."""
    chosen = load_recipe(recipe)
    room = room_for(read_teams(file), chosen, train_job(example_run(chosen, "example", "dropforge"), chosen))
    for words, flavors in (("of its own", room.own), ("by borrowing what others leave", room.borrowed)):
        if flavors:
            console.print(Text(f"team {room.team} has room {words}: {', '.join(flavors)}"))


@app.command("check")
def check(file: FileArgument = Path(FILE)) -> None:
    """Compare the cluster of your kubeconfig with the file; the exit code is 1 if anything differs. Changes nothing."""
    teams = read_teams(file)
    _warn_of_racks(teams)
    cluster, wanted = Cluster(), render(teams)
    problems = []
    for one in wanted:
        found = _get(cluster, path_of(one))
        if found is None:
            problems.append(f"{_named(one)} is missing")
        else:
            problems += [f"{_named(one)}: {difference}" for difference in differences(one, found, _number)]
            problems += _asleep(one, found)
    known = {path_of(one) for one in wanted}
    labels = ",".join(f"{key}={value}" for key, value in LABELS.items())
    for folder in sorted({folder_of(one) for one in wanted}):
        for found in (_get(cluster, folder, labelSelector=labels) or {}).get("items", []):
            if f"{folder}/{found['metadata']['name']}" not in known:
                kind = next(one["kind"] for one in wanted if folder_of(one) == folder)
                problems.append(f"{kind} {found['metadata']['name']} is there, and the file has it no more: delete it")
    for problem in problems:
        console.print(Text(problem))
    if problems:
        console.print(
            f"Fix them with `dropforge queues render {file} | kubectl apply --server-side -f -`", markup=False
        )
        raise typer.Exit(1)
    console.print(f"All {len(wanted)} objects are as the file wants them.")


def _warn_of_racks(teams: Teams) -> None:
    """Beside the objects: which Kueue runs is written nowhere that a user of it may look."""
    racks = [name for name, flavor in teams.flavors.items() if flavor.topology]
    if racks:
        text = f"flavors with a topology ({', '.join(racks)}) need a Kueue with the fix of its issue 10778"
        mend = "0.18 has it, and 0.16.1 does not: docs/how-to/racks.md"
        Console(stderr=True, soft_wrap=True).print(Text(f"{text}. {mend}", style="yellow"))


def _get(cluster: Cluster, path: str, **query: str) -> dict[str, Any] | None:
    try:
        return cluster.get(path, **query)
    except UnknownKindError as error:
        raise DropforgeError(error.thing, error.cause, "Install Kueue 0.15 or newer") from error


def _named(one: Mapping[str, Any]) -> str:
    metadata = one["metadata"]
    where = f" of namespace {metadata['namespace']}" if "namespace" in metadata else ""
    return f"{one['kind']} {metadata['name']}{where}"


def _asleep(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What Kueue itself says against a queue, and weights that it does not look at."""
    status = found.get("status") or {}
    told = [
        f"{_named(wanted)} admits nothing: {condition.get('message')}"
        for condition in status.get("conditions") or []
        if condition.get("type") == "Active" and condition.get("status") != "True"
    ]
    weight = wanted.get("spec", {}).get("fairSharing", {}).get("weight", "1")
    if wanted["kind"] == "ClusterQueue" and weight != "1" and "fairSharing" not in status:
        told.append(f"{_named(wanted)}: its weight counts for nothing until Kueue's configuration has `fairSharing`")
    return told


def _number(quantity: str) -> Any:
    from kubernetes.utils.quantity import parse_quantity

    return parse_quantity(quantity)
