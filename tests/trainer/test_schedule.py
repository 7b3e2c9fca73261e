"""Learning rates are pure functions of the step, and those that torch and transformers know too."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropforge.errors import RecipeError
from trainer.config import Train, read_settings
from trainer.loop.schedule import check_steps, count_steps, drops, learning_rate

from .toy import recipe

KINDS = ("constant", "linear", "cosine", "exponential", "step", "plateau", "wsd")
PLAIN = read_settings(recipe(train={"learning_rate": 1.0})).train


def train(**values: Any) -> Train:
    return dataclasses.replace(PLAIN, **values)


def rates(steps: int, **values: Any) -> list[float]:
    return [learning_rate(train(**values), step, steps) for step in range(steps)]


def theirs(make: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 60),
    st.floats(0, 0.99) | st.integers(1, 50).map(float),
    st.floats(0, 1),
    st.lists(st.floats(0, 9) | st.just(float("nan")), max_size=8),
)
def test_every_schedule_warms_up_to_the_peak_and_stays_above_the_minimum(
    kind: Any, steps: int, warmup: float, least: float, losses: list[float]
) -> None:
    made = train(schedule=kind, warmup=warmup, min_rate=least)
    seen = [{"step": step, "eval/loss": loss} for step, loss in enumerate(losses)]
    found = [learning_rate(made, step, steps, seen) for step in range(steps)]
    first = min(count_steps(warmup, steps), steps)
    assert found[:first] == sorted(found[:first])
    assert all(0 < rate < 1 for rate in found[:first])
    assert all(least - 1e-12 <= rate <= 1 for rate in found[first:])
    assert found[first:] == sorted(found[first:], reverse=True)
    if first < steps and kind != "plateau":
        assert found[first] == pytest.approx(1.0)


def test_warm_up_is_a_share_or_a_number_of_steps_and_that_of_torch() -> None:
    expected = theirs(lambda o: torch.optim.lr_scheduler.LinearLR(o, 1 / 4, total_iters=3), 12)
    assert rates(12, schedule="constant", warmup=3.0) == pytest.approx(expected)
    assert rates(12, schedule="constant", warmup=0.25) == pytest.approx(expected)


def test_the_schedules_are_those_of_torch() -> None:
    library = torch.optim.lr_scheduler
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"schedule": "cosine", "min_rate": 0.1}, lambda o: library.CosineAnnealingLR(o, 20, eta_min=0.1)),
        ({"schedule": "linear", "min_rate": 0.2}, lambda o: library.LinearLR(o, 1.0, 0.2, total_iters=20)),
        ({"schedule": "exponential", "drop_factor": 0.3}, lambda o: library.ExponentialLR(o, 0.3 ** (1 / 20))),
        ({"schedule": "step", "drop_factor": 0.5, "drop_every": 6.0}, lambda o: library.StepLR(o, 6, 0.5)),
        ({"schedule": "step", "drop_factor": 0.5, "drop_every": 0.3}, lambda o: library.StepLR(o, 6, 0.5)),
    ]
    for values, make in cases:
        assert rates(20, warmup=0.0, **values) == pytest.approx(theirs(make, 20)), values


def test_warm_up_stable_decay_is_that_of_transformers() -> None:
    from transformers.optimization import get_wsd_schedule

    def make(optimizer: Any) -> Any:
        return get_wsd_schedule(optimizer, 0, 5, num_training_steps=20, decay_type="1-sqrt", min_lr_ratio=0.1)

    expected = theirs(make, 20)
    assert rates(20, schedule="wsd", warmup=0.0, decay=5.0, min_rate=0.1) == pytest.approx(expected)
    assert rates(20, schedule="wsd", warmup=0.0, decay=0.25, min_rate=0.1) == pytest.approx(expected)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=25), st.integers(1, 4))
def test_plateaus_are_those_of_torch(losses: list[int], patience: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    peer = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=patience, threshold=0.0, eps=0.0)
    seen = []
    for number, loss in enumerate(losses):
        seen.append({"step": number + 1, "eval/loss": float(loss)})
        peer.step(float(loss))
        assert optimizer.param_groups[0]["lr"] == 0.5 ** drops(seen, patience)


def test_a_plateau_counts_neither_what_was_before_training_nor_what_is_to_come() -> None:
    made = train(schedule="plateau", warmup=0.0, drop_factor=0.5, plateau_patience=1)
    seen = [{"step": step, "eval/loss": loss} for step, loss in ((0, 1.0), (2, 3.0), (4, 3.0), (6, 3.0), (8, 3.0))]
    assert [learning_rate(made, step, 10, seen) for step in (0, 4, 5, 6, 9)] == [1.0, 1.0, 1.0, 0.5, 0.5]


def test_parts_that_do_not_fit_into_the_steps_are_refused() -> None:
    check_steps(train(schedule="wsd", warmup=2.0, decay=3.0), 5)
    with pytest.raises(RecipeError, match="3 steps of warm-up and 3 of decay do not fit into 5 steps"):
        check_steps(train(schedule="wsd", warmup=3.0, decay=3.0), 5)
    with pytest.raises(RecipeError, match="5 steps of warm-up do not fit into 5 steps"):
        check_steps(train(warmup=5.0), 5)
