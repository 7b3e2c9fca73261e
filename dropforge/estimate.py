"""What a run would cost, before anything starts: weights, memory of a rank, steps and tokens. Arithmetic, no torch.

Memory is counted tensor by tensor; what a pass holds is in `dropforge.activations`.
Weights, gradients and two AdamW moments in fp32 are 16 bytes a trained weight
(https://arxiv.org/abs/1910.02054, section 3.1). `bench.estimate` holds the sum against peaks of whole trainings on CPU.
Nothing of it was held against a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import Any, Final

from dropforge.activations import arithmetic_of, one_block_bytes, passes_bytes, shard_ranks
from dropforge.errors import RecipeError
from dropforge.methods import LOW_RANK, nf4_bytes, why_whole
from dropforge.recipe import Recipe
from dropforge.seq2seq_shape import Seq2SeqShape
from dropforge.shape import (
    ENCODERS,
    Shape,
    check_positions,
    check_unquantised,
    config_of,
    positions_of,
    published,
    shape_of_config,
)
from dropforge.shared_memory import check_shared_memory
from dropforge.text import counted

RUNTIME_BYTES: Final = 930_000_000  # torch, transformers and a run without a model, as seen on CPU
# What a CPU's heap takes for each byte that comes and goes, as seen: freed tensors leave holes that others do not fit,
# more where adapters' small ones lie between. Weights, gradients and moments stay where they are and leave none.
HOLES: Final = {"lora": 2.5, "qlora": 2.5, "prefix": 2.5, "dora": 2.0}
_HOLES = 1.5  # of all others
_CASTS = 1.0  # beside them, of what is cast to 16 bits and back
_BYTES_PER_TOKEN = 4.0  # English text and a byte-level BPE of some thousands of words
_CONFIG_BYTES = 1 << 20
_SMALL_DISK: Final = 10e9  # bytes that the disk of every node has to spare


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its fullest, by what holds them.

    :param weights: what the rank keeps of them. :param moments: the optimizer's.
    :param working: weights gathered from other ranks with their gradients, or cast to bf16.
    :param activations: kept for the backward pass, and passing within it. :param logits: those of the targets and what
        is made of them, or the head's gradient where both are made in chunks.
    :param copy: a checkpoint's copy of weights and moments.
    :param whole: at another time than the passes (`working`, `activations`, `logits`), the rest of the model, or of its
        first blocks (`reads_slices`), as
        a rank loads it before it keeps its shard.
    :param evaluation: at yet another time, an evaluation's logits with their logarithms, and the whole model where bf16
        shards are evaluated in fp32.
    :param heap: what a CPU's heap takes beyond that. :param runtime: the process itself.
    """

    weights: int
    gradients: int
    moments: int
    working: int
    activations: int
    logits: int
    copy: int
    whole: int
    evaluation: int
    heap: int
    runtime: int

    @property
    def total(self) -> int:
        """All of it, at its fullest."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """What the total is made of: states, and of what comes at different times the most."""
        left_out = {name for names in _TIMES for name in names if names != self._fullest}
        return {
            _TOLD.get(part.name, part.name): getattr(self, part.name)
            for part in fields(self)
            if part.name not in left_out and getattr(self, part.name)
        }

    @property
    def passing(self) -> int:
        """Of what comes and goes, the most at one time."""
        return sum(getattr(self, name) for name in self._fullest)

    @property
    def _fullest(self) -> tuple[str, ...]:
        return max(_TIMES, key=lambda names: sum(getattr(self, name) for name in names))


_TIMES: Final = (("working", "activations", "logits"), ("whole",), ("evaluation",))
_TOLD: Final = {
    "working": "working copy of the weights",
    "moments": "optimizer states",
    "copy": "checkpoint's copy",
    "whole": "loading",
}


@dataclass(frozen=True)
class Estimate:
    """Figures of one run; None where the base model's config is not known here.

    :param memory: of the place that trains: the rank's GPU, or the rank's process.
    :param host: bytes of the rank's process beside its GPU; None without one.
    :param most_rows: largest micro-batch that fits into the memory that the recipe names, 0 if none does; None where
        that cannot be told. :param exact: whether the model is of a kind whose weights are counted exactly.
    """

    parameters: int | None
    trained: int | None
    ranks: int
    sequences_per_step: int
    accumulation: int
    steps: int | None
    tokens: int | None
    memory: Memory | None
    host: int | None
    checkpoint_bytes: int | None
    most_rows: int | None
    exact: bool

    @property
    def parts(self) -> dict[str, int] | None:
        """What the memory of one rank is made of, in bytes."""
        return self.memory.parts if self.memory else None

    @property
    def rank_bytes(self) -> int | None:
        """Memory of one rank."""
        return self.memory.total if self.memory else None

    @property
    def least_bytes(self) -> int | None:
        """What one rank takes even if every guess was too high: an MLP without a gate, adapters on few modules, a loss
        that comes in pieces."""
        if self.memory is None:
            return None
        held = self.memory
        states = (held.weights + held.gradients + held.moments) * 4 // 5 + held.activations // 2
        return max(states, (held.weights + held.whole) * 4 // 5) + held.runtime // 2


def estimate(
    recipe: Recipe,
    data_bytes: int | None = None,
    *,
    data_rows: int | None = None,
    targets: float = 1.0,
    curated: bool = False,
) -> Estimate:
    """Estimate a run.

    :param data_bytes: size of the drop, decompressed; without it, or with `data.mix`, steps are known only if the
        recipe names them.
    :param data_rows: of the drop, which are counted in the place of bytes where each is a sequence of its own.
    :param targets: share of the tokens that are learned from; where it is not known, all.
    :param curated: whether size and rows are of the training rows alone, after curation.
    """
    train, compute = recipe.train, recipe.compute
    ranks = compute.nodes * compute.processes_per_node
    sequences = train.rows
    steps, passes = train.max_steps, train.passes or 1.0
    share = 1.0 if curated else 1 - recipe.data.eval_fraction
    if steps is None and recipe.data.mix is None:
        if not packs(recipe) and data_rows is not None:
            steps = max(1, ceil(data_rows * share * passes / sequences))
        elif packs(recipe) and data_bytes is not None:
            tokens = data_bytes * share / _BYTES_PER_TOKEN
            steps = max(1, ceil(tokens * passes / (sequences * train.sequence_length)))
    shape = shape_of(recipe)
    memory = host = trained = most = None
    if shape is not None:
        trained = trained_weights(recipe, shape)
        rows = rows_at_once(recipe)
        memory = memory_of(recipe, shape, rows, targets)
        if compute.gpus:
            # The first rank writes the whole model; where all read it whole, each of them holds it.
            each = 4 * shape.parameters // (compute.processes_per_node if reads_slices(recipe) else 1)
            host = RUNTIME_BYTES + max(each, state_bytes(recipe) * trained // _copies(recipe))
            host += offloaded_bytes(recipe, shape, rows, targets)
        room = _room(recipe)
        if room is not None:
            most = largest_micro_batch(recipe, shape, room, targets)
    return Estimate(
        parameters=shape.parameters if shape else None,
        trained=trained,
        ranks=ranks,
        sequences_per_step=sequences,
        accumulation=ceil(sequences / (ranks * train.micro_batch)),
        steps=steps,
        tokens=steps * sequences * train.sequence_length if steps else None,
        memory=memory,
        host=host,
        checkpoint_bytes=None if trained is None else state_bytes(recipe) * trained,
        most_rows=most,
        exact=shape is not None and shape.exact and (recipe.task != "classification" or shape.kind in ENCODERS),
    )


def packs(recipe: Recipe) -> bool:
    """Whether several rows may share a sequence."""
    return recipe.task == "causal-lm" and recipe.train.packing != "off"


def trained_weights(recipe: Recipe, shape: Shape) -> int:
    """Weights that the optimizer moves, over all ranks."""
    train = recipe.train
    if train.method == "prefix":  # keys and values of each layer
        return train.prefix.tokens * shape.layers * 2 * shape.narrow
    if train.method in LOW_RANK:
        targets = train.lora.targets if isinstance(train.lora.targets, tuple) else None
        return shape.adapted(train.lora.r, targets, magnitudes=train.method == "dora")
    frozen = 0
    if train.freeze is not None and isinstance(shape, Seq2SeqShape):
        frozen = shape.frozen(train.freeze.blocks, train.freeze.embeddings)
    elif train.freeze is not None:
        tables = (shape.vocab + shape.positions) * shape.hidden
        frozen = min(train.freeze.blocks, shape.layers) * shape.block + (tables if train.freeze.embeddings else 0)
    return shape.parameters - frozen


def state_bytes(recipe: Recipe) -> int:
    """Bytes of a trained weight with the optimizer's moments: what a checkpoint holds of it."""
    train = recipe.train
    if train.optimizer == "sgd":
        return 8 if train.momentum else 4
    return {"adamw-bf16": 8, "adamw-8bit": 6}.get(train.optimizer, 12)


