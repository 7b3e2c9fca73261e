"""Candidate and champion are measured by several ranks, whole on each or in shards, with the figures of one rank."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dropforge.run import ExitCode
from dropforge.store import open_store
from trainer.evaluate import evaluate
from trainer.gang import Gang
from trainer.model.fit import Meter
from trainer.model.shard import Sharded
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .ranks import Ranks
from .ranks_loop import make_base
from .test_whole import train
from .toy import REPOSITORY, Toy, sample_rows, write_dataset

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
ASKED = {"rows": 10, "max_new_tokens": 6, "metrics": ["token-f1"], "batch": 3}


def measured(gang: Gang, uri: str) -> tuple[bool, list[tuple[int, int]]]:
    """Whether this rank has the result, and of each model that was shared the bytes of the whole and of this rank."""
    shares: list[tuple[int, int]] = []
    before = Sharded.prove

    def prove(self: Sharded, *arguments: Any) -> None:
        before(self, *arguments)
        shares.append((self.bytes, self.local_bytes()))

    Sharded.prove = prove  # type: ignore[method-assign]
    try:
        return bool(evaluate(uri, StopSignal(), Console(quiet=gang.rank != 0), gang)), shares
    finally:
        Sharded.prove = before  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    root = str(tmp_path_factory.mktemp("ranks") / "bucket")
    return Toy(root, write_dataset(open_store(root), {"train": sample_rows(60), "eval": sample_rows(31, seed=1)}))


@pytest.fixture(scope="module")
def models(toy: Toy) -> tuple[str, str]:
    """Candidate and champion: two trainings of different length."""
    for name, steps in (("better", 60), ("worse", 3)):
        train(toy.run(name, train={"max_steps": steps}))
    return f"{toy.files('better').uri}/model", f"{toy.files('worse').uri}/model"


def order(
    toy: Toy, name: str, models: tuple[str, str], evaluate: dict[str, Any] | None = None, **overrides: Any
) -> str:
    uri = toy.run(name, evaluate={"max_rows": 100, "generation": ASKED, **(evaluate or {})}, **overrides)
    files, (candidate, champion) = toy.files(name), models
    told = {"run": uri, "candidate": candidate, "champion": {"version": "1", "model": champion}}
    files.put("evaluate.json", json.dumps(told).encode())
    return f"{files.uri}/evaluate.json"


def result(toy: Toy, name: str) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """The result, what each row adds, and all answers."""
    files = toy.files(name)
    answers = [json.loads(files.get(f"answers/{side}.json"))["data"] for side in ("candidate", "champion")]
    return json.loads(files.get("evaluation.json")), json.loads(files.get("evaluation-rows.json")), answers


@pytest.mark.dist
@pytest.mark.parametrize(
    ("parallel", "nodes", "precision"), [("auto", 1, "fp32"), ("fsdp", 1, "fp32"), ("hybrid", 2, "bf16")]
)
def test_ranks_find_what_one_rank_finds(
    ranks: Ranks, toy: Toy, models: tuple[str, str], parallel: str, nodes: int, precision: str
) -> None:
    compute = {"parallel": parallel, "nodes": nodes, "processes_per_node": 2}
    precise = {"precision": precision}
    measured(Gang(), order(toy, f"alone-{parallel}", models, evaluate=precise))
    one, each, answers = result(toy, f"alone-{parallel}")
    found = ranks(measured, 2, order(toy, f"together-{parallel}", models, compute=compute, evaluate=precise))
    many, rows, said = result(toy, f"together-{parallel}")
    assert [has for has, _ in found] == [True, False]
    for _, shares in found:
        assert len(shares) == (0 if parallel == "auto" else 2)
        assert all(part < 0.6 * whole for whole, part in shares)
    exact = precision == "fp32"
    assert many["precision"] == one["precision"] == precision
    assert said == answers or not exact
    assert many["rows"] == one["rows"] == 31
    for side in ("candidate", "champion"):
        assert many[side].keys() == one[side].keys()
        for name in one[side].keys() - {"precision", "model/rows_per_second"}:
            assert many[side][name] == pytest.approx(one[side][name], rel=1e-5 if exact else 0.2), name
        for name, column in each[side].items():
            if exact:
                np.testing.assert_allclose(np.array(rows[side][name], float), np.array(column, float), 1e-4, 1e-5)
    assert many["candidate"]["eval/loss"] < many["champion"]["eval/loss"]


@pytest.mark.dist
def test_a_champion_for_another_task_has_a_problem_and_ends_no_rank(
    ranks: Ranks, toy: Toy, models: tuple[str, str], tmp_path: Path
) -> None:
    other = shutil.copytree(models[1], tmp_path / "classifier")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForSequenceClassification"]}))
    compute = {"parallel": "fsdp", "processes_per_node": 2}
    found = ranks(measured, 2, order(toy, "other-task", (models[0], str(other)), compute=compute))
    assert [has for has, _ in found] == [True, False]
    told = json.loads(toy.files("other-task").get("evaluation.json"))
    assert "it is a classifier" in told["champion"]["problem"]
    assert told["candidate"]["eval/loss"] > 0


def most(gang: Gang, small: str, uri: str) -> tuple[int, int]:
    """The most memory of a rank above what it had before, and bytes of the whole model.

    :param small: is measured first, which imports and allocates what has nothing to do with the model's size.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)  # what is freed goes back at once
    measured(gang, small)
    meter = Meter(gang.device)
    before = meter.held()
    meter.begin()
    _, shares = measured(gang, uri)
    return meter.peak() - before, max((whole for whole, _ in shares), default=0)


