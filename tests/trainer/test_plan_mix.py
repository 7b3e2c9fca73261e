"""Training rows of several sources, and how often an epoch goes through each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dropforge.errors import DataError, RecipeError
from dropforge.recipes.load import build_recipe
from dropforge.store import open_store
from trainer.assembly import make_plan
from trainer.config import read_settings
from trainer.data.mix import Mix, make_mix, unlike_asked
from trainer.data.plan import Plan
from trainer.prepare import await_prepared

from .ranks import Ranks
from .ranks_loop import Stage, make_stage, train_in_parts
from .test_ranks_parity import apart
from .toy import Toy, recipe, sample_rows, write_dataset

NAMES = ("a", "b", "c")
SOURCE = np.array([0] * 60 + [1] * 30 + [2] * 11, dtype=np.int32)


def mixed(passes: tuple[float, ...], *, packed: bool = True, epochs: float = 1.0, seed: int = 3) -> Plan:
    sizes = np.random.default_rng(0).integers(2, 65, len(SOURCE)).astype(np.int64)
    mix = Mix(SOURCE, NAMES, passes)
    return Plan(sizes, sizes - 1, seed, 64, rows=4, packed=packed, epochs=epochs, max_steps=None, mix=mix)


def times(plan: Plan, epochs: int) -> np.ndarray:
    return sum(plan.epoch(index).times(len(SOURCE)) for index in range(epochs))  # type: ignore[return-value]


@pytest.mark.parametrize("packed", [True, False])
def test_an_epoch_goes_through_each_source_as_often_as_asked(packed: bool) -> None:
    found = times(mixed((1.0, 3.0, 0.0), packed=packed), 1)
    assert set(found[SOURCE == 0]) == {1}
    assert set(found[SOURCE == 1]) == {3}
    assert set(found[SOURCE == 2]) == {0}


@pytest.mark.parametrize("packed", [True, False])
def test_a_part_of_a_source_is_another_part_until_it_is_through(packed: bool) -> None:
    plan = mixed((1.0, 0.5, 2.0), packed=packed, epochs=8.0)
    for epoch in range(1, 9):
        found = times(plan, epoch)[SOURCE == 1]
        assert found.max() - found.min() <= 1, "no document a second time before each was there once"
    got = plan.mixture()["b"]["passes"]
    assert got == pytest.approx(0.5, abs=0.05)
    assert times(plan, 8)[SOURCE == 1].mean() == pytest.approx(8 * got, abs=1)


@pytest.mark.parametrize("packed", [True, False])
def test_sources_stand_in_packs_of_their_own_and_are_shuffled_together(packed: bool) -> None:
    plan = mixed((1.0, 2.0, 1.0), packed=packed, epochs=3.0)
    assert all(len(set(SOURCE[pack])) == 1 for index in range(3) for pack in plan.epoch(index))
    order = [int(SOURCE[pack[0]]) for pack in plan.epoch(0)]
    assert order != sorted(order)
    assert order != [int(SOURCE[pack[0]]) for pack in plan.epoch(1)]


@pytest.mark.parametrize("packed", [True, False])
def test_a_mixed_step_is_a_pure_function_of_its_number_for_any_number_of_ranks(packed: bool) -> None:
    forward, backward = (mixed((1.0, 0.5, 2.5), packed=packed, epochs=4.5) for _ in range(2))
    there = [[pack.tolist() for pack in forward.step(step)] for step in range(forward.steps)]
    back = [[pack.tolist() for pack in backward.step(step)] for step in reversed(range(forward.steps))]
    assert there == back[::-1]
    assert sum(map(len, there)) == forward.packs
    for world in (1, 2, 3):
        for step in range(forward.steps):
            found = [
                pack.tolist()
                for r in range(world)
                for b in forward.share(forward.step(step), r, world, 2)
                for pack in b
            ]
            assert sorted(found) == sorted(there[step])
    assert forward.digest("x") == backward.digest("x") != mixed((1.0, 0.5, 2.0), packed=packed, epochs=4.5).digest("x")


def test_shares_asked_and_got_are_told() -> None:
    told = mixed((1.0, 2.0, 0.0)).mixture()
    assert told["b"]["passes_asked"] == told["b"]["passes"] == 2.0
    assert told["c"]["token_share"] == 0
    assert sum(one["token_share"] for one in told.values()) == pytest.approx(1, abs=1e-3)


def test_a_source_of_few_packs_that_comes_more_often_than_asked_is_told() -> None:
    (told,) = unlike_asked(mixed((1.0, 1.0, 0.05)).mixture())
    assert told.startswith("source c: an epoch goes 0.")
    assert " times through it, and 0.05 were asked: it takes whole packs of a source" in told
    assert unlike_asked(mixed((1.0, 2.0, 0.0)).mixture()) == unlike_asked({}) == []


def test_a_source_that_is_not_there_is_refused_with_those_that_are() -> None:
    counts = np.array([60, 30, 0])
    with pytest.raises(DataError, match=r"'d'.*there is no such source.*'a', 'b'"):
        make_mix({"d": 1.0}, NAMES, SOURCE, counts)
    with pytest.raises(DataError, match=r"'c'.*none of its rows that are used has a token to learn from"):
        make_mix({"c": 1.0}, NAMES, SOURCE, counts)
    with pytest.raises(DataError, match="it leaves nothing"):
        make_mix({"a": 0.0, "b": 0.0}, NAMES, SOURCE, counts)
    assert make_mix(None, NAMES, SOURCE, counts) is None
    found = make_mix({"b": 0.25}, NAMES, SOURCE, counts)
    assert found is not None
    assert found.passes == (1.0, 0.25, 1.0)


STEPS = 6


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """Forty rows of three sources; six steps of 16 rows go through them more than twice."""
    folder = tmp_path_factory.mktemp("mixed")
    rows = [row | {"source": NAMES[index % 3]} for index, row in enumerate(sample_rows(40))]
    toy = Toy(str(folder), write_dataset(open_store(str(folder)), {"train": rows, "eval": sample_rows(9, 1)}))
    train = {"rows_per_step": 16, "tokens_per_step": None, "max_steps": STEPS}
    return make_stage(toy, "mixed", folder / "scratch", train=train, data={"mix": {"b": 2.0, "c": 0.5}})


def test_documents_know_the_source_of_their_row(stage: Stage) -> None:
    prepared = await_prepared(stage.settings, stage.spec, stage.scratch, lambda: None)
    plan = make_plan(stage.settings, prepared, True)
    told = plan.mixture()
    assert {name: one["documents"] for name, one in told.items()} == {"a": 14, "b": 13, "c": 13}
    assert told["b"]["passes"] == 2
    assert told["c"]["passes"] == pytest.approx(0.5, abs=0.1)
    assert plan.passes(plan.steps) > 2


@pytest.mark.dist
@pytest.mark.parametrize("packed", [True, False])
def test_a_mixed_training_goes_on_with_other_numbers_of_ranks(ranks: Ranks, stage: Stage, packed: bool) -> None:
    """Over several epochs, and stopped in the middle of one."""
    stage = stage.change(schedule="constant")
    [(whole, _)] = ranks(train_in_parts, 1, stage, f"whole-{packed}", [STEPS], packed)
    ranks(train_in_parts, 2, stage, f"parts-{packed}", [3], packed)
    (parts, _), *_ = ranks(train_in_parts, 3, stage, f"parts-{packed}", [STEPS], packed)
    assert apart(parts, whole) < 1e-4


@pytest.mark.parametrize("value", [{}, {"": 1.0}, {"a": -1.0}, {"a": 101.0}, {"a": "much"}, ["a"]])
def test_a_mix_that_says_nothing_is_refused(value: Any) -> None:
    plain = recipe()
    with pytest.raises(RecipeError, match=r"data.mix"):
        build_recipe(plain | {"data": plain["data"] | {"mix": value}})
    with pytest.raises(RecipeError, match=r"data\.mix"):
        read_settings(plain | {"data": plain["data"] | {"mix": value}})


def test_a_source_that_is_not_there_ends_the_preparation(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"source 'wiki': there is no such source.*The sources are: 't'"):
        make_stage(toy, "lost", tmp_path / "scratch", data={"mix": {"wiki": 2.0}})


def test_the_plan_command_tells_what_an_epoch_takes() -> None:
    from trainer.commands.plan import _sources

    [(name, told)] = _sources(mixed((1.0, 2.0, 0.5)).mixture())
    assert name == "sources"
    assert "b: 2 passes over 30 documents (2 asked), " in told
    assert len(told.splitlines()) == 3
    assert _sources({}) == []
