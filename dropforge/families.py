"""A family's file: its recipe; when the calendar retrains it, on which drops, from where; and how its drops are taken
in.

One strict YAML file per family, whose name is the family's. What is wrong with one file says nothing about the others:
both come back, the families that can be read and the errors of those that cannot.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo

from pydantic import BaseModel, Field, ValidationError, field_validator

from dropforge import layout
from dropforge.errors import DropforgeError, RecipeError
from dropforge.intake_rules import Intake, check_rules
from dropforge.recipe import START, Recipe
from dropforge.recipes.load import RECIPE_LIMIT, build_recipe, extended, merge, read_yaml, resolve
from dropforge.recipes.rules import check_startable
from dropforge.section import Section, help_of
from dropforge.validation_errors import cause

ENDING: Final = ".yaml"
_LAST: Final = re.compile(r"last ([1-9][0-9]{0,2}) drops?")
#: Keys of the recipe that the family's own keys say, and these.
_OWN: Final = {("base", "start"): "start", ("data", "source"): "data"}


class Alert(Section):
    """When a retrain takes strikingly long: its task `late` fails then, and the retrain continues."""

    times: float = Field(default=1.5, gt=1, le=100)
    """So many times the average of the family's retrains that came to their end."""
    after_runs: int = Field(default=3, ge=1, le=20)
    """Retrains that an average takes; before that there is no alert."""


