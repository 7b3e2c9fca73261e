"""The sizes of a decoder, or of DistilBERT, read from its Hugging Face config: how many weights it has, and which of
them adapters reach.

Needs the standard library only: the trainer's image has no pydantic, and whoever plans has no torch. Counts are exact
for the kinds in `KINDS`; any other config is taken for a Llama of the same sizes, and said to be a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from dropforge.errors import RecipeError

KINDS: Final = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gpt2")
ENCODERS: Final = ("distilbert",)  # counted without a head
LARGEST: Final = 1_000_000_000  # as in `dropforge.recipe`
_PUBLISHED: Final = Path(__file__).parent / "recipes" / "published.json"


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, or of an encoder without a head.

    :param head: width of an attention head. :param mlp: width of the MLP, or of each expert's.
    :param tied: whether the head is the embedding. :param positions: rows of a table of learned positions.
    :param experts: of a mixture, 0 without one; a token passes `chosen` of them.
    :param attention_bias, mlp_bias: whether a Llama's projections have biases.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    mlp: int
    vocab: int
    tied: bool = False
    kind: str = "llama"
    positions: int = 0
    experts: int = 0
    chosen: int = 0
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def exact(self) -> bool:
        """Whether the counts are those of the model, not those of a Llama in its place."""
        return self.kind in (*KINDS, *ENCODERS)

    @property
    def wide(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head

    @property
    def narrow(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a block's linear layers by name; those of experts are no layers of their own."""
        if self.kind == "gpt2":
            return {
                "attn.c_attn": (self.hidden, 3 * self.hidden),
                "attn.c_proj": (self.hidden, self.hidden),
                "mlp.c_fc": (self.hidden, self.mlp),
                "mlp.c_proj": (self.mlp, self.hidden),
            }
        if self.kind in ENCODERS:
            names = ("q_lin", "k_lin", "v_lin", "out_lin")
            attention = {f"attention.{name}": (self.hidden, self.hidden) for name in names}
            return attention | {"ffn.lin1": (self.hidden, self.mlp), "ffn.lin2": (self.mlp, self.hidden)}
        attention = {
            "self_attn.q_proj": (self.hidden, self.wide),
            "self_attn.k_proj": (self.hidden, self.narrow),
            "self_attn.v_proj": (self.hidden, self.narrow),
            "self_attn.o_proj": (self.wide, self.hidden),
        }
        if self.experts:
            return attention
        return attention | {
            "mlp.gate_proj": (self.hidden, self.mlp),
            "mlp.up_proj": (self.hidden, self.mlp),
            "mlp.down_proj": (self.mlp, self.hidden),
        }

    @property
    def every_linear(self) -> list[tuple[int, int, int]]:
        """Of the linear layers of all blocks: how many there are of each kind, their inputs and their outputs."""
        return [(self.layers, *sizes) for sizes in self.linears.values()]

    @property
    def matrices(self) -> int:
        """Weights of the matrices of one block."""
        experts = self.experts * 3 * self.hidden * self.mlp + self.experts * self.hidden
        return sum(inputs * outputs for inputs, outputs in self.linears.values()) + experts

    @property
    def block(self) -> int:
        """Weights of one block."""
        if self.kind in ("gpt2", *ENCODERS):  # biases everywhere, and norms with a bias
            return self.matrices + sum(outputs for _, outputs in self.linears.values()) + 4 * self.hidden
        more = 2 * self.hidden  # the two norms
        if self.kind == "qwen2" or self.attention_bias:
            more += self.wide + 2 * self.narrow
        if self.attention_bias and self.kind != "qwen2":
            more += self.hidden
        if self.mlp_bias:
            more += 2 * self.mlp + self.hidden
        if self.kind == "qwen3":
            more += 2 * self.head
        return self.matrices + more

    @property
    def alone(self) -> Shape:
        """The same with one block, the largest."""
        return replace(self, layers=1)

    @property
    def root(self) -> int:
        """Weights outside of the blocks: embeddings, the last norm, the head."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden
        return tables + self.hidden * (2 if self.kind in ("gpt2", *ENCODERS) else 1)

    @property
    def parameters(self) -> int:
        """All weights, tied ones once."""
        return self.layers * self.block + self.root

    def adapted(self, rank: int, targets: tuple[str, ...] | None, *, magnitudes: bool = False) -> int:
        """Weights of low-rank adapters.

        :param targets: the last parts of the names of layers, as peft takes them; None is every linear layer.
        :param magnitudes: whether each output has one, as in DoRA.
        """
        found = sum(
            rank * (inputs + outputs) + (outputs if magnitudes else 0)
            for name, (inputs, outputs) in self.linears.items()
            if targets is None or any(f".{name}".endswith(f".{target}") for target in targets)
        )
        if targets is None and self.experts:  # peft adapts the router too, and the experts' fused matrices
            found += rank * (self.hidden + self.experts)
            fused = 2 * (self.hidden + 2 * self.mlp)  # gate and up are two layers in one, and get twice the rank
            found += self.experts * rank * (fused + self.mlp + self.hidden)
        return self.layers * found


def mlp_width(architecture: str, hidden: int) -> int:
    """Width of the MLP of a new model: SwiGLU with 8/3 of the hidden size has as many weights as a plain one with 4."""
    return 4 * hidden if architecture in ("gpt2", "distilbert") else -(-hidden * 8 // 3 // 16) * 16


def config_of(scratch: Mapping[str, Any]) -> dict[str, Any]:
    """The Hugging Face config, with its `model_type`, that `base.scratch` stands for; without special tokens."""
    if scratch.get("config") is not None:
        return dict(scratch["config"])
    architecture, hidden = str(scratch["architecture"]), int(scratch["hidden_size"])
    common = {"model_type": architecture, "vocab_size": scratch["vocab_size"], "tie_word_embeddings": True}
    if architecture == "distilbert":
        return common | {
            "dim": hidden,
            "hidden_dim": mlp_width(architecture, hidden),
            "n_layers": scratch["layers"],
            "n_heads": scratch["heads"],
            "max_position_embeddings": scratch["context"],
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "seq_classif_dropout": 0.0,
        }
    if architecture == "gpt2":
        return common | {
            "n_embd": hidden,
            "n_layer": scratch["layers"],
            "n_head": scratch["heads"],
            "n_positions": scratch["context"],
            # Few passes over the data: dropout costs more than it gives.
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    own = {
        "hidden_size": hidden,
        "intermediate_size": mlp_width(architecture, hidden),
        "num_hidden_layers": scratch["layers"],
        "num_attention_heads": scratch["heads"],
        "num_key_value_heads": scratch["heads"],
        "max_position_embeddings": scratch["context"],
    }
    if architecture == "mistral":
        own["sliding_window"] = None
    return common | own


def shape_of_config(config: Mapping[str, Any]) -> Shape | None:
    """The shape of a config; None where a size is missing or no number.

    :raises ValueError: for sizes that no model has.
    """
    if config.get("model_type") in ENCODERS:
        config = _as_decoder(config)
    if config.get("model_type") in ("t5", "bart"):
        from dropforge.seq2seq_shape import seq2seq_shape

        return seq2seq_shape(config)
    try:
        hidden = int(config.get("hidden_size") or config["n_embd"])
        heads = int(config.get("num_attention_heads") or config["n_head"])
        kind = str(config.get("model_type", "llama"))
        experts = int(config.get("num_local_experts") or 0)
        shape = Shape(
            hidden=hidden,
            layers=int(config.get("num_hidden_layers") or config["n_layer"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head=int(config.get("head_dim") or hidden // max(1, heads)),
            mlp=int(config.get("intermediate_size") or config.get("n_inner") or 4 * hidden),
            vocab=int(config["vocab_size"]),
            # Where a config is silent, the library ties.
            tied=bool(config.get("tie_word_embeddings", kind == "gpt2")),
            kind=kind,
            positions=int(config.get("n_positions") or 0) if kind in ("gpt2", *ENCODERS) else 0,
            experts=experts,
            chosen=int(config.get("num_experts_per_tok") or 1) if experts else 0,
            attention_bias=bool(config.get("attention_bias")),
            mlp_bias=bool(config.get("mlp_bias")),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    sizes = (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.head, shape.mlp // 4 or 1, shape.vocab)
    rest = (shape.positions, shape.experts, shape.chosen)
    if not all(1 <= size <= LARGEST for size in sizes) or not all(0 <= size <= LARGEST for size in rest):
        raise ValueError("its sizes are those of no model")
    return shape


_DISTILBERT: Final = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_position_embeddings": "n_positions",
}


def check_unquantised(config: Mapping[str, Any], what: str) -> None:
    """Refuse weights that are quantised already: none of the methods trains them, and merged into them, adapters would
    be rounded away.

    :raises RecipeError: if a model's config says so.
    """
    found = config.get("quantization_config")
    if found is None:
        return
    way = str(found.get("quant_method") or "")[:40] if isinstance(found, Mapping) else ""
    raise RecipeError(
        "recipe key `base.model`",
        f"the weights of {what} are quantised already" + (f" ({way})" if way else ""),
        "Name the model that they were made of, in 16 or 32 bits; `train.method: qlora` quantises it for the training",
    )


def _as_decoder(config: Mapping[str, Any]) -> dict[str, Any]:
    """DistilBERT's config in the words of the others; nothing is tied, but there is no head either."""
    known = {"max_position_embeddings": 512, **config}  # as the library has it
    return {**{_DISTILBERT.get(key, key): value for key, value in known.items()}, "tie_word_embeddings": True}


