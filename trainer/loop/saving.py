"""When the state is saved and where, how each save went, and what is still saved when a stop was asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from trainer.config import Settings
from trainer.gang import Gang
from trainer.report.console import Console
from trainer.report.tracking import Tracker
from trainer.state.checkpoint import Checkpoints, Seal, Snapshot
from trainer.state.fast import Fast
from trainer.state.grace import LastSave, last_save
from trainer.state.saver import Saved, Saver
from trainer.state.stop import StopSignal

LAST_WORDS: Final = 3.0  # seconds of the grace that the launcher keeps for itself


class Saving:
    """Saves of one rank; all ranks call the same at the same step.

    :param snapshot: the state as it is now, and the evaluation loss at its step if there is one.
    :param offer: called with the checkpoints that exist after each save. :param fast: this node's fast tier.
    :ivar saved, saved_fast: step of the newest checkpoint in the durable place and in the fast tier.
    """

    saver: Saver

    def __init__(
        self,
        checkpoints: Checkpoints,
        gang: Gang,
        settings: Settings,
        stop: StopSignal,
        console: Console,
        tracker: Tracker,
        *,
        snapshot: Callable[[], tuple[Snapshot, float | None]],
        offer: Callable[[list[Seal]], None],
        fast: Fast | None,
    ) -> None:
        self.checkpoints, self.gang, self.settings, self.stop = checkpoints, gang, settings, stop
        self.console, self.tracker, self.fast = console, tracker, fast
        self._snapshot, self._offer = snapshot, offer
        self.saved: int | None = None
        self.saved_fast: int | None = None
        self._started = False
        self._owed = False  # a checkpoint in the durable place, which waits for the upload before it

    def start(self, before_seal: Callable[[], None]) -> None:
        """Begin to take saves. :param before_seal: called on rank 0 before a checkpoint becomes complete."""
        train = self.settings.train
        self.saver = Saver(
            self.checkpoints,
            self.gang,
            keep=train.keep_checkpoints,
            best=train.keep_best,
            before_seal=before_seal,
            fast=self.fast,
        )
        self._started = True

    def resumed(self, step: int, durable: bool) -> None:
        """The state is that of a checkpoint. :param durable: whether it is in the durable place."""
        if durable:
            self.saved = step
            if self.gang.leader:
                self._prune(step)
        else:
            self.saved_fast = step
            self.console.say(f"checkpoint step-{step} is in the fast tier only")

    def _prune(self, step: int) -> None:
        """Delete the older checkpoints that an attempt which was killed has left: there may be no save any more."""
        train = self.settings.train
        try:
            removed = self.checkpoints.prune(train.keep_checkpoints, step, train.keep_best)
        except Exception as error:  # stores raise many kinds
            self.console.say(f"older checkpoints could not be looked through ({error}); they stay for now")
            return
        if removed:
            self.console.say(f"removed {', '.join(f'step-{at}' for at in removed)}, which an earlier attempt has left")

    @property
    def newest(self) -> int | None:
        """Step of the newest checkpoint in any place."""
        return max((step for step in (self.saved, self.saved_fast) if step is not None), default=None)

    def poll(self) -> None:
        """Tell of saves that have ended, if any were begun; waits for nothing."""
        if not self._started:
            return
        self.collect(self.saver.poll())
        self.collect(self.saver.uploads.poll())

    def save(self, step: int, due: bool) -> bool:
        """Begin a checkpoint; all ranks take part. Whether one of them was asked to stop meanwhile.

        The step waits for a copy of the state, and for the save before, if that is still going on. If it cannot be
        written, training goes on with the older ones: a full disk may be mended before the end.

        :param due: whether the durable place is to have one.
        """
        self._owed = self._owed or due
        began, before = time.perf_counter(), self.saver.step
        self.collect(self.saver.wait())
        waited = time.perf_counter() - began
        if before is not None and waited > 1:
            self.console.say(f"waited {waited:.1f} s for checkpoint step-{before}; raise `train.checkpoint_every`")
        self.collect(self.saver.uploads.poll())
        uploading = self.saver.uploads.step
        stops, busy = self.gang.sum([float(self.stop.asked), float(uploading is not None)])
        if stops:
            return True
        if busy and self._owed:
            self.console.say(
                f"checkpoint step-{step} stays in the fast tier, because the upload of step-{uploading} "
                "is still running; the next one goes to the durable place"
            )
        durable = not busy and (self._owed or self.fast is None)
        self.begin(durable)
        self._owed = self._owed and not durable
        return bool(self.gang.sum([float(self.stop.asked)])[0])

    def begin(self, durable: bool = True) -> None:
        """Begin to save the state as it is now."""
        snapshot, loss = self._snapshot()
        self.saver.begin(snapshot, loss, durable)

    def land(self) -> None:
        """Wait for what is going on, as long as the grace allows."""
        self.collect(self.saver.wait(self.grace_left))
        self.collect(self.saver.uploads.wait(self.grace_left))

    def at_end(self, step: int) -> None:
        """The last checkpoint of a training that is done."""
        if self.saved == step:
            return
        self.collect(self.saver.wait())
        self.collect(self.saver.uploads.wait())
        if self.saved != step:
            self.begin()
            self.land()

    def at_stop(self, step: int) -> None:
        """The last checkpoint before a stop, if this step has none yet and there is time for one."""
        end = time.monotonic() + min(self.gang.gather(self.grace_left()))
        self.collect(self.saver.wait(lambda: end - time.monotonic()))
        if self.fast is not None:
            self._in_tiers_at_stop(step, end)
            return
        hurried = self.saver.step is not None or end - time.monotonic() < 1.2 * self.saver.slowest
        told = self.gang.gather((self.saved == step, hurried))
        if all(done for done, _ in told):
            return
        if any(late for _, late in told):
            self.console.say(
                f"no time is left to save step {step}: a save takes {self.saver.slowest:.0f} s, "
                f"{max(0.0, end - time.monotonic()):.0f} s are left; "
                + ("there is no checkpoint yet" if self.saved is None else f"checkpoint step-{self.saved} stays")
            )
            return
        self.begin()
        self.collect(self.saver.wait(lambda: end - time.monotonic()))

    def _in_tiers_at_stop(self, step: int, end: float) -> None:
        """What still fits goes to both places, or to the fast tier; an upload that is going on gets what is left."""
        lanes = (self.saver, self.saver.uploads)
        self.collect(lanes[1].poll())
        here = (
            self.saved == step,
            self.saved_fast == step,
            lanes[0].step is None and lanes[0].holds(step),
            end - time.monotonic() if lanes[0].step is None else 0.0,
            *(lane.slowest for lane in lanes),
            lanes[1].step is not None,
        )
        done, near, held, left, fast, durable, uploading = zip(*self.gang.gather(here), strict=True)
        chosen = last_save(min(left), 0.0 if all(held) else max(fast), max(durable), any(uploading))
        if all(done) or chosen is LastSave.NONE or (all(near) and chosen is LastSave.FAST):
            pass
        elif all(held):
            self.saver.upload(step)
        else:
            self.begin(chosen is LastSave.BOTH)
            self.collect(self.saver.wait(lambda: end - time.monotonic()))
        self.collect(lanes[1].wait(lambda: end - time.monotonic()))
        if self.saved != step:
            newest = "no checkpoint" if self.saved is None else f"checkpoint step-{self.saved}"
            there = f"step-{self.saved_fast} is in the fast tier" if self.saved_fast else "the fast tier has none"
            self.console.say(
                f"stopped at step {step} with {max(0.0, end - time.monotonic()):.0f} s left, an upload takes "
                f"{max(durable):.0f} s: the durable place has {newest}, {there}"
            )

    def grace_left(self) -> float:
        """Seconds until the launcher ends this rank, with a tenth in reserve; infinite if nobody asked for a stop."""
        if self.stop.since is None:
            return math.inf
        return 0.9 * max(1.0, self.settings.grace_seconds - LAST_WORDS) - (time.monotonic() - self.stop.since)

    def collect(self, ended: Saved | None) -> None:
        """Tell how a save went."""
        if ended is None:
            return
        if ended.fast_error is not None:
            self.console.say(f"checkpoint step-{ended.step} went to the durable place at once ({ended.fast_error})")
        if ended.error is not None:
            self.console.say(
                f"checkpoint step-{ended.step} could not be written ({ended.error}); the older ones are kept. "
                "Look at the room and the rights of the storage"
            )
            self.tracker.tags({"dropforge.checkpoint_error": f"step {ended.step}: {ended.error}"[:500]})
            return
        if ended.fast:
            self.saved_fast = ended.step
        else:
            self.saved = ended.step
        if ended.seal is None:
            return
        where = " in the fast tier" if ended.fast else ""
        removed = f", removed {', '.join(f'step-{step}' for step in ended.removed)}" if ended.removed else ""
        self.console.say(
            f"checkpoint step-{ended.step}{where}: {ended.seal.bytes / 1e6:.1f} MB in {ended.seconds:.2f} s, "
            f"{ended.copied:.2f} s of it in the step{removed}"
        )
        if ended.trouble is not None:
            self.console.say(f"older checkpoints could not be looked through ({ended.trouble}); they stay for now")
        elif not ended.fast:
            self._offer(ended.seals)
        name = "train/fast_checkpoint" if ended.fast else "train/checkpoint"
        self.tracker.metrics({f"{name}_seconds": ended.seconds, f"{name}_stall_seconds": ended.copied}, ended.step)
