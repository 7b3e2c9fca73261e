"""Faults that a test asks for: tasks are killed, or cut off from S3 and MLflow, wherever they have changed something.

What strikes is the cluster policy in `policy.py`; product code knows nothing of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, TypedDict

from tests import local_settings

Way = Literal["kill", "refuse", "hang"]
END = "end"  # the task's work was done, and its result not stored yet


class Strike(TypedDict):
    """One execution that was struck. :param where: after which request; `END` after all of them."""

    how: Way
    where: str


def install(folder: Path) -> None:
    """Give a stack that has not started the policy."""
    (folder / "faults").mkdir(parents=True, exist_ok=True)
    local_settings.install(folder / "airflow", Path(__file__).with_name("policy.py"))


def arm(folder: Path, match: str, stage: str, *ways: Way, at_most: int = 30) -> None:
    """Strike a task: each execution after one change more than the one before, in these ways in turn; last at its end.

    :param match: text in the name, the drop or the form of the run.
    :param stage: the task, or `TASK.resumed` for what it does after it has waited.
    """
    made = folder / "faults" / f"{match}@{stage}.tmp"
    made.write_text(json.dumps({"match": match, "ways": ways, "at_most": at_most, "strikes": []}))
    made.replace(made.with_suffix(".json"))


def strikes(folder: Path, match: str, stage: str) -> list[Strike]:
    """What has struck so far."""
    found: list[Strike] = json.loads((folder / "faults" / f"{match}@{stage}.json").read_text())["strikes"]
    return found
