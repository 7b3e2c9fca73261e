"""The promotion rule, case by case."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropforge.promotion import Gain, Guard, Policy, decide, gain_from, policy_of, verdict_as_dict
from tests.markdown import narrow

LOSS = "eval/loss"


def loss(value: float) -> dict[str, float]:
    return {LOSS: value}


@pytest.mark.parametrize(
    ("candidate", "champion", "base", "policy", "promote"),
    [
        (2.0, None, 3.0, Policy(), True),
        (2.0, None, None, Policy(), True),
        (3.5, None, 3.0, Policy(), False),
        (3.5, None, 3.0, Policy(better_than_base=False), True),
        (2.0, 2.5, 3.0, Policy(), True),
        (2.5, 2.5, 3.0, Policy(), False),
        (2.6, 2.5, 3.0, Policy(), False),
        (2.6, 2.5, 3.0, Policy(min_improvement=-0.05), True),
        (2.45, 2.5, 3.0, Policy(min_improvement=0.05), False),
        (2.3, 2.5, 3.0, Policy(min_improvement=0.05), True),
        (math.nan, 2.5, 3.0, Policy(), False),
        (math.inf, None, None, Policy(), False),
        (2.0, math.nan, 3.0, Policy(), False),
    ],
)
def test_losses(candidate: float, champion: float | None, base: float | None, policy: Policy, promote: bool) -> None:
    verdict = decide(
        loss(candidate),
        None if champion is None else loss(champion),
        None if base is None else loss(base),
        policy,
    )
    assert verdict.promote is promote, verdict.reason
    assert verdict.reason


def test_higher_is_better_where_the_policy_says_so() -> None:
    policy = Policy(metric="eval/accuracy", direction="higher")
    assert decide({"eval/accuracy": 0.8}, {"eval/accuracy": 0.7}, None, policy).promote
    assert not decide({"eval/accuracy": 0.6}, {"eval/accuracy": 0.7}, None, policy).promote


@pytest.mark.parametrize("same", [True, False])
def test_answers_are_texts_and_decide_between_any_tokenizers(same: bool) -> None:
    recipe = {"metric": "gen/rouge-l", "min_improvement": 0.1, "better_than_base": True}
    policy = policy_of(recipe, same_tokenizer=same)
    assert (policy.metric, policy.direction) == ("gen/rouge-l", "higher")
    champion, base = {"gen/rouge-l": 0.5}, {"gen/rouge-l": 0.2}
    assert decide({"gen/rouge-l": 0.6}, champion, base, policy).promote
    assert not decide({"gen/rouge-l": 0.54}, champion, base, policy).promote
    assert not decide({"gen/rouge-l": 0.0}, None, {"gen/rouge-l": 0.0}, policy).promote
    losses = policy_of({**recipe, "metric": "eval/loss"}, same_tokenizer=same)
    assert losses.metric == ("eval/loss" if same else "eval/bits_per_byte")


def test_a_missing_metric_never_promotes() -> None:
    assert not decide({}, None, None, Policy()).promote


@given(st.floats(0.1, 10), st.floats(0.1, 10))
def test_two_models_cannot_each_replace_the_other(one: float, two: float) -> None:
    policy = Policy(better_than_base=False)
    assert not (
        decide(loss(one), loss(two), None, policy).promote and decide(loss(two), loss(one), None, policy).promote
    )


def test_the_table_shows_every_check() -> None:
    text = decide(loss(2.0), loss(2.5), loss(3.0), Policy()).as_markdown()
    assert "better than champion | 2.0000 | 2.5000 | yes" in narrow(text)
    assert text.count("\n") == 4


def test_figures_of_two_precisions_do_not_compare() -> None:
    verdict = decide(loss(2.0) | {"precision": "fp32"}, None, loss(3.0) | {"precision": "bf16"}, Policy())  # type: ignore[operator]
    assert not verdict.promote
    assert "measured in bf16, the candidate in fp32" in verdict.reason
    assert decide(loss(2.0) | {"precision": "bf16"}, None, loss(3.0) | {"precision": "bf16"}, Policy()).promote  # type: ignore[operator]
    assert decide(loss(2.0) | {"precision": "fp32"}, None, loss(3.0), Policy()).promote  # type: ignore[operator]


def test_classifiers_compare_whatever_their_tokenizers() -> None:
    promote = {"metric": "eval/macro_f1", "min_improvement": 0.0, "better_than_base": False}
    policy = policy_of(promote, same_tokenizer=False, task="classification")
    assert (policy.metric, policy.direction) == ("eval/macro_f1", "higher")
    assert decide({"eval/macro_f1": 0.8}, {"eval/macro_f1": 0.7}, None, policy).promote
    assert not decide({"eval/macro_f1": 0.6}, {"eval/macro_f1": 0.7}, None, policy).promote
    assert policy_of(promote, same_tokenizer=False).metric == "eval/bits_per_byte"


def guarded(candidate: dict[str, float], champion: dict[str, float] | None, *guards: dict[str, object], **more: bool):  # type: ignore[no-untyped-def]
    """The verdict on a candidate that is better by its loss."""
    promote = {"metric": LOSS, "min_improvement": 0.0, "better_than_base": False, "guards": guards}
    policy = policy_of(promote, same_tokenizer=more.get("same", True))
    bits = {"eval/bits_per_byte": 1.0}
    return decide({**bits, **loss(2.0), **candidate}, champion and {**bits, **loss(2.5), **champion}, None, policy)


ROUGE = {"metric": "gen/rouge-l"}


@pytest.mark.parametrize(
    ("rouge", "champion", "guard", "promote"),
    [
        (0.2, 0.5, {"at_least": 0.2}, True),
        (0.19, 0.5, {"at_least": 0.2}, False),
        (0.9, None, {"at_most": 0.8}, False),
        (0.5, 0.5, {"max_regression": 0.0}, True),
        (0.49, 0.5, {"max_regression": 0.0}, False),
        (0.49, 0.5, {"max_regression": 0.05}, True),
        (0.6, 0.5, {"max_regression": 0.0}, True),
        (0.1, None, {"max_regression": 0.0}, True),
        (0.1, math.nan, {"max_regression": 0.0}, False),
        (math.nan, 0.5, {"max_regression": 0.5}, False),
        (0.0, 0.0, {"max_regression": 0.0, "at_least": 0.0}, True),
    ],
)
def test_a_better_loss_does_not_outweigh_a_guard(
    rouge: float, champion: float | None, guard: dict[str, float], promote: bool
) -> None:
    verdict = guarded(
        {"gen/rouge-l": rouge}, None if champion is None else {"gen/rouge-l": champion}, {**ROUGE, **guard}
    )
    assert verdict.promote is promote, verdict.reason
    if not promote:
        assert "gen/rouge-l" in verdict.reason


def test_a_guard_of_a_lower_metric_looks_the_other_way_and_every_limit_has_its_row() -> None:
    guard = {"metric": "eval/perplexity", "at_most": 9.0, "max_regression": 0.1}
    verdict = guarded({"eval/perplexity": 8.7}, {"eval/perplexity": 8.0}, guard)
    assert verdict.promote
    rows = [check for check in verdict.checks if check.name == "guard"]
    assert [check.reference for check in rows] == [9.0, 8.0]
    assert "worse than the champion's by 8.75%; 10.00% is let pass" in verdict.as_markdown()
    assert not guarded({"eval/perplexity": 8.9}, {"eval/perplexity": 8.0}, guard).promote


def test_between_tokenizers_a_guard_holds_bits_per_byte_against_the_champion() -> None:
    verdict = guarded(
        {"eval/perplexity": 99.0},
        {"eval/perplexity": 1.0},
        {"metric": "eval/perplexity", "max_regression": 0.0},
        same=False,
    )
    assert verdict.checks[-1].candidate == 1.0
    assert "eval/bits_per_byte" in verdict.checks[-1].reason


def test_a_guard_that_nobody_measured_holds_the_candidate_back() -> None:
    verdict = guarded({}, None, {**ROUGE, "at_least": 0.1})
    assert not verdict.promote
    assert "has no finite gen/rouge-l, which is guarded" in verdict.reason


def sure(low: float | None, *, value: float = 0.2, needed: float = 0.0, **more: object) -> tuple[bool, str]:
    """Whether a candidate is promoted whose loss is a fifth lower, if the gain must hold with 95% confidence."""
    promote = {"metric": LOSS, "min_improvement": needed, "better_than_base": False, "confidence": 0.95}
    policy = policy_of(promote, same_tokenizer=True)
    values = {"metric": LOSS, "confidence": 0.95, "rows": 40, "value": value, "low": low, "high": 0.3, **more}
    verdict = decide(loss(2.0), loss(2.5), None, policy, gain_from(values))
    return verdict.promote, verdict.reason


@pytest.mark.parametrize(
    ("low", "needed", "promote"),
    [
        (0.1, 0.0, True),
        (0.0, 0.0, False),
        (-0.01, 0.0, False),
        (0.06, 0.05, True),
        (0.05, 0.05, False),
        (-0.01, -0.02, True),
        (-0.02, -0.02, True),
        (-0.03, -0.02, False),
        (None, -0.5, False),
    ],
)
def test_a_gain_must_hold_with_the_confidence_that_is_asked_for(
    low: float | None, needed: float, promote: bool
) -> None:
    assert sure(low, needed=needed)[0] is promote


def test_the_table_shows_the_interval_and_few_rows_say_so() -> None:
    reason = sure(-0.01)[1]
    assert "gain in eval/loss is 20.00%, from -1.00% to 30.00% with 95% confidence, by 40 rows; " in reason
    assert "more than 0.00% is needed" in reason
    reason = sure(None, rows=7)[1]
    assert "7 rows are too few to say anything with 95% confidence: keep more rows" in reason
    assert "more than 10000%" in str(Gain("gen/rouge-l", 0.9, 30, 3e8, 0.1, 3e8))


def test_an_interval_of_something_else_is_none() -> None:
    for other in ({"metric": "eval/bits_per_byte"}, {"confidence": 0.9}):
        promote, reason = sure(0.1, **other)
        assert not promote
        assert "clear the task `evaluate`" in reason
    policy = Policy(better_than_base=False, confidence=0.95)
    assert not decide(loss(2.0), loss(2.5), None, policy).promote
    assert decide(loss(2.0), None, None, policy).promote  # nobody to be better than


def test_a_verdict_is_plain_values() -> None:
    policy = Policy(better_than_base=False, confidence=0.95)
    verdict = decide(loss(2.0), loss(2.5), None, policy, Gain(LOSS, 0.95, 40, 0.2, 0.1, 0.3))
    (check,) = [check for check in verdict_as_dict(verdict)["checks"] if check["name"] == "gain is sure"]
    assert (check["candidate"], check["reference"], check["passed"]) == (0.1, 0.0, True)


PROMOTE = {"metric": "eval/loss", "min_improvement": 0.1, "better_than_base": False}


@pytest.mark.parametrize(
    ("mine", "theirs", "guards", "promote", "told"),
    [
        ({"loss": 2.0}, {"loss": 2.0}, [], True, ""),
        ({"loss": 2.01}, {"loss": 2.0}, [], False, "holdout/loss is worse than the champion's by 0.50%"),
        ({"loss": 2.01}, {"loss": 2.0}, [{"metric": "holdout/loss", "max_regression": 0.01}], True, ""),
        ({"loss": 2.01}, {"loss": 2.0}, [{"metric": "holdout/loss", "at_most": 3.0}], False, "holdout/loss is worse"),
        ({"loss": 2.0}, {"loss": 2.0}, [{"metric": "holdout/loss", "at_most": 1.5}], False, "must be at most 1.5"),
        ({}, {"loss": 2.0}, [], False, "no finite holdout/loss, which is guarded"),
        ({"loss": 2.0}, {}, [], False, "the champion has no finite holdout/loss to hold it against"),
    ],
)
def test_on_the_family_s_own_rows_a_candidate_may_be_no_worse(
    mine: dict[str, float], theirs: dict[str, float], guards: list[dict[str, object]], promote: bool, told: str
) -> None:
    """However much better it is on those of the drop."""
    policy = policy_of({**PROMOTE, "guards": guards}, same_tokenizer=True, held_out=True)
    candidate, champion = (
        {LOSS: value, **{f"holdout/{name}": figure for name, figure in found.items()}}
        for value, found in ((1.0, mine), (2.0, theirs))
    )
    verdict = decide(candidate, champion, None, policy)
    assert verdict.promote is promote, verdict.reason
    assert told in verdict.reason


@pytest.mark.parametrize(
    ("metric", "same", "task", "there"),
    [
        ("eval/accuracy", True, "causal-lm", "holdout/accuracy"),
        ("eval/accuracy", False, "causal-lm", "holdout/bits_per_byte"),
        ("gen/rouge-l", True, "causal-lm", "holdout/loss"),
        ("gen/rouge-l", False, "causal-lm", "holdout/bits_per_byte"),
        ("eval/macro_f1", False, "classification", "holdout/macro_f1"),
    ],
)
def test_they_are_compared_by_what_decides_and_can_be_compared(metric: str, same: bool, task: str, there: str) -> None:
    promote = {**PROMOTE, "metric": metric}
    (guard,) = policy_of(promote, same_tokenizer=same, task=task, held_out=True).guards
    assert (guard.metric, guard.max_regression) == (there, 0.0)
    assert guard.direction == ("higher" if there in ("holdout/accuracy", "holdout/macro_f1") else "lower")
    assert policy_of(promote, same_tokenizer=same, task=task).guards == ()


def test_a_champion_without_a_figure_keeps_its_place() -> None:
    """Whoever uploads rows on which it has none would choose the next one."""
    for champion in ({"problem": "its loss on these rows is nan"}, {"eval/loss": math.nan}, {}):
        verdict = decide({"eval/loss": 1.0}, champion, None, Policy(better_than_base=False))
        assert not verdict.promote
        assert "the champion has no finite eval/loss to beat" in verdict.reason
        assert "Take its alias away" in verdict.reason
    guarded = Policy(better_than_base=False, guards=(Guard("holdout/loss", "lower", max_regression=0.0),))
    verdict = decide({"eval/loss": 1.0, "holdout/loss": 1.0}, {"eval/loss": 2.0}, None, guarded)
    assert not verdict.promote
    assert "the champion has no finite holdout/loss to hold it against" in verdict.reason
    cost = Policy(better_than_base=False, guards=(Guard("cost/gpu_hours", "lower", max_regression=0.0),))
    assert decide({"eval/loss": 1.0, "cost/gpu_hours": 1.0}, {"eval/loss": 2.0}, None, cost).promote


def test_rows_of_labels_that_the_champion_does_not_know_are_compared_without() -> None:
    policy = Policy("eval/accuracy", "higher", better_than_base=False)
    candidate, champion = {"eval/accuracy": 0.9}, {"eval/accuracy": 0.7}
    assert decide(candidate, champion, None, policy).promote
    assert not decide(candidate, champion, None, policy, shared={"eval/accuracy": 0.6}).promote
    assert not decide(candidate | {"holdout/lost_labels": 3}, champion, None, policy).promote


@pytest.mark.parametrize(
    ("guard", "champion", "promote"),
    [
        ({"metric": "holdout/accuracy", "at_least": 0.9}, False, False),
        ({"metric": "holdout/loss", "at_most": 1.0}, False, False),
        ({"metric": "holdout/accuracy", "max_regression": 0.1}, False, True),  # nobody is there to be held against
        ({"metric": "eval/accuracy", "at_least": 0.9}, False, True),
        ({"metric": "holdout/accuracy", "at_least": 0.9}, True, True),  # it does not know them either, or they are lost
    ],
    ids=["at least", "at most", "no worse", "own rows", "champion"],
)
def test_a_first_candidate_passes_no_limit_by_labels_that_it_does_not_know(
    guard: dict[str, object], champion: bool, promote: bool
) -> None:
    """A drop of two labels of ten left the rows of the others out of the family's own, and passed with all of them."""
    figures = {"eval/accuracy": 0.95, "holdout/accuracy": 0.95, "holdout/loss": 0.1, "holdout/unseen_labels": 160}
    policy = policy_of(
        {"metric": "eval/accuracy", "min_improvement": -0.1, "better_than_base": False, "guards": [guard]},
        same_tokenizer=True,
        task="classification",
        held_out=True,
    )
    verdict = decide(figures, figures if champion else None, None, policy)
    assert verdict.promote is promote
    assert ("the candidate does not know the labels of 160 rows of the holdout" in verdict.reason) is not promote
    assert decide(figures | {"holdout/unseen_labels": 0}, None, None, policy).promote
