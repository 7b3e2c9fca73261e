"""Parameter groups and the optimizer's state by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

from trainer.config import Train

BETAS: Final = (0.9, 0.95)
MOMENTS: Final = ("exp_avg", "exp_avg_sq")


def decays(name: str, parameter: torch.Tensor, embeddings: set[int]) -> bool:
    """Whether weight decay applies: matrices only, and neither embeddings, their new rows, nor what is tied to them."""
    if id(parameter) in embeddings or "trainable_tokens" in name:
        return False
    return parameter.ndim >= 2 and "norm" not in name.lower()


def make_optimizer(model: nn.Module, train: Train) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, in groups by name."""
    embeddings = {
        id(weight) for part in model.modules() if isinstance(part, nn.Embedding) for weight in part.parameters()
    }
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    groups = [
        {"params": [w for n, w in named if decays(n, w, embeddings)], "weight_decay": train.weight_decay},
        {"params": [w for n, w in named if not decays(n, w, embeddings)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=train.learning_rate, betas=BETAS, fused=True
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    """The optimizer's state as `NAME:exp_avg`, `NAME:exp_avg_sq` and `NAME:step`; empty before the first step.

    A weight that has had no gradient yet has the state that AdamW gives it with its first one.
    """
    tensors: dict[str, Any] = {}
    if not optimizer.state:
        return tensors
    for name, weight in named:
        state = optimizer.state.get(weight) or _first_state(weight)
        tensors |= {f"{name}:{key}": state[key] for key in (*MOMENTS, "step")}
    return tensors


def _first_state(weight: nn.Parameter) -> dict[str, torch.Tensor]:
    moments = {key: torch.zeros_like(weight, requires_grad=False) for key in MOMENTS}
    return {**moments, "step": torch.zeros((), dtype=torch.float32, device=weight.device)}


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, nn.Parameter]],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Give the optimizer its state by name. It keeps the tensors, which must be laid out as their weights are.

    :raises KeyError: if a parameter's state is missing.
    """
    if not tensors:
        return
    for name, weight in named:
        optimizer.state[weight] = {key: tensors[f"{name}:{key}"] for key in (*MOMENTS, "step")}
