"""The log line of a step, for people, for the job library and for MLflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from trainer.report.board import Board
from trainer.report.console import Console, duration
from trainer.report.flops import Gauge
from trainer.report.job_status import JobStatus
from trainer.report.memory import peak_memory
from trainer.report.points import Points
from trainer.report.tracking import Tracker

if TYPE_CHECKING:
    from trainer.loop.progress import Progress
    from trainer.loop.step import StepResult

_SHOWN: Final = 5  # rows named in a line
_UNEVEN: Final = 1.2  # times the fastest rank's time from which people are told who is slow


@dataclass
class Window:
    """Sums over the steps since the last log step.

    :param busy: by rank, over the steps for which it is known, and so is `exchange`.
    :param router: a mixture's router loss times the targets, of which there were `routed`.
    """

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    targets: int = 0
    data: float = 0.0
    wait: float = 0.0
    exchange: float = 0.0
    exchanges: int = 0
    busy: list[float] = field(default_factory=list)
    router: float = 0.0
    routed: int = 0

    def add(self, result: StepResult) -> None:
        self.steps += 1
        self.seconds += result.seconds
        self.tokens += result.tokens
        self.targets += result.targets
        self.data += result.data_seconds
        self.wait += result.wait_seconds
        if result.exchange_seconds is not None:
            self.exchange += result.exchange_seconds
            self.exchanges += 1
        if result.busy:
            self.busy = [
                one + other for one, other in zip(self.busy or [0.0] * len(result.busy), result.busy, strict=True)
            ]
        if result.router is not None:
            self.router += result.router * result.targets
            self.routed += result.targets

    def spread(self) -> tuple[int, float] | None:
        """The rank that worked longest, and how many times as long as the one that worked shortest."""
        if len(self.busy) < 2 or not min(self.busy) > 0:
            return None
        slowest = max(range(len(self.busy)), key=self.busy.__getitem__)
        return slowest, self.busy[slowest] / min(self.busy)


@dataclass
class StepLog:
    """Says each log step and each skipped one. Speeds and times are means over the steps since the last log step.

    :param steps: of the whole training. :param left: seconds that it will still take.
    """

    console: Console
    tracker: Tracker
    steps: int
    gauge: Gauge
    left: Callable[[], float]
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    board: Board | None = None
    job_status: JobStatus | None = None
    window: Window = field(default_factory=Window)
    points: Points = field(default_factory=Points)

    def after_step(self, result: StepResult, progress: Progress, log: bool) -> None:
        self.window.add(result)
        if result.overflows and result.scale is not None and result.nats is not None:
            self._overflowed(result, progress)
        if result.nats is None:
            self._skipped(result, progress)
        if log:
            self._log(result, progress)
            self.window = Window()

    def _skipped(self, result: StepResult, progress: Progress) -> None:
        self.console.say(
            f"step {result.step}: loss {result.own_nats} or gradient norm {result.norm} is not finite; "
            f"step skipped on all ranks; rows {shown_rows(progress.skips[-1]['rows'])}"
        )
        self.tracker.metrics({"train/skipped": progress.skipped}, result.step)

    def _overflowed(self, result: StepResult, progress: Progress) -> None:
        self.console.say(
            f"step {result.step}: gradients were too large for fp16, and it was taken {result.overflows} more time(s): "
            f"the loss scale is {result.scale.value if result.scale else 1:g}"
        )
        self.tracker.metrics({"train/overflows": float(progress.overflows)}, result.step)

    def _log(self, result: StepResult, progress: Progress) -> None:
        loss, left = progress.window_loss, self.left()
        facts = self._facts(result, loss) | {"eta_seconds": round(left, 1)}
        spread = self.window.spread()
        text = "-" if loss is None else f"{loss:.4f}"
        more = f"  mfu {facts['mfu']:.1%}" if "mfu" in facts else ""
        uneven = f"  rank {spread[0]} takes {spread[1]:.1f} times the fastest" if spread and spread[1] > _UNEVEN else ""
        self.console.say(
            f"step {progress.step}/{self.steps}  loss {text}  lr {result.rate:.2e}  grad {result.norm:.3f}  "
            f"{facts['tokens_per_second']:.0f} tok/s{more}  eta {duration(left)}{uneven}"
        )
        self.console.progress(progress.step, **facts)
        self.points.add(progress.step, facts)
        metrics = {f"train/{name}": value for name, value in facts.items()}
        metrics["train/tokens"] = float(progress.tokens)
        self.tracker.metrics(metrics, progress.step)
        if self.board is not None:
            self.board.scalars(metrics, progress.step)
        if self.job_status is not None:
            told = {name: value for name, value in facts.items() if name != "eta_seconds"}
            self.job_status.tell(progress.step, self.steps, left, told)

    def _facts(self, result: StepResult, loss: float | None) -> dict[str, float]:
        """What is told of the steps since the last log step; what is not known is left out."""
        window, found = self.window, {} if loss is None else {"loss": loss}
        speed = window.tokens / max(1e-9, window.seconds)
        if window.routed:
            found["router_loss"] = round(window.router / window.routed, 6)
        found |= {
            "tokens_per_second": round(speed, 1),
            "tokens_per_second_per_device": round(speed / self.gauge.devices, 1),
            "grad_norm": result.norm,
            "learning_rate": result.rate,
            "step_seconds": round(window.seconds / window.steps, 6),
            "data_wait_seconds": round(window.data / window.steps, 6),
        }
        mfu = self.gauge.mfu(window.tokens, window.targets, window.seconds)
        if mfu is not None:
            found["mfu"] = round(mfu, 4)
        if result.scale is not None:
            found["loss_scale"] = result.scale.value
        if self.gauge.devices > 1:
            found["collective_wait_seconds"] = round(window.wait / window.steps, 6)
            if window.exchanges:
                found["gradient_wait_seconds"] = round(window.exchange / window.exchanges, 6)
        spread = window.spread()
        if spread:
            found |= {"rank_spread": round(spread[1], 3), "slowest_rank": spread[0]}
        return found | {name: round(value, 1) for name, value in peak_memory(self.device).items()}


def shown_rows(keys: list[str]) -> str:
    """The first of some rows' keys, for a line."""
    more = len(keys) - _SHOWN
    return ", ".join(keys[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
