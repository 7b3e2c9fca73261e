"""What all parts of a recipe are: strict, frozen models whose docstrings are the help of their keys.

The docstrings are read when somebody asks. By pydantic's `use_attribute_docstrings` each process that only reads a
recipe, so each task, would parse the source of all sections: a third of the time that their import takes.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict


def help_of(model: type[BaseModel], field: str) -> str | None:
    """What the docstring under a field says, in the model or the base that has it."""
    for owner in model.__mro__:
        if text := _docstrings(owner.__module__).get((owner.__qualname__, field)):
            return text
    return None


@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """By class and field; none where there is no source."""
    try:
        body = ast.parse(inspect.getsource(sys.modules[module])).body
    except (OSError, TypeError, KeyError):
        return {}
    return {
        (model.name, field.target.id): inspect.cleandoc(text.value.value)
        for model in body
        if isinstance(model, ast.ClassDef)
        for field, text in pairwise(model.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        if text := help_of(model, name):
            schema["properties"][field.alias or name].setdefault("description", text)


class Section(BaseModel):
    """A part of the recipe: strict, frozen, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_describe
    )
