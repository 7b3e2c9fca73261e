"""The folder of the local cluster: who writes which file, and how.

HOME/supervisor.lock, supervisor.json      the one supervisor, which touches the latter while it works
HOME/wake                                  touched by clients after every request
HOME/jobs/NAMESPACE/NAME/job.json          written once, by the client that creates the job
HOME/jobs/NAMESPACE/NAME/delete.json       written by a client that wants the job's end
HOME/jobs/NAMESPACE/NAME/queue.json        written by clients: held back, priority
HOME/jobs/NAMESPACE/NAME/state.json        status, pods and events; written by the supervisor alone
HOME/jobs/NAMESPACE/NAME/pods/POD/         spec.json and stop.json (supervisor), status.json and log (the pod's keeper)
HOME/removed/NAME-UID/                     the last deleted jobs, for a look at their logs
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

HOME_VARIABLE: Final = "KUBEFLOW_TRAINING_HOME"
STALE = ".new-"  # a job folder in the making


class Layout:
    """Paths of one local cluster."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.jobs, self.removed = home / "jobs", home / "removed"
        self.lock, self.supervisor, self.wake = home / "supervisor.lock", home / "supervisor.json", home / "wake"

    def prepare(self) -> None:
        """Make the folders; only the owner may look inside, because logs may tell much."""
        for folder in (self.home, self.jobs, self.removed):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def job(self, namespace: str, name: str) -> Path:
        return self.jobs / namespace / name

    def job_folders(self) -> Iterator[Path]:
        """The folders of all jobs, in no order."""
        for namespace in _folders(self.jobs):
            for folder in _folders(namespace):
                if not folder.name.startswith(STALE):
                    yield folder

    def knock(self) -> None:
        """Tell the supervisor that there is something to do."""
        self.wake.touch()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write whole or not at all, and durably: temporary file, fsync, rename."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The file's content, or None if it does not exist or is no JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def timestamp(seconds: float | None = None) -> str:
    """RFC 3339 in UTC with microseconds; now if not told otherwise."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _folders(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
