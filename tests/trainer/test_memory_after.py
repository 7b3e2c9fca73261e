"""What the end of a training needs of memory is what the training has let go of, and a lack of it is told as that."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer import training
from trainer.loop.loop import Loop
from trainer.model import export
from trainer.rank import ending

from .test_whole import train
from .toy import Toy


def test_the_model_is_read_back_into_memory_that_was_let_go(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[Loop] = []
    held: list[dict[str, int]] = []
    load = export.open_model

    class Seen(Loop):
        def __post_init__(self) -> None:
            super().__post_init__()
            loops.append(self)
            self.parameters = list(self.built.model.parameters())  # as another holder of them has them

    def loading(folder: Any, local: str) -> Any:
        loop: Any = loops[-1]
        moments = [tensor for state in loop.optimizer.state.values() for tensor in state.values()]
        held.append(
            {
                "weights": sum(weight.nbytes for weight in loop.parameters),
                "gradients": sum(weight.grad.nbytes for weight in loop.parameters if weight.grad is not None),
                "moments": sum(tensor.nbytes for tensor in moments),
            }
        )
        return load(folder, local)

    monkeypatch.setattr(training, "Loop", Seen)
    monkeypatch.setattr(export, "open_model", loading)
    said = train(toy.run("memory", train={"max_steps": 1}))
    assert held == [{"weights": 0, "gradients": 0, "moments": 0}]
    assert toy.files("memory").stat("report.json") is not None, said


def test_a_lack_of_memory_after_the_training_is_not_the_recipes_fault(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr(training, "export_model", lacking)
    with pytest.raises(Exception, match="memory") as caught:
        train(toy.run("lacking", train={"max_steps": 1}))
    code, message = ending(caught.value)
    assert code == 1
    assert "after the training (CUDA out of memory. Tried to allocate 2 GiB.)" in message
    assert "micro_batch" not in message
