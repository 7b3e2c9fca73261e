"""Tags of Dropforge's that a training may write. All others are orders to Airflow, or what it has decided.

`dropforge.ask` has a model registered, and `dropforge.run` says whose an MLflow run is: code of a recipe, which has a
training's login and its folder, sets neither.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "dropforge."
_ATTEMPT: Final = ("attempt", "date", "idle", "profile", "resumed_from", "steps", "user_code")
_SAVED: Final = ("best_checkpoint", "checkpoint_error", "checkpoints", "last_checkpoint")
_OF_RUNS: Final = frozenset([*_ATTEMPT, *_SAVED])
_OF_CHECKPOINTS: Final = frozenset(["best", "bytes", "deleted", "digest", "last", "run", "step", "tokens", "uri"])


def may_set(key: str, *, checkpoint: bool = False) -> bool:
    """Whether a training may set or remove a tag. :param checkpoint: of a logged model, not of a run."""
    if not key.strip().casefold().startswith(PREFIX):
        return True
    return key.removeprefix(PREFIX) in (_OF_CHECKPOINTS if checkpoint else _OF_RUNS)
