"""The parts of the recipe that the trainer obeys, as frozen dataclasses.

The recipe was checked by pydantic before the run existed; the trainer's image has no pydantic, and a mode that is
asked for but not known here must be refused, so `run.json` is checked again: every key, its type and its choices.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, Literal, TypeVar

from dropforge.errors import RecipeError
from dropforge.methods import check_done
from dropforge.profiling import Span
from dropforge.run import wrong_address
from dropforge.shape import config_of, context_of
from trainer.interval import Interval
from trainer.scores import SCORES

MOST_PASSES: Final = 100  # over a source in an epoch
DEFAULT_TOKENS: Final = 4096  # of a step, where the recipe names neither tokens nor rows
Section = TypeVar("Section")
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "activations", "states", "all"]
OptimizerName = Literal["adamw", "adamw-bf16", "adamw-8bit", "sgd"]
Task = Literal["causal-lm", "classification", "sequence-to-sequence"]
Parallel = Literal["auto", "ddp", "fsdp", "fsdp-no-reshard", "hybrid"]
AttentionName = Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"]


@dataclass(frozen=True)
class Scratch:
    """A model made from a config, with a tokenizer trained on the dataset: its sizes, or a whole config instead."""

    architecture: Literal["llama", "qwen2", "mistral", "gpt2", "distilbert"] | None
    hidden_size: int | None
    layers: int | None
    heads: int | None
    vocab_size: int | None
    context: int | None
    config: dict[str, Any] | None = None

    @property
    def plain(self) -> dict[str, Any]:
        """The Hugging Face config that it comes to, with its `model_type`, without special tokens."""
        return config_of(vars(self))

    @property
    def vocabulary(self) -> int:
        """Size of the tokenizer's vocabulary, and of the model's."""
        return int(self.plain["vocab_size"])


@dataclass(frozen=True)
class Base:
    """The model to start from: exactly one of `model` and `scratch`."""

    model: str | None
    revision: str | None
    scratch: Scratch | None
    new_tokens: tuple[str, ...] | None
    start: str


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters."""

    r: int
    alpha: int
    dropout: float
    targets: tuple[str, ...] | Literal["all-linear"]


@dataclass(frozen=True)
class Prefix:
    """Learned keys and values before each document."""

    tokens: int


@dataclass(frozen=True)
class Freeze:
    """Weights that are not trained."""

    blocks: int
    embeddings: bool


@dataclass(frozen=True)
class EarlyStopping:
    """When training ends before its last step."""

    patience: int
    min_delta: float


@dataclass(frozen=True)
class FastCheckpoints:
    """The fast tier: a folder of each node's own."""

    folder: str
    every: int | str
    keep: int


@dataclass(frozen=True)
class Train:
    """The training; batch sizes are global. What stands for what is told by `dropforge.recipe.Train`."""

    method: Literal["full", "lora", "dora", "qlora", "prefix"]
    lora: Lora
    prefix: Prefix
    freeze: Freeze | None
    sequence_length: int
    packing: Literal["auto", "off"]
    attention: AttentionName
    tokens_per_step: int | None
    rows_per_step: int | None
    micro_batch: int
    activation_checkpointing: Recompute
    compile: bool
    offload: Offload
    epochs: float | None
    max_steps: int | None
    max_rows: int | None
    optimizer: OptimizerName
    momentum: float
    learning_rate: float
    schedule: Literal["cosine", "linear", "constant", "exponential", "step", "plateau", "wsd"]
    warmup: float
    min_rate: float
    decay: float
    drop_factor: float
    drop_every: float
    plateau_patience: int
    weight_decay: float
    clip: float
    seed: int
    precision: Literal["fp32", "tf32", "bf16", "fp16"]
    deterministic: bool
    loss_on: Literal["answers", "all"]
    router_loss: float | None
    log_every: int | str | None
    eval_every: int | str
    checkpoint_every: int | str
    checkpoints: str | None
    fast_checkpoints: FastCheckpoints | None
    keep_checkpoints: int
    keep_best: int
    early_stopping: EarlyStopping | None
    export: Literal["last", "best"]
    profile: str | None
    tensorboard: bool
    max_skipped_steps: int

    @property
    def rows(self) -> int:
        """Sequences in one optimizer step, over all ranks."""
        if self.rows_per_step is not None:
            return self.rows_per_step
        return (self.tokens_per_step or DEFAULT_TOKENS) // self.sequence_length or 1

    @property
    def passes(self) -> float:
        """Passes over the training rows, where `max_steps` does not decide."""
        return 1.0 if self.epochs is None else self.epochs


