"""Which GPUs of this machine jobs may use, found without any framework: by the driver's library, else by its files."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

GPUS_VARIABLE: Final = "KUBEFLOW_TRAINING_GPUS"
VISIBLE_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_NVML: Final = "libnvidia-ml.so.1"


def devices(env: Mapping[str, str] = os.environ, count: Callable[[], int] | None = None) -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them: indices, or UUIDs where the environment gives those.

    `KUBEFLOW_TRAINING_GPUS` says how many there are, detected or not. A CUDA_VISIBLE_DEVICES of our own confines jobs
    to what it names.

    :param count: finds how many the machine has; the driver is asked unless given.
    :raises ValueError: if `KUBEFLOW_TRAINING_GPUS` is no number.
    """
    declared = env.get(GPUS_VARIABLE)
    visible = env.get(VISIBLE_VARIABLE)
    if visible is None:
        return [str(index) for index in range(int(declared) if declared else (count or detected)())]
    named: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        if not name or name.startswith("-") or name in named:
            break  # as CUDA does: what follows the first invalid name does not exist
        named.append(name)
    if declared:
        return named[: int(declared)]
    here = (count or detected)()
    return [name for name in named if not name.isdigit() or int(name) < here] if here else []


def detected() -> int:
    """How many GPUs the driver offers to this process."""
    found = _nvml()
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) if found is None else found


def _nvml() -> int | None:
    """The driver's own count; None where its library is missing or does not work."""
    try:
        library = ctypes.CDLL(_NVML)
        if library.nvmlInit_v2() != 0:
            return None
        number = ctypes.c_uint()
        good = library.nvmlDeviceGetCount_v2(ctypes.byref(number)) == 0
        library.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return number.value if good else None
