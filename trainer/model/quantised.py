"""A frozen base in 4 bits (NF4 with double quantisation, QLoRA: https://arxiv.org/abs/2305.14314, section 3).

The kernels are those of bitsandbytes; its `Linear4bit` is not used, because its forward pass changes the layer: casts
of the bias stay, and without gradients the bytes are laid out anew for some CPUs, after which they can no longer be
shared among ranks. Here one frozen tensor of bytes holds all of a layer's weight. So a layer computes the same before
the ranks share the model and after, in training and in evaluation, and whatever shards, gathers, compares or digests
weights does so with these. Quantisation adds nothing up in an order that depends on threads, so that every rank,
machine and attempt comes to the same bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dropforge.errors import RecipeError
from dropforge.methods import NF4_BLOCK, NF4_SCALES, nf4_bytes
from trainer.compat import check_quantising
from trainer.model.build import is_seq2seq
from trainer.node.device_errors import device_error

_KEY: Final = "recipe key `train.method`"
_KIND: Final = "nf4"
_LOOK: Final = 8  # tokens that show whether the model calls its layers


class Nf4Linear(nn.Linear):
    """A linear layer whose weight is frozen in 4 bits.

    :param inputs, outputs: as of `nn.Linear`. :param packed: (`nf4_bytes(outputs * inputs)`,) int8, see `pack`.
    :param bias: (outputs,) as it was; frozen too.
    """

    def __init__(self, inputs: int, outputs: int, packed: nn.Parameter, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)  # a weight of its own would only be thrown away
        self.in_features, self.out_features = inputs, outputs
        self.weight = packed
        self.bias = bias  # type: ignore[assignment]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., outputs), in the arithmetic of the input or of autocast."""
        device = input.device.type
        arithmetic = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        shape = (self.out_features, self.in_features)
        found: torch.Tensor = _Product.apply(input.to(arithmetic), self.weight, self.bias, shape)
        return found

    def plain(self) -> nn.Linear:
        """A linear layer with the fp32 weight that the bytes stand for."""
        with torch.device("meta"):
            found = nn.Linear(self.in_features, self.out_features, bias=False)
        weight = unpack(self.weight, (self.out_features, self.in_features), torch.float32)
        found.weight = nn.Parameter(weight, requires_grad=False)
        found.bias = self.bias
        return found


