"""The training loop.

The loss of a step is the sum over its target tokens divided by their number over all ranks and micro-batches, which
the plan knows beforehand. After the backward pass one collective carries targets, loss, stop signal and finiteness,
so that all ranks decide alike whether to step, skip, stop or give up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dropforge.errors import DropforgeError
from trainer.config import Settings
from trainer.data.batch import make_batch
from trainer.data.plan import Plan, share
from trainer.data.tokens import Tokens
from trainer.gang import Gang, collective
from trainer.measure import Measured, measure
from trainer.model.build import Built
from trainer.model.loss import LossModel
from trainer.optim import learning_rate, load_optimizer, make_optimizer, optimizer_tensors
from trainer.progress import Progress
from trainer.report.console import Console, duration
from trainer.report.tracking import Tracker
from trainer.state.checkpoint import Checkpoints, Seal, Snapshot, generators, set_generators
from trainer.state.stop import PreemptedError, StopSignal

BAD_STEPS: Final = 5  # skipped steps in a row that are still borne


class DivergedError(DropforgeError):
    """The loss is no number any more."""


@dataclass
class Loop:
    """Everything a rank needs for training.

    :param pad: id for padding. :param offer: called with the checkpoints that exist after each save.
    """

    gang: Gang
    settings: Settings
    built: Built
    loss: LossModel
    plan: Plan
    train: Tokens
    eval: Tokens
    pad: int
    checkpoints: Checkpoints
    stop: StopSignal
    console: Console
    tracker: Tracker
    offer: Callable[[list[Seal]], None] = lambda _: None

    def __post_init__(self) -> None:
        self.progress = Progress()
        self.optimizer = make_optimizer(self.built.model, self.settings.train)
        self.steps = self.plan.steps
        # About a hundred points on a curve, and a sign of life at least every ten steps.
        self.log_every = max(1, min(10, self.steps // 100))
        self.wrapped: nn.Module = self.loss
        self.saved: int | None = None

    def restore(self, snapshot: Snapshot) -> None:
        """Take the state of a checkpoint over.

        :raises KeyError: if it is of another model.
        """
        named = dict(self.built.trainable())
        if set(named) != set(snapshot.weights):
            raise KeyError(f"the checkpoint has other weights: {sorted(set(named) ^ set(snapshot.weights))[:3]}")
        with torch.no_grad():
            for name, weight in named.items():
                weight.copy_(snapshot.weights[name])
        load_optimizer(self.optimizer, named.items(), dict(snapshot.moments))
        self.progress = Progress.load(snapshot.progress)
        self.saved = snapshot.step
        self._generators = snapshot.generators

    def start(self) -> None:
        """Wrap the model for several ranks and set the random state."""
        if self.gang.world > 1:
            with collective():
                cuda = self.gang.device.type == "cuda"
                self.wrapped = DistributedDataParallel(
                    self.loss, device_ids=[self.gang.local_rank] if cuda else None, gradient_as_bucket_view=True
                )
            # DDP rebuilds its buckets after the first backward pass, and sums then round in another order. One that
            # is thrown away keeps a resumed run the same to the last bit.
            self._backward(make_batch(self.train, [], self.pad), 0.0, last=True)
            self.optimizer.zero_grad()
        states = getattr(self, "_generators", None)
        if states is not None and len(states) == self.gang.world:
            set_generators(states[self.gang.rank], self.gang.device)
        else:  # a fresh run, or another number of ranks: any state will do, if it differs by rank and is repeatable
            torch.manual_seed((self.settings.train.seed * 1_000_003 + self.progress.step) * 4_099 + self.gang.rank)

    def run(self) -> None:
        """Train to the end.

        :raises PreemptedError: after a checkpoint, if a rank was asked to stop.
        :raises DivergedError: after too many steps in a row that are not finite.
        """
        train = self.settings.train
        if self.progress.step == 0 and self.evaluate("before training") is None:
            raise PreemptedError(None)
        self.loss.train()
        self._restart_clock()
        if self._lacks_evaluation() and self.evaluate(f"at step {self.progress.step}") is None:
            raise PreemptedError(self.saved)
        while self.progress.step < self.steps:
            stopping = self._step()
            step = self.progress.step
            last = step == self.steps
            if self._lacks_evaluation() and not stopping:
                stopping = self.evaluate("after training" if last else f"at step {step}") is None
            if stopping or last or step % train.checkpoint_every == 0:
                self.save()
            if stopping:
                raise PreemptedError(self.saved)

    def _lacks_evaluation(self) -> bool:
        """Whether an evaluation is due at this step; after a stop in the middle of one it is still due."""
        step, every = self.progress.step, self.settings.train.eval_every
        due = step == self.steps or (every and step and step % every == 0)
        return bool(due) and self.progress.evaluation(step) is None

    def _restart_clock(self) -> None:
        self.mark, self.mark_tokens = time.perf_counter(), self.progress.tokens

    def _step(self) -> bool:
        """One optimizer step; whether a rank was asked to stop."""
        progress, train = self.progress, self.settings.train
        began = time.perf_counter()
        packs = self.plan.step(progress.step)
        wanted = sum(int(self.plan.targets[pack].sum()) for pack in packs)
        shares = share(packs, self.plan.lengths, self.gang.rank, self.gang.world, train.micro_batch)
        rate = learning_rate(train, progress.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        summed = torch.zeros((), dtype=torch.float64, device=self.gang.device)
        targets, tokens = 0, 0
        for index, mine in enumerate(shares):
            batch = make_batch(self.train, mine, self.pad).to(self.gang.device)
            # DDP averages over ranks, the loss is a sum: hence the number of ranks.
            summed += self._backward(batch, self.gang.world / wanted, last=index == len(shares) - 1)
            targets += len(batch.targets)
            tokens += batch.tokens
        nats = float(summed)
        norm = float(nn.utils.clip_grad_norm_([weight for _, weight in self.built.trainable()], train.clip))
        finite = math.isfinite(nats) and math.isfinite(norm)
        total, seen, read, stops, broken = self.gang.sum(
            [nats if finite else 0.0, float(targets), float(tokens), float(self.stop.asked), float(not finite)]
        )
        if int(seen) != wanted:
            raise RuntimeError(f"ranks saw {int(seen)} targets in step {progress.step}, the plan has {wanted}")
        progress.step += 1
        progress.tokens += int(read)
        progress.targets += wanted
        if broken:
            self._skip(nats, norm)
        else:
            self.optimizer.step()
            progress.in_row = 0
            progress.nats += total
            progress.window += wanted
            progress.loss_first = total / wanted if progress.loss_first is None else progress.loss_first
            progress.loss_last = total / wanted
        self.optimizer.zero_grad(set_to_none=False)
        progress.seconds += time.perf_counter() - began
        if progress.step % self.log_every == 0 or progress.step == self.steps:
            self._log(rate, norm)
        return bool(stops)

    def _backward(self, batch: Any, scale: float, last: bool) -> torch.Tensor:
        wrapped = self.wrapped
        whole = last or not isinstance(wrapped, DistributedDataParallel)
        with collective(), nullcontext() if whole else wrapped.no_sync():  # type: ignore[operator]
            loss = wrapped(batch.ids, batch.positions, batch.places, batch.targets)
            (loss * scale).backward()
        return loss.detach()  # type: ignore[no-any-return]

    def _skip(self, nats: float, norm: float) -> None:
        self.progress.skipped += 1
        self.progress.in_row += 1
        step = self.progress.step
        self.console.say(f"step {step}: loss {nats} or gradient norm {norm} is not finite; step skipped on all ranks")
        self.tracker.metrics({"train/skipped": self.progress.skipped}, step)
        if self.progress.in_row > BAD_STEPS:
            raise DivergedError(
                f"step {step}",
                f"loss or gradient was not finite in {self.progress.in_row} steps in a row",
                "Lower `train.learning_rate`, lengthen `train.warmup`, or look at the rows of these steps",
            )

    def _log(self, rate: float, norm: float) -> None:
        progress = self.progress
        now = time.perf_counter()
        speed = (progress.tokens - self.mark_tokens) / max(1e-9, now - self.mark)
        self.mark, self.mark_tokens = now, progress.tokens
        loss = progress.nats / progress.window if progress.window else None
        progress.nats, progress.window = 0.0, 0
        left = progress.seconds / progress.step * (self.steps - progress.step)
        text = "-" if loss is None else f"{loss:.4f}"
        self.console.say(
            f"step {progress.step}/{self.steps}  loss {text}  lr {rate:.2e}  grad {norm:.3f}  "
            f"{speed:.0f} tok/s  eta {duration(left)}"
        )
        self.console.progress(progress.step, loss=loss, tokens_per_second=round(speed, 1))
        values = {
            "train/tokens_per_second": speed,
            "train/learning_rate": rate,
            "train/grad_norm": norm,
            "train/tokens": float(progress.tokens),
            **({} if loss is None else {"train/loss": loss}),
        }
        self.tracker.metrics(values, progress.step)

    def evaluate(self, when: str) -> Measured | None:
        """Measure and log; None if a rank was asked to stop meanwhile."""
        step, train = self.progress.step, self.settings.train
        began = time.perf_counter()
        self.console.phase(f"evaluating {when}", step)
        found = measure(
            self.loss,
            self.eval,
            self.gang,
            size=train.sequence_length,
            micro=train.micro_batch,
            pad=self.pad,
            precision=self.settings.eval_precision,
            stop=lambda: self.stop.asked,
        )
        if found is not None:
            self.progress.evaluations.append({"step": step, **found.plain()})
            self.tracker.metrics(found.metrics(), step)
            self.console.say(
                f"eval {when}: loss {found.loss:.4f}  perplexity {found.perplexity:.2f}  accuracy {found.accuracy:.4f}"
                f"  ({found.targets} tokens, {time.perf_counter() - began:.1f} s)"
            )
        self._restart_clock()
        return found

    def save(self) -> None:
        """Write a checkpoint and delete what is too many; all ranks take part.

        If it cannot be written, training goes on with the older ones: a full disk may be mended before the end.
        """
        began = time.perf_counter()
        states = self.gang.gather(generators(self.gang.device))
        progress = self.progress
        failed = False
        if self.gang.leader:
            named = self.built.trainable()
            snapshot = Snapshot(
                progress.step, dict(named), optimizer_tensors(self.optimizer, named), states, progress.plain()
            )
            try:
                self.tracker.flush()
                seal = self.checkpoints.save(snapshot, progress.eval_loss)
                gone = self.checkpoints.prune(self.settings.train.keep_checkpoints, progress.step)
                self._saved(seal, gone, time.perf_counter() - began)
            except Exception as error:  # stores raise many kinds
                failed = True
                self.console.say(
                    f"checkpoint step-{progress.step} could not be written ({error}); the older ones are kept. "
                    "Look at the room and the rights of the storage"
                )
                self.tracker.tags({"dropforge.checkpoint_error": f"step {progress.step}: {error}"[:500]})
        if not self.gang.sum([float(failed)])[0]:
            self.saved = progress.step
        self._restart_clock()

    def _saved(self, seal: Seal, gone: list[int], seconds: float) -> None:
        removed = f", removed {', '.join(f'step-{step}' for step in gone)}" if gone else ""
        self.console.say(f"checkpoint step-{seal.step}: {seal.bytes / 1e6:.1f} MB in {seconds:.2f} s{removed}")
        self.tracker.metrics({"train/checkpoint_seconds": seconds}, seal.step)
        self.offer(self.checkpoints.seals())

    def report(self) -> Mapping[str, Any]:
        """The loop's part of the run's report."""
        progress = self.progress
        return {
            "steps": progress.step,
            "epochs": round(self.plan.passes(progress.step), 4),
            "tokens": progress.tokens,
            "target_tokens": progress.targets,
            "seconds": round(progress.seconds, 3),
            "tokens_per_second": round(progress.tokens / max(1e-9, progress.seconds), 1),
            "skipped_steps": progress.skipped,
            "train": {"loss_first": progress.loss_first, "loss_last": progress.loss_last},
            "eval": {"before": _figures(progress.evaluation(0)), "after": _figures(progress.evaluation(self.steps))},
        }


def _figures(values: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if values is None else {key: value for key, value in values.items() if key != "step"}
