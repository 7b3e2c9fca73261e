"""Limits of a job's time: what counts, and when to look again."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from kubeflow_training.jobs.observation import Observation, Phase
from kubeflow_training.jobs.waiting.limits import Limits, exceeded, next_check, size_to_be_had

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


def waits(phase=Phase.STARTING, placed=2, wanted=3, since=STARTED):
    """A gang of which some pods have a node, and the others want one since second 1000."""
    return Observation(phase, message="words", pods_placed=placed, pods_wanted=wanted, unplaced_since=since)


SMALLER = Limits(until=9000, queue_until=2000, min_nodes=2, place_seconds=500)


@pytest.mark.parametrize(
    ("limits", "observation", "now", "size"),
    [
        (SMALLER, waits(), 1499.9, None),
        (SMALLER, waits(), 1500, 2),
        (SMALLER, waits(placed=3, wanted=4), 1500, 3),
        (SMALLER, waits(placed=1), 5000, None),
        (SMALLER, waits(placed=3), 5000, None),
        (SMALLER, waits(Phase.RUNNING), 5000, None),
        (SMALLER, waits(Phase.RESTARTING), 5000, None),
        (SMALLER, waits(Phase.FAILED), 5000, None),
        (SMALLER, None, 5000, None),
        # The queue may have held the job for hours: a pod's own time begins when it is made.
        (SMALLER, waits(since=datetime.fromtimestamp(4900, UTC)), 5000, None),
        # Pods that are not even created, for want of quota, or whose age nobody tells.
        (SMALLER, waits(Phase.QUEUED, since=None), 1999, None),
        (SMALLER, waits(Phase.QUEUED, since=None), 2000, 2),
        (SMALLER, waits(since=None), 5000, None),
        # The try's own time is over: no next gang then.
        (SMALLER, waits(), 9000, None),
        (Limits(queue_until=2000), waits(Phase.QUEUED), 5000, None),
    ],
)
def test_the_size_at_which_a_waiting_gang_starts_again(limits, observation, now, size):
    assert size_to_be_had(limits, observation, now) == size
    if size is not None:
        words = f"only {size} of {observation.pods_wanted} pods got a node in time: words"
        assert exceeded(limits, observation, now) == words
        assert next_check(limits, observation) <= now


def test_a_gang_with_too_few_nodes_waits_in_its_queue_no_longer_than_it_may():
    told = exceeded(SMALLER, waits(Phase.QUEUED, placed=1), 2000)
    assert told == "it waits in the queue for longer than it may: words"
