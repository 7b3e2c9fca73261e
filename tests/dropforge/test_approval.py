"""A person's word on a promotion."""

from __future__ import annotations

from typing import Any

import pytest

from dropforge import approval, confirmation, layout
from dropforge.approval import Answer, Pair, answered
from dropforge.install.access import COMPONENTS
from dropforge.json_objects import UnreadableError
from dropforge.promotion import Policy, decide
from dropforge.store import Store
from tests.markdown import narrow

AT = "2026-11-24T05:00:00Z"
PASSED = decide({"eval/loss": 1.0}, None, {"eval/loss": 5.0}, Policy())
FAILED = decide({"eval/loss": 9.0}, None, {"eval/loss": 5.0}, Policy())


@pytest.mark.parametrize(
    ("answer", "promote", "reason"),
    [
        (None, False, "awaiting approval"),
        (Answer(True, "ann", AT), True, f"ann said yes at {AT}"),
        (Answer(False, "ann", AT), False, f"ann said no at {AT}"),
        (Answer(False, None, AT), False, f"no one answered by {AT}, which counts as no"),
        (Answer(True, None, AT), True, f"no one answered by {AT}, which counts as yes"),
    ],
)
def test_the_word_is_the_last_check(answer: Answer | None, promote: bool, reason: str) -> None:
    verdict = answered(PASSED, answer)
    assert verdict.promote is promote
    assert verdict.checks[:-1] == PASSED.checks
    assert reason in verdict.reason
    assert f"| approved | - | - | {'yes' if promote else 'no'} | {reason} |" in narrow(verdict.as_markdown())


@pytest.mark.parametrize(
    ("answer", "promote"),
    [
        (Answer(True, "Ann", AT, "7"), True),
        (Answer(True, "7", AT), True),  # as an older version kept it
        (Answer(True, "ann", AT), False),
        (Answer(True, "Bob", AT, "8"), False),
        (Answer(True, None, AT), False),
        (Answer(False, "Ann", AT, "7"), False),
    ],
)
def test_a_yes_counts_of_those_alone_who_are_asked_by_now(answer: Answer, promote: bool) -> None:
    verdict = answered(PASSED, answer, people=["7"], silence=False)
    assert verdict.promote is promote
    assert answer.told in verdict.reason


def test_a_person_s_word_lies_where_no_pod_writes(store: Store) -> None:
    approval.write(store, "run-1", Pair("a" * 64, "3"), Answer(True, "ann", AT))
    confirmation.write(store, "run-1", confirmation.Word(True, "ann", AT), {})
    keys = [info.key for info in store.list("")]
    (pods,) = (one for one in COMPONENTS if one.name == "trainer")
    (tasks,) = (one for one in COMPONENTS if one.name == "tasks")
    assert len(keys) == 2
    assert not any(key.startswith(pods.writes) for key in keys)
    assert all(key.startswith(tasks.writes) for key in keys)


@pytest.mark.parametrize(
    ("digest", "champion", "named"),
    [
        ("a" * 64, "4](http://e.example)\n\n# Reviewed: press Promote", r"`champion_version` of evaluation\.json"),
        ("a" * 64, ["4"], r"`champion_version` of evaluation\.json"),
        ("a`](http://e.example)", "4", r"`model\.digest` of report\.json"),
    ],
)
def test_what_a_pod_wrote_into_its_run_words_no_question(digest: str, champion: Any, named: str) -> None:
    with pytest.raises(UnreadableError, match=named) as error:
        Pair.of({"model": {"digest": digest}}, {"champion_version": champion})
    assert len(str(error.value)) < 500
    assert Pair.of({"model": {"digest": "a" * 64}}, {"champion_version": 4}) == Pair("a" * 64, "4")


@pytest.mark.parametrize("pair", [Pair("a" * 64, "3"), Pair("b" * 64, None)])
def test_a_question_is_kept_by_its_pair(pair: Pair) -> None:
    assert Pair.asked(pair.about) == pair
    assert Pair.asked("") is None  # what an older version asked


def test_a_yes_saves_no_candidate_that_failed() -> None:
    assert answered(FAILED, Answer(True, "ann", AT)) == FAILED


def test_an_answer_is_for_one_candidate_against_one_champion(store: Store) -> None:
    first, none = Pair("a" * 64, "3"), Pair("a" * 64, None)
    assert approval.read(store, "run-1", first) is None
    approval.write(store, "run-1", first, Answer(True, "ann", AT))
    assert approval.read(store, "run-1", first) == Answer(True, "ann", AT)
    for other in (none, Pair("a" * 64, "4"), Pair("b" * 64, "3"), Pair("a" * 63 + "b", "3")):
        assert approval.read(store, "run-1", other) is None
    approval.write(store, "run-1", none, Answer(False, None, AT))
    approval.write(store, "run-1", first, Answer(False, "bob", AT))
    assert approval.read(store, "run-1", first) == Answer(False, "bob", AT)
    assert approval.read(store, "run-1", none) == Answer(False, None, AT)


def test_an_answer_that_is_asked_anew_counts_no_more_and_can_be_read_by_people(store: Store) -> None:
    pair = Pair("a" * 64, "3")
    assert not approval.withdraw(store, "run-1", pair)
    approval.write(store, "run-1", pair, Answer(True, "ann", AT))
    assert approval.withdraw(store, "run-1", pair)
    assert approval.read(store, "run-1", pair) is None
    assert not approval.withdraw(store, "run-1", pair)
    assert b'"ann"' in store.get(layout.approval_key("run-1", pair.candidate, pair.champion))
    approval.write(store, "run-1", pair, Answer(False, "bob", AT))
    assert approval.read(store, "run-1", pair) == Answer(False, "bob", AT)