def context_of(config: Mapping[str, Any]) -> int | None:
    """Longest sequence in tokens that a config names; None where it names none."""
    found = next(
        (config[key] for key in ("max_position_embeddings", "n_positions", "max_seq_len") if key in config), None
    )
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Longest row in tokens that the trainer takes for a base with this config; None where it knows no such bound."""
    found = config.get("n_positions" if config.get("model_type") == "gpt2" else "max_position_embeddings")
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def check_positions(length: int, positions: int | None, prefix: int = 0) -> None:
    """See that rows fit into a base model. :param prefix: places that a prefix takes before each document.

    :raises RecipeError: if rows would be longer than the model was made for.
    """
    if positions is None or length <= positions - prefix:
        return
    raise RecipeError(
        "recipe key `train.sequence_length`",
        f"{length} is longer than the base model's context of {positions}"
        + (f" leaves beside a prefix of {prefix}" if prefix else ""),
        f"Set it to {positions - prefix} or less" if positions > prefix else "Set `train.prefix.tokens` to less",
    )


@cache
def _published() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(_PUBLISHED.read_text())
    return found


def published(model: str) -> dict[str, Any] | None:
    """The config of a model of the hub as its makers published it, for planning where no hub is; None if not known."""
    found = _published().get(model)
    return None if found is None else dict(found)