@dataclass(frozen=True)
class Generation:
    """The evaluation by generation."""

    rows: int
    max_new_tokens: int
    metrics: tuple[str, ...]
    batch: int
    every: int


@dataclass(frozen=True)
class Code:
    """A wheel of a user's own functions."""

    wheel: str
    sha256: str


@dataclass(frozen=True)
class Settings:
    """What the trainer reads of a recipe.

    :param task: what the model learns: to continue text, a label for each row, or the answer to what an encoder reads.
    :param max_left_out: largest share of training rows that may teach nothing.
    :param mix: for each source of rows the passes over it in an epoch; one where it is not named.
    :param eval_rows: most evaluation rows to use.
    :param eval_precision: arithmetic of an evaluation's forward pass.
    :param eval_batches: most forward passes of an evaluation while training.
    :param generation: the evaluation by generation, if there is one.
    :param grace_seconds: time between SIGTERM and SIGKILL.
    :param gpus: GPUs of this node, one a rank; 0 trains on the CPU.
    :param parallel: how ranks share the model. :param shard_group: with `hybrid`, ranks that hold one copy together.
    :param compile_cache: folder for compiled code.
    :param data_cache: folder where the node keeps fetched files, up to `data_cache_bytes`.
    :param code: the wheel of the user's own functions, if there is one.
    """

    task: Task
    base: Base
    train: Train
    max_left_out: float
    mix: dict[str, float] | None
    eval_rows: int
    eval_precision: Literal["fp32", "tf32", "bf16", "fp16"]
    eval_batches: int | None
    generation: Generation | None
    grace_seconds: int
    gpus: int
    parallel: Parallel
    shard_group: int | None
    compile_cache: str | None
    data_cache: str | None = None
    data_cache_bytes: int = 0
    code: Code | None = None

    @property
    def sharded(self) -> bool:
        """Whether ranks share the weights, and not only the rows."""
        return self.parallel in ("fsdp", "fsdp-no-reshard", "hybrid")


