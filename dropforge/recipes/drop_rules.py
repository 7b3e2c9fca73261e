"""What the recipe of a drop may say: a list of keys, and the bounds of their numbers.

Whoever uploads rows describes them, and may ask for less than the family has. All other keys are the family's or the
installation's. The resolved recipes with and without the drop's are compared, so it does not matter how it says
something: what differs has to be on the list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from dropforge.errors import RecipeError
from dropforge.recipe import Recipe
from dropforge.recipe_drops import Length, Rate

_AGAIN: Final = "which are read again with each (`curation.scope: family`)"
#: Keys that describe the rows, at any value; but where each drop is read with all others, they are the family's.
DESCRIPTIVE: Final = frozenset(
    {
        "data.columns",
        "data.encoding",
        "data.keep_columns",
        "data.license",
        "data.prompt_template",
        "data.quotes",
        "data.text_column",
        "data.text_files",
    }
)
LENGTHS: Final = frozenset(get_args(Length))
RATES: Final = frozenset(get_args(Rate))
#: Limits of the family that a drop may make stricter, and which way that is.
STRICTER: Final = {
    "curation.max_filtered": -1,
    "curation.max_quarantined": -1,
    "curation.min_rows": 1,
    "data.max_left_out": -1,
}
_RATE_FACTOR: Final = 10.0
_NAMED: Final = 10  # keys in a refusal
#: Of each pair one is given; the family decides which.
EITHER: Final = {"train.epochs": "train.max_steps", "train.max_steps": "train.epochs"}


@dataclass(frozen=True)
class Authority:
    """Who decides what a drop may not, for the texts of errors.

    :param name: as `family support`. :param change: what else changes the value, as `the form may change it`.
    """

    name: str
    change: str


def is_allowed(path: str) -> bool:
    """Tell whether a drop's recipe may say the key, whatever its value."""
    return _describes(path) or path in LENGTHS | RATES | STRICTER.keys()


def check_differences(under: Recipe, merged: Recipe, authority: Authority) -> None:
    """Refuse what a drop's recipe changed although it may not.

    :param under: the recipe without the drop's. :param merged: the recipe with it.
    :raises RecipeError: naming the keys, the values that hold, and the way to change them.
    """
    asked = merged.plain()
    broken: dict[str, str] = {}
    for path, holds, wanted in differences(under.plain(), asked):
        if _describes(path):
            if merged.curation.scope == "family" and path != "data.license":
                broken[path] = _asked(f"has {_text(holds)} for all its drops, {_AGAIN}", wanted)
            continue
        rule = _broken_rule(path, holds, wanted, under, asked) if is_allowed(path) else f"has {_text(holds)}"
        if rule:
            broken[path] = _asked(rule, wanted)
    if not broken:
        return
    (first, cause), *others = list(broken.items())[:_NAMED]
    more = f"; and {len(broken) - _NAMED} more keys" if len(broken) > _NAMED else ""
    bounds = ", or gives it bounds of its own (`drops.bounds`)" if broken.keys() & (LENGTHS | RATES) else ""
    raise RecipeError(
        f"recipe key `{first}`",
        f"{authority.name} {cause}{''.join(f'; `{path}`: it {text}' for path, text in others)}{more}",
        f"Leave {'them' if others else 'it'} out of the drop; {authority.change}{bounds}",
    )


def _asked(rule: str, wanted: Any) -> str:
    return f"{rule}, and the recipe of this drop asks for {_text(wanted)}"


def split_descriptive(values: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """Take the description of the rows out of a recipe's values.

    :return: the nested values of descriptive keys, and the dotted names of all others.
    """
    described: dict[str, Any] = {}
    others: list[str] = []
    for key, value in values.items():
        path = f"{prefix}{key}"
        if path in DESCRIPTIVE and "." not in key:
            described[key] = value
        elif isinstance(value, Mapping) and value:
            inner, more = split_descriptive(value, f"{path}.")
            described |= {key: inner} if inner else {}
            others += more
        else:
            others.append(path)
    return described, others


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys whose JSON differs in two nested mappings, with both values; None where a key is missing."""
    for key in dict.fromkeys([*one, *other]):
        before, after = one.get(key), other.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differences(before, after, f"{prefix}{key}.")
        elif (key in one) != (key in other) or json.dumps(before) != json.dumps(after):  # 1 is neither true nor 1.0
            yield f"{prefix}{key}", before, after


def _describes(path: str) -> bool:
    return path in DESCRIPTIVE or path.startswith(tuple(f"{key}." for key in DESCRIPTIVE))


def _broken_rule(path: str, holds: Any, wanted: Any, under: Recipe, asked: Mapping[str, Any]) -> str:
    """What the family lets a number be, if this one is not that; empty if it is."""
    if path in STRICTER:
        way = STRICTER[path]
        fits = wanted is not None and (holds is None or way * (wanted - holds) >= 0)
        return "" if fits else f"has {_text(holds)}, which a drop may only make {'higher' if way > 0 else 'lower'}"
    partner = EITHER.get(path)
    if wanted is None and partner is not None and asked["train"][partner.rpartition(".")[2]] is not None:
        return ""  # of the pair, the one that is given is judged
    bounds = {str(key): pair for key, pair in under.drops.bounds.items()}.get(path)
    if bounds is None and path in RATES:
        factor = _RATE_FACTOR * (1 + 1e-9)  # 3e-4 times ten is a little less than 3e-3
        bounds = (holds / factor, holds * factor)
    if bounds is not None:
        fits = wanted is not None and bounds[0] <= wanted <= bounds[1]
        return "" if fits else f"has {_text(holds)}, and lets a drop ask for {bounds[0]:g} to {bounds[1]:g}"
    if path == "train.epochs" and holds is None and under.train.max_steps is None:
        holds = 1.0  # the trainer's own
    if holds is None and partner is not None:
        given = getattr(under.train, partner.rpartition(".")[2]) is not None
        return f"has `{partner}` in its place" if given else "counts in epochs: it has one"
    fits = holds is None or (wanted is not None and wanted <= holds)
    return "" if fits else f"has {_text(holds)}, and lets a drop ask for no more"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:200]
