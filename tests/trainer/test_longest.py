"""Memory is looked for with the largest row that may come, in whichever step that is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.assembly import make_plan
from trainer.data.mix import Mix
from trainer.data.plan import Plan
from trainer.loop.longest import longest

from .test_loop import Bench
from .toy import Toy


def made(packed: bool, mix: Mix | None = None) -> Plan:
    dice = np.random.default_rng(1)
    lengths = dice.integers(2, 40, 200)
    lengths[-1] = 63
    targets = dice.integers(1, lengths)
    return Plan(lengths, targets, 3, 64, rows=2, packed=packed, epochs=4.0, max_steps=None, mix=mix)


@pytest.mark.parametrize("packed", [True, False])
def test_no_row_of_any_step_is_larger(packed: bool) -> None:
    plan = made(packed)
    rows = [pack for step in range(plan.steps) for pack in plan.step(step)]
    tokens, targets = longest(plan)
    assert tokens == max(int(plan.lengths[row].sum()) for row in rows)
    assert tokens >= targets >= max(int(plan.targets[row].sum()) for row in rows)


def test_a_source_that_is_left_out_counts_for_nothing() -> None:
    source = np.array([0] * 199 + [1], np.int32)
    tokens, targets = longest(made(False, Mix(source, ("a", "b"), (1.0, 0.0))))
    plan = made(False)
    assert tokens == plan.lengths[:199].max()
    assert targets < longest(plan)[0]
    assert longest(made(False, Mix(source, ("a", "b"), (0.5, 0.1))))[0] == 63


def test_memory_is_tried_with_the_longest_row_though_the_first_step_has_a_shorter_one(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(toy, tmp_path / "scratch", train={"tokens_per_step": 64, "micro_batch": 1})
    for seed in range(1000):
        train = replace(bench.settings.train, seed=seed)
        bench.settings = replace(bench.settings, train=train)
        plan = make_plan(bench.settings, bench.prepared, True)
        if int(plan.lengths[plan.step(0)[0]].sum()) <= 48:
            break
    else:
        raise AssertionError("no step begins with a short row")
    asked: dict[str, Any] = {}
    monkeypatch.setattr("trainer.loop.loop.check_fit", lambda *_, **values: asked.update(values))
    bench.loop().start()
    assert asked["tokens"] == 64
    assert 0 < asked["share"] <= 1