def read_settings(recipe: Mapping[str, Any]) -> Settings:
    """Check the recipe of `run.json`.

    :raises RecipeError: naming the key, the cause and the mend.
    """
    if not isinstance(recipe, Mapping):
        raise _bad("recipe", "it is not a mapping")
    base = _read(Base, recipe.get("base"), "base")
    check_done(recipe)
    train = _read(Train, recipe.get("train"), "train")
    if "task" not in recipe:
        raise _bad("task", "it is missing")
    settings = Settings(
        task=_value(Task, recipe["task"], "task"),
        base=base,
        train=train,
        max_left_out=_value(float, _get(recipe, "data", "max_left_out"), "data.max_left_out"),
        mix=_value(dict[str, float] | None, _get(recipe, "data", "mix"), "data.mix"),
        eval_rows=_value(int, _get(recipe, "evaluate", "max_rows"), "evaluate.max_rows"),
        eval_precision=_value(
            Literal["fp32", "tf32", "bf16", "fp16"], _get(recipe, "evaluate", "precision"), "evaluate.precision"
        ),
        eval_batches=_value(int | None, _get(recipe, "evaluate", "max_batches"), "evaluate.max_batches"),
        generation=_value(Generation | None, _get(recipe, "evaluate", "generation"), "evaluate.generation"),
        grace_seconds=_value(int, _get(recipe, "compute", "grace_seconds"), "compute.grace_seconds"),
        gpus=_value(int, _get(recipe, "compute", "gpus"), "compute.gpus"),
        parallel=_value(Parallel, _get(recipe, "compute", "parallel"), "compute.parallel"),
        shard_group=_value(int | None, _get(recipe, "compute", "shard_group"), "compute.shard_group"),
        compile_cache=_value(str | None, _get(recipe, "compute", "compile_cache"), "compute.compile_cache"),
        **_data_cache(recipe["compute"]),
        code=_value(Code | None, recipe.get("code"), "code"),
    )
    if (base.model is None) == (base.scratch is None):
        raise _bad("base.model", "exactly one of `base.model` and `base.scratch` must be given")
    if base.scratch is not None:
        if train.method != "full":
            raise _bad("train.method", "adapters need a trained model, `base.scratch` has random weights")
        if train.freeze is not None or base.new_tokens is not None:
            raise _bad("base.scratch", "its weights are all new: `train.freeze`, `base.new_tokens` need `base.model`")
        _check_scratch(base.scratch)
        context = context_of(base.scratch.plain)
        if context is not None and context < train.sequence_length:
            raise _bad("train.sequence_length", f"it is longer than the model's context of {context}")
    _check_task(settings, recipe.get("promote"))
    _check_train(train)
    _check_new_tokens(base, train)
    if train.attention in ("flash_attention_2", "flex_attention") and not settings.gpus:
        raise _bad("train.attention", f"`{train.attention}` needs a GPU, and `compute.gpus` is 0")
    for key, precision in (("train", train.precision), ("evaluate", settings.eval_precision)):
        if precision == "tf32" and not settings.gpus:
            raise _bad(f"{key}.precision", "a CPU has no `tf32`, and `compute.gpus` is 0")
    if train.attention == "flash_attention_2" and train.precision != "bf16":
        raise _bad("train.attention", f"`{train.attention}` needs `train.precision: bf16`")
    if train.attention == "flex_attention" and train.deterministic:
        raise _bad("train.attention", f"`{train.attention}` is not known to be deterministic")
    if settings.shard_group is not None and settings.parallel != "hybrid":
        raise _bad("compute.shard_group", "only `compute.parallel: hybrid` has groups")
    if settings.compile_cache is not None and (not train.compile or not settings.compile_cache.startswith("/")):
        raise _bad("compute.compile_cache", "it is no absolute folder, or `train.compile` is not set")
    if train.compile and (train.method == "prefix" or train.activation_checkpointing == "selective"):
        raise _bad("train.compile", "a prefix cannot be compiled, and compiled blocks choose what is computed again")
    if train.compile and train.method == "qlora":
        raise _bad("train.compile", "what unpacks 4 bits is bitsandbytes' own code, which is not compiled")
    if train.offload != "none" and not settings.gpus:
        raise _bad("train.offload", "`compute.gpus` is 0, and there is no GPU whose memory it would spare")
    if train.offload in ("states", "all") and not settings.sharded:
        cause = f"`compute.parallel: {settings.parallel}` keeps weights and optimizer state on each GPU"
        raise _bad("train.offload", cause)
    if train.offload in ("activations", "all") and train.activation_checkpointing == "selective":
        raise _bad("train.offload", "what selective checkpointing keeps stays on the GPU")
    if train.offload in ("states", "all") and (train.method == "qlora" or train.optimizer == "adamw-8bit"):
        raise _bad("train.offload", "what bitsandbytes packs into 4 or 8 bits stays on the GPU")
    for name, value in (("max_rows", settings.eval_rows), ("max_batches", settings.eval_batches)):
        if value is not None and value < 1:
            raise _bad(f"evaluate.{name}", "it must be at least 1")
    if settings.generation is not None:
        _check_generation(settings.generation, settings)
    if not 0 <= settings.max_left_out <= 1:
        raise _bad("data.max_left_out", "it must be in [0, 1]")
    for source, passes in (settings.mix or {}).items():
        if not 0 <= passes <= MOST_PASSES:
            raise _bad(f"data.mix, source {source!r}", f"{passes:g} passes are not from 0 to {MOST_PASSES}")
    return settings


