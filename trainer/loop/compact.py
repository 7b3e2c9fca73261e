"""AdamW whose two moments are kept in bf16: 4 bytes a weight instead of 8, weights and arithmetic stay fp32.

Moments are rounded to the nearest bf16, not stochastically: then a step needs no random numbers, and is the same for
any number of ranks and after a resume. Rounding loses changes of less than 2**-8 of a moment. With decays of 0.9 and
0.95 a step takes a moment a tenth and a twentieth of the way to the gradient and to its square, so that the first comes
within 5 % of where it belongs, and so does the root of the second; with a decay of 0.999 that would never get smaller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

_PIECE: Final = 1 << 22  # values that are in fp32 at once
EPSILON: Final = 1e-8  # of torch's AdamW too


class CompactAdamW(torch.optim.Optimizer):
    """Decoupled weight decay (https://arxiv.org/abs/1711.05101, algorithm 2), computed by torch's own fused kernel.

    :param groups: as for `torch.optim.AdamW`, each with its `weight_decay`; fp32 weights.
    :param lr: learning rate. :param betas: decays of the two moments; the second at most 0.95, see above.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        del closure
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    if not state:
                        state.update(first_moments(weight))
                    _update(group, weight, state)


def first_moments(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is kept of a weight before its first gradient, laid out as the weight is."""
    moments = {
        key: torch.zeros_like(weight, dtype=torch.bfloat16, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")
    }
    return {**moments, "step": torch.zeros((), dtype=torch.float32, device=weight.device)}


def _update(group: dict[str, Any], weight: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    parts = [_pieces(tensor) for tensor in (weight, weight.grad, state["exp_avg"], state["exp_avg_sq"])]  # type: ignore[arg-type]
    for values, gradient, first, second in zip(*parts, strict=True):
        value, mean, square = values.contiguous(), first.float().contiguous(), second.float().contiguous()
        adamw(
            [value],
            [gradient.contiguous()],
            [mean],
            [square],
            [],
            [state["step"].clone()],  # the kernel counts, once for each piece
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=EPSILON,
            maximize=False,
        )
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
    return list(torch.split(local, max(1, _PIECE // local[0].numel())))
