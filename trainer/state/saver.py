"""Saving beside the training: a step pays for one copy of the state, a thread for the rest.

The thread of each rank writes the rank's file, then the ranks tell each other how it went, and rank 0 seals. They speak
over a process group of their own, so that nothing they say can meet a collective of the training.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch.distributed as dist

from trainer.gang import Gang
from trainer.state.blocks import Staging
from trainer.state.checkpoint import PROGRESS, Checkpoints, File, Seal, Snapshot, rank_file

_NICE: Final = 10  # the thread gives way to the computation, but not so far that it holds the GIL and sleeps
_LOOK: Final = 0.05  # seconds between two looks at the limit of a wait


@dataclass(frozen=True)
class Saved:
    """How a save ended, on every rank.

    :param error: why there is no checkpoint of this step; None if there is one.
    :param seal, seals, removed: on rank 0 the manifest, those that exist now, and the steps that were deleted.
    :param trouble: what went wrong once it existed.
    :param copied, seconds: time for the copy of the state, and from its beginning to the manifest.
    """

    step: int
    error: str | None = None
    seal: Seal | None = None
    seals: list[Seal] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    trouble: str | None = None
    copied: float = 0.0
    seconds: float = 0.0


class Saver:
    """Writes one checkpoint at a time; made on all ranks together.

    :param keep, best: newest and best checkpoints to keep. :param before_seal: called on rank 0 before the manifest.
    """

    def __init__(
        self, checkpoints: Checkpoints, gang: Gang, *, keep: int, best: int, before_seal: Callable[[], Any]
    ) -> None:
        self._checkpoints = checkpoints
        self._gang = gang
        self._keep, self._best = keep, best
        self._before_seal = before_seal
        self._group: Any = dist.new_group(backend="gloo") if gang.world > 1 else None
        self._staging = Staging(pinned=gang.device.type == "cuda")
        self._thread: threading.Thread | None = None
        self._ended: Saved | None = None
        self.slowest = 0.0  # seconds that a save took

    @property
    def step(self) -> int | None:
        """The step whose checkpoint is being written."""
        return self._step if self._thread is not None else None

    def begin(self, snapshot: Snapshot, eval_loss: float | None = None) -> None:
        """Copy the state and return; the rest goes on beside the training. Collect the one before with `wait` first."""
        assert self._thread is None, "one save at a time"
        began = time.perf_counter()
        data = self._staging.fill(snapshot.blocks(self._gang.rank, self._gang.world))
        progress = json.dumps(snapshot.progress).encode()
        tokens = int(snapshot.progress.get("tokens", 0))
        copied = time.perf_counter() - began
        self._step = snapshot.step

        def work() -> None:
            with suppress(OSError):  # a sandbox may forbid it
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            try:
                ended = self._write(snapshot.step, data, progress, eval_loss, tokens)
            except BaseException as problem:  # a thread that dies unheard would be a checkpoint that nobody misses
                ended = Saved(snapshot.step, repr(problem))
            self._ended = Saved(**{**vars(ended), "copied": copied, "seconds": time.perf_counter() - began})

        self._thread = threading.Thread(target=work, name="saver", daemon=True)
        self._thread.start()

    def poll(self) -> Saved | None:
        """How the save went, once it has ended; each is told once."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread.join()
        self._thread = None
        ended, self._ended = self._ended, None
        if ended is not None and ended.error is None:
            self.slowest = max(self.slowest, ended.seconds)
        return ended

    def wait(self, left: Callable[[], float] = lambda: float("inf")) -> Saved | None:
        """Wait for the save in flight, as long as `left` says there are seconds left; None without one, or too late."""
        while self._thread is not None and self._thread.is_alive() and (rest := left()) > 0:
            self._thread.join(min(_LOOK, rest))
        return self.poll()

    def _write(self, step: int, data: memoryview, progress: bytes, eval_loss: float | None, tokens: int) -> Saved:
        checkpoints, gang = self._checkpoints, self._gang
        files: dict[str, File] = {}
        error, seal = None, None
        try:
            if gang.leader:
                checkpoints.unseal(step)
                files[PROGRESS] = checkpoints.write(step, PROGRESS, progress)
            files[rank_file(gang.rank)] = checkpoints.write(step, rank_file(gang.rank), data)
        except Exception as problem:  # stores raise many kinds
            error = str(problem)
        try:
            told = self._gather((files, error))
            error = next((problem for _, problem in told if problem), None)
            if error is not None and gang.leader:
                self._clear(step)
            elif gang.leader:
                try:
                    self._before_seal()
                    every = {name: facts for part, _ in told for name, facts in part.items()}
                    seal = checkpoints.seal(step, gang.world, every, eval_loss, tokens)
                except Exception as problem:
                    error = str(problem)
            error = self._gather(error)[0]
        except Exception as problem:  # a peer is gone
            error = error or str(problem)
        if error is not None or seal is None:
            return Saved(step, error)
        try:
            removed = checkpoints.prune(self._keep, step, self._best)
            return Saved(step, None, seal, checkpoints.seals(), removed)
        except Exception as problem:
            return Saved(step, None, seal, [], [], str(problem))

    def _clear(self, step: int) -> None:
        """Take the files of a failed save away: they hold the room that the next one needs."""
        with suppress(Exception):
            self._checkpoints.discard(step)

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self._gang.world
        dist.all_gather_object(found, value, group=self._group)
        return found
