"""Evaluation by generation: the model answers fixed prompts greedily, and its answers are compared with the known ones.

Which rows stand together in a forward pass follows from the prompts alone, and whole batches are dealt out to the
ranks, so neither their number nor the training's micro-batch changes an answer. Nothing is drawn at random. Tokens are
written with the model's cache of keys and values; one answer of each batch is then looked at by the plain forward pass
that evaluates: where the cache gives other tokens than that, all answers are written anew without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch

from trainer.config import Generation
from trainer.data.prompts import Prompt, behind_thoughts, stops
from trainer.gang import Gang, collective
from trainer.model.isolation import tolerance
from trainer.model.loss import LossModel, Precision
from trainer.model.seq2seq import Seq2SeqLoss
from trainer.scores import PREFIX, SCORES

_AGREE_EVERY: Final = 8  # tokens between two looks, with the other ranks, whether all rows have ended
_IDLE: Final = 8  # tokens of a forward pass that only keeps step


@dataclass(frozen=True)
class Answer:
    """What the model wrote.

    :param tokens: without the one that ended it. :param ended: whether one did.
    :param said: the part that is compared: what comes behind thoughts, which the reference is without.
    """

    text: str
    tokens: int
    ended: bool
    said: str


@dataclass(frozen=True)
class Answers:
    """One answer for each prompt; None where the prompt could not be asked: none fits the template or the context."""

    prompts: Sequence[Prompt]
    answers: Sequence[Answer | None]
    names: Sequence[str]
    scorers: Mapping[str, Callable[[str, str], float]] = field(default_factory=lambda: SCORES)

    @cached_property
    def scores(self) -> list[dict[str, float]]:
        """For each prompt its scores by name; they are 0 where there is no answer."""
        return [
            {name: 0.0 if answer is None else self.scorers[name](answer.said, prompt.answer) for name in self.names}
            for answer, prompt in zip(self.answers, self.prompts, strict=True)
        ]

    def metrics(self) -> dict[str, float]:
        """Means over all prompts, by their names in MLflow."""
        scores, count = self.scores, len(self.prompts)
        found = {PREFIX + name: math.fsum(row[name] for row in scores) / count for name in self.names}
        found[PREFIX + "ended"] = sum(answer is not None and answer.ended for answer in self.answers) / count
        found[PREFIX + "tokens"] = sum(0 if answer is None else answer.tokens for answer in self.answers) / count
        return found

    def plain(self) -> dict[str, Any]:
        """Figures as JSON values: `metrics`, and how many rows were asked."""
        unanswered = sum(answer is None for answer in self.answers)
        return {**self.metrics(), "asked_rows": len(self.prompts), "unanswered_rows": unanswered}

    def __str__(self) -> str:
        found = self.metrics()
        length = found.pop(PREFIX + "tokens")
        told = "  ".join(f"{name.removeprefix(PREFIX)} {value:.4f}" for name, value in found.items())
        unanswered = sum(answer is None for answer in self.answers)
        lost = f", {unanswered} of them have no answer: their prompts do not fit" if unanswered else ""
        return f"{told}, {len(self.prompts)} rows of {length:.0f} tokens{lost}"

    def table(self, step: int | None = None) -> dict[str, Any]:
        """All rows as MLflow reads a table: `columns` and `data`. :param step: of the weights, for a column."""
        columns = [*(["step"] if step is not None else []), "row", "prompt", "reference", "answer", "ended"]
        rows = []
        for prompt, answer, scores in zip(self.prompts, self.answers, self.scores, strict=True):
            text, ended = ("", False) if answer is None else (answer.text, answer.ended)
            first = [step] if step is not None else []
            rows.append([*first, prompt.row, prompt.text, prompt.answer, text, ended, *scores.values()])
        return {"columns": [*columns, *self.names], "data": rows}


@torch.no_grad()
def generate(
    loss: LossModel,
    prompts: Sequence[Prompt],
    gang: Gang,
    tokenizer: Any,
    asked: Generation,
    *,
    pad: int,
    precision: Precision = "fp32",
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _: None,
    scorers: Mapping[str, Callable[[str, str], float]] = SCORES,
) -> Answers | None:
    """Have the model answer; a collective, with the same prompts on every rank.

    :param pad: id for padding. :param precision: arithmetic of the forward pass, whatever the training's.
    :param stop: called with each token, which is a sign of life, and agreed on every few; None is returned if any
        rank's is true. :param tell: called where ranks agree. :param say: told if the model's cache is of no use.
    :param scorers: the metrics that `asked` names, of an answer and its reference.
    """
    ends = set(stops(loss.model, tokenizer))
    writer = _Writer(loss, gang, asked, context(loss.model), ends, pad, stop, tell)
    with loss.without_dropout(precision):
        asks = [prompt.ids for prompt in prompts]
        try:
            written = writer.write(asks, tolerance(precision != "fp32"))
        except _CacheError as error:
            say(f"answers are written without the model's cache: {error}")
            written = writer.write(asks, None)
    if written is None:
        return None
    found = [
        None if ids is None else _answer(ids, ends, tokenizer, prompt.lead)
        for ids, prompt in zip(written, prompts, strict=True)
    ]
    return Answers(prompts, found, asked.metrics, scorers)


def context(model: Any) -> int | None:
    """Longest sequence in tokens that a model was made for; None where its config does not tell."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def batches(lengths: Sequence[int], size: int, longest: int, context: int | None) -> list[list[int]]:
    """Which prompts are answered side by side: long ones first; whoever may meet the context's end is alone.

    :param lengths: of the prompts in tokens; what has none or leaves no room for an answer stands in no batch.
    :param size: most rows of a batch. :param longest: most tokens of an answer.
    """
    fitting = [index for index, length in enumerate(lengths) if 0 < length < (context or math.inf)]
    order = sorted(fitting, key=lambda index: (-lengths[index], index))
    tight = [index for index in order if lengths[index] + longest > (context or math.inf)]
    loose = order[len(tight) :]
    return [[index] for index in tight] + [loose[at : at + size] for at in range(0, len(loose), size)]


