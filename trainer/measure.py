"""Token-exact evaluation: the same figures for every batch size, packing and number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional

from trainer.data.batch import make_batch
from trainer.data.packing import Pack, pack_window
from trainer.data.tokens import Tokens
from trainer.gang import Gang, collective
from trainer.model.loss import LossModel, Precision

_AGREE_EVERY: Final = 16  # batches between two looks at the stop signal


@dataclass(frozen=True)
class Measured:
    """Sums over all target tokens, and what follows from them.

    :param loss: nats per target token of the model's own tokenizer.
    :param bits_per_byte: by the bytes of the rows' own text, so comparable between tokenizers; None if not known.
    :param precision: arithmetic of the forward pass; figures of two precisions do not compare.
    """

    rows: int
    targets: int
    loss: float
    accuracy: float
    bits_per_byte: float | None
    precision: Precision = "fp32"

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def metrics(self) -> dict[str, float]:
        """Names as in MLflow."""
        values = {"eval/loss": self.loss, "eval/perplexity": self.perplexity, "eval/accuracy": self.accuracy}
        if self.bits_per_byte is not None:
            values["eval/bits_per_byte"] = self.bits_per_byte
        return values

    def plain(self) -> dict[str, Any]:
        return {
            **self.metrics(),
            "rows": self.rows,
            "target_tokens": self.targets,
            "precision": self.precision,
        }


@torch.no_grad()
def measure(
    loss: LossModel,
    tokens: Tokens,
    gang: Gang,
    *,
    size: int,
    micro: int,
    pad: int,
    precision: Precision = "fp32",
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[int, int], None] = lambda *_: None,
) -> Measured | None:
    """Evaluate all documents, spread over the ranks without repeats.

    :param size: tokens of a row, :param micro: rows of a forward pass.
    :param precision: arithmetic of the forward pass, whatever the training's; losses and sums are fp32 and float64.
    :param stop: called with each batch, which is a sign of life, and agreed on every few; None is returned if any
        rank's is true.
    """
    batches = _batches(loss, tokens, size, micro)
    training, bf16 = loss.training, loss.bf16
    loss.eval()
    loss.bf16 = precision == "bf16"
    # Loss, right ones and targets; they stay on the device, so that batches do not wait for each other.
    sums = torch.zeros(3, dtype=torch.float64, device=gang.device)
    try:
        turns = -(-len(batches) // gang.world)
        for turn in range(turns):
            index = turn * gang.world + gang.rank
            # A rank without a batch runs an empty one: a sharded model needs all ranks in each forward pass.
            batch = make_batch(tokens, batches[index] if index < len(batches) else [], pad).to(gang.device)
            with collective():
                logits = loss.logits(batch.ids, batch.positions, batch.places)
            each = functional.cross_entropy(logits, batch.targets, reduction="none")
            right = logits.argmax(-1) == batch.targets
            sums += torch.stack([each.double().sum(), right.sum().double(), torch.ones_like(each).double().sum()])
            asked = stop()
            if turn % _AGREE_EVERY == _AGREE_EVERY - 1 and gang.sum([float(asked)])[0]:
                return None
            tell(turn + 1, turns)
    finally:
        loss.train(training)
        loss.bf16 = bf16
    return _measured(tokens, gang.sum(sums.tolist()), precision)


def _batches(loss: LossModel, tokens: Tokens, size: int, micro: int) -> list[list[Pack]]:
    order = (-tokens.lengths).argsort(kind="stable")
    packs = pack_window(tokens.lengths, order, size) if loss.packed else [order[i : i + 1] for i in range(len(order))]
    return [packs[index : index + micro] for index in range(0, len(packs), micro)]


def _measured(tokens: Tokens, sums: list[float], precision: Precision) -> Measured:
    """:param sums: nats, right ones and targets over all ranks."""
    nats, right, targets = sums
    rows = int(tokens.facts.get("rows", 0))
    if not targets:
        return Measured(rows, 0, math.nan, math.nan, None, precision)
    spelled = tokens.facts.get("target_bytes")
    bits = nats / math.log(2) / spelled if spelled else None
    return Measured(rows, int(targets), nats / targets, right / targets, bits, precision)
