"""Checks before the first step, on the model as it is trained: micro-batches add up, work done again is the same, and
so is compiled code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch.utils.checkpoint import CheckpointError

from dropforge.errors import DropforgeError, RecipeError
from trainer.compat import compiler_error
from trainer.data.batch import Batch
from trainer.data.plan import Pack

#: Largest difference, as a part of the gradient's norm.
TOLERANCE: Final = {"fp32": 1e-4, "tf32": 2e-2, "bf16": 5e-2, "fp16": 5e-2}


def halves(packs: Sequence[Pack]) -> list[list[Pack]]:
    """A micro-batch as two smaller ones: between its rows, or between the documents of its only row."""
    if len(packs) == 1 and len(packs[0]) > 1:
        middle = len(packs[0]) // 2
        return [[packs[0][:middle]], [packs[0][middle:]]]
    middle = len(packs) // 2
    return [list(packs[:middle]), list(packs[middle:])]


def splits(packs: Sequence[Pack]) -> bool:
    """Whether both halves have a document: else one of them is the whole, and to compare them proves nothing."""
    return all(any(len(pack) for pack in half) for half in halves(packs))


def check_accumulation(
    packs: Sequence[Pack],
    make: Callable[[list[Pack]], Batch],
    backward: Callable[[Batch, float, bool], torch.Tensor],
    norm: Callable[[], float],
    precision: str,
) -> float | None:
    """Compare the gradient of a micro-batch with the sum of its halves', which is taken off it; dropout must be off.

    A loss that averages over rows, or a layer that mixes them, makes a training depend on how a step is cut. All ranks
    take part, and see the same: the gradient is that of all of them. It is left in the weights, to be set to zero.

    :param packs: a real micro-batch of this rank. :param make: see `trainer.data.batch.make_batch`.
    :param backward: see `trainer.loop.step.Step.backward`. :param norm: global norm of the gradient.
    :returns: the difference as a part of the gradient's norm; None if there is no gradient to compare.
    :raises DropforgeError: if it is larger than `TOLERANCE`.
    """
    backward(make(list(packs)), 1.0, True)
    whole = norm()
    first, second = halves(packs)
    backward(make(first), -1.0, False)
    backward(make(second), -1.0, True)
    rest = norm()
    if not (math.isfinite(whole) and math.isfinite(rest)) or whole == 0:
        return None  # a loss that is no number is the steps' business
    difference = rest / whole
    if not difference <= TOLERANCE[precision]:
        raise DropforgeError(
            "the model's gradient",
            f"two halves of a micro-batch do not add up to it (they differ by {difference:.1e} of its norm, "
            f"{TOLERANCE[precision]:.0e} is allowed)",
            "A layer mixes the rows of a batch, as batch norm does, or the loss is no sum: choose another model",
        )
    return difference


def check_recomputation(
    passes: Callable[[float], object],
    kept: Callable[[], AbstractContextManager[None]],
    norm: Callable[[], float],
    precision: str,
) -> float | None:
    """Compare a gradient with everything kept with that of blocks that compute again, dropout and all.

    A block whose work depends on what changes between the passes, as a counter or a generator of its own does, would
    train on another gradient without a word. All ranks take part. The gradient is left in the weights.

    :param passes: forward and backward pass over a batch, from one random state; its gradient is multiplied and added.
    :param kept: a context in which blocks keep everything. :param norm: global norm of the gradient.
    :returns: the difference as a part of the gradient's norm; None if there is no gradient to compare.
    :raises RecipeError: if it is larger than `TOLERANCE`.
    """
    with kept():
        passes(1.0)
    whole = norm()
    try:
        passes(-1.0)
    except CheckpointError as error:
        raise _not_repeatable(" ".join(str(error).split())[:200]) from error
    rest = norm()
    if not (math.isfinite(whole) and math.isfinite(rest)) or whole == 0:
        return None
    difference = rest / whole
    if not difference <= TOLERANCE[precision]:
        raise _not_repeatable(f"gradients differ by {difference:.1e} of their norm")
    return difference


def _not_repeatable(cause: str) -> RecipeError:
    return RecipeError(
        "recipe key `train.activation_checkpointing`",
        f"the model's blocks do not compute the same a second time ({cause})",
        "Use `none`",
    )


def check_compiled(
    passes: Callable[[float], object],
    plain: Callable[[], AbstractContextManager[None]],
    norm: Callable[[], float],
    precision: str,
) -> float | None:
    """Compile, and compare the gradient of compiled code with that of the model's own.

    All ranks take part. The gradient is left in the weights.

    :param passes: see `check_recomputation`. :param plain: a context in which the model's own code runs.
    :param norm: global norm of the gradient.
    :returns: the difference as a part of the gradient's norm; None if there is no gradient to compare.
    :raises RecipeError: if it is larger than `TOLERANCE`, or the model cannot be compiled.
    """
    with plain():
        passes(1.0)
    whole = norm()
    try:
        passes(-1.0)
    except compiler_error() as error:
        raise _not_compiled(f"torch cannot compile them: {' '.join(str(error).split())[:300]}") from error
    rest = norm()
    if not (math.isfinite(whole) and math.isfinite(rest)) or whole == 0:
        return None
    difference = rest / whole
    if not difference <= TOLERANCE[precision]:
        raise _not_compiled(f"their gradient differs by {difference:.1e} of its norm from that of the model's own code")
    return difference


def _not_compiled(cause: str) -> RecipeError:
    return RecipeError(
        "recipe key `train.compile`",
        f"the model's blocks do not compute the same when compiled ({cause})",
        "Leave it out",
    )
