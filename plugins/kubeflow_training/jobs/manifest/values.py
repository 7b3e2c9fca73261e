"""Plain values for typed classes: unknown names are refused with the nearest, and text becomes the number it is."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Final, Literal

from kubeflow_training.jobs.errors import ManifestError

NOTHING: Final = object()
"""The default of a field that has none."""


def checked(what: str, cls: type, data: Any) -> dict[str, Any]:
    """The values as the class wants them.

    :raises ManifestError: if they are none.
    """
    from difflib import get_close_matches

    if not isinstance(data, Mapping):
        raise ManifestError(what, f"it is {type(data).__name__} instead of a mapping", f"Give a {cls.__name__}")
    kinds = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in kinds:
            near = get_close_matches(str(key), kinds, 1)
            mend = f"Did you mean `{near[0]}`?" if near else f"It knows {', '.join(kinds)}"
            raise ManifestError(what, f"it has no `{key}`", mend)
        values[key] = _value(f"{what}: `{key}`", kinds[key], value)
    missing = [item.name for item in fields(cls) if item.name not in values and default_of(item) is NOTHING]
    if missing:
        raise ManifestError(what, f"`{missing[0]}` is missing", "Name it")
    return values


def _value(what: str, kind: Any, value: Any) -> Any:
    """The value as its field wants it: numbers and truth may be written as text, nothing else is bent."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) not in (None, Mapping, Sequence, Literal) else (kind,)
    kinds = tuple(typing.get_origin(item) or item for item in kinds)
    if value is None or (isinstance(value, str) and value in ("", "None") and type(None) in kinds):
        if type(None) in kinds:
            return None
        raise ManifestError(what, "it is empty", "Give a value, or leave it out")
    if isinstance(value, str) and str not in kinds and Literal not in kinds:
        try:
            if bool in kinds:
                return {"true": True, "false": False}[value.strip().lower()]
            if int in kinds or float in kinds:
                return int(value) if int in kinds else float(value)
            value = json.loads(value.replace("'", '"')) if Mapping in kinds else value
        except (ValueError, KeyError):
            pass
    if Literal in kinds:
        if value not in typing.get_args(kind):
            raise ManifestError(what, f"{value!r} is none of {', '.join(typing.get_args(kind))}", "Choose one of them")
        return value
    if isinstance(value, float) and value.is_integer() and float not in kinds:
        value = int(value)
    fits = {
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, int | float) and not isinstance(value, bool),
        str: isinstance(value, str),
        Sequence: isinstance(value, list | tuple),
        Mapping: isinstance(value, Mapping),
    }
    if not any(fits.get(item, is_dataclass(item) and isinstance(value, Mapping | item)) for item in kinds):
        names = {Sequence: "a list", Mapping: "a mapping", int: "a whole number", float: "a number", str: "text"}
        wanted = " or ".join(names.get(item, getattr(item, "__name__", "")) for item in kinds if item is not type(None))
        raise ManifestError(what, f"{value!r} is not {wanted}", "Correct it")
    return value


def default_of(item: Any) -> Any:
    if item.default is not MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not MISSING else NOTHING
