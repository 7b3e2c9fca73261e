"""Whole runs on all GPUs of this machine, as the cluster starts them, beside the same run on its CPU.

`make test-gpu` runs them, with the cells of exactness that this many GPUs can take. Without `DROPFORGE_RANKS_ON=cuda`
the same tests train two ranks on the CPU, which shows that they can fail.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dropforge.run import ExitCode

from .ranks import ON_GPUS, gpus
from .test_launch import ranks_of, read
from .toy import Toy

pytestmark = [pytest.mark.gpu, pytest.mark.dist]
RANKS = gpus() if ON_GPUS else 2
STEPS = {"max_steps": 6, "checkpoint_every": 2}
PARALLEL = ("ddp", "fsdp") if RANKS > 1 else ("auto",)


def whole(start: Any, uri: str, ranks: int) -> None:
    process = start(uri, ranks)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == ExitCode.DONE, output


def here(parallel: str) -> dict[str, Any]:
    return {"compute": {"processes_per_node": RANKS, "gpus": RANKS if ON_GPUS else 0, "parallel": parallel}}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_run_learns_what_it_learns_on_a_cpu(
    start: Any, toy: Toy, tmp_path: Path, parallel: str, precision: str
) -> None:
    whole(start, toy.run("reference", train=STEPS), 1)
    whole(start, toy.run("here", train={**STEPS, "precision": precision}, **here(parallel)), RANKS)
    reference, found = (json.loads(toy.files(name).get("report.json")) for name in ("reference", "here"))
    assert (found["environment"]["device"] == "cpu") is not ON_GPUS
    near = 1e-4 if precision == "fp32" else 2e-2
    assert found["eval"]["before"]["eval/loss"] == pytest.approx(reference["eval"]["before"]["eval/loss"], rel=1e-5)
    assert found["eval"]["after"]["eval/loss"] == pytest.approx(reference["eval"]["after"]["eval/loss"], rel=near)
    assert found["model"]["max_logit_difference"] < 1e-4
    for name in found["model"]["files"]:
        toy.files("here").download(f"model/{name}", tmp_path / "model" / name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float32
    assert all(weight.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(start: Any, toy: Toy, parallel: str) -> None:
    train = {**STEPS, "deterministic": True, "max_steps": 400}
    whole(start, toy.run("whole", train=train, **here(parallel)), RANKS)
    uri = toy.run("killed", train=train, **here(parallel))
    process = start(uri, RANKS)
    read(process, r"checkpoint step-2:")
    os.kill(ranks_of(process)[-1], signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode == ExitCode.HARDWARE
    whole(start, uri, RANKS)
    assert json.loads(toy.files("killed").get("report.json"))["resumed_from"] is not None
    assert weights(toy, "killed") == weights(toy, "whole")


def weights(toy: Toy, run: str) -> str:
    return hashlib.sha256(toy.files(run).get("model/model.safetensors")).hexdigest()


def test_the_driver_sees_the_gpus() -> None:
    if not ON_GPUS:
        pytest.skip("there is none to see")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(listed) >= RANKS > 0
