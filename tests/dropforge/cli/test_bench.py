"""`dropforge bench network` on this machine: real ranks over gloo, a real S3, and an end in the middle."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dropforge.cli.app import app
from dropforge.cli.measuring import StoppedError, stoppable
from dropforge.network_baselines import Kept, Shape, keep, read_kept
from dropforge.network_bench import COLLECTIVES, Figure, Measured, Order, sizes
from dropforge.run import ExitCode
from dropforge.store import S3Store

pytestmark = pytest.mark.dist

COMMAND = [str(Path(sys.executable).parent / "dropforge"), "bench", "network", "--backend", "local", "--recipe", "tiny"]


def environment(folder: Path, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DROPFORGE_", "MLFLOW_"))}
    return {**clean, "DROPFORGE_STATE": str(folder / "none"), "COLUMNS": "200", "TMPDIR": str(folder), **more}


def bench(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], env=environment(folder, **env), capture_output=True, text=True, timeout=280
    )


def test_a_measurement_is_held_to_the_kept_one_and_takes_its_place(s3_store: S3Store, tmp_path: Path) -> None:
    shape = Shape("", "gloo", 2, 1, 0, socket.gethostname())
    size = 1 << 20
    fast = tuple(Figure(name, bytes_, 1e-5) for name in COLLECTIVES for bytes_ in (8, size))
    keep(s3_store, shape, Measured(2, 2, "gloo", hosts=("a", "b"), figures=fast), "2026-11-25T00:00:00+00:00", Kept())
    done = bench(tmp_path, "--nodes", "2", "--seconds", "1", "--keep", "--json", DROPFORGE_BUCKET=s3_store.bucket)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["nodes"], found["transport"]) == (2, 2, "gloo")
    assert (found["slow"], found["verdict"]) == (True, "slower than expected")
    assert [one["what"] for one in found["compared"]] == [*COLLECTIVES, "latency"]
    assert "the cores were busy" in "\n".join(found["causes"])
    assert {one["collective"] for one in found["figures"]} == set(COLLECTIVES)
    for one in found["figures"]:
        assert one["alg_gb_per_second"] == pytest.approx(one["bytes"] / one["seconds"] / 1e9)
        share = 1 if one["collective"] == "all_reduce" else 0.5
        assert one["bus_gb_per_second"] == pytest.approx(share * one["alg_gb_per_second"])
    assert [one["gb_per_second"] > 0 for one in found["links"]] == [True]
    assert "running: 2 of 2 pods run" in done.stderr
    kept = read_kept(s3_store, shape).baseline
    assert kept is not None
    assert kept.before is not None
    assert kept.before.plain()["figures"] == found["figures"]
    assert f"kept as s3://{s3_store.bucket}/{shape.key}" in done.stderr
    assert not list(tmp_path.glob("dropforge-bench-*"))


def of(mark: int) -> list[int]:
    """The processes that have a mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"DROPFORGE_TEST_MARK={mark}\0".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@contextmanager
def measuring(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path, int]]:
    """A command whose ranks are at it, what it has said, and the mark of all its processes."""
    log, mark = folder / "stderr", secrets.randbelow(10**9)
    # Behind a shell's `&` it would inherit that SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*COMMAND, "--nodes", "2", "--seconds", "300"],
            env=environment(folder, DROPFORGE_TEST_MARK=str(mark)),
            stdout=subprocess.DEVNULL,
            stderr=stream,
            text=True,
        )
    signal.signal(signal.SIGINT, before)
    try:
        wait(lambda: "all_reduce 8 B" in log.read_text(), 240)
        assert len(of(mark)) > 4
        yield process, log, mark
        wait(lambda: not of(mark), 60)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_is_left_of_a_measurement_that_is_stopped(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with measuring(tmp_path) as (process, log, _):
        process.send_signal(number)
        assert process.wait(60) == code
    if code == 130:
        assert "stopped, and the job is removed" in log.read_text()
        assert not list(tmp_path.glob("dropforge-bench-*"))


def test_a_rank_that_dies_is_named_and_not_those_who_lost_it(tmp_path: Path) -> None:
    with measuring(tmp_path) as (process, log, mark):
        (rank,) = [
            pid
            for pid in of(mark)
            if b"--rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
            and b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
        ]
        os.kill(rank, signal.SIGKILL)
        assert process.wait(100) == 2
    told = " ".join(log.read_text().split())
    assert "rank 1 (worker-0) failed first" in told
    assert "rank 1 was ended by SIGKILL" in told
    assert "@network" not in told


def test_a_stop_gets_past_what_takes_errors_for_its_own_and_nohup_holds() -> None:
    def heard(number: signal.Signals) -> None:
        with stoppable(), suppress(Exception):  # as Kubernetes' client has around a plugin for tokens
            os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        heard(signal.SIGHUP)
        with pytest.raises(StoppedError) as stopped:
            heard(signal.SIGTERM)
        assert stopped.value.code == 143
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_node_waits_for_the_others_as_long_as_the_order_says() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer.network", Order(0, "gloo", sizes(1 << 20), 1, joining=1).to_json()],
        env={**os.environ, "PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == ExitCode.HARDWARE
    assert "the nodes could not meet" in done.stderr
    assert "1 of 2 nodes came" in done.stderr


def wait(met: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "env", "told"),
    [
        ((), {}, "it has one rank, and none to reach"),
        (("--nodes", "2", "--backend", "kubernetes"), {}, "Name a recipe of the cluster"),
        (("--nodes", "2", "--backend", "moon"), {}, "there is none such"),
        (("--nodes", "2", "--keep"), {}, "DROPFORGE_BUCKET is not set"),
        (
            ("--nodes", "2", "--keep"),
            {"DROPFORGE_BUCKET": "b", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
            "Could not connect",
        ),
    ],
)
def test_what_cannot_be_measured_or_kept_is_told_before_anything_starts(
    words: tuple[str, ...], env: Mapping[str, str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"AWS_MAX_ATTEMPTS": "1", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", **env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DROPFORGE_STATE", str(tmp_path / "none"))
    done = CliRunner().invoke(app, [*COMMAND[1:], *words])
    assert told in str(done.exception)
    assert "job default/" not in done.output


def test_a_measurement_that_nothing_has_room_for_says_so(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("extends: tiny\ncompute: {gpus: 1, processes_per_node: 1}\n")
    done = bench(tmp_path, "--recipe", str(recipe), "--nodes", "2", KUBEFLOW_TRAINING_GPUS="0")
    assert done.returncode == 2, done.stdout
    assert "the job asks for" in done.stderr
    assert "gpus" in done.stderr
