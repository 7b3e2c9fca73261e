"""What AdamWs with narrow moments share: weights and arithmetic are fp32, and torch's own fused kernel updates them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.optim.adamw import adamw

PIECE: Final = 1 << 22  # values that are in fp32 at once
EPSILON: Final = 1e-8  # of torch's AdamW too


class NarrowAdamW(torch.optim.Optimizer):
    """Decoupled weight decay (https://arxiv.org/abs/1711.05101, algorithm 2), with moments of a kind that is narrower.

    :param groups: as for `torch.optim.AdamW`, each with its `weight_decay`; fp32 weights.
    :param lr: learning rate. :param betas: decays of the two moments.
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
                        state.update(self.first_moments(weight))
                    self._update(group, weight, state)

    @staticmethod
    def first_moments(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is kept of a weight before its first gradient, laid out as the weight is."""
        raise NotImplementedError

    @staticmethod
    def _update(group: dict[str, Any], weight: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """Move a weight and its moments by its gradient, and count."""
        raise NotImplementedError


def update_piece(
    group: dict[str, Any],
    value: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    step: torch.Tensor,
) -> None:
    """Move a piece of a weight and its fp32 moments, all of them contiguous, in place."""
    adamw(
        [value],
        [gradient],
        [first],
        [second],
        [],
        [step.clone()],  # the kernel counts, once for each piece
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=EPSILON,
        maximize=False,
    )
