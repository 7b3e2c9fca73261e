"""The parts of the recipe that the trainer obeys, as frozen dataclasses.

The recipe was checked by pydantic before the run existed; the trainer's image has no pydantic, and a mode that is
asked for but not known here must be refused, so `run.json` is checked again: every key, its type and its choices.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar

from dropforge.errors import RecipeError

Section = TypeVar("Section")
Parallel = Literal["auto", "ddp", "fsdp", "fsdp-no-reshard", "hybrid"]


@dataclass(frozen=True)
class Scratch:
    """A model made from a config, with a tokenizer trained on the dataset."""

    architecture: Literal["llama", "qwen2", "mistral", "gpt2"]
    hidden_size: int
    layers: int
    heads: int
    vocab_size: int
    context: int


@dataclass(frozen=True)
class Base:
    """The model to start from: exactly one of `model` and `scratch`."""

    model: str | None
    revision: str | None
    scratch: Scratch | None


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters."""

    r: int
    alpha: int
    dropout: float
    targets: tuple[str, ...] | Literal["all-linear"]


@dataclass(frozen=True)
class Train:
    """The training; batch sizes are global."""

    method: Literal["full", "lora"]
    lora: Lora
    sequence_length: int
    packing: Literal["auto", "off"]
    tokens_per_step: int
    micro_batch: int
    epochs: float
    max_steps: int | None
    learning_rate: float
    schedule: Literal["cosine", "linear", "constant"]
    warmup: float
    weight_decay: float
    clip: float
    seed: int
    precision: Literal["fp32", "bf16"]
    loss_on: Literal["answers", "all"]
    eval_every: int
    checkpoint_every: int
    keep_checkpoints: int
    keep_best: int

    @property
    def rows_per_step(self) -> int:
        """Sequences in one optimizer step, over all ranks."""
        return self.tokens_per_step // self.sequence_length


@dataclass(frozen=True)
class Settings:
    """What the trainer reads of a recipe.

    :param max_left_out: largest share of training rows that may teach nothing.
    :param eval_rows: most evaluation rows to use.
    :param eval_precision: arithmetic of an evaluation's forward pass.
    :param grace_seconds: time between SIGTERM and SIGKILL.
    :param gpus: GPUs of this node, one a rank; 0 trains on the CPU.
    :param parallel: how ranks share the model. :param shard_group: with `hybrid`, ranks that hold one copy together.
    """

    base: Base
    train: Train
    max_left_out: float
    eval_rows: int
    eval_precision: Literal["fp32", "bf16"]
    grace_seconds: int
    gpus: int
    parallel: Parallel
    shard_group: int | None


def read_settings(recipe: Mapping[str, Any]) -> Settings:
    """Check the recipe of `run.json`.

    :raises RecipeError: naming the key, the cause and the mend.
    """
    if not isinstance(recipe, Mapping):
        raise _bad("recipe", "it is not a mapping")
    base = _read(Base, recipe.get("base"), "base")
    train = _read(Train, recipe.get("train"), "train")
    settings = Settings(
        base=base,
        train=train,
        max_left_out=_value(float, _get(recipe, "data", "max_left_out"), "data.max_left_out"),
        eval_rows=_value(int, _get(recipe, "evaluate", "max_rows"), "evaluate.max_rows"),
        eval_precision=_value(Literal["fp32", "bf16"], _get(recipe, "evaluate", "precision"), "evaluate.precision"),
        grace_seconds=_value(int, _get(recipe, "compute", "grace_seconds"), "compute.grace_seconds"),
        gpus=_value(int, _get(recipe, "compute", "gpus"), "compute.gpus"),
        parallel=_value(Parallel, _get(recipe, "compute", "parallel"), "compute.parallel"),
        shard_group=_value(int | None, _get(recipe, "compute", "shard_group"), "compute.shard_group"),
    )
    if (base.model is None) == (base.scratch is None):
        raise _bad("base.model", "exactly one of `base.model` and `base.scratch` must be given")
    if base.scratch is not None:
        if train.method == "lora":
            raise _bad("train.method", "adapters need a trained model, `base.scratch` has random weights")
        if base.scratch.context < train.sequence_length:
            raise _bad("train.sequence_length", f"it is longer than the model's context of {base.scratch.context}")
    for name in ("sequence_length", "micro_batch", "rows_per_step", "checkpoint_every", "keep_checkpoints"):
        if getattr(train, name) < 1:
            raise _bad(f"train.{name}", "it must be at least 1")
    if train.max_steps is not None and train.max_steps < 1:
        raise _bad("train.max_steps", "it must be at least 1")
    if train.keep_best < 0:
        raise _bad("train.keep_best", "it must be at least 0")
    if train.epochs <= 0 or train.learning_rate <= 0 or train.clip <= 0 or not 0 <= train.warmup < 1:
        raise _bad("train", "epochs, learning_rate and clip must be positive, warmup in [0, 1)")
    if settings.shard_group is not None and settings.parallel != "hybrid":
        raise _bad("compute.shard_group", "only `compute.parallel: hybrid` has groups")
    if settings.eval_rows < 1:
        raise _bad("evaluate.max_rows", "it must be at least 1")
    if not 0 <= settings.max_left_out <= 1:
        raise _bad("data.max_left_out", "it must be in [0, 1]")
    return settings


def _get(recipe: Mapping[str, Any], section: str, key: str) -> Any:
    values = recipe.get(section)
    if not isinstance(values, Mapping) or key not in values:
        raise _bad(f"{section}.{key}", "it is missing")
    return values[key]


def _read(kind: type[Section], values: Any, path: str) -> Section:
    if not isinstance(values, Mapping):
        raise _bad(path, "it is missing or not a mapping")
    hints = typing.get_type_hints(kind)
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise _bad(f"{path}.{key}", "the trainer does not know it, and will not ignore what is asked for")
    for key in sorted(known - set(values)):
        raise _bad(f"{path}.{key}", "it is missing")
    return kind(**{key: _value(hints[key], values[key], f"{path}.{key}") for key in known})


def _value(kind: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(kind)
        if value is None and type(None) in options:
            return None
        errors = []
        for option in options:
            if option is not type(None):
                try:
                    return _value(option, value, path)
                except RecipeError as error:
                    errors.append(error)
        raise errors[0]
    if origin is Literal:
        if value not in typing.get_args(kind):
            raise _bad(path, f"{value!r} is none of {', '.join(map(repr, typing.get_args(kind)))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value) or not value:
            raise _bad(path, f"{value!r} is not a list of names")
        return tuple(value)
    if is_dataclass(kind):
        return _read(kind, value, path)  # type: ignore[arg-type]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool) or value != value:
        raise _bad(path, f"{value!r} is not of type {kind.__name__}")
    return value


def _bad(key: str, cause: str) -> RecipeError:
    return RecipeError(f"recipe key `{key}`", cause, "Mend the recipe and start a new run")
