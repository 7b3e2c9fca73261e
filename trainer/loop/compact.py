"""AdamW whose two moments are kept in bf16: 4 bytes a weight instead of 8, weights and arithmetic stay fp32.

Moments are rounded to the nearest bf16, not stochastically: then a step needs no random numbers, and is the same for
any number of ranks and after a resume. Rounding loses changes of less than 2**-8 of a moment. With decays of 0.9 and
0.95 a step takes a moment a tenth and a twentieth of the way to the gradient and to its square, so that the first comes
within 5 % of where it belongs, and so does the root of the second; with a decay of 0.999 that would never get smaller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer.loop.narrow import PIECE, NarrowAdamW, update_piece


class CompactAdamW(NarrowAdamW):
    """Both moments are bf16; the second's decay is at most 0.95, see above."""

    @staticmethod
    def first_moments(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        moments = {
            key: torch.zeros_like(weight, dtype=torch.bfloat16, requires_grad=False)
            for key in ("exp_avg", "exp_avg_sq")
        }
        return {**moments, "step": torch.zeros((), dtype=torch.float32, device=weight.device)}

    @staticmethod
    def _update(group: dict[str, Any], weight: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        parts = [_pieces(tensor) for tensor in (weight, weight.grad, state["exp_avg"], state["exp_avg_sq"])]  # type: ignore[arg-type]
        for values, gradient, first, second in zip(*parts, strict=True):
            value, mean, square = values.contiguous(), first.float().contiguous(), second.float().contiguous()
            update_piece(group, value, gradient.contiguous(), mean, square, state["step"])
            if not values.is_contiguous():  # then `contiguous` made a copy
                values.copy_(value)
            first.copy_(mean)
            second.copy_(square)
        state["step"] += 1


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views of what this rank holds of a tensor, along its first dimension; none if it holds nothing."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.numel():
        return []
    local = local if local.ndim else local.view(1)
    return list(torch.split(local, max(1, PIECE // local[0].numel())))
