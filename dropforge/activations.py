"""What a training pass over a rank's rows holds: activations, and what the loss takes. Arithmetic, no torch.

What the library's decoders keep for the backward pass was read off `torch.autograd.graph.saved_tensors_hooks` and
agrees with the allocations of a whole pass to 2 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from dropforge.methods import LOW_RANK
from dropforge.recipe import Recipe
from dropforge.seq2seq_shape import Seq2SeqShape
from dropforge.shape import Shape

# Bytes that a block keeps for its backward pass, for each token and each unit of (hidden size, width of the query
# heads, width of the MLP), by what is trained and the arithmetic: `cast` computes in bf16 with fp32 weights
# (autocast), `bf16` has bf16 weights too (sharded); fp16 takes as much. Products with `frozen` weights keep no input.
_GATED: Final = {
    ("full", "fp32"): (24, 16, 16),
    ("lora", "fp32"): (16, 16, 16),
    ("full", "cast"): (26, 8, 8),
    ("lora", "cast"): (18, 10, 8),
    ("full", "bf16"): (16, 8, 8),
    ("lora", "bf16"): (12, 8, 8),
    ("frozen", "fp32"): (8, 16, 12),
    ("frozen", "cast"): (8, 8, 6),
    ("frozen", "bf16"): (8, 8, 6),
}
_PLAIN: Final = {  # GPT-2: a plain MLP, whose GELU is made of several operations
    ("full", "fp32"): (16, 16, 20),
    ("lora", "fp32"): (16, 16, 20),
    ("full", "cast"): (12, 8, 10),
    ("lora", "cast"): (12, 10, 10),
    ("full", "bf16"): (8, 8, 10),
    ("lora", "bf16"): (8, 8, 10),
    ("frozen", "fp32"): (8, 16, 16),
    ("frozen", "cast"): (8, 8, 8),
    ("frozen", "bf16"): (4, 8, 8),
}
_ENCODER: Final = {  # DistilBERT: one matrix each for queries, keys and values, and a GELU in one operation
    ("full", "fp32"): (16, 16, 8),
    ("lora", "fp32"): (16, 16, 8),
    ("full", "cast"): (16, 8, 4),
    ("lora", "cast"): (16, 10, 4),
    ("full", "bf16"): (8, 8, 4),
    ("lora", "bf16"): (8, 8, 4),
    ("frozen", "fp32"): (8, 16, 4),
    ("frozen", "cast"): (8, 8, 2),
    ("frozen", "bf16"): (4, 8, 2),
}
_KEPT: Final = {"gpt2": _PLAIN, "distilbert": _ENCODER}  # and all others are gated
_BIASED: Final = ("gpt2", "distilbert", "bart")  # linear layers have biases
_NORMED: Final = {"fp32": 8, "cast": 6, "bf16": 6}  # Qwen 3: norms of queries and keys, where all weights are trained


def passes_bytes(recipe: Recipe, shape: Shape, rows: int, targets: float = 1.0) -> tuple[int, int]:
    """What a forward and a backward pass hold at their fullest: activations, and what the loss takes."""
    if isinstance(shape, Seq2SeqShape):
        return _pairs_bytes(recipe, shape, rows, arithmetic_of(recipe), targets)
    train, tokens = recipe.train, rows * recipe.train.sequence_length
    learn, pass_on = _blocks(recipe, shape)
    kept = learn * _kept(recipe, shape, trains(recipe)) + pass_on * _kept(recipe, shape, "frozen")
    if train.activation_checkpointing != "none" and learn + pass_on:  # the block that is computed again
        kept += _computed(recipe, shape, trains(recipe) if learn else "frozen")
    kept *= tokens
    within = tokens * 4 * (2 * shape.mlp * max(1, shape.chosen) + 3 * shape.hidden)  # of the last block's backward pass
    if recipe.task == "classification":
        return kept + within, 0
    if _in_chunks(recipe, shape):
        return kept + within, _head_bytes(recipe, shape)
    logits = int(12 * tokens * targets) * shape.vocab  # logits or their gradient, logarithms, and the gradient of these
    return kept + min(within, 12 * tokens * shape.hidden), logits


def one_block_bytes(recipe: Recipe, shape: Shape, rows: int, targets: float = 1.0) -> int:
    """Activations where only one block's are there at a time: of the largest that learns, if any does."""
    train = recipe.train
    if train.freeze is not None and train.freeze.blocks < shape.layers:
        recipe = recipe.model_copy(update={"train": train.model_copy(update={"freeze": None})})
    return passes_bytes(recipe, shape.alone, rows, targets)[0]


def _blocks(recipe: Recipe, shape: Shape) -> tuple[int, int]:
    """Blocks whose weights learn, and frozen ones that gradients pass."""
    freeze = recipe.train.freeze
    if freeze is None or recipe.train.method != "full":
        return shape.layers, 0
    frozen = min(freeze.blocks, shape.layers)
    return shape.layers - frozen, 0 if freeze.embeddings else frozen


