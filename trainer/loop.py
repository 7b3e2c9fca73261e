"""The training loop: when to step, log, evaluate, save and stop. What a step does is in `trainer.step`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from dropforge.errors import DropforgeError
from trainer.config import Settings
from trainer.data.batch import make_batch
from trainer.data.plan import Plan, share
from trainer.data.tokens import Tokens
from trainer.gang import Gang
from trainer.heart import Heart
from trainer.measure import Measured, measure
from trainer.model.build import Built
from trainer.model.loss import LossModel
from trainer.observer import Observer
from trainer.optim import learning_rate, load_optimizer, optimizer_tensors
from trainer.progress import Progress
from trainer.report.console import Console
from trainer.report.steps import StepLog
from trainer.report.tracking import Tracker
from trainer.selfcheck import check_accumulation
from trainer.state.checkpoint import Checkpoints, Seal, Snapshot, generators, set_generators
from trainer.state.stop import PreemptedError, StopSignal
from trainer.step import Step, StepResult

BAD_STEPS: Final = 5  # skipped steps in a row that are still borne


class DivergedError(DropforgeError):
    """The loss is no number any more."""


@dataclass
class Loop:
    """Everything a rank needs for training.

    :param pad: id for padding. :param offer: called with the checkpoints that exist after each save.
    :param observers: called after each step, behind the one that logs.
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
    observers: list[Observer] = field(default_factory=list)
    heart: Heart = field(default_factory=Heart)

    def __post_init__(self) -> None:
        train = self.settings.train
        self.progress = Progress()
        self.step = Step(self.gang, train, self.built, self.loss, self.plan, self.train, self.pad, self.stop)
        self.optimizer = self.step.optimizer
        self.steps = self.plan.steps
        self.observers = [self.heart, StepLog(self.console, self.tracker, self.steps), *self.observers]
        # About a hundred points on a curve, and a sign of life at least every ten steps.
        self.log_every = max(1, min(10, self.steps // 100))
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
        self.heart.warm_up()
        self.step.wrap()
        self._check_accumulation()
        self.heart.rest()
        states = getattr(self, "_generators", None)
        if states is not None and len(states) == self.gang.world:
            set_generators(states[self.gang.rank], self.gang.device)
        else:  # a fresh run, or another number of ranks: any state will do, if it differs by rank and is repeatable
            torch.manual_seed((self.settings.train.seed * 1_000_003 + self.progress.step) * 4_099 + self.gang.rank)

    def _check_accumulation(self) -> None:
        """On the first rows of the plan, wherever the training begins."""
        packs = share(self.plan.step(0), self.plan.lengths, self.gang.rank, self.gang.world, 1 << 30)[0]
        weights = [weight for _, weight in self.built.trainable()]
        self.loss.eval()
        self.accumulation = check_accumulation(
            packs[: self.settings.train.micro_batch],
            lambda some: make_batch(self.train, some, self.pad).to(self.gang.device),
            self.step.backward,
            lambda: float(torch.nn.utils.clip_grad_norm_(weights, math.inf)),
            self.settings.train.precision,
        )
        self.loss.train()
        self.optimizer.zero_grad()

    def run(self) -> None:
        """Train to the end.

        :raises PreemptedError: after a checkpoint, if a rank was asked to stop.
        :raises DivergedError: after too many steps in a row that are not finite.
        """
        train = self.settings.train
        if self.progress.step == 0 and self.evaluate("before training") is None:
            raise PreemptedError(None)
        self.loss.train()
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

    def _step(self) -> bool:
        """One optimizer step; whether a rank was asked to stop."""
        progress = self.progress
        rate = learning_rate(self.settings.train, progress.step, self.steps)
        self.heart.step(progress.step + 1)
        result = self.step.take(progress.step, rate)
        progress.count(result)
        log = progress.step % self.log_every == 0 or progress.step == self.steps
        for observer in self.observers:
            observer.after_step(result, progress, log)
        if log:
            progress.nats, progress.window = 0.0, 0
        self._check_bad_steps(result)
        return result.stopping

    def _check_bad_steps(self, result: StepResult) -> None:
        if self.progress.in_row > BAD_STEPS:
            raise DivergedError(
                f"step {result.step}",
                f"loss or gradient was not finite in {self.progress.in_row} steps in a row",
                "Lower `train.learning_rate`, lengthen `train.warmup`, or look at the rows of these steps",
            )

    def evaluate(self, when: str) -> Measured | None:
        """Measure and log; None if a rank was asked to stop meanwhile."""
        step, train = self.progress.step, self.settings.train
        began = time.perf_counter()
        self.console.phase(f"evaluating {when}", step)
        self.heart.evaluation(step)
        found = measure(
            self.loss,
            self.eval,
            self.gang,
            size=train.sequence_length,
            micro=train.micro_batch,
            pad=self.pad,
            stop=lambda: self.stop.asked,
        )
        self.heart.rest()
        if found is not None:
            self.progress.evaluations.append({"step": step, **found.plain()})
            self.tracker.metrics(found.metrics(), step)
            self.console.say(
                f"eval {when}: loss {found.loss:.4f}  perplexity {found.perplexity:.2f}  accuracy {found.accuracy:.4f}"
                f"  ({found.targets} tokens, {time.perf_counter() - began:.1f} s)"
            )
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
            "accumulation_difference": self.accumulation,
            "train": {"loss_first": progress.loss_first, "loss_last": progress.loss_last},
            "eval": {"before": _figures(progress.evaluation(0)), "after": _figures(progress.evaluation(self.steps))},
        }


def _figures(values: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if values is None else {key: value for key, value in values.items() if key != "step"}
