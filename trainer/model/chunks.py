"""Head and cross entropy in chunks of rows: the whole logits, wider than all the rest of a model, are never there.

The loss is the sum over rows, so each chunk's gradients are made where its logits are, in the forward pass, and kept
until the backward pass multiplies them (Liger Kernel, https://arxiv.org/abs/2410.10989, section 3.2). torch has an
operation for it, which is taken in fp32 where there is one; of 16-bit inputs it gives a 16-bit sum, and ours fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from trainer.compat import fused_cross_entropy


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Sum over rows of the cross entropy of their logits, fp32.

    :param hidden: (N, H) fp32 or bf16. :param weight: (V, H) of the same type. :param targets: (N,) int64.
    :param bias: (V,), or None.
    """
    rows = chunk_rows(weight.shape[0], weight.device.type)
    fused = fused_cross_entropy()
    if fused is not None and hidden.dtype == torch.float32:
        return fused(hidden, weight, targets, bias, rows)  # type: ignore[no-any-return]
    return _Chunked.apply(hidden, weight, bias, targets, rows)  # type: ignore[no-any-return]


def chunk_rows(vocabulary: int, device: str) -> int:
    """Rows whose fp32 logits make a chunk: what a CPU's caches bear, and enough to keep a GPU busy.

    torch's own choice is a row or two where the vocabulary is much wider than the hidden state: a vocabulary of 131,072
    on a state of 128 took 16 times as long with it (torch 2.15).
    """
    room = 512 << 20 if device == "cuda" else 32 << 20
    return max(64, min(4096 if device == "cuda" else 1024, room // (4 * vocabulary)))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        rows: int,
    ) -> torch.Tensor:
        wanted = ctx.needs_input_grad
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        to_hidden = torch.empty_like(hidden) if wanted[0] else None
        # Chunk after chunk is added to it, which 16 bits would swallow.
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        to_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
        for start in range(0, len(hidden), rows):
            states, chosen = hidden[start : start + rows], targets[start : start + rows]
            logits = functional.linear(states, weight, None if bias is None else bias.to(weight.dtype)).float()
            logarithms = functional.log_softmax(logits, dim=-1)
            loss += functional.nll_loss(logarithms, chosen, reduction="sum")
            if not any(wanted[:3]):
                continue
            gradient = logarithms.exp_()
            gradient[torch.arange(len(chosen), device=gradient.device), chosen] -= 1.0
            narrow = gradient.to(weight.dtype)
            if to_hidden is not None:
                to_hidden[start : start + rows] = narrow @ weight
            if to_weight is not None:
                to_weight += (narrow.T @ states).float()
            if to_bias is not None:
                to_bias += gradient.sum(0)
        ctx.types = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.found = (to_hidden, to_weight, to_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        """Once only: what the forward pass made is used up."""
        found, ctx.found = ctx.found, (None, None, None)
        scaled = [
            None if item is None else item.mul_(outer[0].to(item.dtype)).to(kind)
            for item, kind in zip(found, ctx.types, strict=True)
        ]
        return *scaled, None, None
