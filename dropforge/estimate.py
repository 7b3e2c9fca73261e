"""What a run would cost, before anything starts: parameters, memory per rank, steps and tokens.

Estimates, said as such: the formulas follow the usual accounting (fp32 weights, gradients and two AdamW moments are
16 bytes a trained parameter, https://arxiv.org/abs/1910.02054, section 3.1). Against the resident memory of small
models on CPU they were 3 to 20 % low.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from dropforge.errors import RecipeError
from dropforge.recipe import LARGEST, Recipe

RUNTIME_BYTES = 700_000_000  # torch and transformers themselves, as seen on CPU
_BYTES_PER_TOKEN = 4.0  # English text and a byte-level BPE of some thousands of words
_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder that its memory follows from."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    tied: bool = False
    kind: str = "llama"
    positions: int = 0

    @property
    def parameters(self) -> int:
        """Weights of a Llama-like decoder: embeddings, attention, gated MLP, norms, head; or those of GPT-2."""
        width = self.hidden
        tables = self.vocab * width * (1 if self.tied else 2)
        if self.kind in ("gpt2", "distilbert"):  # a plain MLP, biases everywhere, learned positions
            layer = 4 * width * width + 2 * width * self.mlp + self.mlp + 9 * width
            return self.layers * layer + tables + self.positions * width + 2 * width
        head = width // self.heads
        attention = width * head * (2 * self.heads + 2 * self.kv_heads)
        if self.kind == "qwen2":
            attention += head * (self.heads + 2 * self.kv_heads)
        layer = attention + 3 * width * self.mlp + 2 * width
        return self.layers * layer + tables + width


@dataclass(frozen=True)
class Estimate:
    """Figures of one run; None where the base model's config is not on this machine."""

    parameters: int | None
    trained: int | None
    ranks: int
    sequences_per_step: int
    accumulation: int
    steps: int | None
    tokens: int | None
    weights_bytes: int | None
    optimizer_bytes: int | None
    activation_bytes: int | None
    logits_bytes: int | None
    checkpoint_bytes: int | None

    @property
    def parts(self) -> dict[str, int] | None:
        """What the memory of one rank is made of, in bytes."""
        states, passing = (self.weights_bytes, self.optimizer_bytes), (self.activation_bytes, self.logits_bytes)
        if states[0] is None or states[1] is None or passing[0] is None or passing[1] is None:
            return None
        return {
            "weights": states[0],
            "gradients and optimizer": states[1],
            "activations": passing[0] + passing[1],
            "runtime": RUNTIME_BYTES,
        }

    @property
    def rank_bytes(self) -> int | None:
        """Memory of one rank."""
        return sum(self.parts.values()) if self.parts else None

    @property
    def least_bytes(self) -> int | None:
        """What one rank takes even if every guess was too high: an MLP without a gate, adapters on few modules, a loss
        that comes in pieces."""
        if self.weights_bytes is None or self.optimizer_bytes is None or self.activation_bytes is None:
            return None
        return (self.weights_bytes + self.optimizer_bytes) * 4 // 5 + (self.activation_bytes + RUNTIME_BYTES) // 2


def estimate(recipe: Recipe, data_bytes: int | None = None) -> Estimate:
    """Estimate a run.

    :param data_bytes: size of the drop, decompressed; without it, or with `data.mix`, steps are known only if the
        recipe names them.
    """
    train, compute = recipe.train, recipe.compute
    ranks = compute.nodes * compute.processes_per_node
    sequences = train.rows
    steps = train.max_steps
    if steps is None and data_bytes is not None and recipe.data.mix is None:
        tokens = data_bytes * (1 - recipe.data.eval_fraction) / _BYTES_PER_TOKEN
        steps = max(1, ceil(tokens * (train.epochs or 1.0) / (sequences * train.sequence_length)))
    shape = shape_of(recipe)
    parameters = shape.parameters if shape else None
    trained = parameters
    if shape and train.method == "lora":
        head = shape.hidden // shape.heads
        widths = (
            2 * (shape.hidden + shape.heads * head)
            + 2 * (shape.hidden + shape.kv_heads * head)
            + 3 * (shape.hidden + shape.mlp)
        )
        trained = shape.layers * train.lora.r * widths
    weights = optimizer = activation = logits = checkpoint = None
    if shape and parameters is not None and trained is not None:
        weights = 4 * parameters  # with shards too: a rank loads the whole model before it keeps its part
        optimizer = 12 * trained // shard_ranks(recipe)
        at_once = train.micro_batch * train.sequence_length
        width = 2 if train.precision == "bf16" else 4
        activation = at_once * shape.layers * (18 * shape.hidden + 4 * shape.mlp) * width
        logits = at_once * 2 * 4 * shape.vocab if recipe.task == "causal-lm" else 0  # a row has one for each label
        checkpoint = 12 * trained
    return Estimate(
        parameters=parameters,
        trained=trained,
        ranks=ranks,
        sequences_per_step=sequences,
        accumulation=ceil(sequences / (ranks * train.micro_batch)),
        steps=steps,
        tokens=steps * sequences * train.sequence_length if steps else None,
        weights_bytes=weights,
        optimizer_bytes=optimizer,
        activation_bytes=activation,
        logits_bytes=logits,
        checkpoint_bytes=checkpoint,
    )


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


