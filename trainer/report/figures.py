"""What a training did, as the first part of `report.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.data.plan import Plan
from trainer.report.flops import Gauge

if TYPE_CHECKING:
    from trainer.loop.progress import Progress


def training_figures(progress: Progress, plan: Plan, exported: int, gauge: Gauge) -> Mapping[str, Any]:
    """
    :param exported: the step whose weights became the model; `eval.after` was measured with them.
    """
    mfu = gauge.mfu(progress.tokens, progress.targets, progress.seconds)
    return {
        "steps": progress.step,
        "exported_step": exported,
        "ended": "all steps" if progress.step >= plan.steps else "early: evaluations no longer got better",
        "epochs": round(plan.passes(progress.step), 4),
        "tokens": progress.tokens,
        "target_tokens": progress.targets,
        "seconds": round(progress.seconds, 3),
        "tokens_per_second": round(progress.tokens / max(1e-9, progress.seconds), 1),
        "flops": None if gauge.flops is None else gauge.flops.of(progress.tokens, progress.targets),
        "mfu": None if mfu is None else round(mfu, 4),
        "skipped_steps": progress.skipped,
        "skipped": progress.skips,
        "loss_scale": progress.loss_scale,
        "overflows": progress.overflows,
        "train": {"loss_first": progress.loss_first, "loss_last": progress.loss_last},
        "eval": {"before": _figures(progress.evaluation(0)), "after": _figures(progress.evaluation(exported))},
    }


def _figures(values: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if values is None else {key: value for key, value in values.items() if key != "step"}
