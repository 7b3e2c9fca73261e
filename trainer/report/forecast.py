"""How long a training will still take, evaluations and saves included; the export at its end is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer.interval import Interval

if TYPE_CHECKING:
    from trainer.loop.progress import Progress


def seconds_left(
    progress: Progress, wall: Mapping[str, float], steps: int, *, evaluation: Interval, checkpoint: Interval
) -> float:
    """From the means of what was done so far, over all attempts.

    :param wall: seconds of each phase so far. :param steps: of the whole training.
    """
    done = max(1, progress.step)
    training = progress.seconds / done * (steps - progress.step)
    found = training
    for interval, phase, count in (
        (evaluation, "evaluation", len(progress.evaluations)),
        (checkpoint, "save", progress.saves),
    ):
        if count:
            found += wall.get(phase, 0.0) / count * times_left(interval, progress.step, steps, training)
    return found


def times_left(interval: Interval, step: int, steps: int, seconds: float) -> int:
    """How often what is done each interval and after the last step comes after `step`.

    :param seconds: that the steps left take, for intervals in minutes.
    """
    if step >= steps:
        return 0
    if interval.seconds is not None:
        return int(seconds // interval.seconds) + 1
    if not interval.steps:
        return 1
    return steps // interval.steps - step // interval.steps + bool(steps % interval.steps)
