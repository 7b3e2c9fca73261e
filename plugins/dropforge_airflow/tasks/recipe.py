"""The recipe of a run: the family's, or the preset that a person chose, then the drop's, then the form."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter

from dropforge import family_recipe, layout
from dropforge.drop import Drop
from dropforge.errors import RecipeError
from dropforge.families import rules_of
from dropforge.family_recipe import Kept, Ruling
from dropforge.readable import Readable, readable
from dropforge.recipe import Recipe
from dropforge.recipe_approval import Approval
from dropforge.recipe_costs import Limits, Price
from dropforge.recipes.described import trained
from dropforge.recipes.drop_rules import Authority, check_differences, split_descriptive
from dropforge.recipes.load import (
    build_recipe,
    default_preset,
    merge,
    resolve,
)
from dropforge.recipes.rules import check_startable
from dropforge.recipes.self_service_rules import at_path
from dropforge.run_limits import RunLimits, run_limits
from dropforge.settings import is_self_service
from dropforge.store import Store
from dropforge_airflow.filled import Filled

log = logging.getLogger(__name__)

_APPROVAL: Final = "promote.approval"
_COSTS: Final = ("compute.limits", "compute.price", "compute.gpu_tflops")  # the last two are what a plan comes to
_REVIEWED: Final[Mapping[str, TypeAdapter[Any]]] = {
    _APPROVAL: TypeAdapter(Approval),
    "compute.limits": TypeAdapter(Limits),
    "compute.price": TypeAdapter(Price),
    "compute.gpu_tflops": TypeAdapter(float),
}


@dataclass(frozen=True)
class Installation:
    """What the installation decides.

    :param preset: of families without a recipe, if there is one. :param families: folder of the families' files.
    :param self_service: whether the recipe of a family's first drop becomes the family's.
    :param limits: how much any run may ask for. :param reads: what its recipe may have read.
    """

    preset: str | None = None
    families: Path | None = None
    self_service: bool = False
    limits: RunLimits = field(default_factory=RunLimits)
    reads: Readable = field(default_factory=Readable)

    @classmethod
    def here(cls, families: Path | None = None) -> Installation:
        """That of this process's environment."""
        return cls(default_preset(), families, is_self_service(os.environ), run_limits(), readable())


class Resolved(NamedTuple):
    """:param first: what becomes the family's recipe once the run's plan is made; None if the family has one, or the
    installation does not allow it."""

    recipe: Recipe
    first: Kept | None = None


def resolve_recipe(
    store: Store,
    drop: Drop,
    asked: Filled,
    installation: Installation,
    gathered: Mapping[str, Any] | None = None,
    *,
    by_calendar: bool = False,
) -> Resolved:
    """Resolve the recipe of a run.

    :param gathered: the family's recipe as it was when its window closed, for several drops as one.
    :param by_calendar: whether it started the run, for which no drop's own recipe counts.
    :raises RecipeError: with the key, the cause and the mend.
    """
    family = find_ruling(store, drop.family, installation)
    if gathered is not None:
        values = _with_review(resolve(gathered), family)
        recipe = _held(check_startable(build_recipe(merge(values, asked.over))), values)
        _check_review(recipe, values, family)
        return Resolved(recipe)
    own = None if by_calendar else family_recipe.read_own(store, drop)
    ruling = None if asked.preset else family
    may = installation.self_service and drop.uploaded
    sets_it = ruling is not None and family_recipe.sets_recipe(store, drop.family, ruling, self_service=may)
    try:
        if ruling is None:
            values = _with_review(_over_preset(str(asked.preset), own or {}), family)
        else:
            values = family_recipe.put_drop(ruling, own or {}, sets_it=sets_it)
            log.info("Recipe of %s", "the drop, the family's first" if sets_it else ruling.authority.name)
        recipe = _held(check_startable(build_recipe(merge(values, asked.over))), values)
        _check_review(recipe, values, family)
        # Once more: the preset or the form may have all drops read as this one says.
        if own and not sets_it and recipe.curation.scope == "family":
            preset = Authority(f"preset {asked.preset}", "choose one that says it")
            bare = resolve({"extends": asked.preset}) if ruling is None else ruling.values
            who = preset if ruling is None else ruling.authority
            check_differences(build_recipe(merge(_with_review(bare, family), asked.over)), recipe, who)
        log.info("It trains %s", trained(recipe))
    except RecipeError as error:
        if own is None or asked.over:
            raise
        raise RecipeError(f"{family_recipe.of_drop(drop)}, {error.thing}", error.cause, error.mend) from None
    # What a person changed for one run is not the family's.
    first = family_recipe.first(own or {}, installation.preset, drop.drop) if sets_it and not asked.over else None
    return Resolved(recipe, first)


def find_ruling(store: Store, family: str, installation: Installation) -> Ruling:
    """Find what holds for a family. :raises DropforgeError: if its file or its recipe cannot be used."""
    file = rules_of(installation.families, family) if installation.families is not None else None
    return family_recipe.rule(store, family, installation.preset, file)


def asked_approval(store: Store, family: str, families: str | None) -> Any:
    """What the family says now of people who approve of its models before the alias moves; None for nothing.

    :param families: folder of the families' files. :raises DropforgeError: if its file or recipe cannot be used.
    """
    installation = Installation.here(None if families is None else Path(families))
    return at_path(find_ruling(store, family, installation).values, _APPROVAL)


def _with_review(values: dict[str, Any], family: Ruling) -> dict[str, Any]:
    """A recipe that takes the family's place, with what the family has people answer, and nothing of its own there."""
    for path in _reviewed(family.values):
        if (asked := at_path(family.values, path)) is not None:
            section, _, key = path.partition(".")
            values = {**values, section: {**(values.get(section) or {}), key: asked}}
    return values


def _check_review(recipe: Recipe, values: Mapping[str, Any], family: Ruling) -> None:
    """:raises RecipeError: if who started the run would choose who is asked about it, or that nobody is."""
    for path in _reviewed(values):
        asked = at_path(values, path)
        if (None if asked is None else _REVIEWED[path].validate_python(asked)) != attrgetter(path)(recipe):
            cause = (
                f"the form changes what holds for {family.authority.name}: who starts a run does not choose whom to ask"
            )
            raise RecipeError(f"recipe key `{path}`", cause, f"Leave it out; {family.authority.change}")


def _reviewed(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys by which people are asked about a run. Of limits nobody is named for, who starts the run may be asked."""
    found = (_APPROVAL,) if at_path(values, _APPROVAL) is not None else ()
    return found + (_COSTS if at_path(values, "compute.limits.people") else ())


def _held(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe, unless the form chose code that Airflow's own task would run, where the installation's secrets are.

    :param values: the recipe without what the form says.
    """
    code, curation = recipe.code, recipe.curation
    elsewhere = curation.engine == "spark" and curation.spark.cluster is not None
    if code is not None and curation.kernels and not elsewhere and code.sha256 != at_path(values, "code.sha256"):
        raise RecipeError(
            "recipe key `code.wheel`",
            "the form names it, and its curation kernels would run in Airflow's task, with the installation's secrets",
            "Name wheel and kernels in the family's recipe (`dropforge family set`) or a preset, or curate on the "
            "cluster (`curation.engine: spark` with `curation.spark.cluster`)",
        )
    return recipe


def _over_preset(preset: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """A preset that a person chose takes the family's place: of the drop's recipe the description of rows counts."""
    under = resolve({"extends": preset})
    described, others = split_descriptive(own)
    if others:
        log.warning("Preset %s was chosen: of the drop's %s these do not count: %s", preset, layout.RECIPE, others)
    return merge(under, described)
