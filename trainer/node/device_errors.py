"""What a GPU's errors mean: whose fault they are, and what to do.

CUDA tells an error when its device is next asked for anything, so one surfaces wherever that is, perhaps as the cause
of another; its text is what the driver calls it (`cudaGetErrorString`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dropforge.run import ExitCode

_SIGNS: Final = ("cuda error", "cuda failure", "cublas_status", "cudnn_status", "cuda driver", "cuda out of memory",
                 "no cuda-capable", "cuda-capable device")  # fmt: skip
_KINDS: Final = ("OutOfMemoryError", "AcceleratorError")  # of torch, which is not imported for their sake
_MEMORY: Final = ("out of memory", "status_alloc_failed")
_NODE: Final = (
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "no cuda-capable device is detected",
    "cuda-capable device(s) is/are busy or unavailable",
    "driver version is insufficient",
    "unsupported display driver",
    "system not yet initialized",
    "hardware stack error",
    "initialization error",
    "unknown error",
)
_OTHER_GPU: Final = ("no kernel image is available", "device kernel image is invalid", "unsupported toolchain")
_OUR_FAULT: Final = ("device-side assert", "illegal memory access", "misaligned address", "illegal instruction")


class NodeError(Exception):
    """A node that is the cause of a failure: another one may do."""


def device_error(error: BaseException) -> str | None:
    """The driver's words in an error or what caused it; None if there are none."""
    return next((text for text in map(_words, _chain(error)) if text), None)


def judge(words: str) -> tuple[ExitCode | int, str]:
    """Exit code and message of an error of a GPU. :param words: as of `device_error`."""
    low = words.lower()
    if any(sign in low for sign in _MEMORY):
        return ExitCode.BAD_RECIPE, f"GPU memory: {words}. Lower `train.micro_batch`"
    if any(sign in low for sign in _OTHER_GPU):
        return ExitCode.BAD_RECIPE, f"GPU: {words}. Take an image whose torch has code for this GPU"
    if any(sign in low for sign in _NODE):
        return ExitCode.NODE, f"GPU: {words}. Another node may do; on this one look for Xid messages of its kernel"
    if any(sign in low for sign in _OUR_FAULT):
        return 1, f'GPU: {words}. With `CUDA_LAUNCH_BLOCKING: "1"` in `compute.env` the traceback names its place'
    return 1, f"GPU: {words}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _words(error: BaseException) -> str:
    """What a library says of a device, in one line; empty for any other error."""
    if not isinstance(error, RuntimeError):
        return ""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    told = " ".join(line for line in lines if any(sign in line.lower() for sign in _SIGNS))
    if not told:
        if type(error).__name__ not in _KINDS:
            return ""
        told = lines[0]
    return " ".join(told.split()).rstrip(".")[:300]
