"""`trainer.launch` with two ranks as a contender."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dropforge.run import ExitCode, Tracking
from dropforge.store import open_store
from tests.trainer.toy import Toy, sample_rows, write_dataset

from . import faults
from .driver import REPOSITORY, digests
from .hooks import HOOKS
from .scenarios import EVERY, Damage

_RUN: Final = "faults"
_ROWS: Final = {"train": sample_rows(160), "eval": sample_rows(23, seed=1)}
# What nobody tries again: the DAG's rule, see `kubeflow_training.retries`.
_FINAL: Final = (ExitCode.BAD_RECIPE, ExitCode.BAD_DATA, ExitCode.DIVERGED)
_HOOK: Final = "import sys\nfrom tests.trainer.faults.hooks import HOOKS\nHOOKS[__name__](sys.modules[__name__])\n"


class Ours:
    """Three epochs of 160 rows, packed; a checkpoint and an evaluation every ten steps."""

    steps = 50
    bound = 180.0
    grace = 30.0
    impatient: Mapping[str, str] = {"DROPFORGE_HANG_SECONDS": "8"}  # seconds of a step; 120 unless told
    skips = True
    tells_away = r"MLflow is away"
    tells_full = r"could not be written"

    def make(self, case: Path, mlflow: str) -> Path:
        root = case / "bucket"
        toy = Toy(str(root), write_dataset(open_store(str(root)), _ROWS))
        train: dict[str, Any] = {"max_steps": None, "epochs": 3, "checkpoint_every": EVERY, "eval_every": EVERY}
        toy.run(_RUN, Tracking(mlflow, "r1", "1") if mlflow else None, train=train)
        return self._folder(case)

    def command(self, case: Path) -> list[str]:
        return [sys.executable, "-m", "trainer.launch", str(self._folder(case) / "run.json")]

    def env(self, case: Path, mlflow: str) -> Mapping[str, str]:
        del mlflow  # run.json has it
        place = faults(case, dict.fromkeys(HOOKS, _HOOK))["PYTHONPATH"]
        return {
            "PYTHONPATH": os.pathsep.join([place, str(REPOSITORY)]),
            "PET_NPROC_PER_NODE": "2",
            "OMP_NUM_THREADS": "1",
            "POD_NAME": "pod",
            "TERMINATION_LOG": str(case / "termination.json"),
        }

    def retried(self, code: int) -> bool:
        return code != 0 and code not in _FINAL

    def done(self, case: Path) -> bool:
        return (self._folder(case) / "report.json").exists()

    def complete(self, case: Path, step: int) -> bool:
        return (self._folder(case) / "checkpoints" / f"step-{step}" / "manifest.json").exists()

    def newest(self, case: Path) -> Path:
        return max((self._folder(case) / "checkpoints").iterdir(), key=lambda path: int(path.name.partition("-")[2]))

    def file(self, damage: Damage) -> str:
        return {
            "weights": "rank-0.safetensors",
            "state": "rank-1.safetensors",
            "progress": "progress.json",
            "seal": "manifest.json",
        }[damage.role]

    def model(self, case: Path) -> Path:
        return self._folder(case) / "model" / "model.safetensors"

    def weights(self, case: Path) -> dict[str, str]:
        """The model, and weights, moments and random state of the last checkpoint."""
        folder = self._folder(case)
        last = folder / "checkpoints" / f"step-{self.steps}"
        names = {f"rank {rank} at the end": last / f"rank-{rank}.safetensors" for rank in range(2)}
        return digests({"model": self.model(case), **names})

    def _folder(self, case: Path) -> Path:
        return case / "bucket" / "runs" / _RUN
