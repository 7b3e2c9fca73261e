"""What is measured, in the order of its worth: where time runs out, the last ones are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

Who = Literal["ours", "loop", "trainer", "saves"]

#: Shapes of published models, with random weights.
SHAPES: Final[Mapping[str, dict[str, Any]]] = {
    "1b": {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},  # Llama 3.2 1B
    "7b": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False},  # Llama 2 7B
}  # fmt: skip
LENGTH: Final = 4096  # tokens of a row
DRY_SHAPE: Final = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}  # fmt: skip
DRY_LENGTH: Final = 128


@dataclass(frozen=True)
class Cell:
    """
    :param who: trains: our loop, a bare loop by hand, or transformers' Trainer; `saves` is ours with checkpoints.
    :param rows: of a step, and :param micro: of a forward pass. :param recompute: activations, in full.
    :param steps: that are timed, and :param warm: those before them.
    :param gigabytes: of the GPU without which it is left out. :param seconds: that it takes at most.
    """

    shape: str
    method: Literal["full", "lora"]
    who: Who = "ours"
    attention: str = "auto"
    compile: bool = False
    recompute: bool = False
    rows: int = 8
    micro: int = 1
    steps: int = 6
    warm: int = 3
    gigabytes: float = 40.0
    seconds: float = 60.0
    dry: bool = False

    @property
    def name(self) -> str:
        more = [part for part, on in (("compile", self.compile), ("recompute", self.recompute)) if on]
        more += [self.attention] if self.attention != "auto" else []
        return " ".join([self.shape, self.method, *more])

    @property
    def length(self) -> int:
        return DRY_LENGTH if self.dry else LENGTH

    @property
    def config(self) -> dict[str, Any]:
        """Of the model, for transformers."""
        shape = DRY_SHAPE if self.dry else SHAPES[self.shape]
        return {"model_type": "llama", "max_position_embeddings": 2 * self.length, **shape}


_LORA_7B = Cell("7b", "lora", recompute=True, micro=2, gigabytes=70, seconds=75)
_FULL_1B = Cell("1b", "full", recompute=True, micro=4, gigabytes=40, seconds=60)
_FULL_7B = Cell("7b", "full", recompute=True, micro=1, gigabytes=130, seconds=90, steps=4, warm=2)

CELLS: Final = (
    _LORA_7B,
    replace(_LORA_7B, who="loop"),
    replace(_LORA_7B, who="trainer"),
    _FULL_1B,
    replace(_FULL_1B, who="loop"),
    replace(_FULL_1B, who="trainer"),
    replace(_FULL_1B, who="saves", steps=24, seconds=75),
    _FULL_7B,
    replace(_FULL_1B, compile=True, seconds=90),
    replace(_FULL_1B, attention="flex_attention"),
    replace(_FULL_1B, attention="flash_attention_2"),
)


def dry(cell: Cell) -> Cell:
    """The same in a size that a CPU trains in a second, without what a CPU lacks or takes long to compile."""
    steps, micro = 8 if cell.who == "saves" else 2, min(cell.micro, 2)
    small = replace(cell, dry=True, rows=4, micro=micro, steps=steps, warm=1)
    return replace(small, attention="auto", compile=False, gigabytes=0.0, seconds=0.0)