def _check_task(settings: Settings, promote: Any) -> None:
    """What has no meaning for the task."""
    train, scratch = settings.train, settings.base.scratch
    if settings.task == "causal-lm":
        if scratch is not None and scratch.architecture == "distilbert":
            raise _bad("base.scratch.architecture", "`distilbert` is an encoder, it needs `task: classification`")
        return
    if settings.task == "sequence-to-sequence":
        if scratch is not None and scratch.config is None:
            raise _bad("base.scratch", "its sizes are none of an encoder-decoder, `base.scratch.config` can name one")
        if train.loss_on != "answers":
            raise _bad("train.loss_on", "the prompt is what the encoder reads, and is never learned")
        if train.method == "prefix":
            raise _bad("train.method", "a prefix is trained for language models only")
        if train.compile:
            raise _bad("train.compile", "blocks of encoder-decoders were not tried compiled")
        for key, precision in (("train", train.precision), ("evaluate", settings.eval_precision)):
            if precision == "fp16":
                raise _bad(f"{key}.precision", "encoder-decoders such as T5 leave the range of fp16")
        if train.method != "full" and settings.base.new_tokens:
            raise _bad(
                "base.new_tokens", f"with `{train.method}` encoder and decoder would read other rows than theirs"
            )
        return
    if train.loss_on != "answers":
        raise _bad("train.loss_on", "a classifier learns the label of a row, and none of its tokens")
    if train.router_loss:
        raise _bad("train.router_loss", "a classifier's loss has no part of its router's")
    if settings.generation is not None:
        raise _bad("evaluate.generation", "a classifier gives labels, and writes no answers")
    if isinstance(promote, Mapping) and str(promote.get("metric")).startswith("gen/"):
        raise _bad("promote.metric", "it is of generated answers, and a classifier writes none")
    if train.method == "prefix":
        raise _bad("train.method", "a classifier's head is new, and a prefix is all that would be trained")


def _check_scratch(scratch: Scratch) -> None:
    sizes = {name: value for name, value in vars(scratch).items() if name != "config"}
    if scratch.config is None:
        for name, value in sizes.items():
            if value is None:
                raise _bad(f"base.scratch.{name}", "it is missing, and there is no `base.scratch.config`")
        return
    for name, value in sizes.items():
        if value is not None:
            raise _bad(f"base.scratch.{name}", "`base.scratch.config` is given too, and says the sizes")
    kind, words = scratch.config.get("model_type"), scratch.config.get("vocab_size")
    if not isinstance(kind, str) or not isinstance(words, int) or isinstance(words, bool) or words < 300:
        raise _bad("base.scratch.config", "it must name `model_type`, and a `vocab_size` from 300 on")


def _check_train(train: Train) -> None:
    """What the recipe's model refuses too, and what only the trainer knows."""
    for one, other in (("tokens_per_step", "rows_per_step"), ("epochs", "max_steps")):
        if getattr(train, one) is not None and getattr(train, other) is not None:
            raise _bad(f"train.{one}", f"`train.{other}` is given too, and says something else")
    if train.sequence_length < 1 or (train.tokens_per_step or 0) % train.sequence_length:
        raise _bad("train.tokens_per_step", "it is no multiple of `train.sequence_length`")
    counts = ("tokens_per_step", "rows_per_step", "micro_batch", "max_steps", "max_rows", "keep_checkpoints")
    for name in (*counts, "plateau_patience"):
        if getattr(train, name) is not None and getattr(train, name) < 1:
            raise _bad(f"train.{name}", "it must be at least 1")
    if train.passes <= 0 or train.learning_rate <= 0 or train.clip <= 0 or train.max_skipped_steps < 0:
        raise _bad("train", "epochs, learning_rate and clip must be positive, max_skipped_steps not negative")
    if train.router_loss is not None and not 0 <= train.router_loss <= 100:
        raise _bad("train.router_loss", "it must be from 0 to 100")
    if not 0 <= train.momentum < 1:
        raise _bad("train.momentum", "it must be in [0, 1)")
    if train.method == "prefix" and train.activation_checkpointing != "none":
        raise _bad("train.activation_checkpointing", "a block that is computed again would meet the prefix twice")
    if train.prefix.tokens < 1:
        raise _bad("train.prefix.tokens", "it must be at least 1")
    if train.freeze is not None:
        if train.method != "full":
            raise _bad("train.freeze", f"`{train.method}` freezes the whole base model anyway")
        if train.freeze.blocks < 0 or not (train.freeze.blocks or train.freeze.embeddings):
            raise _bad("train.freeze", "it names neither blocks nor embeddings")
    if train.keep_best < 0:
        raise _bad("train.keep_best", "it must be at least 0")
    for name in ("warmup", "decay", "drop_every"):
        value = getattr(train, name)
        if value < 0 or (value >= 1 and value != int(value)) or (name != "warmup" and not value):
            raise _bad(f"train.{name}", f"{value:g} is neither a share below 1 nor a number of steps")
    if not 0 <= train.min_rate <= 1 or not 0 < train.drop_factor <= 1:
        raise _bad("train.min_rate", "it must be in [0, 1], and `train.drop_factor` in (0, 1]")
    if train.early_stopping and (train.early_stopping.patience < 1 or train.early_stopping.min_delta < 0):
        raise _bad("train.early_stopping", "patience must be at least 1, min_delta not negative")
    for name in ("log_every", "eval_every", "checkpoint_every"):
        value = getattr(train, name)
        try:
            interval = None if value is None else Interval.parse(value)
        except ValueError as error:
            raise _bad(f"train.{name}", str(error)) from None
        if interval == Interval() and name != "eval_every":
            raise _bad(f"train.{name}", "it must be at least 1")
    if train.profile is not None:
        try:
            Span.parse(train.profile)
        except ValueError as error:
            raise _bad("train.profile", str(error)) from None
    fast = train.fast_checkpoints
    for name, value in (("checkpoints", train.checkpoints), ("fast_checkpoints.folder", fast.folder if fast else None)):
        if value is not None and (problem := wrong_address(value, folder=name != "checkpoints")):
            raise _bad(f"train.{name}", problem)
    if fast is not None:
        try:
            often = Interval.parse(fast.every) != Interval()
        except ValueError as error:
            raise _bad("train.fast_checkpoints.every", str(error)) from None
        if not often or fast.keep < 1:
            raise _bad("train.fast_checkpoints", "`every` and `keep` must be at least 1")
    judged = train.schedule == "plateau" or train.early_stopping or train.export == "best"
    if judged and train.eval_every == 0:
        raise _bad("train.eval_every", "plateau, early stopping and the best weights need evaluations on the way")


