"""The one interface of the places where jobs run. Synchronous; a coroutine calls it in a thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Position = Mapping[str, Any]
"""Where reading of one pod's log stopped; plain JSON, its content is the backend's own."""


@dataclass(frozen=True)
class Snapshot:
    """A job as it was at one moment.

    :param job: the PyTorchJob, with metadata and status.
    :param pods: its pods.
    :param events: events about the job and its pods, oldest first; after them what else explains its state: its Kueue
        Workload while it is held back, its nodes where it failed without saying why.
    :param pods_listed: False if the account may not list pods, which then says nothing about there being any.
    """

    job: Mapping[str, Any]
    pods: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    pods_listed: bool = True

    @property
    def uid(self) -> str:
        return str((self.job.get("metadata") or {}).get("uid") or "")

    @property
    def annotations(self) -> Mapping[str, str]:
        return (self.job.get("metadata") or {}).get("annotations") or {}


@dataclass(frozen=True)
class LogChunk:
    """
    :param lines: complete lines after the position asked for, without time stamps.
    :param position: where to go on; survives a restart of the reader.
    """

    lines: list[str] = field(default_factory=list)
    position: Position | None = None


class Backend(Protocol):
    """Where jobs run. Every call may raise `BackendUnavailableError`, which says nothing about the job."""

    def create(self, manifest: Mapping[str, Any]) -> Snapshot:
        """Create the job.

        :raises JobExistsError: if a job of that name exists.
        :raises JobRefusedError, ManifestError: if it never can be created like this.
        """

    def read(self, name: str, namespace: str) -> Snapshot | None:
        """The job, its pods and events; None if there is no such job."""

    def jobs(self, namespace: str | None = None, *, labels: Mapping[str, str] | None = None) -> list[Snapshot]:
        """All jobs, or those of one namespace, or with these labels."""

    def delete(self, name: str, namespace: str, *, uid: str | None = None, grace_seconds: int | None = None) -> bool:
        """Ask for the job's end: SIGTERM to every pod, SIGKILL after the grace period.

        :param uid: delete only the job that has it.
        :returns: whether there was such a job.
        """

    def logs(self, pod: Mapping[str, Any], position: Position | None = None, limit: int = 2000) -> LogChunk:
        """Lines of the pod's log after the position, at most `limit`; nothing twice, nothing left out."""

    def tail(self, pod: Mapping[str, Any], lines: int = 20) -> list[str]:
        """The last lines of the pod's log."""
