"""What the forward pass keeps for the backward pass waits in the host's memory instead of the GPU's.

As `torch.autograd.graph.save_on_cpu` does it, but weights stay where they are: they are there for the backward pass
anyway, and those that shards are gathered into are freed in between. Copies go through page-locked memory on the stream
that computes, so no bit depends on when they are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

LEAST: Final = 1 << 20  # bytes; smaller tensors are not worth a copy


class ActivationsOnHost:
    """Moves what passes keep. :param units: modules whose weights are there while they compute; the whole one first."""

    def __init__(self, units: Sequence[nn.Module]) -> None:
        self._weights: set[int] = set()
        for unit in units:
            # Behind the hook that gathers the unit's weights, which is there already.
            unit.register_forward_pre_hook(self._know)

    def keeping(self) -> saved_tensors_hooks:
        """A context for one forward pass."""
        self._weights.clear()
        return saved_tensors_hooks(self._away, _back)

    def _know(self, unit: nn.Module, inputs: Any) -> None:
        del inputs
        for weight in unit.parameters():
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            self._weights.add(local.untyped_storage().data_ptr())

    def _away(self, tensor: torch.Tensor) -> tuple[torch.device | None, torch.Tensor]:
        size = tensor.numel() * tensor.element_size()
        if size < LEAST or tensor.untyped_storage().data_ptr() in self._weights:
            return None, tensor
        cuda = tensor.device.type == "cuda"
        host = torch.empty_like(tensor, device="cpu", pin_memory=cuda)  # with its strides, which choose kernels
        host.copy_(tensor, non_blocking=cuda)
        return tensor.device, host


def _back(kept: tuple[torch.device | None, torch.Tensor]) -> torch.Tensor:
    device, tensor = kept
    return tensor if device is None else tensor.to(device, non_blocking=True)
