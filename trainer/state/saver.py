"""Saving beside the training: a step pays for one copy of the state, a thread for the rest.

The thread of each rank writes the rank's file, then the ranks tell each other how it went, and rank 0 seals. They speak
over a process group of their own, so that nothing they say can meet a collective of the training.

With a fast tier the file goes there, sealed on each node, and a second thread uploads it from there to the durable
place: the next save has not to wait for that.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from trainer.gang import Gang
from trainer.peer_values import gather_values
from trainer.state.blocks import Staging
from trainer.state.checkpoint import PROGRESS, Checkpoints, File, Seal, Snapshot, TakenError, rank_file
from trainer.state.fast import Fast

_NICE: Final = 10  # the thread gives way to the computation, but not so far that it holds the GIL and sleeps
_PATIENCE: Final = timedelta(hours=24)  # of ranks for the slowest write; one that is gone is noticed at once
_LOOK: Final = 0.05  # seconds between two looks at the limit of a wait


@dataclass(frozen=True)
class Saved:
    """How a save ended, on every rank.

    :param error: why there is no checkpoint of this step; None if there is one.
    :param fast: whether it is in the fast tier, and not in the durable place.
    :param fast_error: why it is in the durable place only.
    :param seal, seals, removed: on rank 0 the manifest, those that exist now, and the steps that were deleted.
    :param trouble: what went wrong once it existed.
    :param wrote: this rank's file in the fast tier.
    :param copied, seconds: time for the copy of the state, and from its beginning to the manifest.
    """

    step: int
    error: str | None = None
    fast: bool = False
    fast_error: str | None = None
    seal: Seal | None = None
    seals: list[Seal] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    trouble: str | None = None
    copied: float = 0.0
    seconds: float = 0.0
    wrote: File | None = None


class Lane:
    """One save at a time, in a thread that gives way to the training; made on all ranks together."""

    def __init__(self, gang: Gang, name: str) -> None:
        self._gang, self._name = gang, name
        self._group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE) if gang.world > 1 else None
        self._thread: threading.Thread | None = None
        self._ended: Saved | None = None
        self._step = 0
        self.slowest = 0.0  # seconds that a save took

    @property
    def step(self) -> int | None:
        """The step whose checkpoint is being written."""
        return self._step if self._thread is not None else None

    def start(self, step: int, work: Callable[[], Saved], began: float, copied: float = 0.0) -> None:
        """Do the work beside the training. Collect the one before with `wait` first."""
        assert self._thread is None, "one save at a time"
        self._step = step

        def run() -> None:
            with suppress(OSError):  # a sandbox may forbid it
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            try:
                ended = work()
            except BaseException as problem:  # a thread that dies unheard would be a checkpoint that nobody misses
                ended = Saved(step, repr(problem))
            self._ended = replace(ended, copied=copied, seconds=time.perf_counter() - began)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        thread.start()
        self._thread = thread  # only now: another thread may be polling

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

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank; to be called by the thread only."""
        if self._group is None:
            return [value]
        return gather_values(value, self._group)


