"""The stages of a run, which are the tasks of the fine-tune DAG, in their order."""

from __future__ import annotations

from typing import Final

STAGES: Final = (
    "plan",
    "curate",
    "check_data",
    "open_run",
    "confirm",
    "tokenise",
    "train",
    "champion",
    "evaluate",
    "decide",
    "approve",
    "register",
    "report",
    "close_run",
)
#: XCom of `open_run` where nothing is left to do: the run that has done it (`dropforge.tracking.Finished`).
NOTHING_NEW: Final = "nothing_new"
#: Those that are jobs of the run's own.
JOBS: Final = ("tokenise", "train", "evaluate")
