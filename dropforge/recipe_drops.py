"""The recipe's section `drops`: what the recipe of a drop may ask for, set by presets and families."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from dropforge.section import Section

#: Amounts, which a drop may lower.
Length = Literal[
    "data.limit_bytes",
    "data.limit_rows",
    "data.max_row_bytes",
    "train.epochs",
    "train.max_rows",
    "train.max_steps",
    "train.sequence_length",
]
#: Which a drop may change by a factor of ten.
Rate = Literal["train.learning_rate"]
Bound = Annotated[float, Field(ge=0, le=1e15)]


class Drops(Section):
    """What the recipe of a drop may set, besides describing its rows."""

    bounds: dict[Length | Rate, Annotated[tuple[Bound, Bound], Field(strict=False)]] = Field(default={}, max_length=20)
    """Lowest and highest value that a drop may give to a number, for example `{train.learning_rate: [1.0e-5, 1.0e-3]}`.
    Without bounds a length is at most the family's own, and a rate within a factor of ten of it."""

    @field_validator("bounds")
    @classmethod
    def _in_order(cls, bounds: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for key, (low, high) in bounds.items():
            if low > high:
                raise ValueError(f"the bounds of `{key}` are the wrong way round: {low:g} is above {high:g}")
        return bounds
