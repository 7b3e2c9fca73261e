"""Whether the calendar retrains, on which drops, and why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dropforge.families import Alert, Family
from dropforge.retraining import Arrival, Ended, Retrain, Skip, There, Trained, decide, limit, work

BASE = {"model": "org/base", "revision": "r1", "scratch": None}
ONE, TWO, THREE = (Arrival(name, name * 4) for name in ("one", "two", "three"))
CHAMPION = Trained("4", frozenset({ONE.id, TWO.id}), BASE)
THERE = There(drops=(ONE, TWO), champion=CHAMPION, base=BASE, recipe={"train": {"max_steps": 3}})


def family(**keys: Any) -> Family:
    return Family(cron="0 3 * * *", recipe={"extends": "tiny"}, **keys)


def reason(found: Retrain | Skip, kind: type[Retrain] | type[Skip]) -> str:
    assert type(found) is kind
    return found.reason


def drops(found: Retrain | Skip) -> tuple[Arrival, ...]:
    assert isinstance(found, Retrain)
    return found.drops


def test_nothing_changed_is_skipped_and_force_trains_all_the_same() -> None:
    told = reason(decide(family(), THERE), Skip)
    assert told == "nothing changed: the champion, version 4, knows 2 drops: one, two, and its base is the same"
    forced = decide(family(), THERE, force=True)
    assert reason(forced, Retrain) == "forced; nothing changed since the champion"
    assert drops(forced) == (ONE, TWO)


def test_a_drop_that_the_champion_does_not_know_is_a_reason() -> None:
    there = replace(THERE, drops=(ONE, TWO, THREE))
    for data, taken in (("all", (ONE, TWO, THREE)), ("since-champion", (THREE,)), ("last 2 drops", (TWO, THREE))):
        found = decide(family(data=data), there)
        assert reason(found, Retrain) == "the champion, version 4, does not know drop three"
        assert drops(found) == taken


def test_since_the_champion_with_nothing_new_is_skipped_even_by_force() -> None:
    told = reason(decide(family(data="since-champion"), THERE, force=True), Skip)
    assert told.startswith("no drop arrived since those of the champion, version 4")
    assert "`data: all` or `last N drops` would take older ones" in told


def test_another_base_is_a_reason_only_where_the_base_is_begun_with() -> None:
    there = replace(THERE, base={**BASE, "revision": "r2"})
    assert "the base changed: `revision` was " in reason(decide(family(), there), Retrain)
    goes_on = replace(there, champion=replace(CHAMPION, start="champion"))
    decide_it = decide(family(start="champion"), goes_on)
    assert "nothing changed" in reason(decide_it, Skip)


def test_the_first_model_needs_no_change_but_a_drop() -> None:
    assert "no champion yet" in reason(decide(family(), replace(THERE, champion=None)), Retrain)
    assert reason(decide(family(), replace(THERE, champion=None, drops=())), Skip) == "the family has no drop yet"
    unknown = replace(THERE, champion=Trained("4", None, {}))
    assert "it is not known which drops" in reason(decide(family(data="since-champion"), unknown), Retrain)


def test_a_retrain_that_has_not_ended_is_not_overlapped_by_force_either() -> None:
    there = replace(THERE, running="retrain__fam__1")
    assert "retrain__fam__1" in reason(decide(family(), there, force=True), Skip)


def test_what_lost_once_is_not_trained_again_until_something_changes() -> None:
    there = replace(THERE, drops=(ONE, TWO, THREE))
    lost = Ended("retrain-1", work(family(), there, there.drops), 60.0, "2026-11-24")
    again = replace(there, ended=(lost,))
    assert "the same was trained by retrain-1 until 2026-11-24, and is not the champion" in reason(
        decide(family(), again), Skip
    )
    assert isinstance(decide(family(), again, force=True), Retrain)
    assert isinstance(decide(family(), replace(again, recipe={"train": {"max_steps": 4}})), Retrain)
    assert isinstance(decide(family(), replace(again, base={**BASE, "revision": "r2"})), Retrain)


@pytest.mark.parametrize(("count", "longest"), [(0, None), (2, None), (3, 150.0), (30, 150.0)])
def test_the_alert_is_by_the_average_of_the_newest_that_ended(count: int, longest: float | None) -> None:
    newest = [Ended(str(n), "w", 50.0 if n % 2 else 150.0, "") for n in range(min(count, 10))]
    if count == 3:
        newest = [Ended(str(n), "w", 100.0, "") for n in range(3)]
    older = [Ended(str(n), "w", 9000.0, "") for n in range(10, count)]
    found, told = limit(Alert(), [*newest, *older])
    assert found == longest
    assert told
