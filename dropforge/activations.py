"""What a training pass over a rank's rows holds: activations, and what the loss takes. Arithmetic, no torch.

What the library's decoders keep for the backward pass was read off `torch.autograd.graph.saved_tensors_hooks` and
agrees with the allocations of a whole pass to 2 %.
"""

from __future__ import annotations

from typing import Final

from dropforge.methods import LOW_RANK
from dropforge.recipe import Recipe
from dropforge.seq2seq_shape import Seq2SeqShape
from dropforge.shape import Shape

# Bytes that a block keeps for its backward pass, for each token and each unit of (hidden size, width of the query
# heads, width of the MLP), by what is trained and the arithmetic: `cast` computes in bf16 with fp32 weights
# (autocast), `bf16` has bf16 weights too (sharded); fp16 takes as much.
_GATED: Final = {
    ("full", "fp32"): (24, 16, 16),
    ("lora", "fp32"): (16, 16, 16),
    ("full", "cast"): (26, 8, 8),
    ("lora", "cast"): (18, 10, 8),
    ("full", "bf16"): (16, 8, 8),
    ("lora", "bf16"): (12, 8, 8),
}
_PLAIN: Final = {  # GPT-2: a plain MLP, whose GELU is made of several operations
    ("full", "fp32"): (16, 16, 20),
    ("lora", "fp32"): (16, 16, 20),
    ("full", "cast"): (12, 8, 10),
    ("lora", "cast"): (12, 10, 10),
    ("full", "bf16"): (8, 8, 10),
    ("lora", "bf16"): (8, 8, 10),
}
_ENCODER: Final = {  # DistilBERT: one matrix each for queries, keys and values, and a GELU in one operation
    ("full", "fp32"): (16, 16, 8),
    ("lora", "fp32"): (16, 16, 8),
    ("full", "cast"): (16, 8, 4),
    ("lora", "cast"): (16, 10, 4),
    ("full", "bf16"): (8, 8, 4),
    ("lora", "bf16"): (8, 8, 4),
}
_KEPT: Final = {"gpt2": _PLAIN, "distilbert": _ENCODER}  # and all others are gated
_NORMED: Final = {"fp32": 8, "cast": 6, "bf16": 6}  # Qwen 3: norms of queries and keys, where all weights are trained


def passes_bytes(recipe: Recipe, shape: Shape, rows: int, targets: float = 1.0) -> tuple[int, int]:
    """What a forward and a backward pass hold at their fullest: activations, and what the loss takes."""
    train = recipe.train
    length, tokens = train.sequence_length, rows * train.sequence_length
    arithmetic = arithmetic_of(recipe)
    if isinstance(shape, Seq2SeqShape):
        return _pairs_bytes(recipe, shape, rows, arithmetic, targets)
    width = 4 if arithmetic == "fp32" else 2
    hidden, wide, mlp = _KEPT.get(shape.kind, _GATED)[trains(recipe), arithmetic]
    # The log-sum of each head and the deviations of two norms.
    each = hidden * shape.hidden + wide * shape.wide + 4 * shape.heads + 8
    each += shape.chosen * (2 * width * shape.hidden + mlp * shape.mlp) if shape.experts else mlp * shape.mlp
    if shape.kind == "qwen3":
        normed = _NORMED[arithmetic] if train.method == "full" else 4
        each += normed * (shape.wide + shape.narrow) + 4 * (shape.heads + shape.kv_heads)
    if train.method in LOW_RANK:
        each += width * train.lora.r * len(shape.linears)
    if train.packing != "off":
        each += width * length  # the mask that keeps documents apart, as attention takes it
    stream = 2 if arithmetic == "bf16" else 4  # bytes of what goes from block to block
    products = sum(outputs for _, outputs in shape.linears.values()) + shape.chosen * (2 * shape.mlp + shape.hidden)
    again = {
        "none": each,
        "selective": stream * shape.hidden + width * (products + shape.wide) + 4 * shape.heads,
        "full": stream * shape.hidden,
    }[train.activation_checkpointing]
    one = 0 if train.activation_checkpointing == "none" else each  # the block that is computed again
    kept = tokens * (shape.layers * min(again, each) + one)
    within = tokens * 4 * (2 * shape.mlp * max(1, shape.chosen) + 3 * shape.hidden)  # of the last block's backward pass
    if recipe.task == "classification":
        return kept + within, 0
    if _in_chunks(recipe, shape):
        return kept + within, _head_bytes(recipe, shape)
    logits = int(12 * tokens * targets) * shape.vocab  # logits or their gradient, logarithms, and the gradient of these
    return kept + min(within, 12 * tokens * shape.hidden), logits


def _pairs_bytes(recipe: Recipe, shape: Seq2SeqShape, rows: int, arithmetic: str, targets: float) -> tuple[int, int]:
    """Of an encoder-decoder: see `passes_bytes`."""
    train = recipe.train
    target = max(1, round(train.sequence_length * targets))
    rank = train.lora.r if train.method in LOW_RANK else 0
    kept = rows * shape.kept(
        trains(recipe), arithmetic, rank, train.activation_checkpointing, train.sequence_length - target, target
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
    return 4 * shape.vocab * shape.hidden if recipe.train.method == "full" else 0


def trains(recipe: Recipe) -> str:
    """What a pass keeps depends on: whether products with the base's weights need them for gradients."""
    return "full" if recipe.train.method == "full" else "lora"


def arithmetic_of(recipe: Recipe) -> str:
    """What weights and passes are in: `fp32`, `cast` (fp32 weights, bf16 passes) or `bf16` (both, in shards)."""
    if recipe.train.precision == "fp32":
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
