"""Generated answers as tables: JSON files in the run's folder, and what MLflow's page of a run shows as its tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

TAG: Final = "mlflow.loggedArtifacts"  # where mlflow.log_table notes what it has written
_FOLDER: Final = "answers/"
_TAG_LIMIT: Final = 5000  # characters of a tag's value that MLflow keeps


def name_of(step: int | str) -> str:
    """Where a table lies, in the run's folder and among its artifacts. :param step: of the weights, or their name."""
    return f"{_FOLDER}{f'step-{step}' if isinstance(step, int) else step}.json"


def table_json(table: Mapping[str, Any]) -> bytes:
    """A table of `columns` and `data` as mlflow.log_table writes it."""
    return json.dumps(table, ensure_ascii=False, indent=1).encode()


def tables_tag(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """The tables of all evaluations with answers as the value of MLflow's tag; the newest, if there are too many."""
    steps = [int(item["step"]) for item in evaluations if "asked_rows" in item]
    while len(text := json.dumps([{"path": name_of(step), "type": "table"} for step in steps])) > _TAG_LIMIT:
        steps = steps[1:]
    return text
