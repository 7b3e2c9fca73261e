"""Whether this very model keeps packed documents apart: tried, not assumed.

Position ids isolate documents in many models and leak in many others (recurrent layers, absolute caches, some
attention code), and so do own masks, so nothing is trusted but this check. It is made on the model before the ranks
share it, which decides, and once more on what they train, in its own arithmetic, which must agree.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Final

import torch

from trainer.model.build import takes_positions
from trainer.model.loss import LossModel
from trainer.node.device_errors import device_error

TOLERANCE: Final = 1e-4
_PLAIN: Final = 64  # tokens of a row that show a leak where there is no window
_BEYOND: Final = 16  # tokens by which a document is longer than a window
_LEAST: Final = 8  # tokens of the shorter document


@dataclass(frozen=True)
class Isolation:
    """The result. :param difference: largest difference of logits; :param reason: why packing is refused, or empty."""

    packs: bool
    difference: float
    reason: str


def check_isolation(loss: LossModel, length: int) -> Isolation:
    """Try whether the documents of packed rows are kept apart.

    :param loss: on its device, and packed; weights in fp32. It is left in the mode it had.
    :param length: longest row in tokens. The documents reach beyond sliding windows and attention chunks if a row can.
    :raises torch.OutOfMemoryError: if the memory does not hold two rows: that says nothing about the model.
    """
    if not loss.masked and not takes_positions(loss.model):
        return Isolation(False, float("inf"), "the model takes no position ids")
    if "logits_to_keep" not in inspect.signature(loss.model.forward).parameters:
        return Isolation(False, float("inf"), "the model gives no logits for single places, so it cannot be checked")
    if length < 2 * _LEAST:
        return Isolation(False, float("inf"), "rows are too short to check")
    try:
        difference = largest_difference(loss, length)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        if "allocate memory" in str(error) or device_error(error):  # out of memory on a CPU has no type of its own
            raise
        return Isolation(False, float("inf"), f"the model refuses packed rows ({' '.join(str(error).split())[:160]})")
    if not difference <= tolerance(loss.narrow is not None):  # NaN is no agreement
        return Isolation(False, difference, f"packed documents see each other: logits differ by {difference:.2g}")
    return Isolation(True, difference, "")


def tolerance(narrow: bool) -> float:
    """Largest difference of logits that is rounding, as a part of the largest logit; a leak is of the order of 1."""
    return 5e-2 if narrow else TOLERANCE


def widest_window(config: Any, length: int) -> int:
    """The widest sliding window or attention chunk that a row of `length` tokens goes beyond; 0 without one."""
    parts = [config, config.get_text_config()]  # a composite model keeps its decoder's settings apart
    sizes = [getattr(part, name, None) for part in parts for name in ("sliding_window", "attention_chunk_size")]
    return max((size for size in sizes if isinstance(size, int) and 0 < size <= length - _LEAST - 1), default=0)


def document_lengths(length: int, window: int) -> tuple[int, int]:
    """Lengths of the two documents, together at most `length`; the second is longer, and beyond the window."""
    if not window:
        total = min(length, _PLAIN)
        return total // 3, total - total // 3
    second = min(window + _BEYOND, length - _LEAST)
    return min(window + _BEYOND // 2, length - second), second


def _sample(start: int, size: int) -> list[int]:
    """Places of a document where a leak shows: the first ones, next to a neighbour, the last, some between."""
    spread = [size * part // 8 for part in range(8)]
    return sorted({start + place for place in (*range(min(16, size)), *spread, *range(max(0, size - 8), size))})


@torch.no_grad()
def largest_difference(loss: LossModel, length: int) -> float:
    """Compare packed documents with each alone, and with themselves beside another neighbour, in the loss's arithmetic.

    Logits are computed for some places of each document, the first and last among them: all of them would take more
    memory than the training where the vocabulary is wide. Where ranks share the model, all take part, with one length.

    :returns: the largest difference of logits, as a part of the largest logit.
    """
    # Long enough to show a leak, beyond the window if there is one, and no longer: this is paid at every start.
    first, second = document_lengths(length, widest_window(loss.model.config, length))
    device, vocabulary = loss.place()
    generator = torch.Generator().manual_seed(0)
    a, other, b = (torch.randint(0, vocabulary, (1, size), generator=generator) for size in (first, first, second))
    up, longer = torch.arange(first)[None], torch.arange(second)[None]
    ab, ba = torch.cat([up, longer], 1), torch.cat([longer, up], 1)
    in_a, in_b = _sample(0, first), _sample(0, second)
    behind_a, behind_b = [first + place for place in in_b], [second + place for place in in_a]

    def run(ids: torch.Tensor, positions: torch.Tensor, *places: list[int]) -> list[torch.Tensor]:
        """For each row (len(places), V) logits."""
        flat = [row * ids.shape[1] + place for row, wanted in enumerate(places) for place in wanted]
        found = loss.logits(ids.to(device), positions.to(device), torch.tensor(flat, device=device))
        return list(torch.split(found, [len(wanted) for wanted in places]))

    training = loss.training
    loss.eval()
    try:
        (alone_a,), (alone_b,) = run(a, up, in_a), run(b, longer, in_b)
        # Two rows with the documents in either order: a check on one row only misses models that treat rows alike.
        packed = run(
            torch.cat([torch.cat([a, b], 1), torch.cat([b, a], 1)]),
            torch.cat([ab, ba]),
            sorted(in_a + behind_a),
            sorted(in_b + behind_b),
        )
        (changed,) = run(torch.cat([other, b], 1), ab, behind_a)
    finally:
        loss.train(training)
    left_a, left_b = torch.split(packed[0], [len(in_a), len(in_b)])
    right_b, right_a = torch.split(packed[1], [len(in_b), len(in_a)])
    pairs = ((left_a, alone_a), (right_a, alone_a), (left_b, alone_b), (right_b, alone_b), (changed, left_b))
    scale = max(1.0, *(float(item.abs().max()) for item in packed))
    return max(float((one - same).abs().max()) for one, same in pairs) / scale
