"""The figures of candidate and champion on slices of the evaluation rows, from what each row adds to the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from dropforge.slices import OWN, Cut, Slice, cut, kept_value
from trainer.data.rows import Row
from trainer.row_sums import Columns, figure
from trainer.scores import PREFIX

_METRICS: Final = ("eval/loss", "eval/perplexity", "eval/accuracy", "eval/bits_per_byte", "eval/macro_f1")
#: Those of one model in `evaluation.json`; a classifier's loss is of rows, and has no perplexity.
_LABELS: Final = ("eval/loss", "eval/accuracy", "eval/macro_f1")


def sliced(cuts: Sequence[Cut], rows: Sequence[Row], models: Mapping[str, Columns]) -> list[dict[str, Any]]:
    """JSON values: of each slice `by`, `name`, `rows`, and of each model its figures.

    A slice of fewer rows than its cut asks for has `too_few` in their place; a metric that fewer were measured by is
    left out.

    :param models: see `trainer.row_sums.plain`.
    """
    return [_measured(one, part, models) for part in cuts for one in cut(part, [_value(row, part.by) for row in rows])]


def _value(row: Row, by: str) -> str | None:
    if by in OWN:
        return (row.source if by == "source" else row.label) or None
    return kept_value(row.extras, by)


def _measured(one: Slice, part: Cut, models: Mapping[str, Columns]) -> dict[str, Any]:
    told = {"by": one.by, "name": one.name, "rows": len(one.places)}
    if len(one.places) < part.min_rows:
        return {**told, "too_few": part.min_rows}
    return {**told, **{side: _figures(columns, one.places, part.min_rows) for side, columns in models.items()}}


def _figures(columns: Columns, places: Sequence[int], least: int) -> dict[str, float]:
    known = _LABELS if "label" in columns else _METRICS
    answers = [name for name in columns if name.startswith(PREFIX)]
    taken, found = np.array(places, dtype=np.int64), {}
    for metric in (*known, *answers):
        whole = figure(columns, metric)
        if whole is None:
            continue
        part = whole.take(taken)
        if int(part.measured().sum()) < least:
            continue
        value = float(part.values(np.ones((1, len(taken))))[0])
        if math.isfinite(value):
            found[metric] = value
    return found
