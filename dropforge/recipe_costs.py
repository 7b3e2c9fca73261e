"""The recipe's sections `compute.price` and `compute.limits`: what hours cost, and how many a run may take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dropforge.section import Section

Amount = Annotated[float, Field(ge=0, le=1e12)]


class Price(Section):
    """What an hour costs."""

    gpu_hour: Amount | None = None
    """Of one GPU, with the share of its machine."""
    core_hour: Amount | None = None
    """Of one CPU core; where pods have GPUs, on top of theirs."""
    currency: str = Field(default="USD", pattern="^[A-Z]{3}$")
    """Three letters, as in EUR."""

    @model_validator(mode="after")
    def _prices_something(self) -> Price:
        if self.gpu_hour is None and self.core_hour is None:
            raise ValueError("it prices nothing: give it gpu_hour or core_hour")
        return self


class Amounts(Section):
    """Largest number of hours, or most money; what is left out has no limit."""

    gpu_hours: Amount | None = None
    """Hours of all GPUs together."""
    core_hours: Amount | None = None
    """Hours of all CPU cores together."""
    cost: Amount | None = None
    """In the currency of `compute.price`."""

    @model_validator(mode="after")
    def _limits_something(self) -> Amounts:
        if self.gpu_hours is None and self.core_hours is None and self.cost is None:
            raise ValueError("it limits nothing: give it gpu_hours, core_hours or cost")
        return self


class Limits(Section):
    """Limits above which a run needs approval before a job begins, or is ended."""

    ask_above: Amounts | None = None
    """If the plan comes to more than one of these, the run needs approval."""
    stop_above: Amounts | None = None
    """If the run has used more than one of these over all its attempts, it is ended, after a checkpoint."""
    unknown: Literal["ask", "start", "stop"] = "ask"
    """What happens if the plan cannot estimate what `ask_above` limits."""
    deadline_hours: float = Field(default=24.0, ge=0.001, le=144)
    """How long to wait for the answer."""
    otherwise: Literal["stop", "start"] = "stop"
    """What happens without an answer by then."""
    people: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = Field(
        default=(), max_length=50, strict=False
    )
    """Ids of the Airflow users who may answer; none for everyone with the right to answer for this DAG."""

    @model_validator(mode="after")
    def _limits_something(self) -> Limits:
        if self.ask_above is None and self.stop_above is None:
            raise ValueError("it limits nothing: give it ask_above or stop_above")
        return self
