"""Hours over all gangs of a run, whoever saw their ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dropforge import layout
from dropforge.costs import Rates, Tariff
from dropforge.gangs import Gang, closed, failed, keep, kept, lost_steps, rates_of, used
from dropforge.json_objects import UnreadableError
from dropforge.recipe_costs import Price
from dropforge.recipes import load_recipe
from dropforge.store import Store

FIRST = Gang("train", "train-x", "uid-1", 1, 8, 32, created=1000.0, started=1600.0, ended=5200.0)
SECOND = Gang("train", "train-x-g2", "uid-2", 2, 8, 32, created=5300.0, started=5500.0)
QUEUED = Gang("evaluate", "evaluate-x", "uid-3", 1, 4, 16, created=9000.0)
PRICE = Tariff(Price(gpu_hour=2.0), gpus=True)


def test_hours_begin_with_the_first_container_and_count_over_all_gangs() -> None:
    found = used([FIRST, SECOND, QUEUED], 5500.0 + 1800, PRICE)
    assert (found.gpu_hours, found.core_hours, found.cost) == (8 * 1.5, 32 * 1.5, 24.0)
    assert used([FIRST, SECOND], 99999.0, PRICE, but="uid-2").gpu_hours == 8
    assert used([], 0.0, PRICE).gpu_hours == 0


def test_a_gang_whose_end_nobody_told_is_closed_by_what_was_seen_of_it() -> None:
    known = replace(SECOND, started=None)
    (second, queued) = closed([FIRST, known, QUEUED], 9100.0, {"uid-2": 6000.0, "uid-3": None})
    assert (second.started, second.ended) == (6000.0, 9100.0)
    assert queued.seconds(99999.0) == 0  # it was seen to wait, and cost nothing
    (unseen,) = closed([known], 9100.0, {})
    assert unseen.seconds(0) == 9100.0 - 5300.0  # nobody knows: it began with its job


def test_gangs_are_kept_in_the_runs_folder_one_object_each(store: Store) -> None:
    for gang in (SECOND, FIRST, QUEUED):
        keep(store, "run-1", gang)
    ended = replace(SECOND, ended=6000.0)
    keep(store, "run-1", ended)
    assert kept(store, "run-1") == [FIRST, ended, QUEUED]
    assert kept(store, "run") == []
    keep(store, "run-1", replace(FIRST, uid="../../x"))
    assert all(info.key.startswith("runs/run-1/gangs/") for info in store.list("") if "gangs" in info.key)
    assert ".." not in layout.gang_key("run-1", "../../x")


def test_more_gangs_than_a_run_may_have_are_not_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods write where they lie: a million would hold up the teardown for hours, and with it the family's turn."""
    monkeypatch.setattr("dropforge.gangs.MOST", 3)
    for number in range(5):
        keep(store, "run-1", replace(FIRST, uid=f"uid-{number}"))
        if number == 2:
            assert len(kept(store, "run-1")) == 3
    monkeypatch.setattr("dropforge.gangs.read_as", None)
    with pytest.raises(UnreadableError, match=r"runs/run-1/gangs/: it holds more than the 3 jobs"):
        kept(store, "run-1")


def test_steps_after_the_newest_checkpoint_are_lost_over_all_gangs_that_failed() -> None:
    lost = replace(FIRST, reason="node lost", failed=True, step=47, saved=40)
    saved = replace(SECOND, reason="preempted", failed=True, step=60, saved=60)
    early = replace(saved, step=30)  # it did again what was saved
    assert [gang.lost_steps for gang in (lost, saved, early)] == [7, 0, 0]
    removed = replace(SECOND, reason="deleted")
    known = [lost, removed, saved, replace(SECOND, step=99), replace(QUEUED, failed=True, step=9, saved=0)]
    assert failed(known, "train") == [lost, saved]
    assert lost_steps(failed(known, "train")) == 7
    assert lost_steps([]) == 0
    for unseen in (replace(lost, saved=None), replace(lost, step=None)):
        assert unseen.lost_steps is None
        assert lost_steps([lost, unseen]) is None


@pytest.mark.parametrize(
    ("task", "rates"), [("train", Rates(8, 32)), ("evaluate", Rates(4, 16)), ("tokenise", Rates(0, 16))]
)
def test_what_a_job_holds_is_what_it_is_asked_for_with(task: str, rates: Rates) -> None:
    compute = load_recipe("tiny", {"compute": {"nodes": 2, "gpus": 4, "processes_per_node": 4, "cpus": 16}}).compute
    assert rates_of(compute, task) == rates