def _check_generation(asked: Generation, settings: Settings) -> None:
    for name in ("rows", "max_new_tokens", "batch", "every"):
        if getattr(asked, name) < 1:
            raise _bad(f"evaluate.generation.{name}", "it must be at least 1")
    if settings.train.method == "prefix":
        raise _bad("evaluate.generation", "answers are not written with a prefix yet")
    for metric in asked.metrics:
        known = metric in SCORES or settings.code is not None  # what its wheel has is looked at when that is here
        if not known or asked.metrics.count(metric) > 1:
            raise _bad("evaluate.generation.metrics", f"{metric!r} is none of {', '.join(SCORES)}, or is listed twice")
    if asked.rows > settings.eval_rows:
        raise _bad("evaluate.generation.rows", f"there are {settings.eval_rows} evaluation rows at most")
    train, scratch = settings.train, settings.base.scratch
    if asked.every > 1 and (train.eval_every == 0 or train.early_stopping or train.export == "best"):
        raise _bad(
            "evaluate.generation.every", "there is no evaluation on the way, or each of them may be the run's last"
        )
    context = None if scratch is None else context_of(scratch.plain)
    if context is not None and asked.max_new_tokens >= context:
        raise _bad("evaluate.generation.max_new_tokens", f"with a context of {context} no prompt has room")


def _check_new_tokens(base: Base, train: Train) -> None:
    names = base.new_tokens or ()
    if len(set(names)) < len(names) or not all(name and not any(map(str.isspace, name)) for name in names):
        raise _bad("base.new_tokens", "one is there twice, or holds white space")
    if names and train.freeze is not None and train.freeze.embeddings:
        raise _bad("base.new_tokens", "`train.freeze.embeddings` would leave their rows untrained")
    if names and train.method == "prefix":
        raise _bad("base.new_tokens", "`train.method: prefix` trains no row of the embedding")


def _data_cache(compute: Mapping[str, Any]) -> dict[str, Any]:
    """Runs of before know none."""
    folder = _value(str | None, compute.get("data_cache"), "compute.data_cache")
    if folder is None:
        return {}
    if not folder.startswith("/"):
        raise _bad("compute.data_cache", "it is no absolute folder")
    most = _value(float, compute.get("data_cache_gb"), "compute.data_cache_gb")
    return {"data_cache": folder, "data_cache_bytes": int(most * 1e9)}


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
    if origin is dict:
        _, item = typing.get_args(kind)
        if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) and key for key in value):
            raise _bad(path, f"{value!r} is not a mapping of names")
        return {key: _value(item, found, f"{path}, source {key!r}") for key, found in value.items()}
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _read(kind, value, path)  # type: ignore[arg-type]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool) or value != value:
        raise _bad(path, f"{value!r} is not of type {kind.__name__}")
    return value


def _bad(key: str, cause: str) -> RecipeError:
    return RecipeError(f"recipe key `{key}`", cause, "Fix the recipe and start a new run")
