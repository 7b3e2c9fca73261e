"""What a run takes: hours of GPUs and cores, money, and what the recipe's limits say to them. Pure.

GPU-hours and core-hours are those that the pods hold, whether they use them or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from dropforge.recipe import Compute
from dropforge.recipe_costs import Amounts, Limits, Price

METRIC_GPU_HOURS: Final = "cost/gpu_hours"
METRIC_CORE_HOURS: Final = "cost/core_hours"
METRIC_COST: Final = "cost/total"  # in the currency of the tag dropforge.cost
UNKNOWN: Final = "not known"


@dataclass(frozen=True)
class Hours:
    """:param cost: None where no price makes it known, and any of them where the time is not known."""

    gpu_hours: float | None
    core_hours: float | None
    cost: float | None = None
    currency: str = ""

    def __str__(self) -> str:
        gpus = UNKNOWN if self.gpu_hours is None else f"{_number(self.gpu_hours)}"
        cores = UNKNOWN if self.core_hours is None else f"{_number(self.core_hours)}"
        told = f"GPU-hours {gpus}, core-hours {cores}"
        if self.currency:
            told += f", cost {UNKNOWN if self.cost is None else f'{self.cost:,.2f} {self.currency}'}"
        return told

    def metrics(self, prefix: str) -> dict[str, float]:
        """By name, as MLflow's metrics; what is not known is left out."""
        found = {"gpu_hours": self.gpu_hours, "core_hours": self.core_hours, "total": self.cost}
        return {f"{prefix}/{name}": value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Tariff:
    """What hours cost under a recipe. :param gpus: whether its pods have GPUs, whose price has a share of the cores."""

    price: Price | None
    gpus: bool

    @classmethod
    def of(cls, compute: Compute) -> Tariff:
        return cls(compute.price, bool(compute.gpus))

    def hours(self, gpu_hours: float | None, core_hours: float | None) -> Hours:
        """These hours with what they cost."""
        price = self.price
        if price is None:
            return Hours(gpu_hours, core_hours)
        a_core = (price.core_hour or 0.0) if self.gpus else price.core_hour
        a_gpu = price.gpu_hour if self.gpus else 0.0
        cost = None
        if gpu_hours is not None and core_hours is not None and a_core is not None and a_gpu is not None:
            cost = gpu_hours * a_gpu + core_hours * a_core
        return Hours(gpu_hours, core_hours, cost, price.currency)


Word = Literal["start", "ask", "stop"]


@dataclass(frozen=True)
class Judged:
    """What the recipe's limits make of a plan. :param reasons: one line for each limit that is passed or unknown."""

    word: Word
    reasons: tuple[str, ...] = ()


def judge(found: Hours, limits: Limits | None) -> Judged:
    """Whether a run may begin, somebody is asked, or it may not."""
    if limits is None or limits.ask_above is None:
        return Judged("start")
    above = passed(found, limits.ask_above, "compute.limits.ask_above")
    unknown = tuple(
        f"{_WORDS[name]} {UNKNOWN}, and `compute.limits.ask_above.{name}` is {limit:g}"
        for name, limit in _limits_of(limits.ask_above)
        if getattr(found, name) is None
    )
    if above:
        return Judged("ask", (*above, *unknown))
    return Judged(limits.unknown, unknown) if unknown else Judged("start")


def passed(hours: Hours, limits: Amounts, key: str) -> tuple[str, ...]:
    """The limits that these hours are above, a line each. :param key: of the limits in the recipe."""
    return tuple(
        f"{_WORDS[name]} {_number(value)}, and `{key}.{name}` is {limit:g}"
        for name, limit in _limits_of(limits)
        if (value := getattr(hours, name)) is not None and value > limit
    )


def limits_told(found: Hours, limits: Limits | None) -> list[str]:
    """What the recipe's limits mean for a plan, a line each; empty where there are none."""
    if limits is None:
        return []
    judged = judge(found, limits)
    words = {"start": "the run begins", "ask": "it needs approval first", "stop": "the run does not begin"}
    told = [] if limits.ask_above is None else [": ".join([words[judged.word], *judged.reasons])]
    if limits.stop_above is not None:
        above = passed(found, limits.stop_above, "compute.limits.stop_above")
        told += [f"it would be ended before it is done: {reason}" for reason in above]
    return told


@dataclass(frozen=True)
class Rates:
    """What the pods of a job hold."""

    gpus: float
    cores: float

    def hours(self, seconds: float, tariff: Tariff) -> Hours:
        return tariff.hours(self.gpus * seconds / 3600, self.cores * seconds / 3600)


def seconds_left(used: Hours, rates: Rates, limits: Limits | None, tariff: Tariff) -> float | None:
    """How long a job may run until the run has used what it may; None if it has no limit, 0 if it has used it up."""
    if limits is None or limits.stop_above is None:
        return None
    an_hour, found = rates.hours(3600, tariff), []
    for name, limit in _limits_of(limits.stop_above):
        rate, left = getattr(an_hour, name), limit - (getattr(used, name) or 0.0)
        if left <= 0:
            return 0.0
        if rate:
            found.append(left / rate * 3600)
    return min(found, default=None)


_WORDS: Final = {"gpu_hours": "GPU-hours", "core_hours": "core-hours", "cost": "cost"}


def _limits_of(limits: Amounts) -> list[tuple[str, float]]:
    return [(name, value) for name in Amounts.model_fields if (value := getattr(limits, name)) is not None]


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
