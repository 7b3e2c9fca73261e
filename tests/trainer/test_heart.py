"""Signs of life: what counts as one, and where none can be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.gang import Gang
from trainer.loop.loop import Loop
from trainer.measure import measure
from trainer.node.heart import Bounds, Heart

from .ranks_loop import Stage, make_loop, make_stage
from .toy import Toy


@pytest.fixture
def stage(toy: Toy, tmp_path: Path) -> Stage:
    return make_stage(toy, "signs", tmp_path / "scratch").change(micro_batch=1)


def beating(loop: Loop) -> Heart:
    loop.heart = Heart(0, Bounds(), lambda: loop.stop.looks)
    return loop.heart


def test_each_micro_batch_is_a_sign_of_life(stage: Stage) -> None:
    """A step of many long micro-batches is no hang: the bound is for each of them."""
    loop = make_loop(Gang(), stage, packs=True)
    heart, marks, backward = beating(loop), list[tuple[int, str]](), loop.wrapped.backward

    def seen(*arguments: Any, **more: Any) -> Any:
        beat = heart.beat(0)
        marks.append((beat.mark, beat.phase))
        return backward(*arguments, **more)

    loop.wrapped.backward = seen  # type: ignore[method-assign]
    loop.start()
    before, marks[:] = list(marks), []
    assert len({mark for mark, _ in before[-3:]}) == 3  # the whole micro-batch and its halves
    heart.step(1)
    loop.step.take(0, 1e-3)
    assert len(marks) > 2
    assert len({mark for mark, _ in marks}) == len(marks)
    assert {phase for _, phase in marks} == {"step 1"}


def test_each_batch_of_an_evaluation_is_a_sign_of_life(stage: Stage) -> None:
    loop = make_loop(Gang(), stage, packs=True)
    heart, marks, logits = beating(loop), list[int](), loop.loss.logits

    def seen(*arguments: Any) -> Any:
        marks.append(heart.beat(0).mark)
        return logits(*arguments)

    loop.loss.logits = seen  # type: ignore[method-assign]
    heart.evaluation(0)
    measure(loop.loss, loop.eval, Gang(), size=64, micro=1, pad=loop.pad, stop=lambda: loop.stop.asked)
    assert len(marks) > 2
    assert len(set(marks)) == len(marks)
