"""How long a job may take: in all, in the queue, and running. Pure; trigger, sensor and operator ask the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kubeflow_training.jobs.observation import Observation, Phase

_AT_WORK: Final = frozenset({Phase.STARTING, Phase.RUNNING, Phase.RESTARTING})

_UNPLACED: Final = frozenset({Phase.QUEUED, Phase.STARTING})


@dataclass(frozen=True)
class Limits:
    """
    :param until: Unix time at which the job's time is over, whatever it does.
    :param queue_until: Unix time by which the first container of the job must have started.
    :param queue_seconds: how long it may wait for that from the last time it was suspended or let go again, if that
        ends later than `queue_until`: a queue may take back a job that has run for long.
    :param run_seconds: running time from `Observation.started`; time in a queue or suspended does not count.
    :param min_nodes: with how few nodes the job may start again if it does not get all.
    :param place_seconds: how long a pod may be without a node then, counted from the pod's creation.
    """

    until: float | None = None
    queue_until: float | None = None
    run_seconds: float | None = None
    min_nodes: int | None = None
    place_seconds: float | None = None
    queue_seconds: float | None = None


def size_to_be_had(limits: Limits, observation: Observation | None, now: float) -> int | None:
    """The size at which a gang starts again that has waited too long for all its nodes; None if it does not.

    :param now: Unix time.
    """
    moments = _place_moments(limits, observation)
    if observation is None or not moments or now < min(moments) or (limits.until is not None and now >= limits.until):
        return None
    return observation.pods_placed


def exceeded(limits: Limits, observation: Observation | None, now: float) -> str | None:
    """Which limit the job has passed, in words for a person; None if none, or if it has ended.

    :param observation: the last one; None if the job could not be asked about, and then only `until` counts.
    :param now: Unix time.
    """
    if observation is not None and observation.ended:
        return None
    if limits.until is not None and now >= limits.until:
        what = observation.phase if observation else "not known to have ended"
        return f"its time is over, queueing included; it is {what}"
    if observation is None:
        return None
    if (size := size_to_be_had(limits, observation, now)) is not None:
        return f"only {size} of {observation.pods_wanted} pods got a node in time: {observation.message}"
    if (until := _queue_moment(limits, observation)) is not None and now >= until:
        what = "waits in the queue" if observation.phase is Phase.QUEUED else "is starting"
        return f"it {what} for longer than it may: {observation.message}"
    ran = _ran(observation, now)
    if limits.run_seconds is not None and ran is not None and ran >= limits.run_seconds:
        return f"it runs for {ran:.0f} seconds and may for {limits.run_seconds:g}"
    return None


def next_check(limits: Limits, observation: Observation | None) -> float | None:
    """Unix time at which `exceeded` may next find something if nothing changes; None if it never will."""
    if observation is not None and observation.ended:
        return None
    moments = [limits.until, *_place_moments(limits, observation)]
    if observation is not None:
        moments.append(_queue_moment(limits, observation))
    if observation is not None and observation.started and limits.run_seconds is not None and _works(observation):
        moments.append(observation.started.timestamp() + limits.run_seconds)
    return min((moment for moment in moments if moment is not None), default=None)


def _place_moments(limits: Limits, observation: Observation | None) -> list[float]:
    """When a gang of which a part has its nodes has waited too long for the rest; empty if that cannot be."""
    if limits.min_nodes is None or observation is None or observation.phase not in _UNPLACED:
        return []
    if not limits.min_nodes <= observation.pods_placed < observation.pods_wanted:
        return []
    moments = []
    if observation.phase is Phase.QUEUED and (queued := _queue_end(limits, observation)) is not None:
        moments.append(queued)
    if observation.unplaced_since is not None and limits.place_seconds is not None:
        # From the pod's creation: a queue may have held the job for long, and the cluster may replace a pod any time.
        moments.append(observation.unplaced_since.timestamp() + limits.place_seconds)
    return moments


def _queue_moment(limits: Limits, observation: Observation) -> float | None:
    """When the job has waited too long for its first container; None while that does not count."""
    if observation.phase is Phase.QUEUED:
        return _queue_end(limits, observation)
    # A gang that may start again with fewer nodes waits for the others as long as their own time allows.
    starting = observation.phase is Phase.STARTING and observation.started is None
    return _queue_end(limits, observation) if starting and not _place_moments(limits, observation) else None


def _queue_end(limits: Limits, observation: Observation) -> float | None:
    if limits.queue_until is None or limits.queue_seconds is None or observation.held_since is None:
        return limits.queue_until
    return max(limits.queue_until, observation.held_since.timestamp() + limits.queue_seconds)


def _works(observation: Observation) -> bool:
    return observation.phase in _AT_WORK


def _ran(observation: Observation, now: float) -> float | None:
    return now - observation.started.timestamp() if observation.started and _works(observation) else None
