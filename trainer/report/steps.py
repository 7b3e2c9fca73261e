"""The log line of a step, for people, for the job library and for MLflow."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.loop.divergence import shown_rows
from trainer.loop.progress import Progress
from trainer.loop.step import StepResult
from trainer.report.console import Console, duration
from trainer.report.tracking import Tracker


@dataclass
class StepLog:
    """Says each log step and each skipped one. Speed is over the time spent in steps since the last log step."""

    console: Console
    tracker: Tracker
    steps: int
    seconds: float = 0.0
    tokens: int = 0

    def after_step(self, result: StepResult, progress: Progress, log: bool) -> None:
        self.seconds += result.seconds
        self.tokens += result.tokens
        if result.nats is None:
            self._skipped(result, progress)
        if log:
            self._log(result, progress)
            self.seconds, self.tokens = 0.0, 0

    def _skipped(self, result: StepResult, progress: Progress) -> None:
        self.console.say(
            f"step {result.step}: loss {result.own_nats} or gradient norm {result.norm} is not finite; "
            f"step skipped on all ranks; rows {shown_rows(progress.skips[-1]['rows'])}"
        )
        self.tracker.metrics({"train/skipped": progress.skipped}, result.step)

    def _log(self, result: StepResult, progress: Progress) -> None:
        speed = self.tokens / max(1e-9, self.seconds)
        loss = progress.window_loss
        left = progress.seconds / progress.step * (self.steps - progress.step)
        text = "-" if loss is None else f"{loss:.4f}"
        self.console.say(
            f"step {progress.step}/{self.steps}  loss {text}  lr {result.rate:.2e}  grad {result.norm:.3f}  "
            f"{speed:.0f} tok/s  eta {duration(left)}"
        )
        self.console.progress(progress.step, loss=loss, tokens_per_second=round(speed, 1))
        values = {
            "train/tokens_per_second": speed,
            "train/learning_rate": result.rate,
            "train/grad_norm": result.norm,
            "train/tokens": float(progress.tokens),
            **({} if loss is None else {"train/loss": loss}),
        }
        self.tracker.metrics(values, progress.step)
