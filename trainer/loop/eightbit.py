"""AdamW whose two moments are kept in 8 bits: 2 bytes a weight instead of 8, weights and arithmetic stay fp32.

Each block of at most 256 neighbours in a row of a weight has a scale, and each value one of 256 steps of it, finer
towards zero (https://arxiv.org/abs/2110.02861). bitsandbytes quantises; the update is torch's own fused kernel, as of
the other AdamWs here. A block ends with its row (all that stands at one index of a weight's first dimension), as shards
do: so ranks that share a model keep whole blocks, any number of them reads the state of any other, and rounding to the
nearest step needs no random numbers. Weights without rows worth the name, such as norms, keep fp32 moments.

A second moment that is not zero is never stored as zero: a weight that has no gradient for once, as a row of the
embedding, would otherwise be moved by its first moment divided by nothing.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from trainer.loop.narrow import PIECE, NarrowAdamW, update_piece

BLOCK: Final = 256  # values that share a scale, at most
_NARROW: Final = 8  # a shorter row has more scales than values to save
_SMALLEST: Final = 64  # the smallest block that the kernels know; a shorter row is filled up with zeros meanwhile
_SIGNED: Final = {"exp_avg": True, "exp_avg_sq": False}  # moments, and whether they can be negative


class EightBitAdamW(NarrowAdamW):
    """Both moments are quantised, but for those of weights with narrow rows."""

    @staticmethod
    def first_moments(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of each moment its 8 bits, shaped as the weight, and `NAME_scale`, (rows, blocks of a row) fp32; of a weight
        with narrow rows fp32 moments."""
        found = {}
        width = _width(weight)
        for name in _SIGNED:
            if width is None:
                found[name] = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
            else:
                found[name] = torch.zeros_like(weight, dtype=torch.uint8, requires_grad=False)
                found[f"{name}_scale"] = _scales(weight, -(-width // _block(width)))
        return {**found, "step": torch.zeros((), dtype=torch.float32, device=weight.device)}

    @staticmethod
    def _update(group: dict[str, Any], weight: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        assert weight.grad is not None
        width = _width(weight)
        names = [key for name in _SIGNED for key in (name, f"{name}_scale") if key in state]
        kept = [_local(tensor) for tensor in (weight, weight.grad, *(state[name] for name in names))]
        rows = max(1, PIECE // width) if width else 0
        pieces = zip(*(torch.split(tensor, rows) for tensor in kept), strict=True) if rows else [tuple(kept)]
        for values, gradient, *moments in pieces:
            if not values.numel():  # a rank may hold nothing of a weight
                continue
            flat = torch.Size((len(values), width)) if width else values.shape
            value = values.contiguous()
            first, second = moments[0], moments[-1]
            if width is not None:
                first, second = _read(moments[:2], True, width), _read(moments[2:], False, width)
            update_piece(group, value.view(flat), gradient.contiguous().view(flat), first, second, state["step"])
            if not values.is_contiguous():  # then `contiguous` made a copy
                values.copy_(value)
            if width is not None:
                _write(first, moments[:2], True)
                _write(second, moments[2:], False)
        state["step"] += 1


def _width(weight: torch.Tensor) -> int | None:
    """Values in a row of a weight; None if they are too few to be quantised."""
    width = math.prod(weight.shape[1:]) if weight.ndim > 1 else 0
    return width if width >= _NARROW else None


def _block(width: int) -> int:
    """Values of a block, a power of two: kernels know no others."""
    return min(BLOCK, max(_SMALLEST, 1 << (width - 1).bit_length()))


def _scales(weight: torch.Tensor, blocks: int) -> torch.Tensor:
    if not isinstance(weight, DTensor):
        return torch.zeros((weight.shape[0], blocks), device=weight.device)
    local = torch.zeros((weight.to_local().shape[0], blocks), device=weight.device)
    return DTensor.from_local(
        local,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=torch.Size((weight.shape[0], blocks)),
        stride=(blocks, 1),
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _read(kept: list[torch.Tensor], signed: bool, width: int) -> torch.Tensor:
    """(rows, width) fp32 of a moment. :param kept: its 8 bits and its scales."""
    from bitsandbytes.functional import dequantize_blockwise

    codes, scales = kept
    filled = _filled(codes.contiguous().view(-1, width))
    found = dequantize_blockwise(
        filled, absmax=scales.reshape(-1), code=_map(signed, codes.device), blocksize=_block(width)
    )
    return found[:, :width].contiguous()


def _write(moment: torch.Tensor, kept: list[torch.Tensor], signed: bool) -> None:
    """Round a moment, (rows, width) fp32, to 8 bits."""
    from bitsandbytes.functional import quantize_blockwise

    codes, scales = kept
    width = moment.shape[1]
    found, state = quantize_blockwise(_filled(moment), code=_map(signed, moment.device), blocksize=_block(width))
    found = found[:, :width]
    if not signed:
        found = torch.where((moment > 0) & (found == 0), torch.ones_like(found), found)
    codes.copy_(found.reshape(codes.shape))
    scales.copy_(state.absmax.view(scales.shape))


def _filled(rows: torch.Tensor) -> torch.Tensor:
    """Rows that end with a block: what is added are zeros."""
    more = -rows.shape[1] % _block(rows.shape[1])
    return functional.pad(rows, (0, more)) if more else rows


@cache
def _map(signed: bool, device: torch.device) -> torch.Tensor:
    """(256,) fp32 shares of a scale in ascending order; the first one of those without a sign is zero."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map(signed=signed).to(device)  # type: ignore[no-any-return, no-untyped-call]
