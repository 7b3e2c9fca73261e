"""`train.deterministic`: the same run gives the same bits on the same device, where torch has the operations for it.

https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

# Read when a process makes its first cuBLAS handle; without it, deterministic matrix products on a GPU are an error.
ENVIRONMENT: Final = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}


def environment(recipe: Mapping[str, Any]) -> dict[str, str]:
    """What the processes of a run need in their environment from their start; empty unless the recipe asks for it."""
    train = recipe.get("train")
    return dict(ENVIRONMENT) if isinstance(train, Mapping) and train.get("deterministic") is True else {}


def enable() -> None:
    """Have torch take deterministic operations only, and raise where there is none; before the first work on a GPU."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # Their backward passes add in the order in which threads come. That of flash attention knows the flag above.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def ran() -> dict[str, Any]:
    """What is in force in this process, by torch's own word, for the report."""
    import torch

    return {
        "deterministic": torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "attention_backends": [
            name
            for name, on in (
                ("flash", torch.backends.cuda.flash_sdp_enabled()),  # type: ignore[no-untyped-call]
                ("mem_efficient", torch.backends.cuda.mem_efficient_sdp_enabled()),  # type: ignore[no-untyped-call]
                ("cudnn", torch.backends.cuda.cudnn_sdp_enabled()),  # type: ignore[no-untyped-call]
                ("math", torch.backends.cuda.math_sdp_enabled()),  # type: ignore[no-untyped-call]
            )
            if on
        ],
    }
