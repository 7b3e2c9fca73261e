"""What each evaluation row adds to a model's figures, so that two models can be compared row by row.

A column is (N,) float64 over the rows of the comparison, NaN where the model did not read the row:

===============  ==================================================================================
`nats`           sum of the losses of the row's targets; over `targets` it is `eval/loss`
`targets`        its target tokens; 1 of a classifier's row
`right`          targets that are the most likely; over `targets` it is `eval/accuracy`
`bytes`          of text that the targets stand for; bits over them are `eval/bits_per_byte`
`label, given`   numbers of the label that the row has, and was given (`eval/macro_f1`)
`gen/NAME`       score of the row's answer, whose mean over the rows that were asked is the metric
===============  ==================================================================================

Metrics of `dropforge.evaluation_metrics` are functions of all rows together, and have no column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.bootstrap import Figure, MacroF1, Ratio
from trainer.data.prompts import prompted
from trainer.data.rows import Row
from trainer.data.tokens import Tokens
from trainer.measure import EachDocument
from trainer.scores import PREFIX

if TYPE_CHECKING:
    from trainer.generate import Answers

Columns: TypeAlias = Mapping[str, NDArray[np.float64]]

NAME = "evaluation-rows.json"  # in the run's folder


def measured_columns(tokens: Tokens, each: EachDocument, rows: int) -> dict[str, NDArray[np.float64]]:
    """Columns of what was evaluated. :param rows: how many there are, also those that gave no document."""
    read = np.bincount(tokens.rows, minlength=rows) > 0

    def summed(values: NDArray[Any]) -> NDArray[np.float64]:
        return np.where(read, np.bincount(tokens.rows, values, rows), math.nan)

    found = {"nats": summed(each.nats), "targets": summed(tokens.targets), "right": summed(each.right)}
    if tokens.labels is not None:  # of which each row has one document
        return {**found, "label": summed(tokens.labels), "given": summed(each.given)}
    return found if tokens.spelled is None else {**found, "bytes": summed(tokens.spelled)}


def read_bytes(tokens: Tokens) -> dict[int, int]:
    """The UTF-8 bytes that the targets of each row stand for, by the row's place; 0 of a classifier's."""
    places = dict.fromkeys(tokens.rows.tolist(), 0)
    if tokens.labels is not None or tokens.spelled is None:
        return places
    sizes = np.bincount(tokens.rows, tokens.spelled)
    return {place: int(sizes[place]) for place in places}


def answered_columns(answers: Answers, rows: Sequence[Row]) -> dict[str, NDArray[np.float64]]:
    """Columns of the scores of generated answers. :param rows: those of the comparison, whose first ones were asked."""
    asked = [place for place, row in enumerate(rows) if prompted(row) is not None][: len(answers.prompts)]
    found = {}
    for name in answers.names:
        column = np.full(len(rows), math.nan)
        column[asked] = [scores[name] for scores in answers.scores]
        found[PREFIX + name] = column
    return found


def placed(columns: Columns, places: Sequence[int], rows: int) -> dict[str, NDArray[np.float64]]:
    """Columns over some of the rows as columns over all of them. :param places: (K,) where they stand."""
    found = {name: np.full(rows, math.nan) for name in columns}
    for name, column in columns.items():
        found[name][list(places)] = column
    return found


def figure(columns: Columns, metric: str) -> Figure | None:
    """A metric as a function of how often each row counts; None where the columns do not tell it.

    :param metric: its name in MLflow, as `eval/loss`.
    """
    if metric == "eval/macro_f1":
        if "label" not in columns:
            return None
        there, given = (np.nan_to_num(columns[name], nan=-1).astype(np.int64) for name in ("label", "given"))
        return MacroF1(there, given)
    above, below = {
        "eval/loss": ("nats", "targets"),
        "eval/perplexity": ("nats", "targets"),
        "eval/accuracy": ("right", "targets"),
        "eval/bits_per_byte": ("nats", "bytes"),
    }.get(metric, (metric, metric))
    if above not in columns or below not in columns:
        return None
    upper = np.nan_to_num(columns[above])
    if metric.startswith(PREFIX):
        return Ratio(upper, (~np.isnan(columns[below])).astype(np.float64))
    upper = upper / math.log(2) if metric == "eval/bits_per_byte" else upper
    return Ratio(upper, np.nan_to_num(columns[below]), exponential=metric == "eval/perplexity")


def plain(rows: Sequence[Row], models: Mapping[str, Columns]) -> dict[str, Any]:
    """JSON values: the rows' content keys, and of each model its columns, null where a row was not read."""
    return {"rows": [row.key.hex() for row in rows], **{name: _listed(found) for name, found in models.items()}}


def _listed(columns: Columns) -> dict[str, list[float | None]]:
    return {
        name: [None if math.isnan(value) else value for value in column.tolist()] for name, column in columns.items()
    }
