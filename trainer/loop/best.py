"""Which evaluation was the best, and whether training has stopped getting better.

Both are pure functions of the recorded evaluations, which are the same on every rank and travel in the checkpoint: all
ranks decide alike, and a resumed run as the uninterrupted one. What was measured before training does not count.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

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
    if rule is None:
        return False
    lowest, row = math.inf, 0
    for item in evaluations:
        if item["step"]:
            better = item["eval/loss"] < lowest - (rule.min_delta if lowest < math.inf else 0.0)
            lowest, row = (item["eval/loss"], 0) if better else (lowest, row + 1)
    return row >= rule.patience


class BestWeights:
    """The trainable weights of the best evaluation, in the run's folder: `best/step-N-DIGEST.safetensors`.

    Those that a checkpoint takes for the best are never deleted while it is kept, so a run that is resumed finds them.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def keep(self, step: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Write the weights of a step, by way of a local file: one request takes no more than 5 GB."""
        with tempfile.TemporaryDirectory(prefix="dropforge-best-") as folder:
            path = Path(folder) / "weights"
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path)
            self.store.upload(path, _key(step, path))

    def read(self, step: int) -> dict[str, torch.Tensor]:
        """The weights of a step, mapped from a file that is gone with them: they take no memory of their own.

        :raises DropforgeError: if they are gone or broken.
        """
        for key in self.store.sizes(f"{_FOLDER}step-{step}-"):
            with tempfile.TemporaryDirectory(prefix="dropforge-best-") as folder:
                path = Path(folder) / "weights"
                self.store.download(key, path)
                if key == _key(step, path):
                    return dict(load_file(path))
        raise DropforgeError(
            f"best weights {self.store.uri}/{_FOLDER}step-{step}",
            "they are gone, or their bytes are not those that were written",
            "Start a new run, or one with `train.export: last`",
        )

    def prune(self, steps: Iterable[int | None]) -> None:
        """Delete all but those of some steps."""
        kept = tuple(f"{_FOLDER}step-{step}-" for step in steps)
        for key in self.store.sizes(_FOLDER):
            if not key.startswith(kept):
                self.store.delete(key)


def _key(step: int, path: Path) -> str:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return f"{_FOLDER}step-{step}-{digest}.safetensors"
