"""Token-exact evaluation: the same figures for every batch size, packing and number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from trainer.data.batch import make_batch
from trainer.data.packing import Pack, pack_window
from trainer.data.tokens import Tokens
from trainer.gang import Gang, collective
from trainer.model.loss import LossModel, Precision

_AGREE_EVERY: Final = 16  # batches between two looks at the stop signal


@dataclass(frozen=True)
class EachDocument:
    """What each document adds to the sums. :param nats, right: (D,) over its targets.

    :param given: (D,) of a classifier the number of the label that the document was given.
    """

    nats: NDArray[np.float64]
    right: NDArray[np.float64]
    given: NDArray[np.int64]


@dataclass(frozen=True)
class Measured:
    """Sums over all target tokens, and what follows from them.

    :param loss: nats per target token of the model's own tokenizer.
    :param bits_per_byte: by the bytes of the rows' own text, so comparable between tokenizers; None if not known.
    :param macro_f1: of a classifier, see `macro_f1`; its loss is in nats per row, and it has no perplexity.
    :param precision: arithmetic of the forward pass; figures of two precisions do not compare.
    :param own: the user's metrics of this evaluation, by name.
    :param each: what documents add, where it was asked for.
    """

    rows: int
    targets: int
    loss: float
    accuracy: float
    bits_per_byte: float | None
    precision: Precision = "fp32"
    macro_f1: float | None = None
    own: Mapping[str, float] = field(default_factory=dict)
    each: EachDocument | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def metrics(self) -> dict[str, float]:
        """Names as in MLflow."""
        if self.macro_f1 is not None:
            values = {"eval/loss": self.loss, "eval/accuracy": self.accuracy, "eval/macro_f1": self.macro_f1}
            return {**values, **self._own()}
        values = {"eval/loss": self.loss, "eval/perplexity": self.perplexity, "eval/accuracy": self.accuracy}
        if self.bits_per_byte is not None:
            values["eval/bits_per_byte"] = self.bits_per_byte
        return {**values, **self._own()}

    def _own(self) -> dict[str, float]:
        return {f"eval/{name}": value for name, value in self.own.items()}

    def counted(self) -> dict[str, Any]:
        """What the user's own metrics are given, as JSON values."""
        values: dict[str, Any] = {"loss": self.loss, "accuracy": self.accuracy, "rows": self.rows}
        if self.macro_f1 is None:
            values |= {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {**values, "targets": self.targets, "precision": self.precision}

    def __str__(self) -> str:
        last = f"perplexity {self.perplexity:.2f}" if self.macro_f1 is None else f"macro F1 {self.macro_f1:.4f}"
        return f"loss {self.loss:.4f}  {last}  accuracy {self.accuracy:.4f}"

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
    own: Callable[[Mapping[str, Any]], Mapping[str, float]] | None = None,
    each_document: bool = False,
) -> Measured | None:
    """Evaluate all documents, spread over the ranks without repeats.

    :param size: tokens of a row, :param micro: rows of a forward pass.
    :param precision: arithmetic of the forward pass, whatever the training's; losses and sums are fp32 and float64.
    :param stop: called with each batch, which is a sign of life, and agreed on every few; None is returned if any
        rank's is true.
    :param own: the user's metrics. They get `loss`, `accuracy`, `rows`, `targets`, `precision`; of a language model
        also `perplexity` and `bits_per_byte` (None if not known); of a classifier `labels`, the names, and `confusion`:
        for each label that rows have, how many of them were given each label.
    :param each_document: whether to tell what each document adds, too.
    """
    batches = _batches(loss, tokens, size, micro)
    # Loss, right ones and targets; they stay on the device, so that batches do not wait for each other.
    sums = torch.zeros(3, dtype=torch.float64, device=gang.device)
    # Of each label the rows that are rightly given it, those that are given it, and those that have it.
    count = 0 if tokens.labels is None else int(loss.model.config.num_labels)
    labels = torch.zeros(3, count, dtype=torch.float64, device=gang.device)
    # Of each label how many of its rows are given each label; nobody else needs what grows with their square.
    pairs = torch.zeros(count**2 if own else 0, dtype=torch.float64, device=gang.device)
    single = torch.zeros(3, len(tokens) if each_document else 0, dtype=torch.float64, device=gang.device)
    with loss.without_dropout(precision):
        turns = -(-len(batches) // gang.world)
        for turn in range(turns):
            index = turn * gang.world + gang.rank
            # A rank without a batch runs an empty one: a sharded model needs all ranks in each forward pass.
            batch = make_batch(tokens, batches[index] if index < len(batches) else [], pad).to(gang.device)
            with collective():
                logits = loss.logits(batch.ids, batch.positions, batch.places)
            each = functional.cross_entropy(logits, batch.targets, reduction="none")
            guess = logits.argmax(-1)
            right = guess == batch.targets
            if count:
                labels[0].index_add_(0, batch.targets, right.double())
                for row, found in ((1, guess), (2, batch.targets)):
                    labels[row].index_add_(0, found, torch.ones_like(right, dtype=torch.float64))
            if len(pairs):
                pairs.index_add_(0, batch.targets * count + guess, torch.ones_like(right, dtype=torch.float64))
            sums += torch.stack([each.double().sum(), right.sum().double(), torch.ones_like(each).double().sum()])
            if each_document:
                single.index_add_(1, batch.documents, torch.stack([each.double(), right.double(), guess.double()]))
            asked = stop()
            if turn % _AGREE_EVERY == _AGREE_EVERY - 1 and gang.sum([float(asked)])[0]:
                return None
            tell(turn + 1, turns)
    total = gang.sum([*sums.tolist(), *labels.flatten().tolist(), *pairs.tolist(), *single.flatten().tolist()])
    alone, total = total[len(total) - single.numel() :], total[: len(total) - single.numel()]
    scores, given = total[3 : 3 + 3 * count], total[3 + 3 * count :]
    f1 = macro_f1(*(scores[row * count : (row + 1) * count] for row in range(3))) if count else None
    measured = _measured(tokens, total[:3], precision, f1)
    if each_document:
        nats, right_ones, guesses = np.array(alone).reshape(3, -1)
        measured = replace(measured, each=EachDocument(nats, right_ones, guesses.astype(np.int64)))
    if own is None or not math.isfinite(measured.loss):  # of a model that is broken there is nothing more to say
        return measured
    facts = measured.counted()
    if count:
        names = loss.model.config.id2label
        facts["labels"] = [str(names[number]) for number in range(count)]
        facts["confusion"] = [[int(n) for n in given[row * count : (row + 1) * count]] for row in range(count)]
    return replace(measured, own=dict(own(facts)))


def macro_f1(right: Sequence[float], given: Sequence[float], there: Sequence[float]) -> float:
    """The mean of F1 over the labels that are given or there: each counts alike, however rare it is.

    As `f1_score(average="macro")` of scikit-learn; NaN without a row.

    :param right, given, there: for each label the rows that are rightly given it, are given it, and have it.
    """
    each = [2 * a / (b + c) for a, b, c in zip(right, given, there, strict=True) if b + c]
    return math.fsum(each) / len(each) if each else math.nan


def _batches(loss: LossModel, tokens: Tokens, size: int, micro: int) -> list[list[Pack]]:
    order = (-tokens.lengths).argsort(kind="stable")
    packs = pack_window(tokens.lengths, order, size) if loss.packed else [order[i : i + 1] for i in range(len(order))]
    return [packs[index : index + micro] for index in range(0, len(packs), micro)]


def _measured(tokens: Tokens, sums: list[float], precision: Precision, f1: float | None) -> Measured:
    """:param sums: nats, right ones and targets over all ranks."""
    nats, right, targets = sums
    rows = len(np.unique(tokens.rows))  # a text may be several documents
    if not targets:
        return Measured(rows, 0, math.nan, math.nan, None, precision, f1)
    spelled = tokens.facts.get("target_bytes")
    bits = nats / math.log(2) / spelled if spelled else None
    return Measured(rows, int(targets), nats / targets, right / targets, bits, precision, f1)
