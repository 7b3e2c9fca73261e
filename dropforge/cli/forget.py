"""`dropforge forget` and `dropforge rebuild`: the versions that hold all drops of a family, made again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dropforge import family_recipe, layout, lineage, tracking
from dropforge.cli.connect import StateOption
from dropforge.client.connection import connect
from dropforge.client.patience import asking_mlflow
from dropforge.errors import DataError, DropforgeError
from dropforge.families import rules_of
from dropforge.recipes.load import build_recipe, default_preset
from dropforge.recipes.self_service_rules import at_path
from dropforge.store import Store
from dropforge.terminal import Console, Text

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

    from curation.forget import Held

console = Console(soft_wrap=True)


CodeOption = Annotated[
    str | None,
    typer.Option(help="SHA-256 of the wheel whose curation kernels may run here.", show_default="that of the family"),
]


def forget(
    family: Annotated[str, typer.Argument(help="Name of the model family.")],
    row: Annotated[str | None, typer.Argument(help="FILE:LINE, FILE@POSITION of the ledger, or a content key.")] = None,
    group: Annotated[str | None, typer.Option(help="Forget all rows of this group instead.")] = None,
    code: CodeOption = None,
    state: StateOption = None,
) -> None:
    """Make a version without a row or a group, now and for all later drops, and name the models trained on it.

    For families whose versions cover all their drops: `curation: {scope: family}` in the family's recipe.
    """
    try:
        from curation import forget as made
    except ImportError:
        raise DropforgeError("forget", "curation is not installed", "Install `dropforge[curation]`") from None
    if (row is None) == (group is None):
        raise DataError("forget", "it takes a row or a `--group`", "Give one of them")
    connection = connect(state)
    store, uri = connection.store, connection.settings.tracking_uri
    check = partial(_check_kernels, store, family, code)
    check(made.newest(store, family).recipe)
    name = made.key_of(store, family, row) if row is not None else made.name_of(store, family, group or "")
    found = made.held(store, family, key=name if group is None else None, group=group)
    if group is not None and not found.holding:
        near = get_close_matches(group, names := sorted(made.groups(store, made.newest(store, family).manifest)), 3)
        shown = ", ".join(near or names[:3]) or "none"
        _say(f"No version is known to hold rows of group {group!r}; groups of the newest one: {shown}")
    with asking_mlflow(uri):  # whoever forgets wants the list: it must answer before hours of work begin
        lineage.registered(tracking.client(uri))
    with tempfile.TemporaryDirectory(prefix="forget-") as folder:
        manifest = made.again(store, family, workdir=Path(folder), say=_say, forget=name, check=check)
    console.print(
        f"Version {manifest.digest}: {manifest.counts.get('forgotten', 0):,} rows of the family are forgotten."
    )
    console.print(f"{len(found.holding)} versions held them; still in the bucket, with tokens, quarantine and card:")
    for version in found.holding:
        if version.digest != manifest.digest:
            console.print(f"  {layout.dataset_prefix(version.family, version.digest)}", highlight=False)
    if found.unsure:
        told = ", ".join(f"{version.family}/{version.digest[:12]}" for version in found.unsure)
        why = "Shards, ledgers or keys of masks are gone, or other rules named the row otherwise"
        console.print(Text(f"{why}, so it cannot be determined for: {told}"))
    try:
        sure, perhaps, going, stopped = _models(store, uri, found)  # again: a run may have ended meanwhile
    except DropforgeError as error:
        mend = f"{error.mend.rstrip('.')}; then type the command again, which lists the models and changes nothing"
        raise DropforgeError(error.thing, f"the rows are forgotten, and {error.cause}", mend) from error
    _tell_models(sure, perhaps)
    for run, sweep in going.items():
        told, mend = "Still running with them, to become a model", f"`dropforge stop {run}` ends it"
        if sweep:
            told, mend = "A trial on them, which its sweep may choose", f"End the sweep's run {sweep} in Airflow"
        console.print(Text(f"{told}: {run}. {mend}"))
    for run in stopped:
        told = "Stopped or failed, and would train on them if it were resumed, while those versions last"
        console.print(Text(f"{told}: {run}"))


def _check_kernels(store: Store, family: str, agreed: str | None, recipe: Mapping[str, Any]) -> None:
    """
    :param agreed: SHA-256 of a wheel that the user knows. :param recipe: of the family's newest version.
    :raises DropforgeError: if it has curation kernels that the family's own recipe has not: a form named them for pods,
        or whoever may write datasets, and here they would run with the user's keys.
    """
    made = build_recipe(dict(recipe))
    if made.code is None or not made.curation.kernels or made.code.sha256 == agreed:
        return
    folder = os.environ.get("DROPFORGE_FAMILIES")
    file = rules_of(folder, family) if folder else None
    known = at_path(family_recipe.rule(store, family, default_preset(), file).values, "code.sha256")
    if made.code.sha256 != known:
        raise DropforgeError(
            f"wheel {made.code.wheel}",
            f"its curation kernels made the newest version of {family}, are not those of the family's recipe, "
            "and would run here with your keys",
            f"If you know it, give `--code {made.code.sha256}`",
        )


def _models(
    store: Store, uri: str, found: Held
) -> tuple[list[ModelVersion], list[ModelVersion], dict[str, str], list[str]]:
    """Registered models that know the rows, also by way of a model that they began with, and those that may; and
    the runs that go on with them and those that ended, as of `lineage.unfinished`.

    :raises DropforgeError: if MLflow does not answer.
    """
    specs = lineage.runs(store)
    everywhere = {version.digest for version in (*found.holding, *found.unsure)}
    with asking_mlflow(uri):
        versions = lineage.registered(tracking.client(uri))
        going, ended = lineage.unfinished(tracking.client(uri), everywhere, specs, versions)
    digests = {version.digest for version in found.holding}
    sure = lineage.knowing(digests, specs, versions)
    more = lineage.knowing(everywhere, specs, versions)
    return sure, [version for version in more if version not in sure], going, ended


def _tell_models(sure: Sequence[ModelVersion], perhaps: Sequence[ModelVersion]) -> None:
    for told, models in (("Trained on them", sure), ("May know them", perhaps)):
        for model in models:  # as plain text: names from outside may look like markup
            console.print(Text(f"{told}: {model.name} version {model.version} (run {model.run_id})"))
    if not sure and not perhaps:
        console.print("No registered model was trained on them.")


def _say(line: str) -> None:
    console.print(line, style="dim", markup=False, highlight=False)


def rebuild(
    family: Annotated[str, typer.Argument(help="Name of the model family.")],
    code: CodeOption = None,
    state: StateOption = None,
) -> None:
    """Curate all drops of a family again: the versions are the same, and missing state is restored.

    For families whose versions cover all their drops: `curation: {scope: family}` in the family's recipe.
    """
    try:
        from curation import forget as made
    except ImportError:
        raise DropforgeError("rebuild", "curation is not installed", "Install `dropforge[curation]`") from None
    store = connect(state).store
    with tempfile.TemporaryDirectory(prefix="rebuild-") as folder:
        manifest = made.again(
            store, family, workdir=Path(folder), say=_say, check=partial(_check_kernels, store, family, code)
        )
    console.print(f"Version {manifest.digest}")
