"""Which evaluation was the best, and whether training has stopped getting better.

Both are pure functions of the recorded evaluations, which are the same on every rank and travel in the checkpoint: all
ranks decide alike, and a resumed run as the uninterrupted one. What was measured before training does not count.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from safetensors.torch import load, save

from dropforge.errors import DropforgeError
from dropforge.store import Store
from trainer.config import EarlyStopping

Evaluations = Sequence[Mapping[str, Any]]  # each with its `step` and `eval/loss`, in order
_FOLDER: Final = "best/"


def best_step(evaluations: Evaluations) -> int | None:
    """The step of the lowest evaluation loss, the first of equal ones; None without a finite one."""
    found = [item for item in evaluations if item["step"] and math.isfinite(item["eval/loss"])]
    return min(found, key=lambda item: float(item["eval/loss"]))["step"] if found else None


def stalled(evaluations: Evaluations, rule: EarlyStopping | None) -> bool:
    """Whether the last `patience` evaluations all missed the best before them by less than `min_delta` nats."""
    lowest, row = math.inf, 0
    for item in evaluations:
        if item["step"]:
            better = item["eval/loss"] < lowest - (rule.min_delta if rule and lowest < math.inf else 0.0)
            lowest, row = (item["eval/loss"], 0) if better else (lowest, row + 1)
    return rule is not None and row >= rule.patience


class BestWeights:
    """The trainable weights of the best evaluation, in the run's folder: `best/step-N-DIGEST.safetensors`.

    Those that a checkpoint takes for the best are never deleted while it is kept, so a run that is resumed finds them.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def keep(self, step: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Write the weights of a step."""
        data = save({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
        self.store.put(f"{_FOLDER}step-{step}-{hashlib.sha256(data).hexdigest()}.safetensors", data)

    def read(self, step: int) -> dict[str, torch.Tensor]:
        """The weights of a step. :raises DropforgeError: if they are gone or broken."""
        for item in self.store.list(f"{_FOLDER}step-{step}-"):
            data = self.store.get(item.key)
            if item.key == f"{_FOLDER}step-{step}-{hashlib.sha256(data).hexdigest()}.safetensors":
                return dict(load(data))
        raise DropforgeError(
            f"best weights {self.store.uri}/{_FOLDER}step-{step}",
            "they are gone, or their bytes are not those that were written",
            "Start a new run, or one with `train.export: last`",
        )

    def prune(self, steps: Iterable[int | None]) -> None:
        """Delete all but those of some steps."""
        kept = tuple(f"{_FOLDER}step-{step}-" for step in steps)
        for item in list(self.store.list(_FOLDER)):
            if not item.key.startswith(kept):
                self.store.delete(item.key)
