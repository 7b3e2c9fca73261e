"""Errors of a GPU, wherever they surface, by their consequence: another recipe, another node, or neither.

The texts are CUDA's own (`cudaGetErrorString`), as torch, NCCL and cuBLAS pass them on.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dropforge.errors import RecipeError
from dropforge.run import ExitCode
from trainer.gang import CollectiveError, collective
from trainer.model.attention import choose
from trainer.model.isolation import check_isolation
from trainer.model.loss import LossModel
from trainer.rank import ending
from trainer.state.stop import PreemptedError

from .test_model import small

ECC = "CUDA error: uncorrectable ECC error encountered"
LATE = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1"""


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        (ECC + LATE, ExitCode.NODE, f"GPU: {ECC}. Another node may do"),
        ("CUDA error: uncorrectable NVLink error detected during the execution", ExitCode.NODE, "Another node"),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", ExitCode.NODE, "Another node"),
        ("CUDA error: unknown error", ExitCode.NODE, "Xid"),
        ("CUDA driver initialization failed, you might not have a CUDA gpu: system not yet initialized", 22, "node"),
        ("CUDA error: out of memory", ExitCode.BAD_RECIPE, "GPU memory: CUDA error: out of memory. Lower `train.micro"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", ExitCode.BAD_RECIPE, "memory"),
        ("CUDA error: no kernel image is available for execution on the device", ExitCode.BAD_RECIPE, "Take an image"),
        ("CUDA error: device-side assert triggered", 1, "CUDA_LAUNCH_BLOCKING"),
        ("CUDA error: an illegal memory access was encountered", 1, "CUDA_LAUNCH_BLOCKING"),
        ("CUDA error: operation not permitted", 1, "GPU: CUDA error: operation not permitted"),
    ],
)
def test_what_cuda_says_decides_who_tries_again(text: str, code: int, told: str) -> None:
    assert ending(torch.AcceleratorError(text))[0] == code
    found = ending(RuntimeError(text))
    assert found[0] == code
    assert told in found[1]
    assert "\n" not in found[1]


def test_it_is_found_behind_what_it_has_become() -> None:
    with pytest.raises(CollectiveError) as lost, collective():
        raise RuntimeError(
            f"NCCL error in: ProcessGroupNCCL.cpp:42, unhandled cuda error\nLast error:\nCuda failure 214 '{ECC}'"
        )
    assert ending(lost.value)[0] == ExitCode.NODE
    refused = RecipeError("recipe key `train.router_loss`", "it cannot be taken of single rows", "Set it to 0")
    refused.__cause__ = torch.AcceleratorError(ECC)
    assert ending(refused)[0] == ExitCode.NODE
    assert ending(RecipeError("recipe key `x`", "it is wrong", "Mend it"))[0] == ExitCode.BAD_RECIPE
    told = RecipeError("recipe key `train.micro_batch`", "rows of 2 do not fit", "Set it to 1")
    told.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    assert "Set it to 1" in ending(told)[1]  # it says more than the device
    other = RecipeError("recipe key `x`", "it is wrong", "Mend it")
    other.__context__, other.__suppress_context__ = torch.AcceleratorError(ECC), True  # `from None`
    assert ending(other)[0] == ExitCode.BAD_RECIPE
    asked = PreemptedError("asked to stop")
    asked.__context__ = torch.AcceleratorError(ECC)
    assert ending(asked)[0] == ExitCode.PREEMPTED


@pytest.mark.parametrize("error", [torch.AcceleratorError(ECC), torch.OutOfMemoryError("CUDA out of memory.")])
def test_no_check_of_a_model_takes_it_for_the_models_own(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a broken GPU would have a model padded, or refused."""

    def broken(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(LossModel, "logits", broken)
        with pytest.raises(type(error)):
            check_isolation(LossModel(small("llama"), True), 64)
    model = small("llama")
    monkeypatch.setattr(type(model), "forward", broken)
    with pytest.raises(type(error)):
        choose(model, asked="auto", precision="fp32", length=64, pack=True)
