"""A user's callbacks: told what happened after each step, evaluation and checkpoint, on the rank that leads.

They get copies of plain values and return nothing, so that a training with them comes to the same bits as without. What
they take of time is the step's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.data.user_code import UserCode
from trainer.loop.progress import Progress
from trainer.loop.step import StepResult
from trainer.state.checkpoint import Seal


class Callbacks:
    """
    :param steps: of the whole training. :param place: address below which checkpoints lie.
    """

    def __init__(self, code: UserCode, steps: int, place: str) -> None:
        self._code, self._steps, self._place = code, steps, place
        self._told: str | None = None

    def after_step(self, result: StepResult, progress: Progress, log: bool) -> None:
        """`step`: `loss` is None if the step was skipped, because loss or gradient was not finite."""
        facts = {
            "step": result.step,
            "steps": self._steps,
            "loss": result.loss,
            "learning_rate": result.rate,
            "grad_norm": result.norm,
            "tokens": progress.tokens,
            "targets": progress.targets,
            "seconds": result.seconds,
            "logged": log,
        }
        self._code.call_back("step", facts)

    def evaluated(self, evaluations: Sequence[Mapping[str, Any]]) -> None:
        """`evaluation`: the figures of the last one, by their names in MLflow."""
        self._code.call_back("evaluation", {**evaluations[-1], "steps": self._steps})

    def saved(self, seals: Sequence[Seal]) -> None:
        """`checkpoint`: the newest one in the durable place, once it is complete; each is told once."""
        if not seals or seals[-1].digest == self._told:
            return
        seal, self._told = seals[-1], seals[-1].digest
        facts = {
            "step": seal.step,
            "steps": self._steps,
            "uri": f"{self._place}/checkpoints/step-{seal.step}",
            "digest": seal.digest,
            "bytes": seal.bytes,
            "eval_loss": seal.eval_loss,
        }
        self._code.call_back("checkpoint", facts)
