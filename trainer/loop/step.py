"""One optimizer step: forward and backward over the micro-batches, one collective, then the same update on all ranks.

The loss of a step is the sum over its target tokens divided by their number over all ranks and micro-batches, which
the plan knows beforehand. What ranks must agree on rides in the one collective, each value under its name.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from trainer.config import Train
from trainer.data.batch import Batch, make_batch
from trainer.data.plan import Pack, Plan
from trainer.data.tokens import Tokens
from trainer.gang import Gang
from trainer.interval import Due
from trainer.loop.optim import make_optimizer
from trainer.loop.scale import Scale
from trainer.model.shard import Wrapped
from trainer.state.stop import StopSignal


@dataclass(frozen=True)
class Tally:
    """What a rank puts into the collective of a step. Every field is summed over ranks, so a flag becomes a count.

    :param loss: nats over the rank's targets, 0 where not finite.
    :param targets, tokens: what the rank learned from and read, padding left out.
    :param stop: whether the rank was asked to stop. :param broken: whether its loss or gradient is not finite.
    :param log, evaluation, checkpoint, fast: whether the time for it has come, by the clock of rank 0.
    :param profile: steps that rank 0 was asked to profile.
    :param overflow: in fp16, whether its gradient is not finite and its loss is.
    :param router: a mixture's router loss, times the targets of the rows that it is of.
    :param busy: (ranks,) at the rank's own place the seconds of its work in the step before, 0 elsewhere.
    """

    loss: float
    targets: float
    tokens: float
    stop: float
    broken: float
    log: float
    evaluation: float
    checkpoint: float
    fast: float
    profile: float = 0.0
    overflow: float = 0.0
    router: float = 0.0
    busy: tuple[float, ...] = ()

    def summed(self, gang: Gang) -> Tally:
        """The same over all ranks, equal to the bit on each of them; one collective."""
        mine = dict(vars(self))  # `asdict` copies deeply, in each step
        busy = mine.pop("busy")
        sums = gang.sum([*mine.values(), *busy])
        return Tally(**dict(zip(mine, sums, strict=False)), busy=tuple(sums[len(mine) :]))


@dataclass(frozen=True)
class StepResult:
    """What a step did: plain values, the same on every rank but for `norm` of a broken step and the seconds.

    :param step: its number, the first is 1.
    :param nats: loss summed over the targets of all ranks; None if the step was skipped on all of them.
    :param targets, tokens: over all ranks.
    :param rate: learning rate. :param norm: global gradient norm before clipping.
    :param own_nats: this rank's part of the loss, for the notice of a skipped step.
    :param seconds: the whole step; of these `data_seconds` for making batches and `wait_seconds` in the collective.
    :param exchange_seconds: of the step before, waiting for gradients in the backward pass; None if not known.
    :param busy: for each rank the seconds of the step before in which it did not wait for others; empty if not known.
    :param stopping: whether any rank was asked to stop. :param due: what is to be done because its time has come.
    :param suspects: of a skipped step, the documents whose loss was not finite, or all if that cannot be told.
    :param scale: in fp16, the loss scale for the next step. :param overflows: times that this one was taken again, with
        a smaller one.
    :param router: a mixture's router loss per target, without its coefficient; None without one.
    """

    step: int
    nats: float | None
    targets: int
    tokens: int
    rate: float
    norm: float
    own_nats: float
    seconds: float
    data_seconds: float
    wait_seconds: float
    exchange_seconds: float | None
    busy: tuple[float, ...]
    stopping: bool
    due: Due
    suspects: tuple[int, ...]
    scale: Scale | None = None
    overflows: int = 0
    router: float | None = None

    @property
    def loss(self) -> float | None:
        """Nats per target; None if the step was skipped."""
        return None if self.nats is None else self.nats / self.targets


class Step:
    """Model, optimizer and data of a rank, joined to take optimizer steps.

    :param pad: id for padding. :param micro_batch: rows of a forward pass.
    :ivar scale: the loss scale, in fp16 only.
    """

    def __init__(
        self,
        gang: Gang,
        train: Train,
        wrapped: Wrapped,
        plan: Plan,
        tokens: Tokens,
        pad: int,
        stop: StopSignal,
        micro_batch: int,
    ) -> None:
        self.gang, self.train, self.wrapped = gang, train, wrapped
        self.micro_batch = micro_batch
        self.plan, self.tokens, self.pad, self.stop = plan, tokens, pad, stop
        self.optimizer = make_optimizer(wrapped.built.model, train)
        self.scale = Scale() if train.precision == "fp16" else None
        self._before: StepResult | None = None  # the step before, of this process

    def warm_up(self) -> None:
        """With several ranks, one backward pass that is thrown away.

        DDP rebuilds its buckets after the first one, and sums then round in another order: so a resumed run is the
        same to the last bit.
        """
        if self.gang.world > 1:
            self.backward(make_batch(self.tokens, [], self.pad).to(self.gang.device), 0.0, last=True)
            self.optimizer.zero_grad()

    def backward(self, batch: Batch, scale: float, last: bool) -> torch.Tensor:
        """See `trainer.model.shard.Wrapped.backward`; a sign of life, so that a bound is for one micro-batch."""
        self.stop.looks += 1
        return self.wrapped.backward(batch, scale, last=last)

    def take(self, index: int, rate: float, due: Due = Due()) -> StepResult:  # noqa: B008 - immutable
        """Take optimizer step `index` (from 0) with a learning rate, or skip it on all ranks if it is not finite.

        In fp16 it is taken again, with smaller loss scales, as long as a rank's gradient overflows.

        :param due: on rank 0, what its clock says; on the others nothing.
        """
        began = time.perf_counter()
        packs = self.plan.step(index)
        wanted = sum(int(self.plan.targets[pack].sum()) for pack in packs)
        shares = self.plan.share(packs, self.gang.rank, self.gang.world, self.micro_batch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        data_seconds = time.perf_counter() - began
        wait_seconds, exchanged, scale, overflows = 0.0, None, self.scale, 0
        while True:
            factor = 1.0 if scale is None else scale.value
            losses: list[torch.Tensor] = []
            routers: list[torch.Tensor] = []
            targets, tokens = 0, 0
            for turn, mine in enumerate(shares):
                asked = time.perf_counter()
                batch = make_batch(self.tokens, mine, self.pad).to(self.gang.device)
                data_seconds += time.perf_counter() - asked
                losses.append(self.backward(batch, factor / wanted, last=turn == len(shares) - 1))
                if self.wrapped.loss.router is not None:
                    routers.append(self.wrapped.loss.router)
                targets += len(batch.targets)
                tokens += batch.tokens
            nats = float(torch.stack(losses).double().sum())
            router = float(torch.stack(routers).double().sum()) if routers else 0.0
            norm = self.wrapped.clip(self.train.clip, factor)
            overflow = scale is not None and math.isfinite(nats) and not math.isfinite(norm)
            broken = not overflow and not (math.isfinite(nats) and math.isfinite(norm))
            if self._before and not overflows:  # of the step before, which only the first of these passes tells
                exchanged = self.wrapped.exchange_seconds()
            met = time.perf_counter()
            tally = Tally(
                loss=0.0 if broken or overflow else nats,
                targets=targets,
                tokens=tokens,
                stop=self.stop.asked,
                broken=broken,
                overflow=overflow,
                router=0.0 if broken or overflow else router,
                busy=self._busy(exchanged),
                **vars(due),
            ).summed(self.gang)
            wait_seconds += time.perf_counter() - met
            if int(tally.targets) != wanted:
                raise RuntimeError(f"ranks saw {int(tally.targets)} targets in step {index}, the plan has {wanted}")
            lower = scale.lowered() if scale is not None and tally.overflow and not tally.broken else None
            if lower is None:
                break
            scale, overflows = lower, overflows + 1
            self.optimizer.zero_grad(set_to_none=False)
        suspects: tuple[int, ...] = ()
        skipped = bool(tally.broken or tally.overflow)
        if skipped:  # no scale mends that, so the one from before stays
            suspects = self._suspects(shares, losses, packs)
        else:
            self.optimizer.step()
            self.scale = None if scale is None else scale.stepped()
        self.optimizer.zero_grad(set_to_none=False)
        self._before = StepResult(
            step=index + 1,
            nats=None if skipped else tally.loss,
            targets=wanted,
            tokens=int(tally.tokens),
            rate=rate,
            norm=norm,
            own_nats=nats,
            seconds=time.perf_counter() - began,
            data_seconds=data_seconds,
            wait_seconds=wait_seconds,
            exchange_seconds=exchanged,
            busy=tally.busy if all(tally.busy) else (),
            stopping=bool(tally.stop),
            due=Due(
                log=bool(tally.log),
                evaluation=bool(tally.evaluation),
                checkpoint=bool(tally.checkpoint),
                fast=bool(tally.fast),
                profile=int(tally.profile),
            ),
            suspects=suspects,
            scale=self.scale,
            overflows=overflows,
            router=tally.router / wanted if routers and not skipped else None,
        )
        return self._before

    def _busy(self, exchanged: float | None) -> tuple[float, ...]:
        """What this rank says of its own work in the step before, among the places of all ranks."""
        before, seconds = self._before, 0.0
        if before is not None and exchanged is not None:
            seconds = max(0.0, before.seconds - before.wait_seconds - exchanged)
        return tuple(seconds if rank == self.gang.rank else 0.0 for rank in range(self.gang.world))

    def _suspects(self, shares: list[list[Pack]], losses: list[torch.Tensor], packs: list[Pack]) -> tuple[int, ...]:
        """Documents of the forward passes, of all ranks, whose loss is not finite; else those of the whole step."""
        own = [
            int(document)
            for mine, loss in zip(shares, losses, strict=True)
            if not math.isfinite(float(loss))
            for pack in mine
            for document in pack
        ]
        found = [document for part in self.gang.gather(own) for document in part]
        return tuple(sorted(found or (int(document) for pack in packs for document in pack)))
