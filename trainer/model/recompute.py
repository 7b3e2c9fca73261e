"""Activation checkpointing: what a block computes on its way forward is computed again in the backward pass, not kept.

`full` keeps a block's input only. `selective` keeps the products with weights and what fused attention kernels give,
and computes the cheap rest again; scores of eager attention, which grow with the square of the length, are not kept.
It is torch's own (https://docs.pytorch.org/docs/stable/checkpoint.html), without reentrant passes: gradients reach
adapters under frozen embeddings, and random numbers are drawn again as they were. So a step is the same to the bit.

Training Deep Nets with Sublinear Memory Cost: https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from trainer.config import Recompute
from trainer.model.switch import switched_off

_KEPT: Final = {
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(torch.ops.aten, name)  # not each release has them all
}


class _Block:
    """Stands for the forward method of a block. It holds no closure, so that a copied block has its own."""

    def __init__(self, forward: Callable[..., Any], mode: Recompute) -> None:
        self.forward, self.mode, self.on = forward, mode, True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Without the mode of training in it: the checks before the first step take gradients in evaluation mode.
        if not self.on or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        contexts = _selective if self.mode == "selective" else noop_context_fn
        return checkpoint(functools.partial(self.forward, **kwargs), *args, use_reentrant=False, context_fn=contexts)


def recompute(blocks: Sequence[nn.Module], mode: Recompute) -> None:
    """Have blocks compute again what `mode` does not keep; names, weights and hooks stay as they are."""
    for block in blocks:
        block.forward = _Block(block.forward, mode)


def recomputed(model: nn.Module) -> list[str]:
    """What each block that computes again does, in order; empty without one."""
    return [found.mode for found in _found(model)]


def everything_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Within it, blocks keep all that they compute."""
    return switched_off(_found(model))


def _found(model: nn.Module) -> list[_Block]:
    forwards = (module.__dict__.get("forward") for module in model.modules())
    return [forward for forward in forwards if isinstance(forward, _Block)]


def _selective() -> Any:
    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What of an operation's results is kept. :param operation: an overload of torch's, as its dispatcher names it."""
    del context
    if operation not in _KEPT or _drops_out(operation, args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _drops_out(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it draws random numbers: what is kept draws none a second time, and shifts all that are drawn after."""
    names = [argument.name for argument in operation._schema.arguments]
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))
