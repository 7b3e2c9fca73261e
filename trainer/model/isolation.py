"""Whether this very model keeps packed documents apart: tried, not assumed.

Position ids isolate documents in many models and leak in many others (recurrent layers, absolute caches, some
attention code). An own mask would isolate too but silently drop sliding windows, so nothing is trusted but this check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from trainer.model.build import takes_positions

TOLERANCE: Final = 1e-4


@dataclass(frozen=True)
class Isolation:
    """The result. :param difference: largest difference of logits; :param reason: why packing is refused, or empty."""

    packs: bool
    difference: float
    reason: str


@torch.no_grad()
def check_isolation(model: Any, length: int) -> Isolation:
    """Compare packed documents with each alone, and look whether a changed neighbour changes a document.

    :param model: in fp32 and on its device; it is left in the mode it had.
    :param length: longest row in tokens. The documents reach beyond a sliding window if a row can.
    """
    if not takes_positions(model):
        return Isolation(False, float("inf"), "the model takes no position ids")
    if length < 8:
        return Isolation(False, float("inf"), "rows are too short to check")
    training = model.training
    model.eval()
    try:
        return _check(model, length)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        return Isolation(False, float("inf"), f"the model refuses packed rows ({' '.join(str(error).split())[:160]})")
    finally:
        model.train(training)


def _check(model: Any, length: int) -> Isolation:
    window = getattr(model.config, "sliding_window", None) or 0
    # Long enough to show a leak, beyond the window if there is one, and no longer: this is paid at every start.
    total = min(length, max(64, 3 * (window + 8)) if window < length else 64)
    first = max(2, total // 3)
    lengths = (first, total - first)  # the second document is longer, and beyond the window too
    device = model.get_input_embeddings().weight.device
    rows = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    a, other, b = (torch.randint(0, rows, (1, size), generator=generator) for size in (lengths[0], *lengths))
    positions = torch.cat([torch.arange(size) for size in lengths])[None]

    def run(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids.to(device), position_ids=places.to(device), use_cache=False).logits.float()  # type: ignore[no-any-return]

    # Two rows with the documents in either order: a check on one row only misses models that treat rows alike.
    swapped = torch.cat([torch.arange(size) for size in reversed(lengths)])[None]
    packed = run(torch.cat([torch.cat([a, b], 1), torch.cat([b, a], 1)]), torch.cat([positions, swapped]))
    changed = run(torch.cat([other, b], 1), positions)[:, lengths[0] :]
    alone_a, alone_b = run(a, torch.arange(lengths[0])[None])[0], run(b, torch.arange(lengths[1])[None])[0]
    pairs = (
        (packed[0, : lengths[0]], alone_a),
        (packed[0, lengths[0] :], alone_b),
        (packed[1, : lengths[1]], alone_b),
        (packed[1, lengths[1] :], alone_a),
        (changed[0], alone_b),
    )
    scale = max(1.0, float(packed.abs().max()))
    difference = max(float((left - right).abs().max()) for left, right in pairs) / scale
    if not difference <= TOLERANCE:  # NaN is no agreement
        return Isolation(False, difference, f"packed documents see each other: logits differ by {difference:.2g}")
    return Isolation(True, difference, "")
