"""From YAML text to checked teams: strict YAML, errors that name the key and the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from dropforge.errors import DropforgeError, RecipeError
from dropforge.placement.catalogue import read
from dropforge.placement.node_quotas import in_amounts
from dropforge.placement.team_rules import check_teams
from dropforge.placement.teams import Teams, wrong
from dropforge.recipes.load import RECIPE_LIMIT, UnfitValueError, read_yaml
from dropforge.section import help_of
from dropforge.validation_errors import cause


def read_teams(path: Path) -> Teams:
    """:raises DropforgeError: as `parse_teams`, and if there is no such file."""
    try:
        with path.open("rb") as file:
            text = file.read(RECIPE_LIMIT + 1)
    except OSError as error:
        mend = "Name a file of teams; `helm-values/teams.yaml` is an example"
        raise DropforgeError(f"teams file {str(path)!r}", error.strerror or str(error), mend) from None
    return parse_teams(text)


def parse_teams(text: bytes | str) -> Teams:
    """:raises DropforgeError: naming the key, what is wrong with it, and the mend."""
    try:
        values = read_yaml(text, "key")
    except UnfitValueError as error:
        raise DropforgeError(f"teams file, {error.thing}", error.cause, error.mend) from None
    except RecipeError as error:
        mend = error.mend if "mapping" in error.cause else "It holds flavors, priorities, cohorts and teams"
        raise DropforgeError("teams file", error.cause.replace(" in a recipe", ""), mend) from None
    try:
        teams = Teams.model_validate(values)
    except ValidationError as error:
        raise _first(error) from None
    teams = in_amounts(teams, read())
    check_teams(teams)
    return teams


def _first(error: ValidationError) -> DropforgeError:
    found = error.errors(include_url=False)[0]
    parts = [str(part) for part in found["loc"] if part != "[key]"]
    key, name = ".".join(parts), parts[-1] if parts else ""
    model, about = _place(parts)
    if found["type"] == "extra_forbidden":
        known = list(model.model_fields)
        near = difflib.get_close_matches(name, known, 1, 0.5)
        return wrong(key, "it is unknown", f"Did you mean `{near[0]}`?" if near else f"Known here: {', '.join(known)}")
    said = cause(found)
    if found["type"] == "string_pattern_mismatch":
        name_rule = "it is no name that Kubernetes takes: lower-case letters, digits and hyphens, at most 63"
        said = f"{name_rule}, not {found['input']!r:.60}"
    return wrong(key, said, f"Meaning: {about}" if about else "Fix the value")


def _place(parts: list[str]) -> tuple[type[BaseModel], str]:
    """The section that a key stands in, and what the last key that is known stands for."""
    model: type[BaseModel] = Teams
    about = "flavors, priorities, cohorts and teams"
    for part in parts:
        field = model.model_fields.get(part)
        if field is None:
            continue  # a name that the file chose
        about = help_of(model, part) or about
        model = next(_models(field.annotation), model)
    return model, about[:1].lower() + about[1:]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models(inner)
