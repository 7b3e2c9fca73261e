"""A real training of two ranks, told by a real MLflow, as exporter and verdict see it: the names fit together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from dropforge import tracking
from dropforge.rest import Rest
from dropforge.run import Tracking
from dropforge.store import open_store
from dropforge.watching.exporter import Exporter, Watch
from dropforge.watching.figures import read_figures, verdict_of
from dropforge.watching.runs import Runs
from tests.dropforge.watching.conftest import scraped, series, value
from tests.trainer.toy import REPOSITORY, Toy, sample_rows, write_dataset

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def test_a_training_is_seen_while_it_goes_on_and_judged_when_it_is_done(mlflow_server: str, tmp_path: Path) -> None:
    family = f"fam-{uuid.uuid4().hex[:8]}"
    client = tracking.client(mlflow_server)
    tags = {tracking.TAG_RUN: f"{family}-1", tracking.TAG_FAMILY: family}
    run = client.create_run(client.create_experiment(family), tags=tags)
    told = Tracking(mlflow_server, run.info.run_id, run.info.experiment_id)
    root = str(tmp_path / "bucket")
    rows = {"train": sample_rows(160), "eval": sample_rows(23, seed=1)}
    toy = Toy(root, write_dataset(open_store(root), rows))
    train = {"max_steps": 240, "log_every": 1, "checkpoint_every": 10, "eval_every": 10}
    uri = toy.run(f"{family}-1", told, train=train)
    exporter = Exporter(Watch(toy.store, Runs(Rest(mlflow_server))), 1)
    env = {key: text for key, text in os.environ.items() if not key.startswith(("AWS_", "PET_"))}
    env |= {"PET_NPROC_PER_NODE": "2", "TERMINATION_LOG": str(tmp_path / "termination.json")}
    command = [sys.executable, "-m", "trainer.launch", uri]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, cwd=REPOSITORY, stdout=log, stderr=log)
    try:
        names = ("tokens_per_second", "loss", "eval_loss", "grad_norm", "progress_ratio", "step_seconds")
        names += ("data_wait_ratio", "gradient_wait_ratio", "rank_spread_ratio", "attempts")
        names += ("last_step_timestamp_seconds", "checkpoint_timestamp_seconds", "gpus")
        missing, found = set(names), {}
        while missing:
            assert process.poll() is None, (missing, (tmp_path / "log").read_text()[-3000:])
            found = series(scraped(exporter))
            missing = {name for name in names if value(found, f"training_{name}", family=family) is None}
            time.sleep(0.05)
        assert value(found, "runs", family=family, state="training", task="", reason="") == 1
        progress = value(found, "training_progress_ratio", family=family)
        assert progress is not None
        assert 0 < progress < 1
        assert process.wait(200) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    found = series(scraped(exporter))
    assert value(found, "runs", family=family, state="judging", task="", reason="") == 1
    assert value(found, "training_loss", family=family) is None
    figures = read_figures(Rest(mlflow_server), run.info.run_id)
    assert {name for name, points in vars(figures).items() if not points} <= {"slowed"}
    assert len(figures.seconds) == 240
    verdict = verdict_of(mlflow_server, run.info.run_id)
    assert verdict is not None
    assert verdict.health != "unknown"
    assert {"data", "communication", "slower"} <= set(verdict.shares)
