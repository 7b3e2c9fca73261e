"""The counters of a run. They travel in the checkpoint, so that a resumed run goes on counting where it stood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainer.loop.step import StepResult

_SUSPECTS: Final = 100  # rows of a skipped step whose keys are kept


@dataclass
class Progress:
    """
    :param step: optimizer steps done, skipped ones included.
    :param tokens: tokens seen, padding left out. :param targets: tokens learned from.
    :param seconds: time spent in steps, over all attempts.
    :param skipped: steps that were left out for a loss or gradient that is not finite; `in_row` of them just now.
    :param overflows: times that a step was taken again in fp16; :param loss_scale, steady: see `trainer.loop.scale`,
        None in other arithmetic.
    :param nats, window: sum of the loss and of the targets since the last log line.
    :param skips: for each skipped step its number, the content keys of rows that may be the cause, and their number.
    :param evaluations: for each evaluation its step and figures.
    :param saves: checkpoints begun. :param resumed: the steps from which later attempts went on.
    :param points: those of the curves (`trainer.report.points`), as they stood at the last save.
    :param wall: seconds of each phase of the run (`trainer.report.wall`) up to Unix time `at`, of rank 0.
    """

    step: int = 0
    tokens: int = 0
    targets: int = 0
    seconds: float = 0.0
    skipped: int = 0
    in_row: int = 0
    overflows: int = 0
    loss_scale: float | None = None
    steady: int = 0
    nats: float = 0.0
    window: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    skips: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    saves: int = 0
    resumed: list[int] = field(default_factory=list)
    points: dict[str, Any] = field(default_factory=dict)
    wall: dict[str, float] = field(default_factory=dict)
    at: float | None = None

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> Progress:
        return cls(**values)

    def count(self, result: StepResult, suspects: Sequence[str] = ()) -> None:
        """Take a step into the counters. :param suspects: keys of the rows that may be why it was skipped."""
        self.step = result.step
        self.tokens += result.tokens
        self.targets += result.targets
        self.seconds += result.seconds
        self.overflows += result.overflows
        if result.scale is not None:
            self.loss_scale, self.steady = result.scale.value, result.scale.steady
        if result.nats is None:
            self.skipped += 1
            self.in_row += 1
            self.skips.append({"step": result.step, "rows": list(suspects[:_SUSPECTS]), "count": len(suspects)})
            return
        self.in_row = 0
        self.nats += result.nats
        self.window += result.targets
        self.loss_first = result.loss if self.loss_first is None else self.loss_first
        self.loss_last = result.loss

    @property
    def window_loss(self) -> float | None:
        """Nats per target since the last log step; None if all steps since then were skipped."""
        return self.nats / self.window if self.window else None

    def evaluation(self, step: int) -> dict[str, Any] | None:
        """The figures measured at a step, if they were."""
        return next((dict(item) for item in self.evaluations if item["step"] == step), None)

    @property
    def eval_loss(self) -> float | None:
        """Loss of the evaluation at this very step, if there was one."""
        found = self.evaluation(self.step)
        return None if found is None else float(found["eval/loss"])
