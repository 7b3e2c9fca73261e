"""The learning rate of a step: a pure function of the recipe, the step's number and the evaluations so far.

A resumed run needs no state for it. Every schedule begins with a linear warm-up to the peak and never falls below the
minimum afterwards. With t the share of the steps after the warm-up that are done:

=============  ======================================================================================================
constant       the peak
linear         a line from the peak to the minimum
cosine         half a cosine from the peak to the minimum (https://arxiv.org/abs/1608.03983, eq. 5)
exponential    peak * drop_factor**t
step           peak * drop_factor**n, n the number of whole `drop_every` since the warm-up
plateau        peak * drop_factor**n, n as `drops` counts it
wsd            the peak, then over the last `decay` of all steps 1 - sqrt of their done share
               (https://arxiv.org/abs/2405.18392, eq. 3)
=============  ======================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dropforge.errors import RecipeError
from trainer.config import Train

Evaluations = Sequence[Mapping[str, Any]]  # each with its `step` and `eval/loss`, in order


def learning_rate(train: Train, step: int, steps: int, evaluations: Evaluations = ()) -> float:
    """Rate of optimizer step `step` (0-based) of `steps`.

    :param evaluations: those made before the step; only `plateau` looks at them.
    """
    warmup = count_steps(train.warmup, steps)
    if step < warmup:
        return train.learning_rate * (step + 1) / (warmup + 1)
    least = train.min_rate
    since, left = step - warmup, max(1, steps - warmup)
    match train.schedule:
        case "constant":
            share = 1.0
        case "linear":
            share = least + (1 - least) * (1 - since / left)
        case "cosine":
            share = least + (1 - least) * 0.5 * (1 + math.cos(math.pi * since / left))
        case "exponential":
            share = train.drop_factor ** (since / left)
        case "step":
            share = train.drop_factor ** (since // max(1, count_steps(train.drop_every, steps)))
        case "plateau":
            after = [item for item in evaluations if warmup <= item["step"] <= step and item["step"]]
            share = train.drop_factor ** drops(after, train.plateau_patience)
        case "wsd":
            decay = min(left, count_steps(train.decay, steps))
            into = step - (steps - decay)
            share = 1.0 if into < 0 else least + (1 - least) * (1 - math.sqrt(into / max(1, decay)))
    return train.learning_rate * max(least, share)


def count_steps(value: float, steps: int) -> int:
    """A number below 1 is a share of all steps, any other is a number of steps."""
    return math.ceil(value * steps) if value < 1 else int(value)


def drops(evaluations: Evaluations, patience: int) -> int:
    """How often a plateau was met: `patience` evaluations in a row without a lower loss than the lowest, and one more.

    It counts as torch's `ReduceLROnPlateau(threshold=0)`: after a drop the row begins anew, the lowest loss stays.
    """
    lowest, row, count = math.inf, 0, 0
    for item in evaluations:
        if item["eval/loss"] < lowest:
            lowest, row = item["eval/loss"], 0
        else:
            row += 1
        if row > patience:
            count, row = count + 1, 0
    return count


def check_steps(train: Train, steps: int) -> None:
    """:raises RecipeError: if warm-up and decay do not fit into the steps that there are."""
    # A share is rounded up, so in very short runs it may take every step: that is no contradiction.
    warmup, decay = (int(value if value >= 1 else value * steps) for value in (train.warmup, train.decay))
    decay = decay if train.schedule == "wsd" else 0
    if warmup >= max(1, steps) or warmup + decay > steps:
        parts = f"{warmup} steps of warm-up" + (f" and {decay} of decay" if decay else "")
        raise RecipeError(
            "recipe key `train.warmup`",
            f"{parts} do not fit into {steps} steps",
            "Give both as shares (below 1), shorten them, or train longer",
        )
