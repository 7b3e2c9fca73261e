"""What is measured: a model, rows and a method, and who trains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

OURS, LOOP = "ours", "loop"
PEERS: Final = ("flat", "padded", "trl-padded", "trl-packed")
LENGTH, ROWS = 512, 8  # tokens of a row, rows of a step

Mix = Literal["short", "middle", "long"]


@dataclass(frozen=True)
class Cell:
    """
    :param vocabulary: rows of the embedding. :param mix: lengths of the documents.
    :param peers: of `PEERS`. :param steps: that are timed, and :param warm: those before them.
    :param bar: least ratio to the best peer's tokens for a second of CPU.
    """

    vocabulary: int
    mix: Mix = "middle"
    method: Literal["full", "lora"] = "full"
    recompute: bool = False
    labelled: bool = False
    peers: tuple[str, ...] = ("flat",)
    steps: int = 16
    warm: int = 2
    bar: float = 1.05

    @property
    def micro(self) -> int:
        """Rows of a forward pass: of a classifier, which are not packed, more."""
        return 16 if self.labelled else 4

    @property
    def variants(self) -> tuple[str, ...]:
        return (OURS, LOOP, *self.peers)


_STEPS: Final = {2_048: 16, 32_768: 6, 131_072: 3}  # about as long for each
_BARS: Final = {2_048: 1.15, 32_768: 1.05, 131_072: 1.05}
_MIXES: Final[tuple[Mix, ...]] = ("short", "middle", "long")

CELLS: Final[dict[str, Cell]] = {
    **{
        f"{words // 1024}k-{mix}": Cell(
            words, mix, steps=_STEPS[words], warm=2 if words < 100_000 else 1, bar=_BARS[words]
        )
        for words in _STEPS
        for mix in _MIXES
    },
    "all-peers": Cell(2_048, peers=PEERS, bar=1.15),
    "lora": Cell(32_768, method="lora", steps=6),
    "recompute": Cell(32_768, recompute=True, steps=6),
    "classification": Cell(8_192, labelled=True, peers=("padded", "bucketed")),
}
