"""Whether this very model keeps packed documents apart: tried, not assumed.

Position ids isolate documents in many models and leak in many others (recurrent layers, absolute caches, some
attention code). An own mask would isolate too but silently drop sliding windows, so nothing is trusted but this check.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Final

import torch

from trainer.model.build import takes_positions

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


@torch.no_grad()
def check_isolation(model: Any, length: int) -> Isolation:
    """Compare packed documents with each alone, and look whether a changed neighbour changes a document.

    Logits are computed for some places of each document, the first and last among them: all of them would take more
    memory than the training where the vocabulary is wide.

    :param model: in fp32 and on its device; it is left in the mode it had.
    :param length: longest row in tokens. The documents reach beyond sliding windows and attention chunks if a row can.
    :raises torch.OutOfMemoryError: if the memory does not hold two rows: that says nothing about the model.
    """
    if not takes_positions(model):
        return Isolation(False, float("inf"), "the model takes no position ids")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return Isolation(False, float("inf"), "the model gives no logits for single places, so it cannot be checked")
    if length < 2 * _LEAST:
        return Isolation(False, float("inf"), "rows are too short to check")
    training = model.training
    model.eval()
    try:
        return _check(model, length)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        if "allocate memory" in str(error):  # out of memory on a CPU has no type of its own
            raise
        return Isolation(False, float("inf"), f"the model refuses packed rows ({' '.join(str(error).split())[:160]})")
    finally:
        model.train(training)


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


def _check(model: Any, length: int) -> Isolation:
    # Long enough to show a leak, beyond the window if there is one, and no longer: this is paid at every start.
    first, second = document_lengths(length, widest_window(model.config, length))
    weight = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    a, other, b = (torch.randint(0, weight.shape[0], (1, size), generator=generator) for size in (first, first, second))
    up, longer = torch.arange(first)[None], torch.arange(second)[None]
    ab, ba = torch.cat([up, longer], 1), torch.cat([longer, up], 1)
    in_a, in_b = _sample(0, first), _sample(0, second)

    def run(ids: torch.Tensor, positions: torch.Tensor, places: list[int]) -> torch.Tensor:
        """(B, len(places), V) logits."""
        keep = torch.tensor(places, device=weight.device)
        found = model(
            input_ids=ids.to(weight.device),
            position_ids=positions.to(weight.device),
            use_cache=False,
            logits_to_keep=keep,
        ).logits
        if found.shape[1] != len(places):
            raise ValueError("it gives other logits than those asked for")
        return found.float()  # type: ignore[no-any-return]

    alone_a, alone_b = run(a, up, in_a)[0], run(b, longer, in_b)[0]
    # Two rows with the documents in either order: a check on one row only misses models that treat rows alike.
    here = [in_a, [first + place for place in in_b], in_b, [second + place for place in in_a]]
    union = sorted({place for places in here for place in places})
    order = {place: index for index, place in enumerate(union)}
    packed = run(torch.cat([torch.cat([a, b], 1), torch.cat([b, a], 1)]), torch.cat([ab, ba]), union)
    rows = [packed[row, [order[place] for place in places]] for row, places in zip((0, 0, 1, 1), here, strict=True)]
    changed = run(torch.cat([other, b], 1), ab, here[1])[0]
    pairs = zip((*rows, changed), (alone_a, alone_b, alone_b, alone_a, alone_b), strict=True)
    scale = max(1.0, float(packed.abs().max()))
    difference = max(float((left - right).abs().max()) for left, right in pairs) / scale
    if not difference <= TOLERANCE:  # NaN is no agreement
        return Isolation(False, difference, f"packed documents see each other: logits differ by {difference:.2g}")
    return Isolation(True, difference, "")