class Saver(Lane):
    """Writes one checkpoint at a time; made on all ranks together.

    :param keep, best: newest and best checkpoints to keep. :param before_seal: called on rank 0 before the manifest.
    :param fast: this node's fast tier. :ivar uploads: what goes from there to the durable place.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        gang: Gang,
        *,
        keep: int,
        best: int,
        before_seal: Callable[[], Any],
        fast: Fast | None = None,
    ) -> None:
        super().__init__(gang, "saver")
        self._checkpoints = checkpoints
        self._keep, self._best = keep, best
        self._before_seal = before_seal
        self._fast = fast
        self._staging = Staging(pinned=gang.device.type == "cuda")
        self._node_staging = Staging(pinned=gang.device.type == "cuda")
        self._held: Callable[[], Saved] | None = None  # the upload of the newest save that is in the fast tier alone
        self._held_step: int | None = None
        self.uploads = Lane(gang, "uploader") if fast is not None else Lane(Gang(), "uploader")

    def begin(self, snapshot: Snapshot, eval_loss: float | None = None, durable: bool = True) -> None:
        """Copy the state and return; the rest goes on beside the training. Collect the one before with `wait` first.

        :param durable: False leaves it in the fast tier alone. Otherwise no upload may be going on.
        """
        began = time.perf_counter()
        gang = self._gang
        staging, blocks = self._staging, snapshot.blocks(gang.rank, gang.world)
        if not durable and gang.world > gang.local_world:
            # A node must go on from what it has itself; where ranks hold replicas that is more than its share.
            own = snapshot.blocks(gang.rank, gang.world, (gang.local_rank, gang.local_world))
            if own.keys() != blocks.keys():
                staging, blocks = self._node_staging, own
        data = staging.fill(blocks)
        progress = json.dumps(snapshot.progress).encode()
        tokens = int(snapshot.progress.get("tokens", 0))
        copied = time.perf_counter() - began
        step = snapshot.step

        def work() -> Saved:
            if self._fast is None:
                return self._write(self, step, data, progress, eval_loss, tokens)
            there = self._write_fast(self._fast, step, data, progress, eval_loss, tokens)
            if not durable:
                if there.error is None:
                    self._held, self._held_step = lambda: self._upload(there, progress, eval_loss, tokens), step
                return there
            if there.error is not None:
                ended = self._write(self, step, data, progress, eval_loss, tokens)
                return replace(ended, fast_error=there.error)
            self.uploads.start(step, lambda: self._upload(there, progress, eval_loss, tokens), time.perf_counter())
            return there

        self.start(step, work, began, copied)

    def holds(self, step: int) -> bool:
        """Whether a save of this attempt put the step into the fast tier alone. No save may be going on."""
        return self._held is not None and self._held_step == step

    def upload(self, step: int) -> None:
        """Begin to upload what `holds`; on all ranks, and no upload may be going on."""
        assert self._held is not None, "see `holds`"
        self.uploads.start(step, self._held, time.perf_counter())

    def _upload(self, there: Saved, progress: bytes, eval_loss: float | None, tokens: int) -> Saved:
        """From this node's fast tier to the durable place."""
        assert self._fast is not None
        data, problem = None, None
        try:
            path = self._fast.store.root / "checkpoints" / f"step-{there.step}" / rank_file(self._gang.rank)
            with path.open("rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:  # the others must hear of it
            problem = f"its copy in the fast tier cannot be read: {error}"
        return self._write(self.uploads, there.step, data, progress, eval_loss, tokens, there.wrote, problem)

    def _write_fast(
        self, fast: Fast, step: int, data: memoryview, progress: bytes, eval_loss: float | None, tokens: int
    ) -> Saved:
        """On each node its ranks' files, and the manifest of all once every rank has written."""
        checkpoints, gang = fast.checkpoints, self._gang
        first = gang.local_rank == 0
        files: dict[str, File] = {}
        error, seal = None, None
        try:
            if first:
                checkpoints.unseal(step)
        except Exception as problem:
            error = str(problem)
        # A rank's new file must not meet the old manifest. What counts are the counters of rank 0, on each node.
        progress = self.gather(progress if gang.leader else None)[0]
        try:
            if first:
                files[PROGRESS] = checkpoints.write(step, PROGRESS, progress)
            files[rank_file(gang.rank)] = checkpoints.write(step, rank_file(gang.rank), data)
        except Exception as problem:  # stores raise many kinds
            error = error or str(problem)
        told = self.gather((files, error, self.uploads.step))
        error = next((problem for _, problem, _ in told if problem), None)
        if error is None:
            every = {name: facts for part, _, _ in told for name, facts in part.items()}
            try:
                seal = checkpoints.make_seal(step, gang.world, every, eval_loss, tokens)
                if first:
                    checkpoints.place_seal(seal)
            except Exception as problem:
                error = str(problem)
            error = next((problem for problem in self.gather(error) if problem), None)
        if error is not None:
            if first:
                with suppress(Exception):
                    checkpoints.discard(step)
            return Saved(step, f"fast tier {fast.store.uri}: {error}", fast=True)
        trouble = None
        if first:
            try:
                fast.prune(step, {at for _, _, at in told if at is not None})
            except Exception as problem:
                trouble = str(problem)
        own = files[rank_file(gang.rank)]
        return Saved(step, fast=True, seal=seal if gang.leader else None, trouble=trouble, wrote=own)

    def _write(
        self,
        lane: Lane,
        step: int,
        data: memoryview | None,
        progress: bytes,
        eval_loss: float | None,
        tokens: int,
        expected: File | None = None,
        error: str | None = None,
    ) -> Saved:
        """To the durable place.

        :param data: this rank's file; without it `error` says why. :param expected: what a copy of it must be.
        """
        checkpoints, gang = self._checkpoints, self._gang
        files: dict[str, File] = {}
        seal = None
        try:
            if gang.leader:
                checkpoints.unseal(step)
                files[PROGRESS] = checkpoints.write(step, PROGRESS, progress)
            if data is not None:
                files[rank_file(gang.rank)] = checkpoints.write(step, rank_file(gang.rank), data)
                if expected is not None and files[rank_file(gang.rank)] != expected:
                    error = "its copy in the fast tier is broken"
        except Exception as problem:  # stores raise many kinds
            error = str(problem)
        try:
            told = lane.gather((files, error))
            error = next((problem for _, problem in told if problem), None)
            if error is not None and gang.leader:
                self._clear(step)
            elif gang.leader:
                try:
                    self._before_seal()
                    every = {name: facts for part, _ in told for name, facts in part.items()}
                    seal = checkpoints.seal(step, gang.world, every, eval_loss, tokens)
                except TakenError as problem:
                    error = str(problem)
                except Exception as problem:
                    error = str(problem)
                    self._clear(step)
            error = lane.gather(error)[0]
        except Exception as problem:  # a peer is gone
            error = error or str(problem)
        if error is not None or seal is None:
            return Saved(step, error)
        try:
            removed = checkpoints.prune(self._keep, step, self._best)
            return Saved(step, seal=seal, seals=checkpoints.seals(), removed=removed)
        except Exception as problem:
            return Saved(step, seal=seal, trouble=str(problem))

    def _clear(self, step: int) -> None:
        """Take the files of a failed save away: they hold the room that the next one needs."""
        with suppress(Exception):
            self._checkpoints.discard(step)
