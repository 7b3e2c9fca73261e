"""A sweep's file: a recipe, ranges of some of its keys, and the trials that follow from them. Pure.

The same file gives the same trials on every machine: nothing is drawn but from a hash of its content and its seed.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from dropforge.errors import RecipeError
from dropforge.recipe import Recipe
from dropforge.recipes.load import RECIPE_LIMIT, build_recipe, extended, key_names, merge, read_yaml, resolve
from dropforge.recipes.rules import check_startable
from dropforge.section import Section, help_of
from dropforge.validation_errors import cause

MOST_TRIALS: Final = 100
_MOST_VALUES: Final = 100  # of one key
_DIGITS: Final = 4  # of a number that is drawn: a learning rate says no more, and people read it
_LARGEST: Final = 1e300  # so that the distance of two ends is a number too
_LARGEST_WHOLE: Final = 1e18  # as in a recipe
_ROUNDS: Final = 50  # of draws, for as many different ones as are asked for
_SECTIONS: Final = ("base", "train")
Model = TypeVar("Model", bound=BaseModel)
# Keys that change on which tokens, or from which weights, a trial is measured: figures would not compare.
_OTHER_FIGURES: Final = {
    "train.sequence_length": "it changes which tokens of the evaluation rows count",
    "train.loss_on": "it changes which tokens of the evaluation rows count",
    "base.start": "the trials of a sweep begin with the same weights",
}


class Range(Section):
    """Numbers from one to another, both among them."""

    low: float = Field(alias="from")
    """The lowest value."""
    high: float = Field(alias="to")
    """The highest value."""
    scale: Literal["linear", "log"] = "linear"
    """Whether steps are alike as differences or as ratios."""
    steps: int | None = Field(default=None, ge=2, le=_MOST_VALUES)
    """So many values, evenly spaced; without it values are drawn anywhere between."""
    whole: bool = Field(default=False, alias="int")
    """Whole numbers only."""

    @model_validator(mode="after")
    def _is_range(self) -> Range:
        if not self.low < self.high:
            raise ValueError(f"{self.high:g} is not above {self.low:g}: turn `from` and `to` round, or give one value")
        if self.scale == "log" and self.low <= 0:
            raise ValueError(
                f"a logarithmic scale begins above 0, and `from` is {self.low:g}: give a small number instead"
            )
        if self.whole and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError("whole numbers are asked for, and its ends are none: make `from` and `to` whole")
        if max(abs(self.low), abs(self.high)) >= (_LARGEST_WHOLE if self.whole else _LARGEST):
            most = f"{18 if self.whole else 300} digits"
            raise ValueError(f"an end of it has more than {most}: bring it nearer to 0")
        return self

    def at(self, share: float) -> float | int:
        """The value at a share of the way, 0 being the lowest."""
        if self.scale == "log":
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        if self.whole:
            return min(int(self.high), max(int(self.low), round(value)))
        # Rounding must not leave the range.
        return min(self.high, max(self.low, float(f"{value:.{_DIGITS}g}")))

    @property
    def values(self) -> tuple[float | int, ...] | None:
        """All values, if they are countable by `steps`, each once."""
        if self.steps is None:
            return None
        found = [self.at(step / (self.steps - 1)) for step in range(self.steps)]
        return tuple(dict.fromkeys(found))


class EarlyStop(Section):
    """The median stopping rule of Google Vizier (Golovin et al., 2017, https://doi.org/10.1145/3097983.3098043): a
    trial ends when its best value so far is worse than the median of the other trials' averages up to the same step."""

    after_trials: int = Field(default=2, ge=1, le=MOST_TRIALS)
    """Other trials that must have come as far; of fewer, a median says little."""
    after_evaluations: int = Field(default=1, ge=1, le=10_000)
    """Evaluations that a trial must have before it can end so, the one before the training not counted."""


class Sweep(Section):
    """What a sweep's file says."""

    recipe: dict[str, Any]
    """The recipe of all trials, as in a drop's `recipe.yaml`. It begins with `extends: PRESET`."""
    space: dict[str, Any] = Field(min_length=1, max_length=20)
    """Dotted recipe keys, each with a list of values or a range `{from, to, scale, steps, int}`."""
    trials: int | None = Field(default=None, ge=1, le=MOST_TRIALS)
    """How many: all combinations if they are no more, else so many drawn. Without it there are all combinations."""
    at_once: int = Field(default=2, ge=1, le=16)
    """Trials that train at the same time."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Another seed draws other trials."""
    early_stop: EarlyStop | None = None
    """End trials that fall behind; `{}` takes the defaults, without it each trains to its end."""

    @property
    def preset(self) -> str:
        """What the recipe extends."""
        return str(self.recipe["extends"])

    @property
    def digest(self) -> str:
        """Of the content: the same sweep has the same."""
        return hashlib.sha256(_text(self.plain()).encode()).hexdigest()

    def plain(self) -> dict[str, Any]:
        """As JSON values, the same for equal sweeps."""
        space = {key: item.model_dump(by_alias=True) if isinstance(item, Range) else item for key, item in self._axes()}
        return {**self.model_dump(mode="json", exclude={"space"}), "space": space}

    def _axes(self) -> list[tuple[str, Range | list[Any]]]:
        return [(key, _axis(key, item)) for key, item in sorted(self.space.items())]

    def overrides(self, trial: Trial) -> dict[str, Any]:
        """What a trial's recipe says over the preset."""
        rest = {key: value for key, value in self.recipe.items() if key != "extends"}
        return merge(rest, trial.nested())

    def whole(self, trial: Trial) -> Recipe:
        """A trial's resolved recipe. :raises RecipeError: if it cannot work."""
        try:
            return check_startable(build_recipe(merge(resolve({"extends": self.preset}), self.overrides(trial))))
        except RecipeError as error:
            raise RecipeError(f"trial {trial.number} ({trial.told}), {error.thing}", error.cause, error.mend) from None

    def made(self) -> tuple[Trial, ...]:
        """The trials, numbered from 0. :raises RecipeError: if they are too many."""
        axes = self._axes()
        grid = [list(item.values or ()) if isinstance(item, Range) else item for _, item in axes]
        finite = all(grid)
        cells = math.prod(len(values) for values in grid) if finite else None
        if self.trials is None and (cells is None or cells > MOST_TRIALS):
            cause = "a range without `steps` has no end" if cells is None else f"there are {cells} combinations"
            raise RecipeError(
                "sweep key `space`", f"{cause}, and at most {MOST_TRIALS} trials are run", "Say how many with `trials:`"
            )
        keys = [key for key, _ in axes]
        if cells is not None and cells <= (self.trials or MOST_TRIALS):
            combinations: Iterator[Sequence[Any]] = itertools.product(*grid)
        else:
            assert self.trials is not None
            combinations = iter(_drawn([item for _, item in axes], keys, self.trials, self.digest))
        return tuple(Trial(number, dict(zip(keys, values, strict=True))) for number, values in enumerate(combinations))


@dataclass(frozen=True)
class Trial:
    """One combination of values. :param values: by dotted recipe key."""

    number: int
    values: Mapping[str, Any]

    @property
    def told(self) -> str:
        """In a few words, as `learning_rate 0.001, r 8`; whole keys where their last parts are alike."""
        short = [key.rpartition(".")[2] for key in self.values]
        names = short if len(set(short)) == len(short) else list(self.values)
        return ", ".join(f"{name} {_shown(value)}" for name, value in zip(names, self.values.values(), strict=True))

    def nested(self) -> dict[str, Any]:
        """The values as a recipe has them."""
        result: dict[str, Any] = {}
        for key, value in self.values.items():
            for part in reversed(key.split(".")):
                value = {part: value}
            result = merge(result, value)
        return result


def read_sweep(path: Path) -> Sweep:
    """A sweep from its file. :raises RecipeError: with the key, the cause and the mend."""
    try:
        with path.open("rb") as stream:
            text = stream.read(RECIPE_LIMIT + 1)
    except OSError as error:
        raise RecipeError(f"sweep file {path.name!r}", f"it cannot be read ({error})", "Name a YAML file") from None
    return build_sweep(read_yaml(text, "sweep key"))


def build_sweep(values: Mapping[str, Any]) -> Sweep:
    """Check plain values and freeze them, every trial's recipe included.

    :raises RecipeError: with the key, the cause and the mend.
    """
    _check_keys(values, Sweep, "")
    if isinstance(values.get("early_stop"), Mapping):
        _check_keys(values["early_stop"], EarlyStop, "early_stop.")
    sweep = _validated(Sweep, values, "")
    if extended(sweep.recipe) is None:
        raise RecipeError("sweep key `recipe`", "it extends no preset", "Begin it with `extends: PRESET`")
    for key in sweep.space:
        _check_space(key, sweep.space)
    check_trials(sweep, [sweep.whole(trial) for trial in sweep.made()])
    return sweep


def check_trials(sweep: Sweep, recipes: Sequence[Recipe]) -> None:
    """Whether the figures of these recipes, in the trials' order, say which is the best.

    :raises RecipeError: if two are the same, they do not compare, or no trial could be stopped early as it is asked.
    """
    first = recipes[0]
    seen: dict[str, int] = {}
    for number, recipe in enumerate(recipes):
        if (before := seen.setdefault(_text(recipe.plain()), number)) != number:
            raise RecipeError(
                "sweep key `space`",
                f"trials {before} and {number} have the same recipe",
                "Take one of their values out",
            )
    if first.base.start == "champion":
        raise RecipeError(
            "recipe key `base.start`",
            "the champion may be another one before the last trial begins",
            "Name its checkpoint: `base.start: runs/RUN/step-N`",
        )
    if first.curation.scope == "family":
        raise RecipeError(
            "recipe key `curation.scope`",
            "a drop that arrives meanwhile would give later trials other rows",
            "Write `curation: {scope: drop}`, and name several drops under `data.source.drops`",
        )
    metric = first.promote.metric
    by_tokens = first.task != "classification" and not metric.startswith("gen/") and metric != "eval/bits_per_byte"
    if by_tokens and any(key.startswith("base.") for key in sweep.space):
        raise RecipeError(
            "sweep key `space`",
            f"models of different bases may count other tokens, and {metric} counts tokens",
            "Set `promote: {metric: eval/bits_per_byte}` in the recipe",
        )
    if sweep.early_stop is not None and any(recipe.train.eval_every == 0 for recipe in recipes):
        raise RecipeError(
            "sweep key `early_stop`",
            "the recipe evaluates before and after the training only",
            "Set `train: {eval_every: STEPS}`",
        )


def _drawn(axes: Sequence[Range | list[Any]], keys: Sequence[str], number: int, digest: str) -> list[tuple[Any, ...]]:
    """Different combinations by Latin hypercube: each axis is cut into `number` parts, and each part is met once.

    Fewer than `number` if there are no more.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for round_ in range(_ROUNDS):
        places = []
        for key in keys:
            order = sorted(range(number), key=lambda part: _hashed(digest, round_, key, "order", part))
            places.append([(part + _hashed(digest, round_, key, "within", part)) / number for part in order])
        for shares in zip(*places, strict=True):
            values = tuple(_at(axis, share) for axis, share in zip(axes, shares, strict=True))
            if len(found) < number:
                found.setdefault(_text(values), values)
        if len(found) == number:
            break
    return list(found.values())


def _at(axis: Range | list[Any], share: float) -> Any:
    choices: Sequence[Any] | None = axis.values if isinstance(axis, Range) else axis
    if choices is None:
        assert isinstance(axis, Range)
        return axis.at(share)
    return choices[int(share * len(choices))]


def _hashed(*parts: Any) -> float:
    """A number from 0 up to 1 that follows from the parts alone."""
    return int.from_bytes(hashlib.sha256(_text(parts).encode()).digest()[:6]) / 2**48


def _axis(key: str, item: Any) -> Range | list[Any]:
    """:raises RecipeError: if it is neither a list of different values nor a range."""
    where = f"sweep key `space.{key}`"
    if isinstance(item, Range):
        return item
    if isinstance(item, Mapping):
        _check_keys(item, Range, f"space.{key}.")
        return _validated(Range, item, f"space.{key}.")
    if not isinstance(item, list) or not item:
        raise RecipeError(where, f"it is no list of values, but {item!r:.60}", "Write `[1e-4, 1e-3]`, or a range")
    if len(item) > _MOST_VALUES:
        raise RecipeError(where, f"it has {len(item)} values", f"Give at most {_MOST_VALUES}, or a range")
    if len({_text(value) for value in item}) < len(item):
        raise RecipeError(where, "a value is in it twice", "Take one of them out")
    return item


def _check_space(key: str, space: Mapping[str, Any]) -> None:
    where, known = f"sweep key `space.{key}`", key_names()
    section = key.partition(".")[0]
    if section in Recipe.model_fields and section not in _SECTIONS:
        raise RecipeError(
            where,
            f"all trials share `{section}`: else their figures would not be of the same rows, or not be measured alike",
            f"Set it under `recipe:`; a space is of {' and '.join(f'`{name}.*`' for name in _SECTIONS)}",
        )
    if key not in known:
        near = difflib.get_close_matches(key, known, 1, 0.6) or [
            name for name in known if name.rpartition(".")[2] == key
        ]
        mend = f"Did you mean `{near[0]}`?" if near else "Give the whole key, as `train.learning_rate`"
        raise RecipeError(where, "there is no such recipe key", mend)
    if key in _SECTIONS:
        raise RecipeError(where, "it is a whole section", "Name a key in it, as `train.learning_rate`")
    if why := _OTHER_FIGURES.get(key):
        raise RecipeError(where, why, "Set it under `recipe:`")
    if inner := next((other for other in space if other.startswith(f"{key}.")), None):
        raise RecipeError(where, f"`{inner}` is a part of it", "Remove one of them")
    _axis(key, space[key])


def _check_keys(values: Mapping[str, Any], model: type[BaseModel], path: str) -> None:
    known = [info.alias or name for name, info in model.model_fields.items()]
    for key in values:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, 1, 0.5)
        near = near or (["recipe"] if not path and (key in Recipe.model_fields or key == "extends") else [])
        mend = f"Did you mean `{path}{near[0]}`?" if near else f"Known here: {', '.join(known)}"
        raise RecipeError(f"sweep key `{path}{key}`", "it is unknown", mend)


def _validated(model: type[Model], values: Mapping[str, Any], path: str) -> Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:  # our own words: the cause, and the mend
            said, _, mend = cause(first).partition(": ")
            raise RecipeError(f"sweep key `{path.rstrip('.')}`", said, mend[:1].upper() + mend[1:]) from None
        name = {info.alias or name: name for name, info in model.model_fields.items()}[str(first["loc"][0])]
        key = path + ".".join(str(part) for part in first["loc"])
        raise RecipeError(f"sweep key `{key}`", cause(first), f"Meaning: {help_of(model, name)}") from None


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
