"""Limits of a job's time: what counts, and when to look again."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from kubeflow_training.jobs.limits import Limits, exceeded, next_check
from kubeflow_training.jobs.observation import Observation, Phase

STARTED = datetime.fromtimestamp(1000, UTC)


def at(phase, started=STARTED):
    return Observation(phase, message="words", started=started)


@pytest.mark.parametrize(
    ("limits", "observation", "now", "expected"),
    [
        (Limits(), at(Phase.RUNNING), 1e12, None),
        (Limits(until=2000), at(Phase.RUNNING), 1999.9, None),
        (Limits(until=2000), at(Phase.RUNNING), 2000, "its time is over, queueing included; it is running"),
        (Limits(until=2000), at(Phase.QUEUED, None), 2000, "its time is over, queueing included; it is queued"),
        (Limits(until=2000), None, 2000, "its time is over, queueing included; it is not known to have ended"),
        (Limits(queue_until=2000), at(Phase.QUEUED, None), 2000, "it waits in the queue for longer than it may: words"),
        (Limits(queue_until=2000), at(Phase.STARTING, None), 3000, None),
        (Limits(queue_until=2000), at(Phase.RUNNING), 3000, None),
        (Limits(queue_until=2000), None, 3000, None),
        (Limits(run_seconds=60), at(Phase.RUNNING), 1059, None),
        (Limits(run_seconds=60), at(Phase.RUNNING), 1060, "it runs for 60 seconds and may for 60"),
        (Limits(run_seconds=60), at(Phase.RESTARTING), 1061, "it runs for 61 seconds and may for 60"),
        # Suspended again: the clock starts anew when it runs again.
        (Limits(run_seconds=60), at(Phase.QUEUED), 5000, None),
        (Limits(run_seconds=60), at(Phase.RUNNING, None), 5000, None),
        # An end is told as it is, however late it is seen.
        *((Limits(1, 1, 1), at(phase), 1e12, None) for phase in Phase if phase.ended),
    ],
)
def test_which_limit_is_passed(limits, observation, now, expected):
    assert exceeded(limits, observation, now) == expected


@pytest.mark.parametrize(
    ("limits", "observation", "expected"),
    [
        (Limits(), at(Phase.RUNNING), None),
        (Limits(until=2000, run_seconds=60), at(Phase.RUNNING), 1060),
        (Limits(until=1010, run_seconds=60), at(Phase.RUNNING), 1010),
        (Limits(until=2000, queue_until=1500, run_seconds=60), at(Phase.QUEUED), 1500),
        (Limits(until=2000, queue_until=1500), None, 2000),
        (Limits(until=2000), at(Phase.SUCCEEDED), None),
    ],
)
def test_when_to_look_again(limits, observation, expected):
    assert next_check(limits, observation) == expected
    if expected is not None:
        assert exceeded(limits, observation, expected - 0.01) is None
        assert exceeded(limits, observation, expected) is not None
