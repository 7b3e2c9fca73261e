"""Rolling back: a family's alias goes to the version that held it before, or to one that a person names.

Nothing is deleted or trained. The version that is left is marked, so that no cleared task promotes it again.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dropforge import layout, tracking
from dropforge.errors import DataError
from dropforge.registered_name import check_name
from dropforge.start import champion_files, model_digest
from dropforge.store import Store
from dropforge.text import read_count

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

_NONE = "none"
_ALIAS = re.compile(r"(?!(?i:latest|v\d+)$)[A-Za-z0-9_-]{1,100}")


@dataclass(frozen=True)
class Choice:
    """Which version gets the alias, and which one has it now.

    :param back: whether the version held the alias before the one that it follows, or is older; if not, this is a
        promotion by hand.
    """

    family: str
    alias: str
    version: str
    current: str | None
    back: bool


def choose(
    tracking_uri: str,
    store: Store,
    family: str,
    alias: str = "champion",
    to: str | None = None,
    *,
    approved: bool = False,
) -> Choice:
    """Find the version that is to hold the alias, and see that its files are there.

    :param to: its number; None for the one that held the alias before and was not rolled back itself.
    :param approved: whether people approve of the family's models: one that never held the alias has nobody's yes.
    :raises DataError: if there is none, its files are gone or were changed, nobody approved of it, or the name is no
        family's.
    """
    layout.check_family(family)
    if not _ALIAS.fullmatch(alias):
        mend = "Name that of the recipe's `promote.alias`, as `champion`"
        raise DataError(f"alias {alias[:80]!r}", "MLflow lets no version have it", mend)
    mlflow = tracking.client(tracking_uri)
    holder = tracking.by_alias(mlflow, family, alias)
    check_name(tracking_uri, family)
    current = None if holder is None else str(holder.version)
    target = _before(mlflow, family, alias, holder) if to is None else _version(mlflow, family, to)
    if str(target.version) == current:
        raise DataError(f"version {current} of {family}", f"it is {alias!r} already", "Name another one with `--to`")
    if approved:
        _check_approved(mlflow, family, target, alias)
    _check_files(store, family, target)
    # Numbers tell who was registered first; a cleared task may have promoted an old version again.
    back = holder is not None and (
        int(target.version) < int(holder.version)
        or str(target.version) in {str(one.version) for one in _earlier(mlflow, family, alias, holder)}
    )
    return Choice(family, alias, str(target.version), current, back)


def move(
    tracking_uri: str,
    choice: Choice,
    reason: str,
    by: str,
    hold: AbstractContextManager[None] | None = None,
    *,
    approved: bool = False,
) -> bool:
    """Move the alias; False if an earlier try did.

    :param hold: keeps others from moving it, see `dropforge.moves`.
    :param approved: whether people approve of the family's models by now, as of `choose`.
    :raises DataError: if it was moved elsewhere since the choice, or nobody approved of the version.
    """
    with hold or nullcontext():
        return _move(tracking_uri, choice, reason, by, approved=approved)


def _move(tracking_uri: str, choice: Choice, reason: str, by: str, *, approved: bool) -> bool:
    mlflow = tracking.client(tracking_uri)
    family, alias = choice.family, choice.alias
    holder = tracking.by_alias(mlflow, family, alias)
    current = None if holder is None else str(holder.version)
    if current == choice.version:
        return False
    if current != choice.current:
        raise DataError(
            f"alias {alias!r} of {family}",
            f"it moved from version {choice.current or _NONE} to {current or _NONE} since the choice",
            "Look at the new version, and roll back again if it should not stay",
        )
    target = mlflow.get_model_version(family, choice.version)
    if approved:
        _check_approved(mlflow, family, target, alias)
    tags = target.tags
    if tracking.previous_holder(mlflow, family, tags, alias) is None:
        mlflow.set_model_version_tag(
            family, choice.version, tracking.alias_tag(tracking.TAG_PREVIOUS, alias), current or _NONE
        )
    if choice.back and current is not None:
        told = {"to": choice.version, "by": by, "at": f"{datetime.now(UTC):%FT%TZ}", "reason": reason}
        tag = tracking.alias_tag(tracking.TAG_ROLLED_BACK, alias)
        mlflow.set_model_version_tag(family, current, tag, json.dumps(told, ensure_ascii=False))
    if mark := tracking.told_tag(mlflow, family, tags, tracking.TAG_ROLLED_BACK, alias):
        mlflow.delete_model_version_tag(family, choice.version, mark)
    # Last: whoever sees the alias move finds the reason written.
    mlflow.set_registered_model_alias(family, alias, choice.version)
    return True


def _check_approved(mlflow: MlflowClient, family: str, target: ModelVersion, alias: str) -> None:
    """:raises DataError: if the version never held the alias, so that nobody has said yes to it."""
    if tracking.previous_holder(mlflow, family, target.tags, alias) is None:
        raise DataError(
            f"version {target.version} of {family}",
            f"it never was {alias!r}, and people approve of this family's models (`promote.approval`)",
            "Clear the task `approve` of its run, and have a reviewer answer, or name a version that was one",
        )


def _before(mlflow: MlflowClient, family: str, alias: str, holder: ModelVersion | None) -> ModelVersion:
    """The newest earlier holder that was not rolled back."""
    if holder is None:
        raise DataError(f"family {family}", f"no version of it is {alias!r}", _name_one(mlflow, family))
    for found in _earlier(mlflow, family, alias, holder):
        if tracking.told_tag(mlflow, family, found.tags, tracking.TAG_ROLLED_BACK, alias) is None:
            return found
    raise DataError(
        f"version {holder.version} of {family}",
        f"there is no earlier {alias!r} to go back to",
        _name_one(mlflow, family),
    )


def _earlier(mlflow: MlflowClient, family: str, alias: str, holder: ModelVersion) -> Iterator[ModelVersion]:
    """Who held the alias before, the last one first, up to one that is deleted."""
    seen, found = {str(holder.version)}, holder
    while (number := tracking.previous_holder(mlflow, family, found.tags, alias) or _NONE) not in {_NONE, *seen}:
        seen.add(number)
        try:
            found = _version(mlflow, family, number)
        except DataError:
            return
        yield found


def _version(mlflow: MlflowClient, family: str, number: str) -> ModelVersion:
    from mlflow.exceptions import MlflowException

    try:
        if not number.isascii() or not number.isdigit():
            raise DataError(f"version {number!r} of {family}", "it is no number", _name_one(mlflow, family))
        return mlflow.get_model_version(family, number)
    except MlflowException as error:
        if error.error_code not in tracking.NOT_THERE:
            raise
        raise DataError(f"version {number} of {family}", "there is none", _name_one(mlflow, family)) from None


def _name_one(mlflow: MlflowClient, family: str) -> str:
    """Return what to do: name one of the versions that the family has."""
    found = mlflow.search_model_versions(f"name = '{family}'")
    numbers = sorted(filter(None, (read_count(str(version.version)) for version in found)))
    if not numbers:
        others = [model.name for model in mlflow.search_registered_models() if model.name != family]
        near = difflib.get_close_matches(family, others, 1)
        hint = f". Did you mean {near[0]}?" if near else ""
        return f"None of its runs registered a version yet; `dropforge runs` lists the families that have runs{hint}"
    return f"Name one with `--to`: there are versions {', '.join(map(str, numbers))}"


def _check_files(store: Store, family: str, version: ModelVersion) -> None:
    """:raises DataError: if a model in this bucket is not whole any more. Others cannot be looked at."""
    champion = tracking.as_champion(version)
    if not champion.model.startswith(f"{store.uri}/"):
        return
    what, mend = f"version {version.version} of {family}", "Name another one with `--to`"
    found = champion_files(store, champion)
    if found is None:
        raise DataError(what, f"what its run records of {champion.model} is gone", mend)
    folder, files = found
    if champion.digest and model_digest(files) != champion.digest:
        raise DataError(what, f"{champion.model} holds another model than the one that was registered", mend)
    there = store.sizes(f"{folder}/")
    if gone := sorted(name for name in files if f"{folder}/{name}" not in there):
        raise DataError(what, f"{gone[0]} is gone from {champion.model}", mend)
