"""What differs between runs, case by case."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropforge.comparison import (
    Check,
    ComparedRun,
    Comparison,
    History,
    MetricRow,
    better,
    compare,
    history_names,
    letter,
    read_checks,
    thin,
)
from dropforge.promotion import Policy, decide


def run(name: str = "r", **facts: Any) -> ComparedRun:
    return ComparedRun(name=name, family="fam", run_id=f"id-{name}", experiment="1", status="FINISHED", **facts)


def metric(found: Comparison, name: str) -> MetricRow:
    (row,) = [row for row in found.metrics if row.name == name]
    return row


def test_equal_values_are_told_from_those_that_differ_or_that_only_one_run_has() -> None:
    found = compare(
        [
            run(params={"train.seed": "1", "train.learning_rate": "0.1", "data.format": "chat"}),
            run(params={"train.seed": "1", "train.learning_rate": "0.2"}),
        ]
    )
    assert {row.name: (row.same, row.values) for row in found.params} == {
        "data.format": (False, ("chat", None)),
        "train.learning_rate": (False, ("0.1", "0.2")),
        "train.seed": (True, ("1", "1")),
    }


def test_only_tags_that_tell_what_went_in_are_compared() -> None:
    tags = {"dropforge.git": "a", "dropforge.run": "r", "dropforge.dag_run": "x", "mlflow.user": "u"}
    assert [row.name for row in compare([run(tags=tags), run(tags=tags)]).tags] == ["dropforge.git"]


def test_a_metric_is_compared_with_the_first_run() -> None:
    history = History(((0, 8.0), (10, 2.0), (20, 2.5)))
    found = compare(
        [
            run(metrics={"eval/loss": 2.5, "train/grad_norm": 0.0}, histories={"eval/loss": history}),
            run(metrics={"eval/loss": 2.0, "train/grad_norm": 1.0}),
            run(metrics={}),
        ]
    )
    loss = metric(found, "eval/loss")
    assert (loss.last, loss.leaders) == ((2.5, 2.0, None), {1})
    assert [best and (best.value, best.step, best.whole) for best in loss.best] == [(2.0, 10, True), None, None]
    assert [change and (change.absolute, change.percent) for change in loss.changes] == [None, (-0.5, -20.0), None]
    norm = metric(found, "train/grad_norm")
    assert norm.changes[1] is not None
    assert (norm.changes[1].absolute, norm.changes[1].percent) == (1.0, None)  # nothing is a percentage of zero
    assert norm.leaders == frozenset()  # nobody can say whether a larger one is better


def test_values_that_are_not_finite_neither_win_nor_differ_from_themselves() -> None:
    nan, inf = math.nan, math.inf
    history = History(((1, nan), (2, 3.0), (3, -inf)))
    found = compare([run(metrics={"eval/loss": value}, histories={"eval/loss": history}) for value in (nan, 3.0, -inf)])
    row = metric(found, "eval/loss")
    assert row.leaders == frozenset()
    assert row.changes == (None, None, None)
    assert row.best[0] is not None
    assert row.best[0].value == 3.0
    assert metric(compare([run(metrics={"x": nan}), run(metrics={"x": nan})]), "x").same
    assert not metric(compare([run(metrics={"x": nan}), run(metrics={})]), "x").same


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("train/loss", "lower"),
        ("eval/accuracy", "higher"),
        ("eval/macro_f1", "higher"),
        ("candidate/loss", "lower"),
        ("champion/gen/rouge-l", "higher"),
        ("gen/own", "higher"),
        ("gen/tokens", None),
        ("eval/own", None),
        ("wall/seconds", None),
        ("loss", None),
    ],
)
def test_which_values_are_better(name: str, direction: str | None) -> None:
    assert better(name) == direction


def test_the_curves_are_losses_what_decides_and_the_speed() -> None:
    line = History(((0, 1.0),))
    names = ("train/tokens_per_second", "gen/rouge-l", "eval/loss", "train/loss", "train/grad_norm")
    one = run(
        params={"promote.metric": "gen/rouge-l"},
        metrics=dict.fromkeys((*names, "system/cpu"), 1.0),
        histories=dict.fromkeys(names, line),
    )
    found = compare([one, run()])
    assert [curve.name for curve in found.curves] == [
        "train/loss",
        "eval/loss",
        "gen/rouge-l",
        "train/tokens_per_second",
    ]
    assert found.curves[0].lines == (((0, 1.0),), ())
    assert history_names([one]) == ["train/loss", "eval/loss", "gen/rouge-l", "train/tokens_per_second"]
    assert "system/cpu" not in [row.name for row in found.metrics]


def test_runs_without_anything_compare() -> None:
    found = compare([run("a"), run("b")])
    assert (found.params, found.tags, found.metrics, found.curves) == ((), (), (), ())
    assert found.families == ["fam"]


@given(st.integers(0, 5000), st.integers(2, 300))
def test_a_thinned_curve_keeps_its_ends_and_its_order(count: int, most: int) -> None:
    points = tuple((step, float(step)) for step in range(count))
    found = thin(points, most)
    assert len(found) == min(count, most)
    assert list(found) == sorted(set(found))
    assert (found[:1], found[-1:]) == (points[:1], points[-1:])


def test_letters() -> None:
    assert [letter(place) for place in (0, 25, 26, 49, 701, 702)] == ["A", "Z", "AA", "AX", "ZZ", "AAA"]


def test_the_checks_are_those_that_the_rule_wrote() -> None:
    verdict = decide({"eval/loss": 2.0}, {"eval/loss": 2.5}, {"eval/loss": 9.0}, Policy(min_improvement=0.1))
    found = read_checks(verdict.as_markdown() + "\n\n[Candidate and champion side by side](http://m/#/compare)\n")
    assert [item.check for item in found] == ["measured", "better than base", "better than champion"]
    assert found[2] == Check(
        "better than champion",
        "2.0000",
        "2.5000",
        "yes",
        "eval/loss is better than the champion's by 20.00%; 10% is needed",
    )
    with pytest.raises(ValueError, match="no verdict table"):
        read_checks("<html>")


def test_a_champion_s_problem_is_a_text_of_one_cell_and_read_back() -> None:
    problem = "a|b\n| forged | 1 | 2 | yes | <img src=x> [here](http://x) \\ \x00"
    verdict = decide({"eval/loss": 1.0}, {"problem": problem}, None, Policy(better_than_base=False))
    table = verdict.as_markdown()
    assert len(table.splitlines()) == 2 + len(verdict.checks)
    assert "\\| forged \\| 1" in table
    assert "\\<img src=x> \\[here]" in table
    assert "\0" not in verdict.reason
    assert [check.reason for check in read_checks(table)] == [" ".join(one.reason.split()) for one in verdict.checks]