def rows_at_once(recipe: Recipe) -> int:
    """Most rows of a forward pass on one rank, whose share of a step is dealt out evenly."""
    own = ceil(recipe.train.rows / (recipe.compute.nodes * recipe.compute.processes_per_node))
    return ceil(own / ceil(own / recipe.train.micro_batch))


def memory_of(recipe: Recipe, shape: Shape, rows: int, targets: float = 1.0) -> Memory:
    """The memory of one rank. :param rows: of a forward pass. :param targets: share of the tokens learned from."""
    if isinstance(shape, Seq2SeqShape) and targets == 1:  # not known: a source has as much as its target
        targets = 0.5
    train, shards, on_cpu = recipe.train, shard_ranks(recipe), not recipe.compute.gpus
    sharded, narrow = shards > 1, recipe.train.precision in ("bf16", "fp16")
    trained, base = trained_weights(recipe, shape), base_bytes(recipe, shape)
    whole = 4 * shape.parameters if on_cpu else base  # what is put into 4 bits reaches a GPU like that
    adapters = trained if recipe.train.method != "full" else 0
    activations, logits = passes_bytes(recipe, shape, rows, targets)
    if train.offload in ("activations", "all"):  # those of the block that computes are there
        activations = one_block_bytes(recipe, shape, rows, targets)
    weights = (base + 4 * adapters) // shards
    evaluates_whole = sharded and narrow and recipe.evaluate.precision != recipe.train.precision
    # A row of a classifier has a logit for each label, not one of each token.
    told = 0 if recipe.task == "classification" else 8 * int(rows * train.sequence_length * targets) * shape.vocab
    found = Memory(
        weights=weights,
        gradients=4 * trained // shards,
        moments=(state_bytes(recipe) - 4) * trained // shards,
        working=_working(recipe, shape, adapters),
        activations=activations,
        logits=logits,
        copy=state_bytes(recipe) * trained // _copies(recipe) if on_cpu else 0,
        whole=0,
        evaluation=told + (base if evaluates_whole else 0),
        heap=0,
        runtime=RUNTIME_BYTES,
    )
    if train.offload in ("states", "all"):
        found = replace(found, weights=0, gradients=0, moments=0)
    states = found.gradients + found.moments + found.copy  # none of them is there before the first step
    held = 4 * (shape.root + 2 * shape.block) if reads_slices(recipe) else whole
    found = replace(found, whole=max(0, held - found.weights - states))
    holes = HOLES.get(train.method, _HOLES) + (_CASTS if narrow else 0.0) if on_cpu else 1.0
    return replace(found, heap=int(found.passing * (holes - 1)))


