"""A rank's whole training with the product's own loop, and everything that must not depend on who shared it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainer.gang import Gang
from trainer.loop import step as steps
from trainer.loop.optim import optimizer_tensors
from trainer.state.stop import PreemptedError

from .ranks_loop import Stage, Tensors, copied, make_loop


@dataclass(frozen=True)
class Course:
    """One attempt at a training, as a rank saw it; by the number of the step, the first is 1.

    :param took: documents of each row that this rank was given.
    :param resumed: step of the checkpoint that it went on from.
    :param gradients: of the first step, after clipping; of one rank, or if the attempt is stopped.
    :param weights, moments: at the end, if it is not stopped. All three are whole, and the leader's alone.
    """

    losses: dict[int, float | None]
    norms: dict[int, float]
    rates: dict[int, float]
    took: dict[int, list[tuple[int, ...]]]
    resumed: int | None
    counters: dict[str, Any]
    evaluations: list[dict[str, Any]]
    said: list[str]
    gradients: Tensors
    weights: Tensors
    moments: Tensors


def run_course(
    gang: Gang, stage: Stage, packs: bool, folder: str, stop: int | None = None, probes: bool = True
) -> Course:
    """Train to the end, from the newest checkpoint in a folder if there is one.

    :param stop: the last rank gets a SIGTERM as it begins this step; the others hear of it from the collective.
    :param probes: whether memory and the adding up of micro-batches are looked at before the first step, which takes a
        third of so short a training.
    """
    loop = make_loop(gang, stage, packs, folder)
    if not probes:
        loop._check_fit = loop._check_accumulation = lambda: None  # type: ignore[method-assign]
    said: list[str] = []
    loop.console.say = loop.checkpoints.say = said.append  # type: ignore[method-assign]
    resumed = loop.resume()
    loop.stop.install()
    loop.start()

    losses: dict[int, float | None] = {}
    norms: dict[int, float] = {}
    rates: dict[int, float] = {}
    took: dict[int, list[tuple[int, ...]]] = {}
    gradients: Tensors = {}
    make_batch, take, update = steps.make_batch, loop.step.take, loop.optimizer.step

    def noted(tokens: Any, rows: Any, pad: int) -> Any:
        took[loop.progress.step + 1] += [tuple(int(document) for document in row) for row in rows]
        return make_batch(tokens, rows, pad)

    def watched(index: int, *values: Any) -> Any:
        if index + 1 == stop and gang.rank == gang.world - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        took[index + 1] = []
        steps.make_batch = noted  # type: ignore[assignment]
        result = take(index, *values)
        steps.make_batch = make_batch
        losses[result.step], norms[result.step], rates[result.step] = result.loss, result.norm, result.rate
        return result

    def seen() -> None:
        if loop.progress.step == 0 and (stop or gang.world == 1):  # all ranks gather
            named = loop.wrapped.trainable()
            gradients.update(copied(loop.wrapped.full({name: weight.grad for name, weight in named})))
        update()

    loop.step.take = watched  # type: ignore[method-assign]
    loop.optimizer.step = seen  # type: ignore[method-assign,assignment]
    with suppress(PreemptedError):
        loop.run()
    named = loop.wrapped.trainable()
    progress = loop.progress
    return Course(
        losses=losses,
        norms=norms,
        rates=rates,
        took=took,
        resumed=resumed,
        counters={
            **{name: getattr(progress, name) for name in ("step", "tokens", "targets", "skipped", "in_row")},
            "passes": loop.plan.passes(progress.step),
        },
        evaluations=progress.evaluations,
        said=said,
        gradients=gradients,
        weights={} if stop else copied(loop.wrapped.full(dict(named))),
        moments={} if stop else copied(loop.wrapped.full(optimizer_tensors(loop.optimizer, named))),
    )
