"""The recipe's section `promote.approval`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dropforge.section import Section


class Approval(Section):
    """A user must approve before the alias moves, once the candidate has passed all other checks."""

    deadline_hours: float = Field(default=72.0, ge=0.001, le=144)
    """How long to wait for the answer; meanwhile the family's next run waits before it compares."""
    otherwise: Literal["keep", "promote"] = "keep"
    """What happens without an answer by then."""
    people: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = Field(
        default=(), max_length=50, strict=False
    )
    """Ids of the Airflow users who may answer; none for everyone with the right to answer for this DAG."""
