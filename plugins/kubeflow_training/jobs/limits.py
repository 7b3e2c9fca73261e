"""How long a job may take: in all, in the queue, and running. Pure; trigger, sensor and operator ask the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kubeflow_training.jobs.observation import Observation, Phase

_AT_WORK: Final = frozenset({Phase.STARTING, Phase.RUNNING, Phase.RESTARTING})


@dataclass(frozen=True)
class Limits:
    """
    :param until: Unix time at which the job's time is over, whatever it does.
    :param queue_until: Unix time by which the job must have left its queue.
    :param run_seconds: running time from `Observation.started`; time in a queue or suspended does not count.
    """

    until: float | None = None
    queue_until: float | None = None
    run_seconds: float | None = None


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
    if observation.phase is Phase.QUEUED and limits.queue_until is not None and now >= limits.queue_until:
        return f"it waits in the queue for longer than it may: {observation.message}"
    ran = _ran(observation, now)
    if limits.run_seconds is not None and ran is not None and ran >= limits.run_seconds:
        return f"it runs for {ran:.0f} seconds and may for {limits.run_seconds:g}"
    return None


def next_check(limits: Limits, observation: Observation | None) -> float | None:
    """Unix time at which `exceeded` may next find something if nothing changes; None if it never will."""
    if observation is not None and observation.ended:
        return None
    moments = [limits.until]
    if observation is not None and observation.phase is Phase.QUEUED:
        moments.append(limits.queue_until)
    if observation is not None and observation.started and limits.run_seconds is not None and _works(observation):
        moments.append(observation.started.timestamp() + limits.run_seconds)
    return min((moment for moment in moments if moment is not None), default=None)


def _works(observation: Observation) -> bool:
    return observation.phase in _AT_WORK


def _ran(observation: Observation, now: float) -> float | None:
    return now - observation.started.timestamp() if observation.started and _works(observation) else None