def unknown_memory(recipe: Recipe, figures: Estimate) -> str | None:
    """Why the memory of a rank cannot be held against `compute.memory_gb`; None where it can."""
    if figures.rank_bytes is None:
        return "unknown until the base model's config is here"
    return "on its GPU, whose memory no recipe names" if recipe.compute.gpus else None


def check_memory(recipe: Recipe, figures: Estimate) -> None:
    """Refuse a recipe whose ranks cannot fit into their pod, before a job is killed for it.

    :raises RecipeError: only if the estimate is known and clearly too large.
    """
    compute = recipe.compute
    least, about, parts = figures.least_bytes, figures.rank_bytes, figures.parts
    if unknown_memory(recipe, figures) or least is None or about is None or parts is None:
        return
    ranks = compute.processes_per_node
    if least * ranks <= compute.memory_gb * 1e9:
        return
    told = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
    raise RecipeError(
        "recipe key `compute.memory_gb`",
        f"a pod of {compute.memory_gb:g} GB is too small for {ranks} rank(s) of about {size_text(about)} each ({told})",
        f"Set it to {about * ranks // 10**9 + 1}, or make `train.micro_batch` or the model smaller",
    )


def size_text(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def shape_of(recipe: Recipe) -> Shape | None:
    """The base model's shape: from `base.scratch`, or from the `config.json` of a local folder.

    :raises RecipeError: for a config that cannot be read, or with sizes that no model has.
    """
    scratch = recipe.base.scratch
    if scratch is not None:
        return Shape(
            scratch.hidden_size,
            scratch.layers,
            scratch.heads,
            scratch.heads,
            scratch.mlp_size,
            scratch.vocab_size,
            tied=True,
            kind=scratch.architecture,
            positions=scratch.context,
        )
    path = Path((recipe.base.model or "").removeprefix("file://")) / "config.json"
    if not path.is_file():
        return None
    try:
        with path.open("rb") as stream:
            text = stream.read(_CONFIG_BYTES + 1)
        if len(text) > _CONFIG_BYTES:
            raise TypeError(f"it has more than {_CONFIG_BYTES} bytes")
        config = json.loads(text)
        if not isinstance(config, dict):
            raise TypeError("it is no JSON object")
        return _shape_of_config(config)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(
            "recipe key `base.model`", f"{path} cannot be read ({error})", "Name a folder with a model"
        ) from error


def _shape_of_config(config: Mapping[str, Any]) -> Shape | None:
    """None where a size is missing or no number. :raises ValueError: for sizes that no model has."""
    try:
        hidden = int(config.get("hidden_size") or config["n_embd"])
        heads = int(config.get("num_attention_heads") or config["n_head"])
        shape = Shape(
            hidden,
            int(config.get("num_hidden_layers") or config["n_layer"]),
            heads,
            int(config.get("num_key_value_heads") or heads),
            int(config.get("intermediate_size") or config.get("n_inner") or 4 * hidden),
            int(config["vocab_size"]),
            # Where a config is silent, the library ties.
            bool(config.get("tie_word_embeddings", config.get("model_type") == "gpt2")),
            str(config.get("model_type", "llama")),
            int(config.get("n_positions") or 0),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    sizes = (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.mlp, shape.vocab, shape.positions + 1)
    if not all(1 <= size <= LARGEST for size in sizes):
        raise ValueError("its sizes are those of no model")
    return shape
