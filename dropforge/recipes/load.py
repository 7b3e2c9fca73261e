"""From YAML text to a checked recipe: strict YAML, `extends`, overrides, nearest-key errors.

A recipe of a drop is hostile input: only safe YAML, no aliases (a few lines can expand to gigabytes), no duplicate
keys, at most 64 KiB, and it may extend presets only, never a path. Presets are the shipped ones and those of the folder
that `DROPFORGE_PRESETS` names, where a team keeps what its cluster needs: image, namespace, volumes, queue.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dropforge.errors import RecipeError
from dropforge.methods import check_done
from dropforge.recipe import Recipe
from dropforge.recipes.curation_rules import check_curation
from dropforge.recipes.drop_rules import Authority, check_differences
from dropforge.recipes.place_rules import fill_sizes, without_gpus, without_sizes
from dropforge.recipes.rules import SIZES, check_combinations
from dropforge.recipes.self_service_rules import check_chosen, check_kept
from dropforge.recipes.unknown_keys import Fault, find_unknown, inner_model, paths, recipe_error, without_unknown
from dropforge.section import help_of
from dropforge.strict_yaml import DIGITS, UNFIT, load_strict
from dropforge.text import escape, why_unstorable
from dropforge.validation_errors import MISSING, cause

_FOLDER = Path(__file__).parent
RECIPE_LIMIT = 64 * 1024  # bytes
_NUMBERS = 10**18
_NO_BASE = (
    "It names the model that is trained: a Hugging Face id, a folder or s3://... as `base.model`. Write a recipe with "
    "`dropforge init --base MODEL`, or extend one of `dropforge presets`; `extends: sample` is a toy from nothing"
)
_EITHER = (
    ("base", "model", "scratch"),
    ("train", "epochs", "max_steps"),
    ("train", "tokens_per_step", "rows_per_step"),
)


class UnfitValueError(RecipeError):
    """A value that no key of any file takes."""


def presets() -> tuple[str, ...]:
    """Names of the presets, sorted."""
    return tuple(sorted(_preset_files()))


def about_preset(name: str) -> str:
    """Return what a preset is for: the first sentence of the comment that its file begins with."""
    lines: list[str] = []
    for line in _preset_files()[name].read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(lines), maxsplit=1)[0]


def _preset_files() -> dict[str, Path]:
    shipped = {path.stem: path for path in _FOLDER.glob("*.yaml")}
    folder = os.environ.get("DROPFORGE_PRESETS")
    if not folder:
        return shipped
    own = {path.stem: path for path in Path(folder).glob("*.yaml")}
    thing, twice = "environment variable DROPFORGE_PRESETS", sorted(own.keys() & shipped.keys())
    if twice:
        raise RecipeError(thing, f"{folder} has a preset `{twice[0]}`, as we do", "Give it another name")
    if not own:
        raise RecipeError(thing, f"{folder} has no *.yaml", "Name a folder of presets, or leave it out")
    return shipped | own


def load_recipe(source: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Load a preset by name or a recipe file by path.

    :param overrides: nested values that win over the file.
    :raises RecipeError: with the key, the cause and the mend.
    """
    return build_recipe(merge(resolve(read_named(source)), overrides or {}))


def read_named(source: str | Path) -> dict[str, Any]:
    """Read a recipe file by path, or name a preset as one; `extends` is not resolved.

    :raises RecipeError: if there is neither, or the file is no recipe.
    """
    if str(source) in presets():
        return {"extends": str(source)}
    path = Path(source)
    if not path.is_file():
        raise RecipeError(
            f"recipe {str(source)!r}", "it is neither a file nor a preset", f"Presets: {', '.join(presets())}"
        )
    return _read_file(path)


