"""What may look on at a training without taking part in it."""

from __future__ import annotations

from typing import Protocol

from trainer.loop.progress import Progress
from trainer.loop.step import StepResult


class Observer(Protocol):
    """Called on every rank after each step, skipped ones included; it must change nothing and wait for nobody."""

    def after_step(self, result: StepResult, progress: Progress, log: bool) -> None:
        """
        :param progress: counters with this step in them; `window_loss` is the mean since the last log step.
        :param log: whether this step is to be logged, the same on all ranks.
        """