class _Product(torch.autograd.Function):
    """`x W^T + b` with a frozen W that is unpacked for each pass, and kept for none."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, shape: tuple[int, int]
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)  # saved as any weight is: shards are gathered again into the same memory
        ctx.shape = shape
        return functional.linear(x, unpack(packed, shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        (packed,) = ctx.saved_tensors
        return gradient @ unpack(packed, ctx.shape, gradient.dtype), None, None, None


@torch.no_grad()
def pack(weight: torch.Tensor) -> torch.Tensor:
    """A matrix in NF4 as one row of bytes: two values each, the scales of their blocks in 8 bits, and what these scales
    are scaled by, in fp32: their mean, and the largest distance from it in each 256 of them.

    :param weight: on any device but torch's meta one. :returns: (`nf4_bytes`,) int8, on that device.
    """
    from bitsandbytes.functional import quantize_4bit, quantize_blockwise

    values, state = quantize_4bit(weight.float().contiguous(), blocksize=NF4_BLOCK, quant_type=_KIND)
    scales = state.absmax
    # torch's own mean adds up in an order that depends on the number of threads.
    mean = torch.from_numpy(np.array([scales.cpu().numpy().mean(dtype=np.float64)], dtype=np.float32)).to(scales.device)
    coarse, of_scales = quantize_blockwise(scales - mean, code=_map(scales.device), blocksize=NF4_SCALES)
    parts = (values, coarse, mean, of_scales.absmax)
    # T5 asks for a layer's dtype, and lets int8 pass.
    return torch.cat([part.contiguous().view(-1).view(torch.int8) for part in parts])


def unpack(packed: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The matrix that bytes stand for. :param packed: as `pack` gives them. :param dtype: fp32, bf16 or fp16."""
    from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise

    count = shape[0] * shape[1]
    ends = -(-count // 2), -(-count // NF4_BLOCK)
    values, coarse, rest = torch.split(packed.detach(), [*ends, packed.numel() - sum(ends)])
    fine = rest.clone().view(torch.float32)  # as a copy, for floats begin at a multiple of four bytes
    scales = dequantize_blockwise(
        coarse.view(torch.uint8), absmax=fine[1:], code=_map(packed.device), blocksize=NF4_SCALES
    )
    # Of rows with an odd width the library knows only a way through torch.compile, so all becomes one row.
    rows = shape if shape[1] % 2 == 0 else (1, 2 * ends[0])
    state = QuantState(scales + fine[0], shape=rows, dtype=dtype, blocksize=NF4_BLOCK, quant_type=_KIND)  # type: ignore[no-untyped-call]
    found: torch.Tensor = dequantize_4bit(values.view(torch.uint8), state)
    return found.reshape(-1)[:count].view(shape)


@cache
def _map(device: torch.device) -> torch.Tensor:
    """(256,) fp32 what the 8 bits of a scale stand for (https://arxiv.org/abs/2110.02861, section 2.1)."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map().to(device)  # type: ignore[no-any-return, no-untyped-call]


def quantise(model: Any, blocks: list[nn.Module]) -> None:
    """Put the linear layers of a model's blocks into 4 bits; embeddings, norms and the head stay as they are.

    :param model: in fp32, on any device. On torch's meta device nothing is computed and nothing is tried.
    :raises RecipeError: if bitsandbytes is not here, or the blocks are made of something else than linear layers.
    """
    meta = model.get_input_embeddings().weight.is_meta
    if not meta:
        check_quantising("qlora", "")
    held: dict[int, int] = {}
    for module in model.modules():
        for weight in module._parameters.values():
            if weight is not None:
                held[id(weight)] = held.get(id(weight), 0) + 1
    found = [
        (parent, name, layer)
        for block in blocks
        for parent in block.modules()
        for name, layer in parent.named_children()
        # A subclass may do with its weight whatever it likes, and a weight of two layers is none of a layer's own.
        if type(layer) is nn.Linear and held[id(layer.weight)] == 1
    ]
    whole = sum(weight.numel() for block in blocks for weight in block.parameters())
    reached = sum(layer.weight.numel() for _, _, layer in found)
    if 2 * reached < whole:
        raise RecipeError(
            _KEY,
            f"`qlora` puts linear layers into 4 bits, and of the {whole:,} weights in the blocks of "
            f"{type(model).__name__} {reached:,} are in such layers",
            "Use `lora`",
        )
    for parent, name, layer in found:
        setattr(parent, name, _quantised(layer))
    if not meta:
        _try(model)


def _quantised(layer: nn.Linear) -> Nf4Linear:
    weight = layer.weight
    if weight.is_meta:
        packed = torch.empty(nf4_bytes(weight.numel()), dtype=torch.int8, device=weight.device)
    else:
        packed = pack(weight)
    made = Nf4Linear(layer.in_features, layer.out_features, nn.Parameter(packed, requires_grad=False), layer.bias)
    return made.train(layer.training)


@torch.no_grad()
def _try(model: Any) -> None:
    """:raises RecipeError: if the model does something else with a layer's weight than to call the layer."""
    table = model.get_input_embeddings().weight
    ids = torch.arange(_LOOK, device=table.device)[None] % table.shape[0]
    training = model.training
    model.eval()
    try:
        model(input_ids=ids, **({"decoder_input_ids": ids} if is_seq2seq(model) else {}))
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        if device_error(error):
            raise
        cause = " ".join(str(error).split())[:200]
        raise RecipeError(_KEY, f"{type(model).__name__} cannot be held in 4 bits ({cause})", "Use `lora`") from error
    finally:
        model.train(training)


def dequantise(model: nn.Module) -> None:
    """Give a model's layers the fp32 weights that their bytes stand for, as the model computed with."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Nf4Linear):
                setattr(parent, name, layer.plain())
