"""A window of steps under torch's profiler: planned in the recipe, or asked for while a run goes on.

A request is the object `profile.json` in the run's folder. Rank 0 looks for it from a thread on log steps, and its
answer rides in the collective of a step, so that all ranks begin with the same one. Each rank writes its Chrome trace.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from dropforge.layout import PROFILE_REQUEST
from dropforge.profiling import Span, read_request
from dropforge.store import Store, read_bounded
from trainer.gang import Gang

if TYPE_CHECKING:
    from trainer.loop.progress import Progress
    from trainer.loop.step import StepResult

FOLDER: Final = "profiles/"
_LARGEST: Final = 1 << 20  # bytes of a request


class Requests:
    """Looks for requests beside the training; on rank 0 only."""

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        self._store, self._say = store, say
        self._thread: threading.Thread | None = None
        self._steps = 0
        self._seen: bytes | None = None  # a request that could not be deleted

    def look(self) -> None:
        """Begin to look, if nobody is looking."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="profile requests", daemon=True)
            self._thread.start()

    def take(self) -> int:
        """The steps that were asked for, once; 0 if there is nothing new."""
        steps, self._steps = self._steps, 0
        return steps

    def _look(self) -> None:
        try:
            if self._store.stat(PROFILE_REQUEST) is None:
                self._seen = None  # gone in the end: the next one is a new one, also with the same words
                return
            data = read_bounded(self._store, PROFILE_REQUEST, _LARGEST)
            if data == self._seen:
                return
            self._seen = data
            self._store.delete(PROFILE_REQUEST)
            self._seen = None
        except Exception:  # a store that is away is told of by others; stores raise many kinds
            if self._seen is None:
                return
        try:
            self._steps = read_request(data)
        except ValueError as error:
            self._say(f"a request for a profile is ignored: {error}")


class Profiler:
    """An observer that profiles windows of steps. Whatever fails in it is said and changes nothing else.

    :param planned: the recipe's window. :param requests: on rank 0. :param told: called on rank 0 with the address of
        the traces of a window when its own is written.
    """

    def __init__(
        self,
        gang: Gang,
        store: Store,
        say: Callable[[str], None],
        *,
        planned: Span | None = None,
        requests: Requests | None = None,
        told: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._gang, self._store, self._say = gang, store, say
        self._planned, self._requests, self._told = planned, requests, told
        self._running: Any = None
        self._window = Span(0, 0)
        self._writers: list[threading.Thread] = []

    def after_step(self, result: StepResult, progress: Progress, log: bool) -> None:
        """See `trainer.loop.observer.Observer`."""
        step = progress.step
        if self._running is not None and step >= self._window.last:
            self._end(step)
        if log and self._requests is not None:
            self._requests.look()
        planned = self._planned
        if self._running is None and planned is not None and planned.first - 1 <= step < planned.last:
            self._begin(Span(step + 1, planned.last))
        if result.due.profile:
            self._begin(Span(step + 1, step + result.due.profile))

    def close(self, step: int, seconds: float) -> None:
        """Write what there is of a window that the end of the training cut. :param seconds: to wait at most."""
        if self._running is not None:
            if step >= self._window.first:
                self._end(step)
            else:
                self._drop()
        for writer in self._writers:
            writer.join(seconds / len(self._writers))

    def _begin(self, window: Span) -> None:
        if self._running is not None:
            self._say(f"a request for a profile is ignored: steps {self._window} are being profiled")
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._gang.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        try:
            running = torch.profiler.profile(activities=activities)
            running.start()
        except Exception as error:  # a profiler of somebody else runs, or its library is missing
            self._say(f"steps cannot be profiled ({type(error).__name__}: {error})")
            self._planned = None
            return
        self._running, self._window = running, window
        self._say(f"profiling steps {self._window}")

    def _end(self, step: int) -> None:
        self._window = Span(self._window.first, step)
        running, name = self._running, f"{FOLDER}steps-{self._window}/rank-{self._gang.rank}.json.gz"
        if not self._drop():
            return
        writer = threading.Thread(target=self._write, args=(running, name), name="profile", daemon=True)
        writer.start()
        self._writers.append(writer)

    def _drop(self) -> bool:
        running, self._running = self._running, None
        try:
            running.stop()
        except Exception as error:
            self._say(f"the profile is lost ({type(error).__name__}: {error})")
            return False
        return True

    def _write(self, running: Any, name: str) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="dropforge-profile-") as folder:
                path = Path(folder) / "trace.json.gz"
                running.export_chrome_trace(str(path))
                self._store.upload(path, name)
        except Exception as error:  # stores raise many kinds
            self._say(f"the profile could not be written ({type(error).__name__}: {error})")
            return
        address = f"{self._store.uri}/{name.rpartition('/')[0]}"
        self._say(f"profile: {address}")
        self._told(address)
