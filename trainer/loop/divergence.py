"""How many steps without a finite loss and gradient are borne."""

from __future__ import annotations

from typing import Final

from dropforge.errors import DropforgeError
from trainer.loop.progress import Progress
from trainer.report.steps import shown_rows

BAD_STEPS: Final = 5  # skipped steps in a row that are still borne


class DivergedError(DropforgeError):
    """The loss is no number any more."""


def check_skipped(progress: Progress, most: int) -> None:
    """:param most: skipped steps of a whole run that are borne. :raises DivergedError: if there were more."""
    if progress.in_row > BAD_STEPS:
        cause = f"loss or gradient was not finite in {progress.in_row} steps in a row"
    elif progress.in_row and progress.skipped > most:
        cause = f"loss or gradient was not finite in {progress.skipped} steps, and `train.max_skipped_steps` is {most}"
    else:
        return
    raise DivergedError(
        f"step {progress.step}",
        cause,
        "Lower `train.learning_rate`, lengthen `train.warmup`, or look at the rows of these steps: "
        + shown_rows(progress.skips[-1]["rows"]),
    )
