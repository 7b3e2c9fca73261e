"""`torch.compile` of each block: what it computes is the same, its operations are joined.

Compiled is a block's forward method alone, so that shards are gathered around it, and activation checkpointing does it
again as a whole. All blocks of a kind share their code, and so do rows of all lengths: sizes are symbols, of which
torch tells 1 from all others. Random numbers are drawn as without it.

Only passes that take gradients are compiled. An evaluation runs the model's own code, as the program does that measures
candidate and champion: figures of two arithmetics would not compare.

https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler.html
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import nn

from trainer.model.listening import Listening
from trainer.model.switch import switched_off

_KINDS: Final = 64  # of inputs that code is made for; torch's own 8 are few for mixed kinds of blocks
_BACKEND = "inductor"


class _Forward:
    """Stands for the forward method of a block. It holds no closure, so that a copied block has its own."""

    def __init__(self, forward: Any) -> None:
        self.forward, self.on, self.listening = forward, True, Listening()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.on or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        code = _code_of(self.forward.__func__, _BACKEND)
        with self.listening.afresh():
            return code(self.forward.__self__, *args, **kwargs)


@functools.cache
def _code_of(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    import torch._dynamo.config as tracing

    tracing.recompile_limit = max(tracing.recompile_limit, _KINDS)
    tracing.optimize_ddp = False  # it splits code at the borders of DDP's buckets, and a block is small enough
    if backend != "inductor":
        return torch.compile(function, dynamic=True, backend=backend)
    import torch._inductor.config as code

    if not torch.cuda.is_available():
        code.compile_threads = 1  # else a pool of processes, each with a torch of its own, for few files
    return torch.compile(function, dynamic=True, options={"fallback_random": True})


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Have blocks run compiled code where gradients are taken; names, weights and hooks stay as they are."""
    for block in blocks:
        block.forward = _Forward(block.forward)


def compiled(model: nn.Module) -> int:
    """The number of blocks that run compiled code."""
    return len(_found(model))


def as_written(model: nn.Module) -> AbstractContextManager[None]:
    """Within it, blocks run their own code."""
    return switched_off(_found(model))


def _found(model: nn.Module) -> list[_Forward]:
    found = []
    for module in model.modules():
        forward = module.__dict__.get("forward")
        while forward is not None and not isinstance(forward, _Forward):  # activation checkpointing stands before it
            forward = getattr(forward, "forward", None)
        if forward is not None:
            found.append(forward)
    return found
