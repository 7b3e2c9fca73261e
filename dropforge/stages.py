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
#: Looks at how a run ended, beside `close_run`; it is no stage of it.
WATCHER: Final = "watcher"
#: The tasks that fail because another one has.
TEARDOWNS: Final = frozenset({"close_run", WATCHER})
#: XCom of `plan` or `open_run` where nothing is left to do: the run that has done it (`dropforge.tracking.Finished`).
NOTHING_NEW: Final = "nothing_new"
#: Those that are jobs of the run's own.
JOBS: Final = ("tokenise", "train", "evaluate")
