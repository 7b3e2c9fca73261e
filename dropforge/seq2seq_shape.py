"""The sizes of an encoder-decoder, read from its Hugging Face config: T5 and BART, whose weights are counted exactly.

T5 has no biases, and one table of relative positions in each stack (https://arxiv.org/abs/1910.10683, section 2.1);
BART has biases, and learned positions for each (https://arxiv.org/abs/1910.13461).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from dropforge.shape import LARGEST, Shape

_BART_OFFSET: Final = 2  # rows of its tables of positions that no token has

# Bytes that a block keeps for its backward pass, for each of its tokens, by what is trained and the arithmetic (see
# `dropforge.activations`): of each unit of the hidden size, of the width of the heads, and of the heads times the
# length, where attention keeps its scores; then what a decoder's block keeps more of the first two for its attention
# to the encoder's states, and of each token of the source for each unit of the heads' width.
_KEPT: Final = {
    ("t5", "full", "fp32"): (24, 16, 4, 12, 8, 8),
    ("t5", "lora", "fp32"): (16, 16, 4, 8, 8, 8),
    ("t5", "full", "cast"): (25, 14, 4, 15, 4, 6),
    ("t5", "lora", "cast"): (17, 10, 2, 11, 4, 6),
    ("t5", "full", "bf16"): (20, 14, 4, 10, 4, 4),
    ("t5", "lora", "bf16"): (16, 8, 2, 8, 4, 4),
    ("bart", "full", "fp32"): (16, 16, 0, 8, 8, 8),
    ("bart", "lora", "fp32"): (16, 16, 0, 8, 8, 8),
    ("bart", "full", "cast"): (17, 8, 0, 12, 4, 4),
    ("bart", "lora", "cast"): (18, 8, 0, 15, 4, 4),
    ("bart", "full", "bf16"): (8, 8, 0, 4, 4, 4),
    ("bart", "lora", "bf16"): (8, 8, 0, 4, 4, 4),
}
# And of each unit of the MLP's width, by whether it has a gate.
_MLP: Final = {
    ("t5", False): {"fp32": 4, "cast": 4, "bf16": 2},
    ("t5", True): {"fp32": 28, "cast": 14, "bf16": 14},
    ("bart", False): {"fp32": 8, "cast": 4, "bf16": 4},
}


@dataclass(frozen=True)
class Seq2SeqShape(Shape):
    """Sizes of an encoder-decoder; `layers` are those of both, and `positions` rows of each table of positions.

    :param encoder: layers of the encoder. :param gated: whether the MLP has a gate. :param buckets: of relative
        positions. :param decoder_mlp: width of the decoder's MLP. :param drops: whether a training drops out.
    """

    encoder: int = 0
    gated: bool = False
    buckets: int = 0
    decoder_mlp: int = 0
    drops: bool = False

    @property
    def exact(self) -> bool:
        return True

    @property
    def decoder(self) -> int:
        """Layers of the decoder."""
        return self.layers - self.encoder

    @property
    def attention(self) -> int:
        """Weights of one attention, of the four in a layer's matrices."""
        return 4 * self.hidden * self.wide + (3 * self.wide + self.hidden if self.kind == "bart" else 0)

    def feed(self, width: int) -> int:
        """Weights of an MLP."""
        return (3 if self.gated else 2) * self.hidden * width + (width + self.hidden if self.kind == "bart" else 0)

    @property
    def norm(self) -> int:
        return self.hidden * (2 if self.kind == "bart" else 1)

    @property
    def encoder_block(self) -> int:
        """Weights of a block of the encoder."""
        return self.attention + self.feed(self.mlp) + 2 * self.norm

    @property
    def block(self) -> int:
        """Weights of a block of the decoder, the larger one: its second attention is to what the encoder gives."""
        return 2 * self.attention + self.feed(self.decoder_mlp) + 3 * self.norm

    @property
    def matrices(self) -> int:
        return self.block

    @property
    def alone(self) -> Seq2SeqShape:
        return replace(self, layers=1, encoder=0)

    @property
    def root(self) -> int:
        """Weights outside of the blocks; the tables of relative positions, which T5's first blocks hold, among them."""
        positions = 2 * self.positions * self.hidden + 2 * self.buckets * self.heads
        return self.vocab * self.hidden + positions + 2 * self.norm

    @property
    def parameters(self) -> int:
        return self.encoder * self.encoder_block + self.decoder * self.block + self.root

    def frozen(self, blocks: int, embeddings: bool) -> int:
        """Weights of the first blocks, the encoder's before the decoder's, and of the embeddings."""
        inside = (
            min(blocks, self.encoder) * self.encoder_block
            + max(0, min(blocks, self.layers) - self.encoder) * self.block
        )
        first = 2 if blocks > self.encoder else 1 if blocks else 0
        tables = (self.vocab + 2 * self.positions) * self.hidden if embeddings else 0
        return inside + first * self.buckets * self.heads + tables

    def adapted(self, rank: int, targets: tuple[str, ...] | None, *, magnitudes: bool = False) -> int:
        def cost(layers: Mapping[str, tuple[int, int]]) -> int:
            return sum(
                rank * (inputs + outputs) + (outputs if magnitudes else 0)
                for name, (inputs, outputs) in layers.items()
                if targets is None or any(f".{name}".endswith(f".{target}") for target in targets)
            )

        return self.encoder * cost(self._linears(False)) + self.decoder * cost(self._linears(True))

    def _linears(self, decoder: bool) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a block's linear layers by name."""
        width = self.decoder_mlp if decoder else self.mlp
        into, out = (self.hidden, self.wide), (self.wide, self.hidden)
        if self.kind == "bart":
            names = ("self_attn", "encoder_attn") if decoder else ("self_attn",)
            attention = {f"{name}.{part}_proj": into for name in names for part in "qkv"}
            ends = {f"{name}.out_proj": out for name in names}
            return {**attention, **ends, "fc1": (self.hidden, width), "fc2": (width, self.hidden)}
        names = ("SelfAttention", "EncDecAttention") if decoder else ("SelfAttention",)
        attention = {f"{name}.{part}": into for name in names for part in "qkv"}
        ends = {f"{name}.o": out for name in names}
        first = ("wi_0", "wi_1") if self.gated else ("wi",)
        feed = {f"DenseReluDense.{part}": (self.hidden, width) for part in first}
        return {**attention, **ends, **feed, "DenseReluDense.wo": (width, self.hidden)}

    @property
    def encoder_linears(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the linear layers of a block of the encoder; `decoder_linears` of the decoder."""
        return list(self._linears(False).values())

    @property
    def decoder_linears(self) -> list[tuple[int, int]]:
        return list(self._linears(True).values())

    @property
    def every_linear(self) -> list[tuple[int, int, int]]:
        sides = ((self.encoder, self._linears(False)), (self.decoder, self._linears(True)))
        return [(blocks, *sizes) for blocks, linears in sides for sizes in linears.values()]

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Those of a block of the decoder."""
        return self._linears(True)

    def kept(
        self, trains: str, arithmetic: str, adapters: tuple[int, int], recompute: str, source: int, target: int
    ) -> int:
        """Bytes that a forward pass of one row keeps for its backward pass, all blocks together.

        :param trains, arithmetic: see `_KEPT`. :param adapters: bytes that those of a block of the encoder, and of the
            decoder, keep of a token.
        :param recompute: `train.activation_checkpointing`. :param source, target: tokens of the row.
        """
        hidden, wide, scores, more_hidden, more_wide, seen = _KEPT[self.kind, trains, arithmetic]
        width = 4 if arithmetic == "fp32" else 2
        mlp = _MLP[self.kind, self.gated][arithmetic]
        stream = 2 if arithmetic == "bf16" else 4
        drop = width if self.drops else 0  # bytes of each value of a mask that says what was dropped
        hidden, more_hidden = hidden + 2 * drop, more_hidden + drop
        looks = 0  # of the decoder at the source
        if self.kind == "t5":  # it drops in the MLP and in attention too, and keeps what was there before
            mlp, scores, looks = mlp + 2 * drop, scores + 2 * drop, 3 * drop
        encoder = hidden * self.hidden + wide * self.wide + mlp * self.mlp + scores * self.heads * source
        decoder = (hidden + more_hidden) * self.hidden + (wide + more_wide) * self.wide + mlp * self.decoder_mlp
        decoder += looks * self.heads * source
        decoder += scores * self.heads * target
        found = 0
        for layers, each, linears, length, other in (
            (self.encoder, encoder + adapters[0], self.encoder_linears, source, 0),
            (self.decoder, decoder + adapters[1], self.decoder_linears, target, source * seen * self.wide),
        ):
            block = length * each + other
            products = sum(outputs for _, outputs in linears)
            again = {
                "none": block,
                "selective": length * (stream * self.hidden + width * products),
                "full": length * stream * self.hidden,
            }[recompute]
            found += layers * min(again, block) + (block if layers and recompute != "none" else 0)
        return found


def seq2seq_shape(config: Mapping[str, Any]) -> Seq2SeqShape | None:
    """The shape of a T5's or BART's config; what it does not name is the library's default.

    :raises ValueError: for sizes that no model has.
    """
    kind = str(config.get("model_type"))
    try:
        if kind == "t5":
            encoder = int(config.get("num_layers") or 6)
            heads = int(config.get("num_heads") or 8)
            mlp = int(config.get("d_ff") or 2048)
            shape = Seq2SeqShape(
                hidden=int(config.get("d_model") or 512),
                layers=encoder + int(config.get("num_decoder_layers") or encoder),
                heads=heads,
                kv_heads=heads,
                head=int(config.get("d_kv") or 64),
                mlp=mlp,
                vocab=int(config.get("vocab_size") or 32128),
                tied=True,
                kind=kind,
                encoder=encoder,
                gated=str(config.get("feed_forward_proj", "relu")).startswith("gated"),
                buckets=int(config.get("relative_attention_num_buckets") or 32),
                decoder_mlp=mlp,
                drops=bool(config.get("dropout_rate", 0.1)),
            )
        else:
            encoder = int(config.get("encoder_layers") or 12)
            heads = int(config.get("encoder_attention_heads") or 16)
            hidden = int(config.get("d_model") or 1024)
            shape = Seq2SeqShape(
                hidden=hidden,
                layers=encoder + int(config.get("decoder_layers") or 12),
                heads=heads,
                kv_heads=heads,
                head=hidden // max(1, heads),
                mlp=int(config.get("encoder_ffn_dim") or 4096),
                vocab=int(config.get("vocab_size") or 50265),
                tied=True,
                kind=kind,
                positions=int(config.get("max_position_embeddings") or 1024) + _BART_OFFSET,
                encoder=encoder,
                decoder_mlp=int(config.get("decoder_ffn_dim") or 4096),
                drops=bool(config.get("dropout", 0.1)),
            )
    except (TypeError, ValueError, OverflowError):
        return None
    sizes = (shape.hidden, shape.layers, shape.heads, shape.head, shape.mlp, shape.decoder_mlp, shape.vocab)
    if not all(1 <= size <= LARGEST for size in (*sizes, shape.encoder, shape.decoder)):
        raise ValueError("its sizes are those of no model")
    return shape
