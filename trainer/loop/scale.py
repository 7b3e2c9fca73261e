"""The loss scale of a training in fp16, where gradients below 6e-8 are zero and those above 65504 infinite.

Mixed Precision Training: https://arxiv.org/abs/1710.03740, section 3.2. The scale is halved by an overflow and doubled
after `STEADY` steps without one, as torch's `GradScaler` does it. But a step that overflows is taken again with the
smaller scale, not left out: so no row is lost, and which rows a step learns from stays a function of its number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

STEADY: Final = 2000  # steps
_LEAST: Final = 1.0  # what overflows without a scale is not mended by a smaller one


@dataclass(frozen=True)
class Scale:
    """
    :param value: what the loss is multiplied by; a power of two, so that taking it out of a gradient rounds nothing.
    :param steady: steps since it changed.
    """

    value: float = 2.0**16
    steady: int = 0

    def lowered(self) -> Scale | None:
        """After an overflow; None if a smaller one would help as little."""
        return Scale(self.value / 2) if self.value > _LEAST else None

    def stepped(self) -> Scale:
        """After a step that was taken."""
        return Scale(self.value * 2) if self.steady + 1 >= STEADY else Scale(self.value, self.steady + 1)
