"""The optimizer that a recipe names, its parameter groups, and its state by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.config import Train
from trainer.loop.compact import CompactAdamW
from trainer.loop.eightbit import EightBitAdamW
from trainer.loop.narrow import NarrowAdamW

BETAS: Final = (0.9, 0.95)


def decays(name: str, parameter: torch.Tensor, embeddings: set[int]) -> bool:
    """Whether weight decay applies: matrices only, and neither embeddings, their new rows, nor what is tied to them."""
    if id(parameter) in embeddings or "trainable_tokens" in name:
        return False
    return parameter.ndim >= 2 and "norm" not in name.lower()


def make_optimizer(model: nn.Module, train: Train) -> torch.optim.Optimizer:
    """The recipe's optimizer over the trainable parameters, in groups by name."""
    embeddings = {
        id(weight) for part in model.modules() if isinstance(part, nn.Embedding) for weight in part.parameters()
    }
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [w for n, w in named if decays(n, w, embeddings)], "weight_decay": train.weight_decay},
        {"params": [w for n, w in named if not decays(n, w, embeddings)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=train.learning_rate, momentum=train.momentum)
    if train.optimizer == "adamw-bf16":
        return CompactAdamW(groups, lr=train.learning_rate, betas=BETAS)
    if train.optimizer == "adamw-8bit":
        return EightBitAdamW(groups, lr=train.learning_rate, betas=BETAS)
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=BETAS, fused=True)


def first_state(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the optimizer keeps of a weight before its first gradient, laid out as the weight is; it may be nothing."""
    if isinstance(optimizer, NarrowAdamW):
        return optimizer.first_moments(weight)
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer": torch.zeros_like(weight, requires_grad=False)} if _has_momentum(optimizer) else {}
    moments = {key: torch.zeros_like(weight, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
    return {**moments, "step": torch.zeros((), dtype=torch.float32, device=weight.device)}


def _has_momentum(optimizer: torch.optim.SGD) -> bool:
    return any(group["momentum"] for group in optimizer.param_groups)


def state_bytes(optimizer: torch.optim.Optimizer, weights: Iterable[torch.Tensor]) -> int:
    """Bytes that the optimizer keeps of weights, as this rank holds them; counters left out."""
    mine = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights)
    kept = (first_state(optimizer, _without_memory(weight)).values() for weight in mine)
    return sum(tensor.nbytes for tensors in kept for tensor in tensors if tensor.ndim)


def _without_memory(weight: torch.Tensor) -> torch.Tensor:
    return torch.empty(weight.shape, device="meta")


def optimizer_tensors(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    """The optimizer's state as `NAME:KEY`, such as `NAME:exp_avg`; empty before the first step.

    A weight that has had no gradient yet has the state that the optimizer gives it with its first one.
    """
    if not optimizer.state:
        return {}
    return {
        f"{name}:{key}": tensor
        for name, weight in named
        for key, tensor in (optimizer.state.get(weight) or first_state(optimizer, weight)).items()
    }


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
        keys = first_state(optimizer, _without_memory(weight))
        optimizer.state[weight] = {key: tensors[f"{name}:{key}"] for key in keys}
