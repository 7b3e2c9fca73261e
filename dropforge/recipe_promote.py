"""The recipe's section `promote`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from dropforge.recipe_approval import Approval
from dropforge.section import Section

Metric = (
    Literal[
        "eval/loss",
        "eval/perplexity",
        "eval/accuracy",
        "eval/bits_per_byte",
        "eval/macro_f1",
        "gen/exact-match",
        "gen/token-f1",
        "gen/rouge-l",
        "gen/valid-json",
    ]
    | Annotated[str, Field(pattern=r"^gen/[a-z][a-z0-9_-]{0,40}$")]
)


Measured = Literal[
    "model/bytes",
    "model/parameters",
    "model/rows_per_second",
    "cost/gpu_hours",
    "cost/core_hours",
    "cost/total",
]


#: On the rows of `evaluate.holdout`.
HeldOut = Literal["holdout/loss", "holdout/perplexity", "holdout/accuracy", "holdout/bits_per_byte", "holdout/macro_f1"]


Limit = Annotated[float, Field(ge=-1e15, le=1e15)]


class Guard(Section):
    """A metric that does not decide, but has a limit that every champion must meet."""

    metric: Metric | Measured | HeldOut
    """As in `promote.metric`; of the rows of `evaluate.holdout` (`holdout/...`); the model's size and speed, which the
    evaluation measures of both models (`model/...`); or what the run has used up to the verdict (`cost/...`, which has
    limits only)."""
    at_least: Limit | None = None
    """The lowest value that passes."""
    at_most: Limit | None = None
    """The highest value that passes."""
    max_regression: float | None = Field(default=None, ge=0, lt=1)
    """How much worse than the champion's it may be, as a fraction of that; 0 for not at all."""

    @model_validator(mode="after")
    def _guards_something(self) -> Guard:
        if self.at_least is None and self.at_most is None and self.max_regression is None:
            raise ValueError("it guards nothing: give it at_least, at_most or max_regression")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"nothing is at least {self.at_least:g} and at most {self.at_most:g}")
        return self


class Slices(Section):
    """Evaluation rows cut into parts, each measured for candidate and champion; guards hold in each of them."""

    by: str = Field(default="source", min_length=1, max_length=200)
    """`source` (what the row says, else its file), `label`, or a column that `data.keep_columns` keeps."""
    top: int = Field(default=10, ge=1, le=50)
    """The slices with the most rows; all others together are one more."""
    min_rows: int = Field(default=20, ge=1, le=1_000_000_000)
    """A slice of fewer rows is not measured; the verdict lists it."""
    guards: tuple[Guard, ...] = Field(default=(), max_length=5, strict=False)
    """Limits that hold in each slice that is measured."""


class Stale(Section):
    """A champion of some age is easier to replace: its data are old, whatever it scores."""

    after_days: float = Field(gt=0, le=3650)
    """Days since the champion's version was registered."""
    min_improvement: float = Field(ge=-1, lt=1)
    """Needed gain then, instead of `promote.min_improvement`; negative tolerates a regression."""


class Promote(Section):
    """When the candidate becomes champion."""

    alias: str = Field(default="champion", pattern="^[a-z][a-z0-9_-]{0,62}$")
    """Alias in MLflow's model registry. `latest` and names as `v1` are MLflow's own."""
    metric: Metric = "eval/loss"
    """Deciding metric. Instead of one that counts tokens, bits per byte decide between language models of
    different tokenizers. `eval/macro_f1` is for `task: classification`, which has neither perplexity nor bits per byte
    nor `gen/...`."""
    min_improvement: float = Field(default=0.0, ge=-1, lt=1)
    """Needed gain over the champion, as a fraction; negative tolerates a regression."""
    confidence: float | None = Field(default=None, ge=0.5, le=0.999)
    """How sure the gain over the champion must be, as 0.95: then its complete interval must be above
    `min_improvement`. The interval is that of a paired bootstrap over the evaluation rows."""
    better_than_base: bool = True
    """The candidate must also beat the model it started from."""
    guards: tuple[Guard, ...] = Field(default=(), max_length=20, strict=False)
    """Limits of other metrics, all of which must hold."""
    slices: tuple[Slices, ...] = Field(default=(), max_length=3, strict=False)
    """Parts of the evaluation rows that are measured separately."""
    stale: Stale | None = None
    """What is enough against an old champion; without it its age does not count."""
    input_example: bool = True
    """The input of one evaluation row is kept in the model's folder, and shown in MLflow, as an example of an input. It
    is masked as all rows are (`curation.pii`)."""
    approval: Approval | None = None
    """A user must approve before the alias moves; without this section the rule alone decides."""

    @field_validator("alias")
    @classmethod
    def _is_free(cls, alias: str) -> str:
        """Refuse what MLflow would, once all is trained: `latest` is whatever was registered last."""
        if re.fullmatch(r"latest|v\d+", alias):
            raise ValueError("`latest` and names as `v1` are MLflow's own: take another")
        return alias
