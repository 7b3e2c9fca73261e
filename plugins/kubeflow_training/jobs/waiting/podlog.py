"""Whose log lines are shown, and the last words of one pod."""

from __future__ import annotations

from typing import Literal

from kubeflow_training.jobs.backend import Backend, Snapshot
from kubeflow_training.jobs.errors import JobError
from kubeflow_training.jobs.observation.progress import for_people
from kubeflow_training.jobs.shapes import mapping

LogRanks = Literal["all", "first", "none"]


def last_lines(backend: Backend, snapshot: Snapshot | None, pod_name: str | None, lines: int = 20) -> list[str]:
    """The last lines of one pod's log, progress marks left out; none if they cannot be had."""
    for pod in snapshot.pods if snapshot else ():
        if mapping(pod.get("metadata")).get("name") == pod_name:
            try:
                return for_people(backend.tail(pod, 2 * lines))[-lines:]
            except JobError:
                return []
    return []
