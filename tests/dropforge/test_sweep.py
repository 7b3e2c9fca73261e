"""From a sweep's file to its trials, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropforge.errors import RecipeError
from dropforge.recipes.load import read_yaml
from dropforge.sweep import MOST_TRIALS, Range, Sweep, build_sweep, read_sweep

RECIPE: dict[str, Any] = {"extends": "tiny", "train": {"eval_every": 5}}


def sweep(space: dict[str, Any], **more: Any) -> Sweep:
    return build_sweep({"recipe": RECIPE, "space": space, **more})


def values(found: Sweep) -> list[dict[str, Any]]:
    return [dict(trial.values) for trial in found.made()]


def test_a_grid_that_fits_is_run_whole() -> None:
    found = sweep({"train.weight_decay": [0, 0.1], "train.learning_rate": [1e-3, 1e-2]}, trials=10)
    assert values(found) == [
        {"train.learning_rate": rate, "train.weight_decay": decay} for rate in (1e-3, 1e-2) for decay in (0, 0.1)
    ]
    trial = found.made()[1]
    assert trial.told == "learning_rate 0.001, weight_decay 0.1"
    recipe = found.whole(trial)
    assert (recipe.train.learning_rate, recipe.train.weight_decay, recipe.train.eval_every) == (1e-3, 0.1, 5)


def test_a_range_with_steps_has_both_its_ends() -> None:
    log = {"from": 1e-4, "to": 1e-2, "scale": "log", "steps": 3}
    assert [row["train.learning_rate"] for row in values(sweep({"train.learning_rate": log}))] == [1e-4, 1e-3, 1e-2]
    whole = {"from": 2, "to": 5, "steps": 6, "int": True}
    steps = [row["train.max_steps"] for row in values(sweep({"train.max_steps": whole}))]
    assert steps == [2, 3, 4, 5]
    assert all(type(step) is int for step in steps)


def test_a_grid_that_does_not_fit_is_drawn_from_and_every_part_is_met() -> None:
    space = {"train.learning_rate": {"from": 1e-4, "to": 1e-2, "scale": "log"}, "train.seed": [1, 2, 3, 4]}
    found = sweep(space, trials=8)
    rows = values(found)
    assert len({row["train.learning_rate"] for row in rows}) == 8
    # Two of each value, and one rate in each eighth of the range.
    assert sorted(row["train.seed"] for row in rows) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert values(sweep(space, trials=8)) == rows
    assert values(sweep(space, trials=8, seed=1)) != rows


def test_the_draws_are_these_on_every_machine() -> None:
    found = sweep({"train.learning_rate": {"from": 1e-4, "to": 1e-2, "scale": "log"}}, trials=3)
    assert [row["train.learning_rate"] for row in values(found)] == [0.000198, 0.00349, 0.0007872]


@given(
    low=st.floats(1e-6, 1.0),
    ratio=st.floats(1.001, 1e6),
    share=st.floats(0, 1),
    scale=st.sampled_from(["log", "linear"]),
)
def test_no_value_leaves_its_range(low: float, ratio: float, share: float, scale: str) -> None:
    there = Range.model_validate({"from": low, "to": low * ratio, "scale": scale})
    assert there.low <= there.at(share) <= there.high


@settings(max_examples=25, deadline=None)
@given(number=st.integers(1, 12), seeds=st.integers(1, 5), drawn=st.booleans())
def test_trials_are_different_and_no_more_than_asked_for(number: int, seeds: int, drawn: bool) -> None:
    rate: Any = {"from": 1e-4, "to": 1e-2} if drawn else [1e-3, 2e-3, 3e-3]
    rows = values(sweep({"train.learning_rate": rate, "train.seed": list(range(seeds))}, trials=number))
    assert len({str(row) for row in rows}) == len(rows) == (number if drawn else min(number, 3 * seeds))


REFUSED = [
    (
        {"space": {"train.max_steps": {"from": -1.0e308, "to": 1.0e308, "int": True, "steps": 3}}},
        "sweep key `space.train.max_steps`: an end of it has more than 18 digits",
        "Bring it nearer to 0",
    ),
    (
        {"space": {"train.learning_rate": {"from": -1.0e308, "to": 1.0e308, "steps": 3}}},
        "sweep key `space.train.learning_rate`: an end of it has more than 300 digits",
        "Bring it nearer to 0",
    ),
    ({"spacee": {}}, "sweep key `spacee`", "Did you mean `space`?"),
    ({"train": {"epochs": 1}}, "sweep key `train`", "Did you mean `trials`?"),
    ({"early_stop": {"after": 2}}, "sweep key `early_stop.after`", "Did you mean `early_stop.after_trials`?"),
    ({"recipe": {"train": {}}}, "sweep key `recipe`", "Begin it with `extends: PRESET`"),
    ({"space": {}}, "sweep key `space`", "Dotted recipe keys"),
    ({"space": {"train.learning_rat": [1]}}, "sweep key `space.train.learning_rat`", "`train.learning_rate`"),
    ({"space": {"learning_rate": [1]}}, "sweep key `space.learning_rate`", "`train.learning_rate`"),
    ({"space": {"promote.metric": ["eval/loss"]}}, "sweep key `space.promote.metric`", "Set it under `recipe:`"),
    ({"space": {"data.eval_fraction": [0.1]}}, "sweep key `space.data.eval_fraction`", "Set it under `recipe:`"),
    ({"space": {"compute.backend": ["local"]}}, "sweep key `space.compute.backend`", "Set it under `recipe:`"),
    ({"space": {"train": [{"seed": 1}]}}, "sweep key `space.train`", "Name a key in it"),
    ({"space": {"train.sequence_length": [64, 128]}}, "which tokens of the evaluation rows", "Set it under `recipe:`"),
    ({"space": {"train.lora": [{"r": 1}], "train.lora.r": [2]}}, "`train.lora.r` is a part of it", "Remove one"),
    ({"space": {"train.seed": []}}, "sweep key `space.train.seed`", "Write `[1e-4, 1e-3]`, or a range"),
    ({"space": {"train.seed": 3}}, "it is no list of values", "or a range"),
    ({"space": {"train.seed": [1, 1]}}, "a value is in it twice", "Take one"),
    ({"space": {"train.clip": [1, 1.0]}}, "trials 0 and 1 have the same recipe", "Take one of their values out"),
    ({"space": {"train.seed": ["one"]}}, "trial 0 (seed one), recipe key `train.seed`", "Meaning: "),
    ({"space": {"train.clip": {"from": 2, "to": 1}}}, "1 is not above 2", ""),
    ({"space": {"train.clip": {"from": 0, "to": 1, "scale": "log"}}}, "begins above 0", "Give a small number"),
    ({"space": {"train.clip": {"from": 0, "to": 1, "step": 2}}}, "`space.train.clip.step`", "`space.train.clip.steps`"),
    ({"space": {"train.clip": {"from": 0, "to": 1}}}, "a range without `steps` has no end", "Say how many"),
    ({"space": {"train.seed": list(range(60)), "train.clip": [1, 2]}}, "there are 120 combinations", "Say how many"),
    ({"trials": MOST_TRIALS + 1}, "sweep key `trials`", "all combinations"),
    ({"at_once": 17}, "sweep key `at_once`", "at the same time"),
    ({"recipe": {"extends": "tiny"}, "early_stop": {}}, "sweep key `early_stop`", "eval_every"),
    ({"recipe": {"extends": "tiny", "base": {"start": "champion"}}}, "the champion may be another", "runs/RUN/step-N"),
    ({"recipe": {"extends": "tiny", "curation": {"scope": "family"}}}, "a drop that arrives meanwhile", "scope: drop"),
    ({"space": {"base.scratch.layers": [1, 2]}}, "eval/loss counts tokens", "eval/bits_per_byte"),
]


@pytest.mark.parametrize(("change", "said", "mend"), REFUSED)
def test_what_cannot_work_is_refused_with_its_mend(change: dict[str, Any], said: str, mend: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build_sweep({"recipe": RECIPE, "space": {"train.seed": [1, 2]}, **change})
    assert said in str(caught.value)
    assert mend in caught.value.mend


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("space: {train.max_steps: [0x" + "f" * 5000 + "]}", "a number of 5002 characters, line 2"),
        ("space: {train.max_steps: [0x" + "f" * 4000 + "]}", "`space.train.max_steps`: it is a number of about 4817"),
        ("space: {train.clip: {from: 0, to: " + "9" * 60 + "}}", "`space.train.clip.to`: it is a number of about 60"),
        ("space: {data.split_salt: [2026-11-27]}", "sweep key `space.data.split_salt`: it is a date, in YAML's words"),
    ],
)
def test_a_number_without_end_is_refused_by_its_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "sweep.yaml").write_text(f"recipe: {{extends: tiny}}\n{text}")
    with pytest.raises(RecipeError, match=re.escape(said)):
        read_sweep(tmp_path / "sweep.yaml")


def test_bases_are_compared_by_bytes() -> None:
    recipe = {**RECIPE, "promote": {"metric": "eval/bits_per_byte"}}
    found = build_sweep({"recipe": recipe, "space": {"base.scratch.layers": [1, 2]}})
    assert len(found.made()) == 2


def test_the_form_in_airflow_says_the_same_as_the_file() -> None:
    text = "recipe: {extends: tiny}\nspace:\n  train.learning_rate: {from: 1e-4, to: 1e-2, scale: log, steps: 3}\n"
    file = build_sweep(read_yaml(text))
    assert build_sweep(file.plain()).digest == file.digest
