"""Lines on data that are too few: a training that changes little, figures that measure little. They refuse nothing."""

from __future__ import annotations

from typing import Final

from dropforge.promotion import LEAST_ROWS
from dropforge.text import counted

LEAST_STEPS: Final = 10


def too_small(steps: object, eval_rows: object, *, estimated: bool = False, rows_estimated: bool = False) -> list[str]:
    """Return a line for each amount that is too small.

    :param steps, eval_rows: as a pod wrote them; None if not known.
    :param estimated: whether the steps are a guess. :param rows_estimated: whether the rows are one.
    """
    about, about_rows = ("about " if guess else "" for guess in (estimated, rows_estimated))
    found = []
    if isinstance(steps, int) and steps < LEAST_STEPS:
        found.append(
            f"The training has {about}{counted(steps, 'step')}, fewer than {LEAST_STEPS}, and changes little: "
            "drop more data, raise `train.epochs`, or lower `train.tokens_per_step`"
        )
    if isinstance(eval_rows, int) and eval_rows < LEAST_ROWS:
        found.append(
            f"The evaluation has {about_rows}{counted(eval_rows, 'row')}, fewer than {LEAST_ROWS}, "
            "and its figures say little: drop more data, or raise `data.eval_fraction`"
        )
    return found
