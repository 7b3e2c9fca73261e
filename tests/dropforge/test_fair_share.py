"""Whose drop goes next: round-robin by what each family has in flight, within its limit and Airflow's."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from dropforge.errors import DropforgeError
from dropforge.fair_share import VARIABLE, FamilyLoad, RunSlots, share, slots_of
from dropforge.intake_rules import Waiting

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)


def waits(*hours: float) -> list[Waiting]:
    """Drops that were completed at these hours."""
    return [Waiting(f"{hour}", f"d{hour}", NOW, completed=hour * 3600) for hour in hours]


def went(families: dict[str, FamilyLoad], slots: RunSlots, taken: int = 0) -> str:
    return " ".join(f"{family}{drop_id}" for family, drop_id in share(families, slots, taken, NOW).go)


def test_families_take_turns_however_many_drops_one_has_and_the_oldest_of_each_is_first() -> None:
    families = {"a": FamilyLoad(waits(5, 1, 2, 3, 4)), "b": FamilyLoad(waits(7, 6)), "c": FamilyLoad(waits(8))}
    assert went(families, RunSlots(6)) == "a1 b6 c8 a2 b7 a3"
    assert went(families, RunSlots(6), 5) == "a1 b6 c8"
    assert went(families, RunSlots(6), 7) == "a1 b6 c8"  # a family without a run is never kept out
    assert went(families, RunSlots()) == "a1 b6 c8 a2 b7 a3 a4 a5"


def test_who_has_fewer_runs_in_flight_is_next_and_of_equals_who_waits_longer() -> None:
    families = {"a": FamilyLoad(waits(1, 2), in_flight=2), "b": FamilyLoad(waits(9)), "c": FamilyLoad(waits(3), 1)}
    assert went(families, RunSlots(10), 8) == "b9 c3"


def test_no_family_has_more_than_its_limit_and_its_file_wins_over_the_installation() -> None:
    families = {"a": FamilyLoad(waits(1, 2, 3), 1), "b": FamilyLoad(waits(4, 5, 6), 1, 3), "c": FamilyLoad(waits(7), 9)}
    shared = share(families, RunSlots(16, 2), 11, NOW)
    assert shared.go == (("a", "1"), ("b", "4"), ("b", "5"))
    assert f"at most 2 of its family ({VARIABLE}) and 16 of all" in shared.held["a", "2"]
    assert "at most 3 of its family (intake.max_active_runs) and 16 of all" in shared.held["b", "6"]
    assert set(shared.held) == {("a", "2"), ("a", "3"), ("b", "6"), ("c", "7")}


def test_ten_thousand_families_and_drops_are_shared_out_at_once() -> None:
    families = {f"f{n}": FamilyLoad(waits(*range(n, n + 5))) for n in range(10_000)}
    assert len(share(families, RunSlots(), 0, NOW).go) == 50_000


@pytest.mark.parametrize(
    ("total", "said", "slots"),
    [
        (16, "", RunSlots(16, 8)),
        (1, "", RunSlots(1, 1)),
        (0, "", RunSlots()),
        (16, " 3 ", RunSlots(16, 3)),
        (16, "0", RunSlots(16)),
        (0, "3", RunSlots(None, 3)),
    ],
)
def test_by_itself_a_family_has_half_of_the_slots(total: int, said: str, slots: RunSlots) -> None:
    assert slots_of(total, {VARIABLE: said}) == slots


@pytest.mark.parametrize("said", ["-1", "four", "1e3", "1001", "9" * 5000, "٣"])
def test_a_limit_that_is_no_number_is_refused_by_its_name(said: str) -> None:
    with pytest.raises(DropforgeError, match=f"{VARIABLE}: .* is no whole number"):
        slots_of(16, {VARIABLE: said})