def base_bytes(recipe: Recipe, shape: Shape, width: int = 4) -> int:
    """Bytes of the base model's weights. :param width: of one that is not held in 4 bits."""
    return width * shape.parameters - _saved(recipe, shape.every_linear, width)


def disk_bytes(recipe: Recipe) -> int | None:
    """Bytes that a pod puts on its node's disk: the base as it is fetched, and the whole model that it writes.

    Published weights have 16 bits, exported ones 32. None where that is little, or the base is not known here.
    """
    shape = shape_of(recipe)
    if shape is None:
        return None
    model = recipe.base.model or ""
    fetched = bool(model) and not model.startswith(("/", "file://")) and recipe.compute.data_cache is None
    found = (6 if fetched else 4) * shape.parameters
    return found if found > _SMALL_DISK else None


def _saved(recipe: Recipe, linears: Iterable[tuple[int, int, int]], width: int) -> int:
    """Bytes that 4 bits save of linear layers, so many of these inputs and outputs."""
    if recipe.train.method != "qlora":
        return 0
    return sum(count * (width * inputs * outputs - nf4_bytes(inputs * outputs)) for count, inputs, outputs in linears)


def offloaded_bytes(recipe: Recipe, shape: Shape, rows: int, targets: float = 1.0) -> int:
    """What of a rank waits on the host by `train.offload`; arguments as of `memory_of`."""
    offload, found = recipe.train.offload, 0
    if offload in ("activations", "all"):
        whole = passes_bytes(recipe, shape, rows, targets)[0]
        found += max(0, whole - one_block_bytes(recipe, shape, rows, targets))
    if offload in ("states", "all"):
        trained = trained_weights(recipe, shape)
        adapters = trained if recipe.train.method != "full" else 0
        found += (base_bytes(recipe, shape) + 4 * adapters + state_bytes(recipe) * trained) // shard_ranks(recipe)
    return found