def parse_recipe(text: bytes | str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe from YAML text.

    :raises RecipeError: with the key, the cause and the mend.
    """
    return build_recipe(merge(resolve(read_yaml(text)), overrides or {}))


def build_recipe(values: Mapping[str, Any]) -> Recipe:
    """Check plain values and freeze them. :raises RecipeError: with the key, the cause and the mend."""
    recipe = _validate(values)
    check_combinations(recipe)
    check_curation(recipe)
    return recipe


def _validate(values: Mapping[str, Any]) -> Recipe:
    """Check each value for itself. :raises RecipeError: that names every wrong one."""
    _check_values(values)
    unknown = list(find_unknown(values))
    if not unknown:
        check_done(values)
    try:
        recipe = Recipe.model_validate(fill_sizes(without_unknown(values) if unknown else values))
    except ValidationError as error:
        # What is missing may be what an unknown key was to say.
        wrong = [fault for fault in _faults(error) if not unknown or fault.cause != MISSING]
        raise recipe_error([*unknown, *wrong]) from None
    if unknown:
        raise recipe_error(unknown)
    return recipe


def _faults(error: ValidationError) -> Iterator[Fault]:
    """Yield what is wrong with each key, once."""
    seen: set[str] = set()
    for one in error.errors(include_url=False):
        # Without the branch of a union.
        parts = [str(part) for part in one["loc"]]
        key = ".".join(part for part in parts if "[" not in part and not part.startswith("constrained-"))
        if key in seen:
            continue
        seen.add(key)
        meaning = f"Meaning: {' '.join(help_of_key(key).split())}"
        said = cause(one)
        yield Fault(key, said, _NO_BASE if said == MISSING and key == "base" else meaning)


def put_drop_over(under: Mapping[str, Any], values: Mapping[str, Any], authority: Authority) -> dict[str, Any]:
    """The values of a family's recipe with those of a drop's over them.

    :param under: the family's, `extends` resolved. :param values: the drop's, as `read_yaml` gives them.
    :param authority: who decides what the drop may not.
    :raises RecipeError: if it is no recipe, or asks for what is not the drop's to say.
    """
    merged = merge(under, resolve(values))
    check_differences(_validate(under), _validate(merged), authority)  # before what goes together is looked at
    return merged


def put_first_drop_over(under: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the installation's preset with those of a family's first drop over them, in self-service.

    :raises RecipeError: if it is no recipe, or takes what the installation keeps to itself.
    """
    check_chosen(values)
    merged = merge(under, resolve(values))
    check_kept(under, merged)
    return merged


def read_drop_recipe(path: Path) -> dict[str, Any]:
    """Read the `recipe.yaml` of a drop as far as that can be done without its family's recipe; `extends` stays.

    :raises RecipeError: if it is none, or has a key that no recipe has.
    """
    values = _read_file(path)
    if unknown := list(find_unknown(resolve(values))):
        raise recipe_error(unknown)
    return values


def default_preset() -> str | None:
    """Name of the installation's preset, that of families without a recipe: `DROPFORGE_PRESET`; None if it has none."""
    return os.environ.get("DROPFORGE_PRESET") or None


def preset_values(preset: str | None) -> dict[str, Any]:
    """Return a preset's values; empty without one."""
    return {} if preset is None else resolve({"extends": preset})


def over_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values, `extends` resolved; over the installation's preset where it extends none and names no
    base."""
    alone = "extends" not in values and "base" not in values
    return merge(preset_values(default_preset()), values) if alone else resolve(values)


def _read_file(path: Path) -> dict[str, Any]:
    """The strict YAML mapping of a file, of which no more is read than a recipe may have."""
    with path.open("rb") as stream:
        text = stream.read(RECIPE_LIMIT + 1)
    try:
        return read_yaml(text)
    except RecipeError as error:
        if error.thing != "recipe":
            raise
        raise RecipeError(f"recipe {str(path)!r}", error.cause, error.mend) from None


def read_yaml(text: bytes | str, called: str = "recipe key") -> dict[str, Any]:
    """One strict YAML mapping of values that JSON has too, and of numbers that have an end.

    :param called: what a key of it is called in an error. :raises RecipeError: otherwise.
    """
    values = read_mapping(text, RECIPE_LIMIT)
    _check_values(values, called)
    return values


def read_mapping(text: bytes | str, limit: int) -> dict[str, Any]:
    """One strict YAML mapping. :param limit: bytes or characters that it may have. :raises RecipeError: otherwise."""
    if len(text) > limit:
        raise RecipeError("recipe", f"it is larger than {limit // 1024} KiB", "A recipe holds settings, not data")
    try:
        values = load_strict(text)
    except (yaml.YAMLError, RecursionError, *UNFIT) as error:
        cause = " ".join(str(error).split()).replace(' in "<byte string>"', "").replace(' in "<unicode string>"', "")
        raise RecipeError("recipe", f"it is not a YAML mapping ({cause})", "Correct the line that is named") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise RecipeError("recipe", "it is not a YAML mapping with text keys", "Begin with `base:`")
    return values


def read_pasted(text: str) -> dict[str, Any]:
    """A recipe that somebody pasted: YAML as in a file, or JSON as a run's resolved recipe is written.

    :raises RecipeError: if it is neither, too long, or has a key twice.
    """
    data = text.encode(errors="replace")
    if len(data) <= RECIPE_LIMIT and text.lstrip().startswith("{"):
        try:
            values = dict(json.loads(text, object_pairs_hook=_once, parse_constant=_no_number, parse_int=_whole_number))
            _check_values(values)
            return values
        except json.JSONDecodeError:
            pass  # YAML has mappings in braces too, without quotes
        except (RecursionError, ValueError) as error:
            raise RecipeError("recipe", f"it is no JSON ({error})", "Fix the key that is named") from None
    return read_yaml(data)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r:.60} appears twice")
        found[key] = value
    return found


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def _whole_number(word: str) -> int:
    if len(word) > DIGITS:
        raise ValueError(f"{word:.20}... is a number of {len(word)} digits")
    return int(word)


def extended(values: Mapping[str, Any]) -> str | None:
    """The preset that a recipe extends; None if it extends none. :raises RecipeError: if that is no text."""
    name = values.get("extends")
    if name is not None and not isinstance(name, str):
        kind = type(name).__name__  # no repr: Python writes no number of thousands of digits
        raise RecipeError(
            "recipe key `extends`", f"it is no preset's name, but a {kind}", f"Presets: {', '.join(presets())}"
        )
    return name


def resolve(values: Mapping[str, Any], seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """Replace `extends: PRESET` by the preset's values, under this recipe's own."""
    rest = {key: value for key, value in values.items() if key != "extends"}
    name = extended(values)
    if name is None:
        return rest
    if name not in presets():
        near = difflib.get_close_matches(name, presets(), 1)
        raise RecipeError(
            "recipe key `extends`",
            f"there is no preset {name!r}",
            f"Did you mean {near[0]!r}?" if near else f"Presets: {', '.join(presets())}",
        )
    if name in seen:
        raise RecipeError("recipe key `extends`", f"{' -> '.join([*seen, name])} is a circle", "Break it")
    return merge(resolve(_read_file(_preset_files()[name]), (*seen, name)), rest)


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values of `over` win; mappings are merged, all else is replaced. Of two ways to say the same thing, the
    one that `over` names replaces the other."""
    result = join(under, over)
    for section, one, two in _EITHER:
        above, merged = over.get(section), result.get(section)
        if (
            isinstance(above, Mapping)
            and isinstance(merged, dict)
            and (above.get(one) is None) != (above.get(two) is None)
        ):
            other = one if above.get(one) is None else two
            result[section] = {key: value for key, value in merged.items() if key != other}
    if under.get("curation") == "none" and isinstance(over.get("curation"), Mapping):
        result["curation"] = {"steps": "none", **result["curation"]}  # more keys take nothing back
    return _merge_scratch(under, over, without_gpus(under, over, without_sizes(under, over, result)))


def _merge_scratch(under: Mapping[str, Any], over: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """A config replaces the sizes below it, and one of another type the config below it."""
    above, below, base = (_inner(values, "base", "scratch") for values in (over, under, result))
    config = above.get("config")
    if not isinstance(config, Mapping):
        return result
    base = {key: value for key, value in base.items() if key not in SIZES or above.get(key) is not None}
    kind = config.get("model_type")
    if kind is not None and kind != _inner(below, "config").get("model_type"):
        base["config"] = dict(config)
    return {**result, "base": {**result["base"], "scratch": base}}


def _inner(values: Any, *keys: str) -> dict[str, Any]:
    """A mapping within mappings; empty where there is none."""
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return dict(values) if isinstance(values, Mapping) else {}


def join(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values of both, those of `over` where both have one; contradictions stay."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        result[key] = join(below, value) if both else value  # type: ignore[arg-type]
    return result


def _check_values(value: Any, called: str = "recipe key", path: str = "") -> None:
    """:raises UnfitValueError: for what is no JSON or fits no database, or a number without end: no key takes them."""
    thing = f"{called} `{escape(path)}`"
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_values(key, called, path)
            _check_values(inner, called, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_values(inner, called, path)
    elif isinstance(value, str) and (held := why_unstorable(value)):
        raise UnfitValueError(thing, f"{value!r:.60} holds {held}", "Write characters that can be shown, as UTF-8")
    elif isinstance(value, int) and abs(value) >= _NUMBERS:
        digits = math.ceil((value.bit_length() - 1) * math.log10(2))  # no text: Python refuses it
        raise UnfitValueError(thing, f"it is a number of about {digits} digits", "Write one of at most 18")
    elif value is not None and not isinstance(value, str | int | float):
        kind = type(value).__name__
        raise UnfitValueError(thing, f"it is a {kind}, in YAML's words", "Put a text into quotes, and write no tags")


def key_names() -> tuple[str, ...]:
    """All dotted keys of a recipe, sections among them."""
    return tuple(paths(Recipe))


def help_of_key(key: str) -> str:
    """Return what a key of a recipe means, as part of a sentence. :param key: with dots."""
    model: type[BaseModel] | None = Recipe
    text = "the key is not in the model"
    for part in key.split("."):
        if model is None or part not in model.model_fields:
            break
        text = help_of(model, part) or text
        model = inner_model(model.model_fields[part].annotation)
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]  # GPUs stay in capitals
