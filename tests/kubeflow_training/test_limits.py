"""Limits of a job's time: what counts, and when to look again."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from kubeflow_training.gangs.reattach import Identity
from kubeflow_training.jobs.kinds import INDEXED_JOB, PYTORCH_JOB, TRAIN_JOB
from kubeflow_training.jobs.observation import Observation, Phase, observe
from kubeflow_training.jobs.shapes import moment
from kubeflow_training.jobs.waiting.limits import Limits, exceeded, next_check, size_to_be_had
from kubeflow_training.operators import PyTorchJobOperator

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
        (Limits(queue_until=2000), at(Phase.STARTING), 3000, None),
        # Pods that have a node, and of which none has ever started, wait as well.
        (Limits(queue_until=2000), at(Phase.STARTING, None), 1999, None),
        (Limits(queue_until=2000), at(Phase.STARTING, None), 2000, "it is starting for longer than it may: words"),
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
        (Limits(queue_until=1500), at(Phase.STARTING, None), 1500),
        (Limits(queue_until=1500), at(Phase.STARTING), None),
        (Limits(until=2000), at(Phase.SUCCEEDED), None),
    ],
)
def test_when_to_look_again(limits, observation, expected):
    assert next_check(limits, observation) == expected
    if expected is not None:
        assert exceeded(limits, observation, expected - 0.01) is None
        assert exceeded(limits, observation, expected) is not None


HELD = datetime.fromtimestamp(73000, UTC)


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.STARTING])
def test_a_job_that_its_queue_took_back_after_hours_waits_anew(phase):
    """Created at 1000, it ran from 2000 to 73000 and was suspended then; what is stored are absolute times."""
    limits = Limits(queue_until=1000 + 43200, queue_seconds=43200)
    taken_back = Observation(phase, message="preempted", held_since=HELD)
    assert exceeded(limits, taken_back, 73000 + 43199) is None
    assert next_check(limits, taken_back) == 73000 + 43200
    assert "for longer than it may: preempted" in exceeded(limits, taken_back, 73000 + 43200)
    # What a trigger of an earlier version stored.
    assert exceeded(Limits(queue_until=44200), taken_back, 73001) is not None


def test_a_suspension_before_the_creation_was_stored_shortens_nothing():
    early = Observation(Phase.QUEUED, held_since=datetime.fromtimestamp(10, UTC))
    assert next_check(Limits(queue_until=2000, queue_seconds=500), early) == 2000


@pytest.mark.parametrize("kind", [PYTORCH_JOB, TRAIN_JOB, INDEXED_JOB], ids=lambda kind: kind.name)
@pytest.mark.parametrize("status", ["True", "False"])
def test_the_clusters_own_word_tells_when_a_job_was_held_back_or_let_go(kind, status):
    """Let go after that, its pods still have to start: the wait goes on, and not from its creation."""
    when = "2026-11-21T22:06:49Z"
    conditions = [
        {"type": "Created", "status": "True", "lastTransitionTime": "2026-11-21T01:00:00Z"},
        {"type": "Suspended", "status": status, "lastTransitionTime": when},
    ]
    job = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": {}, "spec": {}}
    seen = observe({**job, "status": {"conditions": conditions}})
    assert (seen.phase, seen.held_since) == (Phase.QUEUED, moment(when))
    assert Observation.from_dict(seen.to_dict()) == seen
    stored = {key: value for key, value in seen.to_dict().items() if key != "held_since"}
    assert Observation.from_dict(stored).held_since is None
    assert observe(job).held_since is None


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


def test_a_gang_that_may_shrink_starts_for_as_long_as_its_pods_may_wait_for_a_node():
    """Its pods are younger than the job: the queue held it for most of its time."""
    young = waits(since=datetime.fromtimestamp(1900, UTC))
    assert exceeded(SMALLER, young, 2001) is None
    assert next_check(SMALLER, young) == 2400
    # All nodes are there, or too few: nothing but the queue's time ends such a start.
    for placed in (1, 3):
        assert "is starting for longer" in exceeded(SMALLER, waits(placed=placed), 2001)


def test_a_gang_that_may_shrink_and_was_taken_back_waits_anew():
    limits = replace(SMALLER, until=None, queue_seconds=500)
    taken_back = replace(waits(Phase.QUEUED, since=None), held_since=HELD)
    assert size_to_be_had(limits, taken_back, 73499) is None
    assert size_to_be_had(limits, taken_back, 73500) == 2


@pytest.mark.parametrize("deferrable", [True, False])
def test_the_operator_hands_its_limits_on(deferrable):
    """As absolute times, which a trigger keeps when it is stored and made anew."""
    timeout = timedelta(hours=12)
    task = PyTorchJobOperator(task_id="train", manifest={}, queue_timeout=timeout, deferrable=deferrable)
    context = {"task_state_store": {}, "ti": SimpleNamespace(try_number=1)}
    job = Identity("job", "default", "job", "f", "o", "1.0", "t", uid="u", created=1000.0)
    limits = task._limits(context, job)
    assert (limits.queue_until, limits.queue_seconds) == (1000 + 43200, 43200)
    _, stored = task._trigger(job, limits).serialize()
    assert (stored["queue_until"], stored["queue_seconds"]) == (1000 + 43200, 43200)


def test_a_gang_with_too_few_nodes_waits_in_its_queue_no_longer_than_it_may():
    told = exceeded(SMALLER, waits(Phase.QUEUED, placed=1), 2000)
    assert told == "it waits in the queue for longer than it may: words"
