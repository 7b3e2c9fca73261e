"""The prepared session on a GPU, as far as a CPU can take it: `python -m bench.gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu.__main__ import fresh, misses, session
from bench.gpu.cells import CELLS, dry

ROOT = Path(__file__).parents[2]


def test_all_of_it_runs_dry_and_all_train_the_same(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "bench.gpu", "--dry", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = json.loads(file.read_text())["cells"]
    assert {cell["who"] for cell in cells} == {"ours", "loop", "trainer", "saves"}
    assert not [cell for cell in cells if "problem" in cell]
    for cell in cells:
        assert f"| {cell['name']} | {cell['who']} |" in done.stdout
        if cell["who"] == "saves":
            assert (cell["saves"], cell["bytes"] > 0) == (1, True)
            continue
        (mine,) = (one for one in cells if (one["name"], one["who"]) == (cell["name"], "ours"))
        assert cell["tokens"] == mine["tokens"] > 0
        assert cell["loss"] == pytest.approx(mine["loss"], rel=1e-2)
    assert min(cell["estimated_gb"] for cell in cells if cell["who"] == "ours") > 0


def test_what_does_not_fit_into_the_time_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = session([replace(cell, gigabytes=0) for cell in CELLS], 0.0, tmp_path / "found.json")
    assert len(found) == len(CELLS)
    assert all("left out: 0 s were left" in cell["problem"] for cell in found)
    assert capsys.readouterr().out.count("left out") == len(CELLS)
    assert len(misses(found)) == len(CELLS)
    assert json.loads((tmp_path / "found.json").read_text())["cells"] == found


def test_a_cell_that_fails_or_hangs_takes_none_of_the_others_along() -> None:
    cell = dry(CELLS[0])
    assert fresh(cell, 120)["tokens_per_second"] > 0
    assert "`flash_attention_2` needs a GPU" in fresh(replace(cell, attention="flash_attention_2"), 120)["problem"]
    assert fresh(cell, 0.1) == {"problem": "it took more than 0 s"}
    slow = {"name": "7b full", "shape": "7b", "who": "ours", "mfu": 0.41, "tokens_per_second": 90.0}
    peer = {"name": "7b full", "shape": "7b", "who": "trainer", "tokens_per_second": 100.0}
    assert misses([{**slow, "peak_gb": 70.0, "estimated_gb": 60.0}, peer]) == [
        "7b full: 0.90 times transformers' Trainer",
        "7b full: 41.0% MFU, the goal is 50%",
        "7b full: 70.0 GB, 60.0 were estimated",
    ]
