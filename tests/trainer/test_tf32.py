"""TF32: matrix products of the passes that ask for it are rounded, and no others; a device without it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dropforge.errors import RecipeError
from dropforge.recipes import load_recipe
from trainer.model.loss import check_tf32
from trainer.report.flops import peak_flops

from .test_loop import bench, trained  # noqa: F401 - a fixture

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("training", "evaluation", "expected"),
    [("tf32", "fp32", ("high", "high", "highest")), ("bf16", "tf32", ("highest", "highest", "high"))],
)
def test_each_pass_has_the_arithmetic_that_the_recipe_asks_of_it(
    bench: Any,  # noqa: F811
    training: str,
    evaluation: str,
    expected: tuple[str, str, str],
) -> None:
    train = {"precision": training, "max_steps": 2, "eval_every": 1}
    loop = bench(train=train, evaluate={"precision": evaluation}, compute={"gpus": 1}).loop()
    forward, backward, evaluated = set(), set(), set()

    def within(*_: Any) -> None:
        (forward if torch.is_grad_enabled() else evaluated).add(torch.get_float32_matmul_precision())

    def back(*_: Any) -> None:
        backward.add(torch.get_float32_matmul_precision())

    loop.built.model.model.register_forward_hook(within)
    _, weight = loop.wrapped.trainable()[0]
    weight.register_post_accumulate_grad_hook(back)
    trained(loop)
    assert (forward, backward, evaluated) == tuple({one} for one in expected)
    assert torch.get_float32_matmul_precision() == "highest"
    assert loop.loss.precision == training


def test_where_it_is_not_there_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tf32(CPU, "fp32", "train.precision")
    with pytest.raises(RecipeError, match=r"`evaluate.precision`: a CPU has no `tf32`. Set `fp32`"):
        check_tf32(CPU, "tf32", "evaluate.precision")
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    for capability in ((7, 0), (8, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        if capability < (8, 0):
            with pytest.raises(RecipeError, match=r"a GPU of Tesla V100 has no `tf32`"):
                check_tf32(gpu, "tf32", "train.precision")
        else:
            check_tf32(gpu, "tf32", "train.precision")
    for section in ("train", "evaluate"):
        asked: dict[str, Any] = {section: {"precision": "tf32"}, "compute": {"gpus": 0}}
        with pytest.raises(RecipeError, match=rf"`{section}.precision`: a CPU has no `tf32`, and `compute.gpus` is 0"):
            load_recipe("tiny", asked)
        assert load_recipe("tiny", {**asked, "compute": {"gpus": 1}})


@pytest.mark.parametrize(
    ("device", "tflops"), [("NVIDIA H100 80GB HBM3", 494.7), ("NVIDIA A100-SXM4-80GB", 156.0), ("Tesla V100", None)]
)
def test_its_peak_is_that_of_the_data_sheets(device: str, tflops: float | None) -> None:
    assert peak_flops(device, "tf32", {}) == (None if tflops is None else pytest.approx(tflops * 1e12))