@pytest.mark.dist
@pytest.mark.exact
def test_no_rank_holds_a_whole_model_that_is_measured(
    ranks: Ranks, toy: Toy, models: tuple[str, str], tmp_path: Path
) -> None:
    large = make_base(tmp_path / "large", hidden_size=512, intermediate_size=1408, num_hidden_layers=12)
    compute = {"parallel": "fsdp", "processes_per_node": 4}
    few: dict[str, Any] = {"generation": None, "max_rows": 8}
    small = order(toy, "small", models, few, compute=compute)
    for peak, size in ranks(most, 4, small, order(toy, "large", (large, large), few, compute=compute), limit=240.0):
        assert size > 140e6
        assert peak < 0.9 * size
    small = order(toy, "small-whole", models, few)
    [(peak, _)] = ranks(most, 1, small, order(toy, "large-whole", (large, large), few), limit=240.0)
    assert peak > size


def start(uri: str, folder: Path, **env: str) -> subprocess.Popen[str]:
    told = {"PET_NPROC_PER_NODE": "2", "TERMINATION_LOG": str(folder / "word"), **env}
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.evaluate", uri], cwd=REPOSITORY, env=os.environ | told, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_the_jobs_command_starts_its_ranks_and_tells_how_they_ended(
    toy: Toy, models: tuple[str, str], tmp_path: Path
) -> None:
    compute = {"parallel": "fsdp", "processes_per_node": 2}
    with start(order(toy, "job", models, compute=compute), tmp_path) as job:
        said = job.communicate(timeout=240)[0]
    assert job.returncode == 0, said
    assert "[rank 0] candidate: eval/loss" in said
    assert "[rank 1] candidate" not in said
    assert json.loads((tmp_path / "word").read_text())["exit_code"] == 0
    assert result(toy, "job")[0]["champion"]["eval/loss"] > 0
    broken = order(toy, "broken", (str(tmp_path / "none"), models[1]), compute=compute)
    with start(broken, tmp_path) as job:
        said = job.communicate(timeout=240)[0]
    assert job.returncode == ExitCode.BAD_RECIPE, said
    assert "has no config.json" in json.loads((tmp_path / "word").read_text())["message"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, ExitCode.PREEMPTED), (signal.SIGKILL, ExitCode.HARDWARE)]
)
def test_a_signal_ends_all_ranks_and_leaves_no_result(
    toy: Toy, models: tuple[str, str], tmp_path: Path, number: int, code: ExitCode
) -> None:
    """SIGTERM goes to the launcher, as from Kubernetes; SIGKILL to one of its ranks."""
    name = f"signal-{number}"
    uri = order(toy, name, models, compute={"parallel": "fsdp", "processes_per_node": 2})
    with start(uri, tmp_path) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if "measuring the candidate: 1 of" in line:
                break
        children = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        ranks = [pid for pid in children if b"trainer.evaluate" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(ranks) == 2
        os.kill(job.pid if number == signal.SIGTERM else ranks[1], number)
        job.communicate(timeout=240)
    assert job.returncode == code
    assert json.loads((tmp_path / "word").read_text())["exit_code"] == code
    assert toy.files(name).stat("evaluation.json") is None
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