def largest_micro_batch(recipe: Recipe, shape: Shape, room: float, targets: float = 1.0) -> int:
    """Most rows of a forward pass with which a rank fits into `room` bytes; 0 if not even one does."""
    one = memory_of(recipe, shape, 1, targets).total
    if one > room:
        return 0
    # Linear once the passes are what is largest, and never less than that before.
    few, many = 1, 2
    while many <= 1 << 40 and memory_of(recipe, shape, many, targets).total <= room:
        few, many = many, many * 2
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if memory_of(recipe, shape, middle, targets).total <= room else (few, middle)
    return few


def _working(recipe: Recipe, shape: Shape, adapters: int) -> int:
    """Weights that a rank has beside its own while it computes, and their gradients before these are shared out."""
    arithmetic, packed = arithmetic_of(recipe), recipe.train.method == "qlora"
    width = 4 if arithmetic == "fp32" else 2
    unpacked = width * max(inputs * outputs for inputs, outputs in shape.linears.values()) if packed else 0
    if shard_ranks(recipe) == 1:
        inside = 0 if packed else shape.layers * shape.matrices  # one layer is unpacked at a time
        cast = 2 * (inside + shape.vocab * shape.hidden + adapters)
        return unpacked + (cast if arithmetic == "cast" else 0)
    block = width * shape.block - _saved(recipe, ((1, *sizes) for sizes in shape.linears.values()), width)
    whole = recipe.compute.parallel == "fsdp-no-reshard"
    gathered = base_bytes(recipe, shape, width) if whole else width * shape.root + 2 * block
    return unpacked + gathered + (0 if adapters else (width + 4) * shape.block)


def _copies(recipe: Recipe) -> int:
    """Ranks that write a checkpoint together: replicas deal it out, a shard is copied by who has it."""
    compute = recipe.compute
    shards = shard_ranks(recipe)
    return shards if shards > 1 else compute.nodes * compute.processes_per_node


def reads_slices(recipe: Recipe) -> bool:
    """Whether each rank reads only its shard of the base model, and a whole one is held by none of them."""
    base, train = recipe.base, recipe.train
    why = why_whole(
        task=recipe.task,
        model=base.model,
        new_tokens=bool(base.new_tokens),
        method=train.method,
        offload=train.offload,
        sharded=shard_ranks(recipe) > 1,
    )
    return why is None


def _room(recipe: Recipe) -> float | None:
    """Bytes that the recipe names for a rank; None where it names none."""
    compute = recipe.compute
    if compute.gpus:
        return None if compute.gpu_memory_gb is None else compute.gpu_memory_gb * 1e9
    return compute.memory_gb * 1e9 / compute.processes_per_node


def unknown_memory(recipe: Recipe, figures: Estimate) -> str | None:
    """Why the memory of a rank cannot be held against what it may take; None where it can."""
    if figures.rank_bytes is None:
        if recipe.task == "classification":
            return "unknown for an encoder, and until the base model's config is here"
        if recipe.task == "sequence-to-sequence":
            return "unknown for another encoder-decoder than T5 and BART, and until the base model's config is here"
        return "unknown: the base model's config is not available"
    return "on its GPU, whose memory `compute.gpu_memory_gb` would name" if _room(recipe) is None else None


def check_memory(recipe: Recipe, figures: Estimate) -> None:
    """Refuse a recipe whose ranks cannot fit, before a job is killed for it.

    With `compute.min_nodes` those of the smallest gang have to fit as well: they may share the model among fewer.

    :raises RecipeError: only if the estimate is known and clearly too large.
    """
    _check_memory(recipe, figures)
    least = recipe.compute.min_nodes
    if least is not None:
        fewer = recipe.model_copy(update={"compute": recipe.compute.model_copy(update={"nodes": least})})
        try:
            _check_memory(fewer, estimate(fewer))
        except RecipeError as error:
            mend = f"Raise it, or: {error.mend}"
            raise RecipeError("recipe key `compute.min_nodes`", f"with {least}, {error.cause}", mend) from None


