"""A drop and the run that takes it: what will be trained, whether the data were there before, and the wait."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from dropforge import family_recipe, ledger
from dropforge.client.airflow import FINETUNE, Airflow
from dropforge.client.connection import Connection
from dropforge.client.patience import Patience
from dropforge.client.progress import read_stages, why_failed
from dropforge.drop import Drop, near_family
from dropforge.errors import DropforgeError, RecipeError
from dropforge.families import rules_of
from dropforge.recipes.described import trained
from dropforge.recipes.load import build_recipe, default_preset
from dropforge.recipes.rules import check_startable
from dropforge.settings import families_folder
from dropforge.source_root import source_root
from dropforge.stages import STAGES


class NotTakenError(DropforgeError):
    """No run has taken a drop yet."""


def foresee(connection: Connection, family: str, own: Mapping[str, Any]) -> tuple[str, str]:
    """What a drop's run will train, in a line, and else why it may refuse to; one of both is empty.

    Only of the embedded stack it is known here: elsewhere the files of families and presets are where Airflow runs.

    :param own: the recipe of the drop. :raises RecipeError: naming the key, if the embedded stack's run would refuse
        it; without a recipe, first the family that was probably meant.
    """
    try:
        return _trained_by(connection, family, own), ""
    except RecipeError as error:
        if connection.stack is None:
            return "", f"The run may refuse it, as far as can be checked from here: {error}"
        if own or not (near := near_family(connection.store, family)):
            raise
        cause = f"it is new, and no recipe came with its drop ({error.thing}: {error.cause})"
        mend = f"Did you mean {near}? For a new family give its recipe along. {error.mend}"
        raise RecipeError(f"family {family}", cause, mend) from error


def _trained_by(connection: Connection, family: str, own: Mapping[str, Any]) -> str:
    file = rules_of(families_folder(source_root() / "dags"), family) if connection.stack is not None else None
    ruling = family_recipe.rule(connection.store, family, default_preset(), file)
    may = connection.settings.self_service or connection.stack is None
    sets_it = family_recipe.sets_recipe(connection.store, family, ruling, self_service=may)
    recipe = check_startable(build_recipe(family_recipe.put_drop(ruling, own, sets_it=sets_it)))
    preset = f"preset {default_preset()}"
    connection.check_recipe(family, recipe)
    first = "the family's recipe once the task `plan` of this run succeeds"
    whose = "the family's recipe" if ruling.own else first if sets_it else preset
    return f"{family} trains {trained(recipe)} ({whose})"


def dropped_before(connection: Connection, drop: Drop) -> Drop | None:
    """The entry of the same bytes from before this upload; None if they are new."""
    before = ledger.find(connection.store, drop)
    if before is None or before.drop == drop.drop:
        return None  # or intake has been quicker than this command
    return before


def never_trained(airflow: Airflow, owners: Sequence[str]) -> tuple[str, str] | None:
    """The stage and the cause that the last run of a drop failed for, if all its runs failed before their training."""
    failed = None
    for owner in owners:
        try:
            stages = read_stages(airflow, owner)
        except DropforgeError:  # Airflow is away, or has no such run, as of a sweep: what it did is not known
            return None
        failed = why_failed(airflow, owner, stages)
        if failed is None or STAGES.index(failed[0]) >= STAGES.index("train"):
            return None
    return failed


def wait_for_run(connection: Connection, drop: Drop, seconds: float = 120, in_line: float = 0) -> str:
    """Wait until a run has claimed the drop; returns the Airflow id of the newest that has.

    :param seconds: how long; with 0 it looks once.
    :param in_line: how many seconds more a drop may wait that is held back by its family's rules of intake.
    :raises NotTakenError: if no run takes it in time.
    :raises DropforgeError: if the stack is stopped meanwhile, or S3 does not answer.
    """
    patience = Patience(connection.stack, f"dropforge follow {drop.family}/{drop.drop}")
    begun, held, entry = time.monotonic(), None, None
    while True:
        problem: DropforgeError | None = None
        try:
            entry = entry or ledger.find(connection.store, drop)  # one of its checksums alone may hold other bytes
            owner = ledger.newest_owner(connection.store, entry.family, entry.id) if entry else None
            if owner is None and entry is not None:
                _check_not_superseded(connection, entry)
                held = ledger.held(connection.store, entry.family, entry.id)
            patience.answered()
        except (BotoCoreError, ClientError) as error:
            if isinstance(error, ClientError) and error.response["ResponseMetadata"]["HTTPStatusCode"] < 500:
                raise
            patience.check_stack()
            mend = "Start the stack with `dropforge up`"
            problem = DropforgeError(f"bucket {drop.bucket}", f"S3 does not answer ({error})", mend)
            patience.bear(problem)
            owner = None
        if owner is not None:
            return owner
        patience.check_stack()
        given = seconds + (in_line if held else 0)
        left = begun + given - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(0.5, left))
    if problem is not None:
        raise problem
    raise NotTakenError(
        f"drop {drop.family}/{drop.drop}",
        f"no run took it within {given:g} s" + (f": {held}" if held else ""),
        "Follow it later: it is not forgotten"
        if held
        else f"Look at the runs of dropforge_intake and {FINETUNE} in Airflow at {connection.airflow.pages}",
    )


def _check_not_superseded(connection: Connection, drop: Drop) -> None:
    because = ledger.superseded_because(connection.store, drop.family, drop.id)
    if because is not None:
        raise DropforgeError(
            f"drop {drop.family}/{drop.drop}",
            f"it gets no run: {because}",
            f"`dropforge letters {drop.family}/{drop.drop} --superseded --replay` puts it in line again",
        )


def start_again(connection: Connection, drop: Drop) -> str:
    """Start a forced re-run, as the form in Airflow does; returns the Airflow run id."""
    conf = {"family": drop.family, "drop": drop.id, "again": True}
    return connection.airflow.trigger(FINETUNE, conf)
