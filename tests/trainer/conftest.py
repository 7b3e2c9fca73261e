"""Fixtures: a small dataset, and processes started as the local cluster starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dropforge.store import open_store

from .ranks import Ranks
from .toy import REPOSITORY, Toy, sample_rows, write_dataset


@pytest.fixture(scope="session")
def toy_rows() -> dict[str, list[dict[str, Any]]]:
    return {"train": sample_rows(160), "eval": sample_rows(23, seed=1)}


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Runs functions of a module on several ranks, about a second each."""
    return Ranks(tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def toy(tmp_path: Path, toy_rows: dict[str, list[dict[str, Any]]]) -> Toy:
    root = str(tmp_path / "bucket")
    return Toy(root, write_dataset(open_store(root), toy_rows))


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Start `python -m trainer.launch` as the local cluster does; what still runs at the end is killed."""
    running: list[subprocess.Popen[str]] = []

    def begin(uri: str, ranks: int = 1, **env: str) -> subprocess.Popen[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "AWS_", "PET_"))}
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.launch", uri],
            env={
                **clean,
                "PET_NPROC_PER_NODE": str(ranks),
                "TERMINATION_LOG": str(tmp_path / "termination.json"),
                "PYTHONUNBUFFERED": "1",
                **env,
            },
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait(20)
