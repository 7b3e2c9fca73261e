"""A job that only measures: submitted, followed to its end, and removed whatever happens to the one who waits."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from dropforge.cli.gangs import asking_cluster, place
from dropforge.errors import DropforgeError
from dropforge.network_bench import MARK

if TYPE_CHECKING:
    from kubeflow_training.jobs.backend import Backend, Position, Snapshot
    from kubeflow_training.jobs.kinds import Kind
    from kubeflow_training.jobs.observation import Observation

_LOOK: Final = 0.3  # seconds
_QUIET: Final = 3  # looks without a new line, after which an ended job's log counts as read
_SILENT: Final = 60.0  # seconds that a cluster may be away
_GONE: Final = 60.0  # seconds that pods may take to go
_TAIL: Final = 40  # lines of a pod that failed, of which figures are left out
_WORDS: Final = 5
_PR_SET_PDEATHSIG: Final = 1


class StoppedError(BaseException):
    """A signal asks this process to end. :param code: as shells have it.

    No `Exception`: what asks the cluster, plugins for its tokens among them, takes those for failures of its own.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"signal {code - 128}")
        self.code = code


@contextmanager
def stoppable() -> Iterator[None]:
    """:raises StoppedError: at SIGINT, SIGTERM and SIGHUP, so that what was begun is tidied up.

    A signal that this process was started to ignore (`nohup`) stays ignored.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        raise StoppedError(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def opened(backend: str, kind: Kind) -> Iterator[Backend]:
    """The cluster of the kubeconfig for jobs of one kind, or processes of this machine, which need no stack.

    :raises DropforgeError: if the cluster cannot be reached.
    """
    if backend != "local":
        yield place(backend, kind)
        return
    from kubeflow_training.jobs.local import LocalCluster

    with tempfile.TemporaryDirectory(prefix="dropforge-bench-") as name:
        folder = Path(name)
        with (folder / "supervisor.log").open("wb") as log:
            supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "kubeflow_training.jobs.local", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for us: we remove the job first
                preexec_fn=_die_with(os.getpid()),
            )
        try:
            yield LocalCluster(folder)
        finally:
            supervisor.terminate()
            supervisor.wait()


def _die_with(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def run(
    backend: Backend,
    manifest: Mapping[str, Any],
    line: Callable[[str], object],
    tell: Callable[[str], object],
    patience: float,
) -> Snapshot:
    """Have the job done; how it was at its end.

    :param line: is given each line of its first pod. :param tell: is given what it waits for, when that changes.
    :param patience: seconds until its pods have to run.
    :raises DropforgeError: if it cannot be made, does not start in time, fails or is removed by somebody else.
    """
    name, namespace = str(manifest["metadata"]["name"]), str(manifest["metadata"]["namespace"])
    with asking_cluster():
        # From here on it may be there, even if the answer is lost.
        try:
            backend.create(manifest)
            return _follow(backend, name, namespace, line, tell, patience)
        finally:
            _remove(backend, name, namespace, tell)


def _follow(
    backend: Backend,
    name: str,
    namespace: str,
    line: Callable[[str], object],
    tell: Callable[[str], object],
    patience: float,
) -> Snapshot:
    from kubeflow_training.jobs.errors import BackendUnavailableError
    from kubeflow_training.jobs.observation import Phase, observe

    thing = f"job {namespace}/{name}"
    began = answered = time.monotonic()
    position: Position | None = None
    told, quiet = "", 0
    while True:
        time.sleep(_LOOK)
        try:
            snapshot = backend.read(name, namespace)
            lines, position = _lines(backend, snapshot, position)
        except BackendUnavailableError:
            if time.monotonic() - answered > _SILENT:
                raise
            continue
        answered = time.monotonic()
        if snapshot is None:
            raise DropforgeError(thing, "it was removed meanwhile", "Give the command again")
        for one in lines:
            line(one)
        seen = observe(snapshot.job, snapshot.pods, snapshot.events)
        if seen.ended:
            quiet = 0 if lines else quiet + 1
            if quiet >= _QUIET:
                if seen.phase is not Phase.SUCCEEDED:
                    raise _failed(backend, thing, snapshot, seen)
                return snapshot
            continue
        doing = f"{seen.phase.value}: {seen.message}" if seen.message else seen.phase.value
        if doing != told:
            tell(doing)
            told = doing
        if seen.phase is not Phase.RUNNING and answered - began > patience:
            mend = "Fix what it waits for (`dropforge doctor --cluster` shows it), or wait longer with --patience"
            raise DropforgeError(thing, f"after {answered - began:.0f} s it does not run ({doing})", mend)


def _lines(backend: Backend, snapshot: Snapshot | None, position: Position | None) -> tuple[list[str], Position | None]:
    """New lines of the first pod."""
    from kubeflow_training.jobs.kinds import kind_seen
    from kubeflow_training.jobs.waiting.polling import has_begun

    for pod in snapshot.pods if snapshot is not None else ():
        if kind_seen(snapshot.job).node_rank(pod, snapshot.job) == 0 and has_begun(pod):  # type: ignore[union-attr]
            chunk = backend.logs(pod, position)
            return chunk.lines, chunk.position or position
    return [], position


def _failed(backend: Backend, thing: str, snapshot: Snapshot, seen: Observation) -> DropforgeError:
    from kubeflow_training.jobs.waiting.podlog import last_lines

    lines = [one for one in last_lines(backend, snapshot, seen.pod, _TAIL) if MARK not in one][-_WORDS:]
    last = "".join(f"\n  {one}" for one in lines)
    # What a training's retry would do is of no use here.
    mend = "Look at what it names, and give the command again" if seen.retryable else seen.mend
    return DropforgeError(thing, f"{seen.message or 'it failed'}{last}", mend)


def _remove(backend: Backend, name: str, namespace: str, tell: Callable[[str], object]) -> None:
    """Until nothing of it is left; a second signal leaves that to the cluster."""
    from kubeflow_training.jobs.errors import JobError

    thing = f"job {namespace}/{name}"
    try:
        if not backend.delete(name, namespace):
            return
        end = time.monotonic() + _GONE
        while backend.read(name, namespace) is not None:
            if time.monotonic() > end:
                tell(f"{thing} is still there after {_GONE:g} s: its pods end soon")
                return
            time.sleep(_LOOK)
    except (JobError, StoppedError) as error:
        tell(f"{thing} may be left behind ({error}): kubectl delete pytorchjob -n {namespace} {name}")