class _CacheError(Exception):
    """The model's cache gives other tokens than its plain forward pass."""


@dataclass(frozen=True)
class _Writer:
    """Writes answers on all ranks in step: a sharded model needs all of them in each forward pass."""

    loss: LossModel
    gang: Gang
    asked: Generation
    context: int | None
    ends: set[int]
    pad: int
    stop: Callable[[], bool]
    tell: Callable[[], None]

    def write(self, prompts: Sequence[Sequence[int]], limit: float | None) -> list[list[int] | None] | None:
        """For each prompt the ids written, on every rank; None if a rank was asked to stop.

        :param limit: how far the model's cache may be off, as a part of the largest logit; without it, none is used.
        :raises _CacheError: on every rank, if it is further.
        """
        # An encoder-decoder has a context for the prompt, and one for the answer.
        longest = 0 if self.paired else self.asked.max_new_tokens
        most = None if self.context is None else self.context + self.paired
        todo = batches([len(ids) for ids in prompts], self.asked.batch, longest, most)
        mine: dict[int, list[int]] = {}
        worst = 0.0
        for turn in range(-(-len(todo) // self.gang.world)):
            index = turn * self.gang.world + self.gang.rank
            rows = todo[index] if index < len(todo) else []
            written = self._batch([prompts[row] for row in rows], limit is not None)
            if written is None:
                return None
            if limit is not None:
                # The shortest prompt has the most padding before it. All ranks look, for the sake of shards.
                off = self._off(prompts[rows[-1]], written[-1]) if rows else 0 * self._off([self.pad], [self.pad])
                worst = max(worst, off)
            mine |= dict(zip(rows, written, strict=True))
        # Whatever the number of ranks, each batch was looked at.
        worst = max(self.gang.gather(worst))
        if limit is not None and worst > limit:
            raise _CacheError(f"with it logits are {worst:.1e} off")
        everyone: dict[int, list[int]] = {}
        for part in self.gang.gather(mine):
            everyone |= part
        return [everyone.get(row) for row in range(len(prompts))]

    def _batch(self, prompts: list[Sequence[int]], cached: bool) -> list[list[int]] | None:
        """What each of some rows is answered; None if a rank was asked to stop."""
        most = self.asked.max_new_tokens
        # Only a row that is alone may have less room than the longest answer takes.
        taken = [0 if self.paired else len(ids) for ids in prompts]
        room = min([most, *(self.context - count for count in taken if self.context is not None)])
        kind = _PairRows if self.paired else _Rows
        rows = kind(self.loss, prompts or [[self.pad] * _IDLE], self.pad, most)
        ends = torch.tensor(sorted(self.ends), device=self._device)
        for count in range(most):
            if not prompts or count >= room:
                with collective():
                    rows.idle(count, cached)
            else:
                with collective():
                    logits = rows.cached(count) if cached else rows.plain(count)
                rows.take(count, logits.argmax(-1), ends)
            stopping = self.stop()
            if count % _AGREE_EVERY == _AGREE_EVERY - 1 or count == most - 1:
                open_rows = bool(prompts) and count + 1 < room and bool(rows.open.any())
                going, asked = self.gang.sum([float(open_rows), float(stopping)])
                if asked:
                    return None
                self.tell()
                if not going:
                    break
        return [_cut(ids[:room], self.ends) for ids in rows.written()] if prompts else []

    def _off(self, prompt: Sequence[int], written: Sequence[int]) -> float:
        """By how much the plain forward pass likes another token better than one that was written."""
        ids = torch.tensor([[*prompt, *written]], device=self._device)
        places = torch.arange(len(prompt) - 1, ids.shape[1] - 1, device=self._device)
        positions = torch.arange(len(prompt) if self.paired else ids.shape[1], device=self._device)[None]
        with collective():
            logits = self.loss.logits(ids, positions, places)
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        off = float((logits.amax(-1) - chosen).max()) / max(1.0, float(logits.abs().max()))
        return off if math.isfinite(off) else 0.0  # a model that is broken with a cache and without

    @property
    def paired(self) -> bool:
        """Whether an encoder reads the prompts, and a decoder writes."""
        return isinstance(self.loss, Seq2SeqLoss)

    @property
    def _device(self) -> torch.device:
        return self.loss.place()[0]


class _Rows:
    """Some prompts and what is written behind them.

    :param most: tokens of an answer.
    """

    def __init__(self, loss: LossModel, prompts: Sequence[Sequence[int]], pad: int, most: int) -> None:
        self.loss, self.pad, device = loss, pad, loss.place()[0]
        self.lengths = torch.tensor([len(ids) for ids in prompts], device=device)
        self.width = max(map(len, prompts))
        # Padding stands before the prompts for the cache, which grows by whole columns, and behind them without one.
        self.left = torch.tensor([[pad] * (self.width - len(ids)) + list(ids) for ids in prompts], device=device)
        blank = [pad] * (self.width + most)
        self.right = torch.tensor([[*ids, *blank][: len(blank)] for ids in prompts], device=device)
        self.answers = torch.full((len(prompts), most), pad, device=device)
        self.open = torch.ones(len(prompts), dtype=torch.bool, device=device)
        self.cache: Any = None

    def cached(self, count: int) -> torch.Tensor:
        """(B, V) logits of token `count`, by the cache if the model keeps one."""
        if count and self.cache is None:
            return self.plain(count)
        columns = torch.arange(self.width + count, device=self.left.device)
        mask = (columns >= self.width - self.lengths[:, None]).long()
        if count:
            ids, positions = self.answers[:, count - 1 : count], (self.lengths + count - 1)[:, None]
        else:
            ids, positions = self.left, (mask.cumsum(-1) - 1).clamp(min=0)
        logits, self.cache = self.loss.next_logits(ids, positions, mask, self.cache)
        return logits

    def plain(self, count: int) -> torch.Tensor:
        """(B, V) logits of token `count`, from all tokens before it."""
        width = self.width + count
        ids = self.right[:, :width].contiguous()
        positions = torch.arange(width, device=ids.device).expand_as(ids).contiguous()
        rows = torch.arange(len(ids), device=ids.device)
        return self.loss.logits(ids, positions, rows * width + self.lengths + count - 1)

    def idle(self, count: int, cached: bool) -> None:
        """A forward pass for the sake of others, who wait for this rank's shards."""
        del count, cached
        ids = torch.full((1, _IDLE), self.pad, device=self.left.device)
        self.loss.logits(ids, torch.arange(_IDLE, device=ids.device)[None], ids.new_zeros(0))

    def take(self, count: int, tokens: torch.Tensor, ends: torch.Tensor) -> None:
        """Write token `count` of each row."""
        self.answers[:, count] = tokens
        self.right.scatter_(1, (self.lengths + count)[:, None], tokens[:, None])
        self.open &= ~torch.isin(tokens, ends)

    def written(self) -> list[list[int]]:
        found: list[list[int]] = self.answers.tolist()
        return found


class _PairRows(_Rows):
    """Some prompts that an encoder reads, and what the decoder writes for each."""

    def __init__(self, loss: LossModel, prompts: Sequence[Sequence[int]], pad: int, most: int) -> None:
        super().__init__(loss, prompts, pad, most)
        self.sources = self.right[:, : self.width].contiguous()
        columns = torch.arange(self.width, device=self.sources.device)
        self.mask = (columns < self.lengths[:, None]).long()
        self.positions = torch.where(self.mask > 0, columns, columns - self.lengths[:, None])

    def cached(self, count: int) -> torch.Tensor:
        ids = self.answers[:, count - 1 : count] if count else self.sources
        logits, self.cache = self.loss.next_logits(ids, self.positions, self.mask, self.cache if count else None)
        return logits

    def plain(self, count: int) -> torch.Tensor:
        ids = torch.cat([self.sources, self.answers[:, : count + 1]], 1)  # the last column is to be written
        rows = torch.arange(len(ids), device=ids.device)
        return self.loss.logits(ids, self.positions, rows * ids.shape[1] + self.width + count - 1)

    def idle(self, count: int, cached: bool) -> None:
        """The passes of those who write: with a cache the decoder alone works from the second token on."""
        if not cached or not count:
            (self.cached if cached else self.plain)(0)
        else:
            begin = self.answers[:, :1]
            self.loss.next_logits(begin, self.positions, self.mask, (self.cache[0], None))

    def take(self, count: int, tokens: torch.Tensor, ends: torch.Tensor) -> None:
        self.answers[:, count] = tokens
        self.open &= ~torch.isin(tokens, ends)


def _cut(ids: list[int], ends: set[int]) -> list[int]:
    """Up to the first end token, which stays."""
    last = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[: last + 1]


def _answer(ids: list[int], ends: set[int], tokenizer: Any, lead: int | None = None) -> Answer:
    ended = bool(ids) and ids[-1] in ends
    ids = ids[:-1] if ended else ids
    begin = len(ids) - ids[::-1].index(lead) if lead in ids else 0

    def text(some: list[int]) -> str:
        return str(tokenizer.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return Answer(text(ids), len(ids), ended, behind_thoughts(text(ids[begin:])))
