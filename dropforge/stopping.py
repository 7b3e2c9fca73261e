"""Which trials of a sweep have fallen behind: the median stopping rule, a pure function of what was measured.

Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017, section 3.2.1: stop a trial at step s
if its best value up to s is strictly worse than the median of the running averages, up to s, of the other trials.
Vizier compares with completed trials; here every trial that has come as far counts, those that were stopped too: so the
first ones, which train side by side, can be told apart, and the median does not become that of the survivors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from statistics import median
from typing import Final

from dropforge.promotion import Direction
from dropforge.sweep import EarlyStop

Curve = Mapping[int, float]
"""Values by optimizer step."""

_WORST: Final = math.inf


def behind(
    curves: Mapping[int, Curve], going: Collection[int], rule: EarlyStop, direction: Direction
) -> dict[int, str]:
    """The trials to stop, each with the reason.

    :param curves: what each trial has measured so far, those that have ended among them. :param going: may be stopped.
    """
    sign = 1 if direction == "lower" else -1
    costs = {trial: {step: _cost(value, sign) for step, value in curve.items()} for trial, curve in curves.items()}
    found: dict[int, str] = {}
    for trial in sorted(going):
        if why := _judged(trial, costs, rule, sign):
            found[trial] = why
    return found


def _judged(trial: int, costs: Mapping[int, Curve], rule: EarlyStop, sign: int) -> str | None:
    """Why a trial has fallen behind, at the newest step that enough others have reached; None if it has not."""
    own = costs.get(trial, {})
    steps = sorted(step for step in own if step > 0)
    for step in reversed(steps[rule.after_evaluations - 1 :]):
        others = [
            _average(curve, step) for other, curve in costs.items() if other != trial and max(curve, default=-1) >= step
        ]
        if len(others) < rule.after_trials:
            continue
        best = min(value for at, value in own.items() if at <= step)
        bar = median(others)
        if not best > bar:
            return None
        told = f"its best of {_shown(sign * best)} up to step {step} is worse than {_shown(sign * bar)}"
        return f"{told}, the median of the averages of {len(others)} other trial{'s' if len(others) > 1 else ''}"
    return None


def _average(curve: Curve, step: int) -> float:
    """Mean of what was measured up to a step; what is not finite makes it the worst."""
    values = [value for at, value in curve.items() if at <= step]
    return math.fsum(values) / len(values) if values and _WORST not in values else _WORST


def _cost(value: float, sign: int) -> float:
    """The value, where lower is better; the worst for one that is no number."""
    return sign * value if math.isfinite(value) else _WORST


def _shown(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "no finite value"