def _check_memory(recipe: Recipe, figures: Estimate) -> None:
    check_shared_memory(recipe, figures.checkpoint_bytes)
    compute, ranks = recipe.compute, recipe.compute.processes_per_node
    if figures.host is not None and figures.host * ranks * 4 // 5 > compute.memory_gb * 1e9:
        raise RecipeError(
            "recipe key `compute.memory_gb`",
            f"a pod of {compute.memory_gb:g} GB is too small for {counted(ranks, 'rank')} that hold the model, and "
            f"later a checkpoint's copy, beside their GPUs, of about {size_text(figures.host)} each",
            f"Set it to {figures.host * ranks // 10**9 + 1}, or choose a smaller model",
        )
    least, about, parts, room = figures.least_bytes, figures.rank_bytes, figures.parts, _room(recipe)
    if least is None or about is None or parts is None or room is None or least <= room:
        return
    told = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
    if compute.gpus:
        raise RecipeError(
            "recipe key `compute.gpu_memory_gb`",
            f"a GPU of {compute.gpu_memory_gb:g} GB is too small for a rank of about {size_text(about)} ({told})",
            f"Use GPUs of {about // 10**9 + 1} GB, share the model among more of them, or choose a smaller one",
        )
    raise RecipeError(
        "recipe key `compute.memory_gb`",
        f"a pod of {compute.memory_gb:g} GB is too small for {counted(ranks, 'rank')} of about {size_text(about)} each "
        f"({told})",
        f"Set it to {about * ranks // 10**9 + 1}, or make `train.micro_batch` or the model smaller",
    )


def check_length(recipe: Recipe) -> None:
    """Refuse rows that are longer than the base model takes, where its config is here.

    :raises RecipeError: also for a config that cannot be read.
    """
    config = _base_config(recipe.base.model or "")
    prefix = recipe.train.prefix.tokens if recipe.train.method == "prefix" else 0
    check_positions(recipe.train.sequence_length, None if config is None else positions_of(config), prefix)


def memory_text(recipe: Recipe, figures: Estimate) -> str:
    """The memory of a rank for people: how much of what, whether it fits, and how many rows would."""
    unknown = unknown_memory(recipe, figures)
    if figures.rank_bytes is None or figures.parts is None:
        return unknown or "unknown"
    room = _room(recipe)
    told = ", ".join(f"{name} {size_text(size)}" for name, size in figures.parts.items())
    place = f"for each rank, {unknown}" if room is None else f"of {room / 1e9:g} GB for each rank"
    text = f"about {size_text(figures.rank_bytes)} {place}"
    if not figures.exact:
        text += ", if it is built like a Llama of these sizes"
    text += f": {told}"
    if figures.host is not None:
        text += f"; and {size_text(figures.host)} of the pod's"
    if room is None:
        return text
    if figures.rank_bytes > room:
        key = "gpu_memory_gb" if recipe.compute.gpus else "memory_gb"
        text += f": DOES NOT FIT; raise compute.{key} or lower train.micro_batch"
    else:
        text += ": fits"
    most = figures.most_rows or 0
    return text + (f"; the largest micro_batch that fits is {most:,}" if most else "; not even one row does")


def size_text(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def shape_of(recipe: Recipe) -> Shape | None:
    """The base model's shape: from `base.scratch`, from the `config.json` of a local folder, or as it was published.

    A classifier has its base's, without a head; of most encoders nothing is known, for they are no Llama, nor of an
    encoder-decoder other than T5 and BART.

    :raises RecipeError: for a config that cannot be read, or with sizes that no model has.
    """
    shape = _base_shape(recipe)
    if isinstance(shape, Seq2SeqShape) or recipe.task == "sequence-to-sequence":
        return shape if recipe.task == "sequence-to-sequence" and isinstance(shape, Seq2SeqShape) else None
    if shape is None or recipe.task == "causal-lm":
        return shape
    return replace(shape, tied=True) if shape.exact else None


def _base_shape(recipe: Recipe) -> Shape | None:
    scratch, model = recipe.base.scratch, recipe.base.model or ""
    if scratch is not None:
        return _checked("recipe key `base.scratch`", config_of(scratch.model_dump()), "its sizes")
    config = _base_config(model)
    return None if config is None else _checked("recipe key `base.model`", config, str(_config_path(model)))


def _config_path(model: str) -> Path:
    return Path(model.removeprefix("file://")) / "config.json"


def _base_config(model: str) -> dict[str, Any] | None:
    """The config of a local folder, or as it was published; None if neither is here."""
    path = _config_path(model)
    if not path.is_file():
        return published(model)
    try:
        with path.open("rb") as stream:
            text = stream.read(_CONFIG_BYTES + 1)
        if len(text) > _CONFIG_BYTES:
            raise TypeError(f"it has more than {_CONFIG_BYTES} bytes")
        config = json.loads(text)
        if not isinstance(config, dict):
            raise TypeError("it is no JSON object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(
            "recipe key `base.model`", f"{path} cannot be read ({error})", "Name a folder with a model"
        ) from error
    check_unquantised(config, str(path.parent))
    return config


def _checked(key: str, config: Mapping[str, Any], what: str) -> Shape | None:
    try:
        return shape_of_config(config)
    except ValueError as error:
        raise RecipeError(key, f"{what} cannot be read ({error})", "Name sizes that a model can have") from error
