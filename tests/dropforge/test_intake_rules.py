"""What a family's rules of intake decide: pure, and the same whenever it is asked again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dropforge.intake_rules import Decision, Intake, Known, Waiting, decide, divide, remember

NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)


def drop(number: int, minutes: float = 0, **more: Any) -> Waiting:
    """A drop that came so many minutes ago."""
    at = NOW - timedelta(minutes=minutes)
    values = {"id": f"id{number}", "drop": f"d{number}", "at": at, "completed": at.timestamp(), "place": "b", **more}
    return Waiting(**values)


def test_a_rate_lets_the_oldest_go_and_says_when_the_next_may() -> None:
    rules = Intake(rate="2 per hour")
    drops = [drop(number, 10 - number) for number in range(4)]
    decided = decide(rules, drops, Known(), NOW)
    assert decided.go == ("id0", "id1")
    assert decided.until == NOW + timedelta(hours=1)
    assert decided.held["id3"] == (
        "its family takes 2 per hour (intake.rate); the next one from 2026-11-24 13:00:00 UTC"
    )
    known = remember(rules, drops, Known(), decided.go, NOW)
    assert decide(rules, drops[2:], known, NOW + timedelta(minutes=59)).go == ()
    assert decide(rules, drops[2:], known, NOW + timedelta(hours=1)).go == ("id2", "id3")


def test_what_was_announced_takes_no_second_turn() -> None:
    rules = Intake(rate="1 per day")
    known = remember(rules, [drop(1)], Known(), ["id1"], NOW - timedelta(hours=1))
    # An intake that was cut off before it noted the event in the marker, and one whose event was lost.
    for again in (drop(1), drop(1, announced=True)):
        assert decide(rules, [again, drop(2)], known, NOW).go == ("id1",)
        assert remember(rules, [again], known, ["id1"], NOW) == known
    # Drops that were announced before the family had rules are not called back, and take no turn.
    before = [drop(3, announced=True), drop(4)]
    assert decide(rules, before, Known(), NOW).go == ("id3", "id4")
    assert list(remember(rules, before, Known(), ["id3", "id4"], NOW).announced) == ["id4"]


def test_a_window_opens_with_the_first_drop_and_takes_all_that_came_until_it_closes() -> None:
    rules = Intake(window="30 minutes")
    drops = [drop(1, 29), drop(2, 5)]
    decided = decide(rules, drops, Known(), NOW)
    assert (decided.go, decided.batches) == ((), ())
    assert decided.until == NOW + timedelta(minutes=1)
    assert set(decided.held) == {"id1", "id2"}
    decided = decide(rules, [*drops, drop(3, -0.5)], Known(), NOW + timedelta(minutes=1))
    assert decided.batches == (("id1", "id2", "id3"),)
    made = drop(9, batch=True)
    assert decide(rules, [made, drop(4)], Known(), NOW).go == ("id9",)


def test_a_window_that_closed_without_a_turn_goes_on_gathering() -> None:
    rules = Intake(window="30 minutes", rate="1 per day")
    known = Known({"x": NOW - timedelta(hours=23)})
    late = [drop(1, 40), drop(2, 1)]
    decided = decide(rules, late, known, NOW)
    assert decided.batches == ()
    assert decided.until == NOW + timedelta(hours=1)
    decided = decide(rules, [*late, drop(3, -30)], known, NOW + timedelta(hours=1))
    assert decided.batches == (("id1", "id2", "id3"),)
    # A batch that is made has its turn before a new one is.
    decided = decide(rules, [drop(9, 1, batch=True), drop(4, 90)], Known(), NOW)
    assert (decided.go, decided.batches) == (("id9",), ())


def test_a_batch_is_of_one_bucket_and_has_a_name_once() -> None:
    rules = Intake(window="1 minute")
    drops = [drop(1, 9, drop="same"), drop(2, 8, drop="same"), drop(3, 7, drop="same", place="other")]
    decided = decide(rules, drops, Known(), NOW)
    assert decided.batches == (("id2",), ("id3",))
    assert list(decided.passed) == ["id1"]
    assert "a newer upload under its name (id id2)" in decided.passed["id1"]


def test_a_batch_is_no_larger_than_a_drop_may_be() -> None:
    rules = Intake(window="30 minutes")

    def parts(sizes: list[int], most: float | None = None, **more: int) -> list[int]:
        drops = [drop(number, 90 - number / 100, size=size, **more) for number, size in enumerate(sizes)]
        return [len(batch) for batch in decide(rules, drops, Known(), NOW, most).batches]

    assert parts([54, 54, 54]) == [3]
    assert parts([54, 54, 46, 54], 100) == [1, 2, 1]
    assert parts([10, 1000, 10, 10], 100) == [1, 1, 2]  # what is too much alone is refused by its own run
    assert parts([0, 0, 0], files=50_000) == [2, 1]
    assert parts([0] * 1001) == [1000, 1]


def test_drops_of_a_refused_batch_are_a_batch_of_their_own_at_once() -> None:
    drops = [drop(1, 50, at=NOW, group="b-first"), drop(2, 40, at=NOW, group="b-second"), drop(3, 1), drop(4, 90)]
    drops += [drop(5, 30, at=NOW, group="b-first"), drop(6, 20, at=NOW, group="b-first", place="other")]
    decided = decide(Intake(window="2 hours"), drops, Known(), NOW)
    assert decided.batches == (("id1", "id5"), ("id2",), ("id6",))
    assert set(decided.held) == {"id3", "id4"}
    assert decide(Intake(window="2 hours", rate="1 per day"), drops, Known(), NOW).batches == (("id1", "id5"),)


def test_the_drop_that_a_refusal_names_is_parted_from_the_others() -> None:
    drops = ["d1", "d10", "d11"]
    assert divide(drops, "file 'd10/a.jsonl' of the drop drops/fam/: it is gone") == (["d10"], ["d1", "d11"])
    assert divide(drops, """file "d1/it's.jsonl", row 1: bad""") == (["d1"], ["d10", "d11"])
    assert divide(drops, "rule `few rows quarantined`: d11/a.jsonl (50 of bad_json)") == (["d11"], ["d1", "d10"])
    assert divide(drops, "dataset fam/ab, rule `rows`: too few") == (["d1"], ["d10", "d11"])
    assert divide([*drops, "d2"], "file 'd1/x', not file 'd2/x'") == (["d1", "d10"], ["d11", "d2"])


def test_latest_only_takes_the_newest_upload_whatever_the_order_of_the_messages() -> None:
    rules = Intake(latest_only=True)
    new, old = drop(2, 1), drop(1, 60)
    decided = decide(rules, [new, old], Known(), NOW)
    assert decided.go == ("id2",)
    assert decided.passed == {"id1": "superseded by drop d2 (id id2), which is newer (intake.latest_only)"}
    known = remember(rules, [new, old], Known(), decided.go, NOW)
    # A message that is late by an hour: its drop is older than one that a run has already.
    assert list(decide(rules, [drop(3, 30)], known, NOW).passed) == ["id3"]
    assert decide(rules, [drop(4)], known, NOW).go == ("id4",)
    # One that was announced and has no run yet is superseded too; its run finds the claim and is skipped.
    assert list(decide(rules, [drop(2, 1, announced=True), drop(4)], known, NOW).passed) == ["id2"]


def test_latest_only_with_a_rate_takes_the_newest_each_time() -> None:
    rules = Intake(latest_only=True, rate="1 per hour")
    known = Known({"x": NOW})
    decided = decide(rules, [drop(1, 2), drop(2, 1)], known, NOW)
    assert (decided.go, list(decided.passed), list(decided.held)) == ((), ["id1"], ["id2"])


@given(
    st.lists(
        st.tuples(st.integers(-90, 90), st.booleans(), st.booleans(), st.sampled_from(["", "b-1"]), st.integers(0, 90)),
        max_size=8,
    ),
    st.sampled_from(
        [
            {"rate": "1 per hour"},
            {"rate": "3 per 2 hours", "latest_only": True},
            {"window": "30 minutes"},
            {"window": "1 hour", "rate": "2 per day"},
            {"latest_only": True},
        ]
    ),
)
def test_every_drop_has_exactly_one_end_and_asking_again_changes_nothing(
    those: list[tuple[int, bool, bool, str, int]], values: dict[str, Any]
) -> None:
    rules = Intake(**values)
    drops = [
        drop(number, minutes, announced=told, batch=made, group=group, size=size)
        for number, (minutes, told, made, group, size) in enumerate(those)
    ]
    decided = decide(rules, drops, Known(), NOW, 100)
    ends = [*decided.go, *decided.passed, *decided.held, *(one for batch in decided.batches for one in batch)]
    assert sorted(ends) == sorted(one.id for one in drops)
    assert decide(rules, list(reversed(drops)), Known(), NOW, 100) == decided
    assert decide(rules, drops, Known(), NOW, 100) == decided
    after = remember(rules, drops, Known(), decided.go, NOW)
    assert set(decide(rules, drops, after, NOW).go) >= set(decided.go)
    assert isinstance(decided, Decision)