def _kept(recipe: Recipe, shape: Shape, learning: str) -> int:
    """Bytes that a block keeps of a token for its backward pass. :param learning: as of `trains`."""
    again, each = recipe.train.activation_checkpointing, _computed(recipe, shape, learning)
    if again == "none":
        return each
    stream = 2 if arithmetic_of(recipe) == "bf16" else 4  # bytes of what goes from block to block
    if again == "full":
        return min(each, stream * shape.hidden)
    products = sum(outputs for _, outputs in shape.linears.values()) + shape.chosen * (2 * shape.mlp + shape.hidden)
    return min(each, stream * shape.hidden + _width(recipe) * (products + shape.wide) + 4 * shape.heads)


def _computed(recipe: Recipe, shape: Shape, learning: str) -> int:
    """The same of all that a block computes, without activation checkpointing."""
    train, arithmetic, width = recipe.train, arithmetic_of(recipe), _width(recipe)
    hidden, wide, mlp = _KEPT.get(shape.kind, _GATED)[learning, arithmetic]
    # The log-sum of each head and the deviations of two norms.
    each = hidden * shape.hidden + wide * shape.wide + 4 * shape.heads + 8
    each += shape.chosen * (2 * width * shape.hidden + mlp * shape.mlp) if shape.experts else mlp * shape.mlp
    if shape.kind == "qwen3":
        normed = _NORMED[arithmetic] if learning == "full" else 4
        each += normed * (shape.wide + shape.narrow) + 4 * (shape.heads + shape.kv_heads)
    each += _adapters_keep(recipe, shape, list(shape.linears.values()), 2 * shape.hidden + shape.mlp)
    if train.packing != "off":
        each += width * train.sequence_length  # the mask that keeps documents apart, as attention takes it
    return each


def _adapters_keep(recipe: Recipe, shape: Shape, linears: Sequence[tuple[int, int]], inputs: int) -> int:
    """Bytes that low-rank adapters keep of a token in a block, beside what the block keeps anyway.

    :param linears: inputs and outputs of what they adapt. :param inputs: units of these that are kept for them alone.
    """
    train, width = recipe.train, _width(recipe)
    if train.method not in LOW_RANK:
        return 0
    found = width * train.lora.r * len(linears)
    if train.lora.dropout:  # each has an input of its own, and what it was multiplied by
        found += 2 * width * sum(into for into, _ in linears) - (4 * inputs if width == 4 else 0)
    if train.method == "dora":  # the base's product and the adapter's, which a magnitude scales
        cast = 2 if width == 2 and shape.kind in _BIASED else 0
        found += (2 * width + cast) * sum(out for _, out in linears)
    return found


def _pairs_bytes(recipe: Recipe, shape: Seq2SeqShape, rows: int, arithmetic: str, targets: float) -> tuple[int, int]:
    """Of an encoder-decoder: see `passes_bytes`."""
    train = recipe.train
    target = max(1, round(train.sequence_length * targets))
    learning = shape
    if train.freeze is not None and train.freeze.embeddings and train.method == "full":  # no gradient reaches those
        frozen = train.freeze.blocks
        learning = replace(shape, layers=max(0, shape.layers - frozen), encoder=max(0, shape.encoder - frozen))
    encoders = _adapters_keep(recipe, shape, shape.encoder_linears, 2 * shape.hidden + shape.mlp)
    decoders = _adapters_keep(recipe, shape, shape.decoder_linears, 3 * shape.hidden + shape.decoder_mlp)
    kept = rows * learning.kept(
        trains(recipe),
        arithmetic,
        (encoders, decoders),
        train.activation_checkpointing,
        train.sequence_length - target,
        target,
    )
    within = rows * target * 4 * (2 * shape.decoder_mlp + 3 * shape.hidden)  # of the last block's backward pass
    if _in_chunks(recipe, shape):
        return kept + within, _head_bytes(recipe, shape)
    return kept + min(within, 12 * rows * target * shape.hidden), 12 * rows * target * shape.vocab


def _in_chunks(recipe: Recipe, shape: Shape) -> bool:
    """Whether head and loss are made of a few targets at a time."""
    return recipe.train.precision != "fp16" and shape.vocab > shape.hidden


def _head_bytes(recipe: Recipe, shape: Shape) -> int:
    """Of a head in chunks: its gradient, which they add to."""
    frozen = recipe.train.freeze is not None and recipe.train.freeze.embeddings and shape.tied
    return 4 * shape.vocab * shape.hidden if recipe.train.method == "full" and not frozen else 0


def trains(recipe: Recipe) -> str:
    """What a pass keeps depends on: whether all weights learn, adapters beside them, or none that a token passes."""
    return {"full": "full", "prefix": "frozen"}.get(recipe.train.method, "lora")


def _width(recipe: Recipe) -> int:
    """Bytes of a product's values."""
    return 4 if arithmetic_of(recipe) == "fp32" else 2


def arithmetic_of(recipe: Recipe) -> str:
    """What weights and passes are in: `fp32`, `cast` (fp32 weights, bf16 passes) or `bf16` (both, in shards)."""
    if recipe.train.precision in ("fp32", "tf32"):
        return "fp32"
    return "bf16" if shard_ranks(recipe) > 1 else "cast"


def shard_ranks(recipe: Recipe) -> int:
    """Ranks that hold one copy of the weights, gradients and moments together."""
    compute = recipe.compute
    match compute.parallel:
        case "fsdp" | "fsdp-no-reshard":
            return compute.nodes * compute.processes_per_node
        case "hybrid":
            return compute.shard_group or compute.processes_per_node
        case _:
            return 1
