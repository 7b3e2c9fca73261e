"""The whole wall time of a run: queue and pull from Airflow's side, the rest from the trainer's report."""

from __future__ import annotations

from typing import Any

import pytest
from dropforge_airflow.tasks.wall import wall_lines, whole_wall

from tests.markdown import narrow

WALL = {"began": 1030.0, "seconds": 100.0, "load": 20.0, "train": 70.0, "restarts": 10.0}


def trained(gang: int = 1, **durations: Any) -> dict[str, Any]:
    return {"gang": gang, "durations": durations}


@pytest.mark.parametrize(
    ("result", "waits"),
    [
        (trained(queued=28.0, pulled=12.0), {"queue": 18.0, "pull": 12.0}),
        (trained(queued=28.0, pulled=None), {"queue": 30.0}),  # this machine pulls nothing
        (trained(gang=2, queued=28.0, pulled=12.0), {"queue": 30.0}),  # the second gang's pull is lost to restarts
        (trained(queued=1.0, pulled=90.0), {"queue": 0.0, "pull": 30.0}),  # two clocks
        (trained(), {"queue": 30.0}),
        (None, {"queue": 30.0}),
    ],
)
def test_queue_and_pull_and_the_trainers_phases_add_up(result: Any, waits: dict[str, float]) -> None:
    found = whole_wall(1000.0, result, WALL)
    assert found == {"seconds": 130.0, **waits, "load": 20.0, "train": 70.0, "restarts": 10.0}
    assert sum(value for name, value in found.items() if name != "seconds") == found["seconds"]


def test_a_run_that_did_not_tell_has_no_table() -> None:
    assert whole_wall(1000.0, trained(), {}) == {}
    assert wall_lines({}) == []


def test_without_the_time_of_the_opening_the_trainers_phases_stand_alone() -> None:
    assert whole_wall(None, trained(pulled=3.0), WALL) == {
        "seconds": 100.0,
        "load": 20.0,
        "train": 70.0,
        "restarts": 10.0,
    }


def test_a_trainer_that_began_before_the_opening_waited_for_nothing() -> None:
    """A task that opens the run once more, or a clock that is off."""
    assert whole_wall(2000.0, None, WALL)["queue"] == 0.0


def test_the_table_ends_with_the_sum() -> None:
    lines = wall_lines(whole_wall(1000.0, trained(pulled=12.0), WALL))
    assert narrow(lines[2]) == "| queue | 18.0 | 14% |"
    assert narrow(lines[-1]) == "| **in total** | 130.0 | |"
