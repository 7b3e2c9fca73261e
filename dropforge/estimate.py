"""What a run would cost, before anything starts: parameters, memory per rank, steps and tokens.

Estimates, said as such: the formulas follow the usual accounting (fp32 weights, gradients and two AdamW moments are
16 bytes a trained parameter, https://arxiv.org/abs/1910.02054, section 3.1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from dropforge.errors import RecipeError
from dropforge.recipe import Recipe

_BYTES_PER_TOKEN = 4.0  # English text and a byte-level BPE of some thousands of words


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
        if self.kind == "gpt2":  # a plain MLP, biases everywhere, learned positions
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
    checkpoint_bytes: int | None

    @property
    def rank_bytes(self) -> int | None:
        """Memory of one rank without what the runtime itself takes."""
        parts = (self.weights_bytes, self.optimizer_bytes, self.activation_bytes)
        return None if None in parts else sum(part for part in parts if part is not None)


def estimate(recipe: Recipe, data_bytes: int | None = None) -> Estimate:
    """Estimate a run.

    :param data_bytes: size of the drop, decompressed; without it steps are known only if the recipe names them.
    """
    train, compute = recipe.train, recipe.compute
    ranks = compute.nodes * compute.processes_per_node
    sequences = train.tokens_per_step // train.sequence_length
    steps = train.max_steps
    if steps is None and data_bytes is not None:
        rows = data_bytes * (1 - recipe.data.eval_fraction) / _BYTES_PER_TOKEN
        steps = max(1, ceil(rows * train.epochs / train.tokens_per_step))
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
    weights = optimizer = activation = checkpoint = None
    if shape and parameters is not None and trained is not None:
        weights = 4 * parameters
        optimizer = 12 * trained
        tokens = train.micro_batch * train.sequence_length
        per_token = shape.layers * (18 * shape.hidden + 4 * shape.mlp) * 4 + 2 * 4 * shape.vocab
        activation = tokens * per_token
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
        checkpoint_bytes=checkpoint,
    )


def shape_of(recipe: Recipe) -> Shape | None:
    """The base model's shape: from `base.scratch`, or from the `config.json` of a local folder."""
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
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise TypeError("it is no JSON object")
    except (OSError, ValueError, TypeError) as error:
        raise RecipeError(
            "recipe key `base.model`", f"{path} cannot be read ({error})", "Name a folder with a model"
        ) from error
    return _shape_of_config(config)


def _shape_of_config(config: Mapping[str, Any]) -> Shape | None:
    try:
        hidden = int(config.get("hidden_size") or config["n_embd"])
        heads = int(config.get("num_attention_heads") or config["n_head"])
        return Shape(
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
    except (KeyError, TypeError, ValueError):
        return None