class Family(Section):
    """What a family is trained with, how the calendar retrains it, how its drops are taken in: at least one."""

    cron: str | None = None
    """When it is retrained, as five fields: `0 3 * * 1` is Mondays at three. Without it no calendar retrains it."""
    timezone: str = "UTC"
    """In which time zone, as `Europe/Berlin`."""
    data: str = "all"
    """What a retrain takes: `all` drops, those `since-champion`, or the `last N drops`."""
    start: str = Field(default="base", pattern=START)
    """Where its weights begin: `base`, `champion`, or `runs/RUN/step-N`."""
    recipe: dict[str, Any] = Field(default_factory=dict)
    """The family's recipe, of its drops as of what the calendar and the window start. It begins with
    `extends: PRESET`."""
    alert: Alert = Alert()
    intake: Intake | None = None
    """What becomes of its drops before they have a run: `rate`, `window`, `latest_only`, `max_active_runs`."""

    @field_validator("cron")
    @classmethod
    def _is_cron(cls, cron: str | None) -> str | None:
        from croniter import CroniterBadDateError, croniter  # type: ignore[import-untyped]

        if cron is None:  # as `cron:` without a value
            return None
        if len(cron.split()) != 5 or not croniter.is_valid(cron):
            raise ValueError("it is no cron expression of five fields")
        if re.search(r"\bR", cron, re.IGNORECASE):
            raise ValueError("`R` is another time whenever it is looked at")
        try:
            croniter(cron, datetime.now(UTC)).get_next()
        except CroniterBadDateError as error:  # the 31st of April
            raise ValueError("no such day ever comes") from error
        return " ".join(cron.split())

    @field_validator("timezone")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ValueError, OSError, LookupError) as error:  # it would leave the folder of zones, or is none in it
            raise ValueError("there is no such time zone") from error
        return name

    @field_validator("data")
    @classmethod
    def _is_choice(cls, data: str) -> str:
        if data not in {"all", "since-champion"} and not _LAST.fullmatch(data):
            raise ValueError("it is none of `all`, `since-champion` and `last N drops`")
        return data

    @property
    def governs(self) -> bool:
        """Whether it has a recipe, which its drops are trained with."""
        return bool(self.recipe)

    @property
    def starts(self) -> bool:
        """Whether the calendar or the window starts runs, which take nothing from the drops' own recipes."""
        return self.cron is not None or (self.intake is not None and self.intake.window is not None)

    @property
    def last(self) -> int | None:
        """How many of the newest drops are taken; None if it is not by number."""
        found = _LAST.fullmatch(self.data)
        return int(found[1]) if found else None

    @property
    def preset(self) -> str:
        """What the recipe extends."""
        return str(self.recipe["extends"])

    def overrides(self, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the recipe says over its preset, with where the weights begin. :param more: wins over it."""
        rest = {key: value for key, value in self.recipe.items() if key != "extends"}
        return merge(merge(rest, {"base": {"start": self.start}}), more or {})

    def whole(self, more: Mapping[str, Any] | None = None) -> Recipe:
        """The resolved recipe. :param more: see `overrides`. :raises RecipeError: if it cannot work."""
        return check_startable(build_recipe(self.resolved(more)))

    def resolved(self, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The values of the recipe over its preset, not checked yet. :param more: see `overrides`."""
        return merge(resolve({"extends": self.preset}), self.overrides(more))


_SECTIONS: Final[Mapping[str, type[BaseModel]]] = {"alert": Alert, "intake": Intake}


@dataclass(frozen=True)
class Families:
    """What a folder holds: families by name, sorted, and an error for each file that is none."""

    families: Mapping[str, Family]
    broken: tuple[DropforgeError, ...]


def read_families(folder: str | Path) -> Families:
    """All families of a folder; one that is not there holds none. Hidden files and other endings are passed over."""
    families: dict[str, Family] = {}
    broken: list[DropforgeError] = []
    found = sorted(Path(folder).glob("*")) if Path(folder).is_dir() else []
    for path in found:
        if path.name.startswith(".") or path.suffix not in {ENDING, ".yml"}:
            continue
        try:
            families[path.stem] = read_family(path)
        except DropforgeError as error:
            broken.append(error)
    return Families(families, tuple(broken))


def read_family(path: Path) -> Family:
    """:raises DropforgeError: naming the file, what is wrong in it, and the mend."""
    where = f"family file {path.name!r}"
    try:
        if path.suffix != ENDING:
            raise RecipeError("its name", f"it does not end in `{ENDING}`", f"Rename it to `{path.stem}{ENDING}`")
        layout.check_family(path.stem)
        return parse_family(_read(path))
    except DropforgeError as error:
        raise RecipeError(f"{where}, {error.thing}", error.cause, error.mend) from None
    except Exception as error:  # whatever it is: the other families do not wait for it
        cause = f"it cannot be read ({type(error).__name__}: {error!s:.200})"
        raise RecipeError(where, cause, "Take away what it said last, or the file") from error


def rules_of(folder: str | Path, family: str) -> Family | None:
    """The family's file; None if it has none. :raises DropforgeError: as `read_family`."""
    path = Path(folder) / f"{layout.check_family(family)}{ENDING}"
    return read_family(path) if path.exists() else None


def parse_family(text: bytes | str) -> Family:
    """Read a family from YAML text. :raises RecipeError: with the key, the cause and the mend."""
    return build_family(read_yaml(text, "key"))


def build_family(values: Mapping[str, Any]) -> Family:
    """Check plain values and freeze them. :raises RecipeError: with the key, the cause and the mend."""
    _check_keys(values, Family)
    for name, model in _SECTIONS.items():
        if isinstance(values.get(name), Mapping):
            _check_keys(values[name], model, f"{name}.")
    try:
        family = Family.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        section, _, inner_key = key.partition(".")
        about = help_of(_SECTIONS.get(section, Family), inner_key) or help_of(Family, section)
        raise RecipeError(f"key `{key}`", cause(first), f"Meaning: {about or key}") from None
    _check_used(family)
    if not family.starts and not family.governs:
        return family
    if extended(family.recipe) is None:
        raise RecipeError("key `recipe`", "it extends no preset", "Begin it with `extends: PRESET`")
    for (section, key), own in _OWN.items():
        inner = family.recipe.get(section)
        if inner is not None and not isinstance(inner, Mapping):
            raise RecipeError(
                f"key `recipe.{section}`", f"it is no mapping, but {inner!r:.60}", "Indent its keys below"
            )
        if inner is not None and key in inner:
            raise RecipeError(f"key `recipe.{section}.{key}`", "the file sets it", f"Say it as `{own}:` beside it")
    whole = family.whole()
    if whole.curation.scope == "family" and family.data != "all":
        raise RecipeError(
            f"key `data: {family.data}`",
            "with `curation.scope: family` a dataset version holds all drops of the family",
            "Write `data: all`, or `curation: {scope: drop}`",
        )
    return family


def _check_used(family: Family) -> None:
    """:raises RecipeError: for keys without the one that they belong to, and rules of intake that cannot work."""
    if family.cron is None and family.intake is None and not family.governs:
        raise RecipeError(
            "keys `recipe`, `cron` and `intake`", "all are missing", "Give one of them, or take the file away"
        )
    if family.intake is not None:
        check_rules(family.intake)
    for key in ("timezone", "data", "alert") if family.cron is None else ():
        if key in family.model_fields_set:
            raise RecipeError(f"key `{key}`", "it is of the calendar", "Give `cron` too, or leave it out")
    if "start" in family.model_fields_set and not family.governs:
        raise RecipeError("key `start`", "it is of the recipe", "Give `recipe` too, or leave it out")


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise OSError("it is no file")
        with path.open("rb") as stream:
            return stream.read(RECIPE_LIMIT + 1)
    except OSError as error:
        raise RecipeError("its text", f"it cannot be read ({error})", "Write it again, or remove it") from None


def _check_keys(values: Mapping[str, Any], model: type[BaseModel], path: str = "") -> None:
    for key in values:
        if key in model.model_fields:
            continue
        near = difflib.get_close_matches(str(key), model.model_fields, 1, 0.5)
        near = near or (["cron"] if key == "schedule" else []) or (["recipe"] if key in Recipe.model_fields else [])
        known = ", ".join(f"{path}{name}" for name in model.model_fields)
        mend = f"Did you mean `{path}{near[0]}`?" if near else f"Known here: {known}"
        raise RecipeError(f"key `{path}{key}`", "it is unknown", mend)
