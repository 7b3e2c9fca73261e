"""The memory that a process has used at most, in megabytes of 1,000,000 bytes."""

from __future__ import annotations

import resource

import torch


def peak_memory(device: torch.device) -> dict[str, float]:
    """Of this process since its start: resident, and on a GPU what tensors had and what the allocator held."""
    found = {"peak_rss_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6}
    if device.type == "cuda":
        found["cuda_peak_allocated_megabytes"] = torch.cuda.max_memory_allocated(device) / 1e6
        found["cuda_peak_reserved_megabytes"] = torch.cuda.max_memory_reserved(device) / 1e6
    return found
