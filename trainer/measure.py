"""Token-exact evaluation: the same figures for every batch size, packing and number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional

from trainer.data.batch import make_batch
from trainer.data.plan import pack_window
from trainer.data.tokens import Tokens
from trainer.gang import Gang
from trainer.model.loss import LossModel

_AGREE_EVERY: Final = 16  # batches between two looks at the stop signal


@dataclass(frozen=True)
class Measured:
    """Sums over all target tokens, and what follows from them.

    :param loss: nats per target token of the model's own tokenizer.
    :param bits_per_byte: comparable between tokenizers; None if the bytes are not known.
    """

    rows: int
    targets: int
    loss: float
    accuracy: float
    bits_per_byte: float | None

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
        return {**self.metrics(), "rows": self.rows, "target_tokens": self.targets}


@torch.no_grad()
def measure(
    loss: LossModel,
    tokens: Tokens,
    gang: Gang,
    *,
    size: int,
    micro: int,
    pad: int,
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[int, int], None] = lambda *_: None,
) -> Measured | None:
    """Evaluate all documents, spread over the ranks without repeats; sums are float64.

    :param size: tokens of a row, :param micro: rows of a forward pass.
    :param stop: looked at together every few batches; if any rank's is true, None is returned.
    """
    order = (-tokens.lengths).argsort(kind="stable")
    packs = pack_window(tokens.lengths, order, size) if loss.packed else [order[i : i + 1] for i in range(len(order))]
    batches = [packs[index : index + micro] for index in range(0, len(packs), micro)]
    training = loss.training
    loss.eval()
    nats, right, count = 0.0, 0, 0
    try:
        turns = -(-len(batches) // gang.world)
        for turn in range(turns):
            index = turn * gang.world + gang.rank
            if index < len(batches):
                batch = make_batch(tokens, batches[index], pad).to(gang.device)
                logits = loss.logits(batch.ids, batch.positions, batch.places)
                each = functional.cross_entropy(logits, batch.targets, reduction="none")
                nats += float(each.double().sum())
                right += int((logits.argmax(-1) == batch.targets).sum())
                count += len(batch.targets)
            if turn % _AGREE_EVERY == _AGREE_EVERY - 1 and gang.sum([float(stop())])[0]:
                return None
            tell(turn + 1, turns)
    finally:
        loss.train(training)
    nats, right_sum, count_sum = gang.sum([nats, float(right), float(count)])
    count = int(count_sum)
    if not count:
        return Measured(int(tokens.facts.get("rows", 0)), 0, math.nan, math.nan, None)
    size_in_bytes = tokens.facts.get("target_bytes")
    bits = nats / math.log(2) / size_in_bytes if size_in_bytes else None
    return Measured(int(tokens.facts.get("rows", 0)), count, nats / count, right_sum / count, bits)


def target_bytes(tokens: Tokens, tokenizer: Any) -> int:
    """UTF-8 bytes of the text that the targets spell, special tokens left out."""
    wanted = []
    for index in range(len(tokens)):
        ids, trained = tokens.document(index)
        wanted.append(ids[trained].tolist())
    return sum(len(text.encode()) for text in tokenizer.batch_decode(wanted, skip_special_tokens=True))
