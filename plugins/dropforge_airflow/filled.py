"""What a filled form asks for: preset, data, and the recipe's values from what was pasted and the fields. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dropforge.data_names import read_name
from dropforge.errors import DataError, RecipeError
from dropforge.recipes.load import join, read_pasted
from dropforge_airflow.form import form_overrides


class Filled(NamedTuple):
    """:param preset: which a person chose, in the place of the family's recipe. :param drop: as people name one, or
    empty. :param over: recipe values that win over those of family or preset, and drop."""

    preset: str | None
    drop: str
    family: str
    over: dict[str, Any]


def filled(params: Mapping[str, Any], bucket: str) -> Filled:
    """Read the form. The fields and the pasted recipe say one thing together; where they contradict, nobody chooses.

    :param bucket: of this installation.
    :raises RecipeError, DataError: with the field, the cause and the mend.
    """
    pasted = _pasted(params.get("recipe"))
    preset = _preset(params.get("preset") or None, pasted.pop("extends", None))
    fields = form_overrides(params)
    _check_agreement(pasted, fields)
    drop, source = _data(params, bucket)
    over = join(pasted, fields)
    if source is not None:
        _check_agreement(over, {"data": {"source": source}}, "form field `data`")
        over = join(over, {"data": {"source": source}})
    return Filled(preset, drop, str(params.get("family") or "").strip(), over)


def _pasted(text: Any) -> dict[str, Any]:
    if text is None:
        return {}
    if not isinstance(text, str):
        raise RecipeError("form field `recipe`", "it is no text", "Paste the recipe as YAML or JSON text")
    try:
        return read_pasted(text)
    except RecipeError as error:
        raise RecipeError(f"form field `recipe`: {error.thing}", error.cause, error.mend) from None


def _preset(chosen: str | None, extends: Any) -> str | None:
    """A pasted recipe's own `extends` takes the place of the preset, unless somebody chose another one."""
    if extends is None:
        return chosen
    if chosen not in (None, extends):
        raise RecipeError(
            "form field `preset`",
            f"it is {chosen}, and the pasted recipe extends {extends!r:.60}",
            "Choose the same preset, or take `extends` out of the pasted recipe",
        )
    return str(extends)


def _data(params: Mapping[str, Any], bucket: str) -> tuple[str, dict[str, Any] | None]:
    # `drop` is what callers of Airflow's API wrote before there was `data`; the calendar still does.
    older = str(params.get("drop") or "").strip()
    named = read_name(str(params.get("data") or ""), bucket)
    if older and (named.drop or named.source):
        raise DataError("form field `data`", "`drop` is given too", "Give one of them")
    return older or named.drop, named.source


def _check_agreement(pasted: Mapping[str, Any], over: Mapping[str, Any], field: str = "") -> None:
    """:raises RecipeError: for a key that both name, with other values."""
    for path, value in _leaves(over):
        found: Any = pasted
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is not None and found != value:
            key = ".".join(path)
            raise RecipeError(
                field or f"form field `{'_'.join(path)}`",
                f"it makes `{key}` {value!r:.60}, and the pasted recipe says {found!r:.60}",
                f"Empty the field, or take `{key}` out of the pasted recipe",
            )


def _leaves(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value
