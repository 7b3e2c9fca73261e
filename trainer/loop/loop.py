"""The training loop: when to step, log, evaluate, save and stop. What a step does is in `trainer.loop.step`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from dropforge.text import counted
from dropforge.wheel import CALLBACKS
from trainer.config import Settings
from trainer.data.batch import Batch, make_batch
from trainer.data.plan import Plan
from trainer.data.prompts import Prompt
from trainer.data.tokens import Tokens
from trainer.data.user_code import UserCode
from trainer.gang import Gang
from trainer.generate import Answers, generate
from trainer.interval import Due, Interval, Timers
from trainer.loop.batching import solve
from trainer.loop.best import BestWeights, best_step, stalled
from trainer.loop.callbacks import Callbacks
from trainer.loop.compiling import Compiled, kinds
from trainer.loop.divergence import DivergedError, check_skipped
from trainer.loop.limits import first_batches
from trainer.loop.longest import longest, widest
from trainer.loop.observer import Observer
from trainer.loop.optim import first_state, load_optimizer, optimizer_tensors, state_bytes
from trainer.loop.progress import Progress
from trainer.loop.saving import Saving
from trainer.loop.scale import Scale
from trainer.loop.schedule import check_steps, learning_rate
from trainer.loop.selfcheck import check_accumulation, check_compiled, check_recomputation, splits
from trainer.loop.step import Step
from trainer.measure import Measured, measure
from trainer.model import deterministic
from trainer.model.build import Built
from trainer.model.compiled import as_written, compiled
from trainer.model.fit import check_fit, rehearsal
from trainer.model.loss import LossModel
from trainer.model.prefix import bare
from trainer.model.recompute import everything_kept, recomputed
from trainer.model.shard import like, wrap
from trainer.node.heart import Heart
from trainer.report.board import Board
from trainer.report.console import Console
from trainer.report.figures import training_figures
from trainer.report.flops import make_gauge
from trainer.report.forecast import seconds_left
from trainer.report.job_status import JobStatus
from trainer.report.points import Points
from trainer.report.steps import StepLog
from trainer.report.tracking import Tracker
from trainer.report.wall import Wall
from trainer.state.checkpoint import Checkpoints, Seal, Snapshot
from trainer.state.fast import Fast
from trainer.state.generators import generators, seed_generators, set_generators
from trainer.state.resume import restore
from trainer.state.stop import PreemptedError, StopSignal

_SHORT: Final = 64  # tokens


@dataclass
class Loop:
    """Everything a rank needs for training. Making one is a collective: the ranks share the model as the recipe says.

    :param pad: id for padding. :param offer: called with the checkpoints that exist after each save.
    :param observers: called after each step, behind the one that logs.
    :param board: what TensorBoard is told, on rank 0 if it was asked for. :param job_status: what Kubeflow Trainer is.
    :param asked: on rank 0, how many steps somebody wants to have profiled; each wish is told once.
    :param wall: what the time went into.
    :param fast: this node's fast tier of checkpoints.
    :param prompts: of the evaluation by generation, written with `tokenizer` as the model's.
    :param answered: called on rank 0 with the answers of an evaluation.
    :param code: the user's own metrics and callbacks.
    :param row_keys: content keys of the training rows, in the order of `train.rows`, to name those of a skipped step.
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
    row_keys: NDArray[np.void] | Sequence[bytes] = ()
    wall: Wall = field(default_factory=Wall)
    asked: Callable[[], int] = lambda: 0
    board: Board | None = None
    job_status: JobStatus | None = None
    fast: Fast | None = None
    prompts: Sequence[Prompt] = ()
    tokenizer: Any = None
    answered: Callable[[Answers, Sequence[Mapping[str, Any]]], None] = lambda *_: None
    code: UserCode = field(default_factory=UserCode)

    def __post_init__(self) -> None:
        train = self.settings.train
        self.progress = Progress()
        self.wrapped = wrap(self.settings, self.gang, self.built, self.loss)
        self.steps = self.plan.steps
        check_steps(train, self.steps)
        self.batching = solve(self.plan.rows, self.gang.world, train.micro_batch)
        self.step = Step(
            self.gang,
            train,
            self.wrapped,
            self.plan,
            self.train,
            self.pad,
            self.stop,
            self.batching.micro_batch,
        )
        self.optimizer = self.step.optimizer
        if self.settings.eval_batches is not None:
            self.eval = first_batches(
                self.eval,
                self.settings.eval_batches,
                micro=train.micro_batch,
                size=train.sequence_length,
                packed=self.loss.packed,
            )
        # About a hundred points on a curve, and a sign of life at least every ten steps.
        log_every = max(1, min(10, self.steps // 100)) if train.log_every is None else train.log_every
        self.every = {
            "log": Interval.parse(log_every),
            "evaluation": Interval.parse(train.eval_every),
            "checkpoint": Interval.parse(train.checkpoint_every),
        }
        if self.fast is not None and train.fast_checkpoints is not None:
            self.every["fast"] = Interval.parse(train.fast_checkpoints.every)
        self.timers = Timers(self.every)
        self.gauge = make_gauge(
            self.built.model,
            self.plan.lengths,
            device=self.gang.device_name,
            devices=self.gang.world,
            precision=train.precision,
            env=os.environ,
            say=self.console.say,
            targets=self.plan.targets if self.train.paired else None,
        )
        self.log = StepLog(
            self.console,
            self.tracker,
            self.steps,
            self.gauge,
            self._seconds_left,
            self.gang.device,
            self.board,
            self.job_status,
        )
        self.callbacks = self._callbacks()
        self.observers = [self.heart, self.log, *self.observers, *([self.callbacks] if self.callbacks else [])]
        self.due = Due()
        self.best = BestWeights(self.checkpoints.store)
        self.saving = Saving(
            self.checkpoints,
            self.gang,
            self.settings,
            self.stop,
            self.console,
            self.tracker,
            snapshot=self._snapshot,
            offer=self._saved,
            fast=self.fast,
        )
        self._generators: Mapping[str, torch.Tensor] | None = None
        self.compiled: Compiled | None = None

    def _callbacks(self) -> Callbacks | None:
        """The user's, on the rank that leads."""
        if not self.gang.leader or not self.code.of(CALLBACKS):
            return None
        return Callbacks(self.code, self.steps, self.checkpoints.store.uri)

    def resume(self) -> int | None:
        """Go on from the newest checkpoint that all ranks can read; its step, or None without one. A collective.

        :raises DropforgeError, StorageError: see `trainer.state.resume`.
        """
        named = dict(self.wrapped.trainable())
        found = restore(self.checkpoints, self.gang, named, partial(first_state, self.optimizer), self.fast)
        if found is None:
            return None
        with torch.no_grad():
            for name, weight in named.items():
                weight.copy_(found.weights[name])
        load_optimizer(self.optimizer, named.items(), found.moments)
        self.progress = Progress.load(found.progress)
        self.progress.resumed.append(found.seal.step)
        if self.progress.loss_scale is not None:
            self.step.scale = Scale(self.progress.loss_scale, self.progress.steady)
        self.log.points = Points.load(self.progress.points)
        self.wall.resume(self.progress.wall, self.progress.at)
        self._generators = found.generators
        self.saving.resumed(found.seal.step, found.durable)
        return found.seal.step

    def start(self) -> None:
        """Make the first step like all others, set the random state, and start the clocks."""
        self.console.say(str(self.batching))
        self.saving.start(self._before_seal)
        self.heart.warm_up()
        with as_written(self.loss):  # what is compiled first is not to be an empty row
            self.step.warm_up()
        self.heart.warm_up()
        self._check_compiled()
        self._check_recomputation()
        self._check_fit()
        self.heart.warm_up()  # each of these, and each pass of the one before, has the bound for itself
        self._check_accumulation()
        self.heart.rest()
        if self._generators is not None:
            set_generators(self._generators, self.gang.device)
        else:  # a fresh run, or another number of ranks: any state will do, if it differs by rank and is repeatable
            seed_generators((self.settings.train.seed * 1_000_003 + self.progress.step) * 4_099 + self.gang.rank)

    def _check_compiled(self) -> None:
        """Compile before memory is measured, and in the mode of training: dropout takes part."""
        blocks = compiled(self.loss)
        if not blocks:
            return
        train, found = self.settings.train, Compiled(blocks)
        self.console.phase("compiling the model's blocks")
        self.loss.train()
        for batch in kinds(self.train, train.sequence_length, self.loss.packed, self.batching.micro_batch):
            here = batch.to(self.gang.device)

            def passes(scale: float, batch: Batch = here) -> None:
                seed_generators(train.seed)
                self.step.backward(batch, scale, last=True)

            self.heart.warm_up()
            difference = check_compiled(
                passes, lambda: as_written(self.loss), lambda: self.wrapped.clip(math.inf), train.precision
            )
            found.difference = max(found.difference, difference or 0.0)
            self.optimizer.zero_grad()
        self.heart.warm_up()
        found.ready()
        self.compiled = found
        self.console.say(str(found))

    def _check_recomputation(self) -> None:
        """On a short row, which fits with everything kept, and in the mode of training: dropout takes part."""
        if not recomputed(self.loss):
            return
        length = min(_SHORT, self.settings.train.sequence_length)
        batch = rehearsal(self.train, length, 0.5, self.loss.packed).to(self.gang.device)

        def passes(scale: float) -> None:
            seed_generators(self.settings.train.seed)
            self.step.backward(batch, scale, last=True)

        self.loss.train()
        check_recomputation(
            passes,
            lambda: everything_kept(self.loss),
            lambda: self.wrapped.clip(math.inf),
            self.settings.train.precision,
        )
        self.optimizer.zero_grad()

    def _check_fit(self) -> None:
        """Measure the longest micro-batch that may come, and refuse what would end in a kill."""
        plan, train, world = self.plan, self.settings.train, self.gang.world
        rows = min(self.batching.micro_batch, math.ceil(len(plan.step(0)) / world))
        most, targets = widest(plan) if self.train.paired else longest(plan)
        tokens = -(-most // 8) * 8
        tokens = tokens if self.train.paired else min(tokens, train.sequence_length)
        weights = self.wrapped.trained_bytes()
        moments = state_bytes(self.optimizer, (weight for _, weight in self.wrapped.trainable()))
        elsewhere = self.wrapped.states_on_host and self.gang.device.type == "cuda"
        extra = 0 if self.optimizer.state or elsewhere else moments  # the first step makes them
        if self.gang.device.type == "cpu":  # a replica copies its part of weights and moments, a shard all it has
            extra += (weights + moments) // (world if self.wrapped.mode == "ddp" else 1)
        self.loss.train()
        self.fit = check_fit(
            self.gang,
            self.wrapped,
            self.train,
            rows=rows,
            tokens=tokens,
            share=min(1.0, targets / max(1, tokens - 1)),
            extra=extra,
            sign=self.heart.warm_up,
        )
        self.optimizer.zero_grad()
        if self.fit is not None:
            self.console.say(
                f"memory: a forward pass of {counted(rows, 'row')} of {self.fit.tokens} tokens and the first steps "
                f"take {self.fit.need / 1e9:.2f} GB more, {self.fit.room / 1e9:.2f} GB are left"
            )

    def _before_seal(self) -> None:
        """What a checkpoint covers is told before it exists: whoever resumes from it does not tell it again."""
        self.tracker.flush()
        if self.board is not None:
            self.board.copy()

    def _check_accumulation(self) -> None:
        """On the first rows of the plan, wherever the training begins."""
        packs = self.plan.share(self.plan.step(0), self.gang.rank, self.gang.world, 1 << 30)[0]
        packs = packs[: self.settings.train.micro_batch]
        self.accumulation: float | None = None
        if not any(self.gang.gather(splits(packs))):
            self.console.say("no rank has two documents in its first micro-batch: that they add up is not looked at")
            return
        self.loss.eval()
        # Code would have to be made for this mode alone.
        with as_written(self.loss), self.loss.whole_rows(len(packs) > 1):
            self.accumulation = check_accumulation(
                packs,
                lambda some: make_batch(self.train, some, self.pad).to(self.gang.device),
                self.step.backward,
                lambda: self.wrapped.clip(math.inf),
                self.settings.train.precision,
            )
        self.loss.train()
        self.optimizer.zero_grad()

    def run(self) -> None:
        """Train to the end.

        :raises PreemptedError: after a checkpoint, if a rank was asked to stop.
        :raises DivergedError: after too many steps in a row that are not finite.
        """
        self.wall.enter("train")
        if self.progress.step == 0 and self.evaluate("before training") is None:
            raise PreemptedError(None)
        self.loss.train()
        if self._lacks_evaluation() and self.evaluate(f"at step {self.progress.step}") is None:
            raise PreemptedError(self.saving.newest)
        for name in self.every:
            self.timers.restart(name)
        while not self._finished():
            stopping = self._step()
            step = self.progress.step
            if self._lacks_evaluation() and not stopping:
                stopping = self.evaluate("after training" if step == self.steps else f"at step {step}") is None
            with self.wall.during("save"):
                self.saving.poll()
            due = self.due.checkpoint or self.every["checkpoint"].due(step)
            often = "fast" in self.every and (self.due.fast or self.every["fast"].due(step))
            if (due or often) and not stopping and not self._finished():
                # A stop that was asked for meanwhile needs no other step, and no other save after it.
                with self.wall.during("save"):
                    stopping = self.saving.save(step, due)
                    for name in ("checkpoint", "fast") if due else ("fast",):
                        if name in self.every:
                            self.timers.restart(name)
            if stopping:
                with self.wall.during("save"):
                    self.saving.at_stop(step)
                raise PreemptedError(self.saving.newest, step)
        with self.wall.during("save"):
            self.saving.at_end(self.progress.step)
        self.wall.enter("export")
        self._take_best()

    def _finished(self) -> bool:
        """Whether all steps are done, or evaluations no longer get better; a resumed run decides alike."""
        return self.progress.step >= self.steps or stalled(
            self.progress.evaluations, self.settings.train.early_stopping
        )

    def _lacks_evaluation(self) -> bool:
        """Whether an evaluation is due at this step; after a stop in the middle of one it is still due."""
        step = self.progress.step
        due = step == self.steps or self.due.evaluation or self.every["evaluation"].due(step)
        return due and self.progress.evaluation(step) is None

    def _step(self) -> bool:
        """One optimizer step; whether a rank was asked to stop."""
        progress, train = self.progress, self.settings.train
        rate = learning_rate(train, progress.step, self.steps, progress.evaluations)
        self.heart.step(progress.step + 1)
        due = replace(self.timers.due(), profile=self.asked()) if self.gang.leader else Due()
        result = self.step.take(progress.step, rate, due)
        self.wall.move("train", "data", result.data_seconds)
        progress.count(result, self._keys(result.suspects))
        self.due = result.due
        if self.compiled is not None and (more := self.compiled.step()):
            self.console.say(f"step {progress.step}: {more} more graph(s) were compiled, for rows of another kind")
        log = self.due.log or self.every["log"].due(progress.step) or progress.step == self.steps
        for observer in self.observers:
            observer.after_step(result, progress, log)
        if log:
            progress.nats, progress.window = 0.0, 0
            self.timers.restart("log")
        try:
            check_skipped(progress, train.max_skipped_steps)
        except DivergedError:
            self.saving.land()
            raise
        return result.stopping

    def _seconds_left(self) -> float:
        return seconds_left(
            self.progress,
            self.wall.totals(),
            self.steps,
            evaluation=self.every["evaluation"],
            checkpoint=self.every["checkpoint"],
        )

    def _keys(self, documents: Sequence[int]) -> list[str]:
        """The content keys of the rows that documents came from; their places where no keys are known."""
        rows = sorted({int(self.train.rows[document]) for document in documents})
        return [bytes(self.row_keys[row]).hex() if len(self.row_keys) else f"row {row}" for row in rows]

    def evaluate(self, when: str) -> Measured | None:
        """Measure and log; None if a rank was asked to stop meanwhile."""
        with self.wall.during("evaluation"):
            return self._evaluate(when)

    def _evaluate(self, when: str) -> Measured | None:
        step, train, precision = self.progress.step, self.settings.train, self.settings.eval_precision
        began = time.perf_counter()
        self.console.phase(f"evaluating {when}", step)
        self.heart.evaluation(step)
        model = self.wrapped.evaluator(precision)
        with nullcontext() if step else bare(model.model):
            found = measure(
                model,
                self.eval,
                self.gang,
                size=train.sequence_length,
                micro=train.micro_batch,
                pad=self.pad,
                precision=precision,
                stop=lambda: self.stop.asked,
                tell=lambda *_: self.saving.poll(),  # a save that ends meanwhile is told of now
                own=self.code.figures,
            )
        measured = time.perf_counter()
        answers = None
        if found is not None and self._asks():
            answers = self._answers(model)
            found = None if answers is None else found  # half an evaluation is none: it is due again
        del model  # it may be a whole copy
        self.heart.rest()
        self.wrapped.settle()
        if found is not None:
            plain, metrics = found.plain(), found.metrics()
            if answers is not None:
                plain, metrics = plain | answers.plain(), metrics | answers.metrics()
            # What rank 0 measured is what all record, so that whatever follows from it is decided alike.
            self.progress.evaluations.append({"step": step, **self.gang.gather(plain)[0]})
            self._keep_best()
            self.tracker.metrics(metrics, step)
            if self.board is not None:
                self.board.scalars(metrics, step)
            self.console.say(
                f"eval {when}: {found}  ({found.targets} {'tokens' if found.macro_f1 is None else 'rows'}, "
                f"{measured - began:.1f} s)"
            )
            if answers is not None:
                self.console.say(f"answers {when}: {answers}  ({time.perf_counter() - measured:.1f} s)")
                if self.gang.leader:
                    self.answered(answers, self.progress.evaluations)
            if self.callbacks is not None:
                self.callbacks.evaluated(self.progress.evaluations)
        self.timers.restart("evaluation")
        return found

    def _asks(self) -> bool:
        """Whether the evaluation that is being made has answers; a resumed run decides alike."""
        asked, done = self.settings.generation, len(self.progress.evaluations)
        if asked is None or not self.prompts:
            return False
        return self.progress.step in (0, self.steps) or done % asked.every == 0

    def _answers(self, model: LossModel) -> Answers | None:
        """None if a rank was asked to stop."""
        assert self.settings.generation is not None
        return generate(
            model,
            self.prompts,
            self.gang,
            self.tokenizer,
            self.settings.generation,
            pad=self.pad,
            precision=self.settings.eval_precision,
            stop=lambda: self.stop.asked,
            tell=self.saving.poll,
            scorers=self.code.scorers,
            say=self.console.say,
        )

    def _snapshot(self) -> tuple[Snapshot, float | None]:
        progress, named = self.progress, dict(self.wrapped.trainable())
        progress.saves += 1
        progress.points = self.log.points.plain()
        progress.wall, progress.at = self.wall.totals(), self.wall.now()
        states: list[Mapping[str, torch.Tensor]] = [{} for _ in range(self.gang.world)]
        states[self.gang.rank] = generators(self.gang.device)
        moments = optimizer_tensors(self.optimizer, named.items())
        return Snapshot(progress.step, named, moments, states, progress.plain()), progress.eval_loss

    def _keep_best(self) -> None:
        """Write the weights of a new best evaluation. A failure ends the attempt: the next one measures it again."""
        step = self.progress.step
        chosen = self.settings.train.export == "best" and step and step < self.steps
        if chosen and best_step(self.progress.evaluations) == step:
            weights = self.wrapped.full(dict(self.wrapped.trainable()))
            if self.gang.leader:
                self.best.keep(step, weights)
            # Those who went on would wait in the next step, whose length the watchdog bounds.
            self.gang.follow(f"best-{step}")

    def _saved(self, seals: list[Seal]) -> None:
        """On rank 0, after a save. :param seals: the durable checkpoints that exist now."""
        self.offer(seals)
        if self.callbacks is not None:
            self.callbacks.saved(seals)
        if self.settings.train.export == "best":
            self._prune_best(seals)

    def _prune_best(self, seals: list[Seal]) -> None:
        """Delete the weights that neither this run nor a checkpoint, kept or being written, takes for the best."""
        tiers = [*seals, *(self.fast.here().values() if self.fast else ())]
        writing = (self.saving.saver.step, self.saving.saver.uploads.step)
        known = [*(seal.step for seal in tiers), *(step for step in writing if step is not None), self.progress.step]
        found = self.progress.evaluations
        try:
            self.best.prune(best_step([item for item in found if item["step"] <= step]) for step in known)
        except Exception as error:  # stores raise many kinds, and the next save tries again
            self.console.say(f"older best weights could not be removed ({error}); they stay for now")

    @property
    def exported(self) -> int:
        """The step whose weights become the model."""
        best = best_step(self.progress.evaluations) if self.settings.train.export == "best" else None
        return self.progress.step if best is None else best

    def _take_best(self) -> None:
        """Put the best weights into the model, of which each rank may hold a part."""
        if self.exported != self.progress.step:
            weights = self.best.read(self.exported)
            self.console.say(f"the model is that of step {self.exported}, which had the lowest evaluation loss")
            with torch.no_grad():
                for name, weight in self.wrapped.trainable():
                    weight.copy_(like(weights[name], weight))

    def release(self) -> None:
        """Let go of moments and gradients: what comes after the training has their memory."""
        self.optimizer.state.clear()
        self.optimizer.zero_grad(set_to_none=True)
        if self.gang.device.type == "cuda":
            torch.cuda.empty_cache()

    def report(self) -> Mapping[str, Any]:
        """The loop's part of the run's report."""
        return {
            **training_figures(self.progress, self.plan, self.exported, self.gauge),
            "accumulation_difference": self.accumulation,
            "distribution": self.wrapped.ran(),
            "determinism": deterministic.ran(),
            "memory": None if self.fit is None else self.fit.plain(),
            "compiled": None if self.compiled is None else self.compiled.plain(),
            "user_code": None if self.code.wheel is None else self.code.wheel.plain(),
        }
