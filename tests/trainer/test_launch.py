"""Whole runs as the local cluster starts them: kills, stops, resumes, exit codes, termination messages."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dropforge.placement.fabrics import PREFLIGHT, Preflight
from dropforge.run import ExitCode
from trainer import launch
from trainer.launch import Ended, Verdict, judge
from trainer.node.agent import Rendezvous
from trainer.rank import run
from trainer.report.console import Console
from trainer.state.checkpoint import Checkpoints
from trainer.state.stop import PreemptedError, StopSignal

from .toy import REPOSITORY, Toy

POD = "train-toy-master-0"
ONE = {"OMP_NUM_THREADS": "1", "POD_NAME": POD}
SLOW = {"max_steps": 4000, "checkpoint_every": 5}  # until it is stopped


@pytest.mark.parametrize(
    ("ends", "stopped", "code", "rank"),
    [
        ([], False, 0, None),
        ([], True, 0, None),
        ([Ended(0, 21), Ended(1, -9)], False, 21, 1),
        ([Ended(0, -15), Ended(1, -9)], False, 21, 1),
        ([Ended(0, 20, "x"), Ended(1, -11)], False, 21, 1),
        ([Ended(0, 21), Ended(1, 11, "shard")], False, 11, 1),
        ([Ended(0, 21), Ended(1, 22, "GPU")], False, 22, 1),
        ([Ended(0, -9), Ended(1, 22, "GPU")], False, 22, 1),
        ([Ended(0, 20), Ended(1, 20)], True, 20, 0),
        ([Ended(0, 20), Ended(1, 20)], False, 20, 0),
        ([Ended(0, -9), Ended(1, -9)], True, 20, 0),
        ([Ended(0, -15)], True, 20, 0),
        ([Ended(0, -15)], False, 21, 0),
        ([Ended(0, 21), Ended(1, 1, "ValueError")], False, 1, 1),
        ([Ended(0, 21), Ended(1, 21)], True, 21, 0),
        ([Ended(0, 20), Ended(1, -9, closed=True)], False, 20, 0),  # what the agent ends is a consequence
        ([Ended(0, 20, closed=True), Ended(1, 21)], False, 21, 1),
        ([Ended(0, 20, closed=True), Ended(1, -9)], False, 21, 1),
        ([Ended(0, 11, closed=True), Ended(1, 21)], False, 11, 0),
    ],
)
def test_the_verdict_names_who_failed_first(ends: list[Ended], stopped: bool, code: int, rank: int | None) -> None:
    verdict = judge(ends, stopped)
    assert (verdict.code, verdict.rank) == (code, rank)


def test_the_verdict_names_the_signal() -> None:
    assert judge([Ended(0, 21), Ended(1, -9, "last words")], False) == Verdict(
        21, "rank 1 was ended by SIGKILL (out of memory, or killed from outside). Last line: last words", 1, "SIGKILL"
    )


def read(process: subprocess.Popen[str], pattern: str) -> list[str]:
    """Lines up to the first that matches."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    raise AssertionError(f"no line matched {pattern!r}:\n{''.join(lines)}")


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    assert process.stdout is not None
    text = process.stdout.read()
    assert process.wait(60) == code, text
    return text


def losses(text: str) -> dict[int, float]:
    found = [json.loads(line.removeprefix("@progress ")) for line in text.splitlines() if line.startswith("@progress ")]
    return {item["step"]: item["loss"] for item in found if "loss" in item}


def final(toy: Toy, name: str, step: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    found = Checkpoints(toy.files(name), name, "", {})
    (seal,) = (seal for seal in found.seals() if seal.step == step)
    saved = found.read(seal)
    return dict(saved.weights), dict(saved.moments), dict(saved.progress)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def termination(tmp_path: Path) -> dict[str, Any]:
    return dict(json.loads((tmp_path / "termination.json").read_text()))


def kept(toy: Toy, name: str) -> list[str]:
    """The lines of the log in the run's folder, without their times."""
    store = toy.files(name)
    text = "".join(gzip.decompress(store.get(item.key)).decode() for item in store.list(f"logs/{POD}/"))
    return [line.split(" ", 1)[1] for line in text.splitlines()]


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks, by rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    by_rank = {}
    for child in map(int, children):
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks = [item for item in environment if item.startswith(b"RANK=")]
        if ranks:
            by_rank[int(ranks[0][5:])] = child
    return [by_rank[rank] for rank in sorted(by_rank)]


def gone(pid: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


class StopSoon(StopSignal):
    """A stop that comes after a few steps."""

    steps = 3

    @property
    def asked(self) -> bool:
        self.steps -= 1
        return self.steps < 0

    def check(self) -> None:
        return


def resume(uri: str) -> str:
    """Go on with a run in this very process, for a few steps; what it said."""
    said: list[str] = []
    console = Console()
    console.say = said.append  # type: ignore[method-assign]
    with contextlib.suppress(PreemptedError):
        run(uri, StopSoon(), console)
    return "\n".join(said)


@pytest.mark.dist
@pytest.mark.compat
def test_a_run_ends_with_model_report_and_message(toy: Toy, start: Any, tmp_path: Path) -> None:
    uri = toy.run("one", train={"deterministic": True})
    text = finish(start(uri, 1, **ONE))
    report = json.loads(toy.files("one").get("report.json"))
    assert report["status"] == "succeeded"
    assert report["steps"] == 12
    assert report["eval"]["after"]["eval/loss"] < report["eval"]["before"]["eval/loss"]
    assert report["model"]["max_logit_difference"] <= 1e-4
    assert report["resumed_from"] is None
    assert [item["attempt"] for item in report["attempts"]] == [1]
    assert set(losses(text)) == set(range(1, 13))
    assert re.search(r"^\d\d:\d\d:\d\dZ \[rank 0\] step 12/12", text, re.M)
    assert termination(tmp_path) == {"exit_code": 0, "message": "done", "rank": None, "step": 12, "steps": 12}
    weights = load_file(Path(toy.files("one").uri) / "model" / "model.safetensors")
    assert "lm_head.weight" not in weights  # tied weights are written once
    printed = [line[10:] if "Z [rank 0] " in line else f"[rank 0] {line}" for line in text.splitlines()]
    assert sorted(kept(toy, "one")) == sorted(printed)  # stdout and stderr are two pipes
    assert report["determinism"] == {
        "deterministic": True,
        "cublas_workspace": ":4096:8",  # from the launcher: a rank must have it before its first work on a GPU
        "cudnn_deterministic": True,
        "cudnn_benchmark": False,
        "attention_backends": ["flash", "math"],
    }
    assert report["packing"]["attention"] == report["distribution"]["attention"] == "sdpa"
    assert report["packing"]["by"] == "positions"
    assert report["packing"]["difference_in_training"] <= 1e-4
    assert "attention: sdpa, " in text
    assert "already done" in resume(uri)  # a retry after success trains nothing


@pytest.mark.dist
@pytest.mark.compat
@pytest.mark.exact  # forked ranks do the same in test_ranks_matrix.py, for a twentieth of the time
def test_stop_on_one_rank_resume_on_two_and_on_one(toy: Toy, start: Any, tmp_path: Path) -> None:
    """SIGTERM to one rank stops both at one step; the resumed run is the uninterrupted one to the bit."""
    more = {"train": {"max_steps": 60, "checkpoint_every": 50, "eval_every": 20}}
    whole = finish(start(toy.run("whole", **more), 2, **ONE))

    process = start(toy.run("parts", **more), 2, **ONE)
    before = "".join(read(process, r'^@progress {"step": 3, '))
    os.kill(ranks_of(process)[1], signal.SIGTERM)
    before += finish(process, ExitCode.PREEMPTED)
    message = termination(tmp_path)
    assert message["exit_code"] == 20
    stopped = int(re.search(r"at step (\d+)", message["message"]).group(1))  # type: ignore[union-attr]
    assert 3 <= stopped < 60
    assert toy.files("parts").stat(f"checkpoints/step-{stopped}/manifest.json")
    shown = Preflight("gloo", 0, 0, 60).to_json()
    after = finish(start(toy.run("parts", **more), 2, **ONE, **{PREFLIGHT: shown}))
    assert "preflight: 2 ranks on 1 node(s) over gloo: " in after
    assert f"resuming from checkpoint step-{stopped}" in after

    assert losses(whole) == {**losses(before), **losses(after)}
    left, right = final(toy, "whole", 60), final(toy, "parts", 60)
    assert same(left[0], right[0])
    assert same(left[1], right[1])
    for key in ("tokens", "targets", "evaluations", "loss_first", "loss_last"):
        assert left[2][key] == right[2][key]
    reports = [json.loads(toy.files(name).get("report.json")) for name in ("whole", "parts")]
    assert reports[0]["eval"] == reports[1]["eval"]
    assert [item["resumed_from"] for item in reports[1]["attempts"]] == [None, stopped]


@pytest.mark.dist
def test_a_killed_rank_is_named_and_another_number_of_ranks_goes_on(toy: Toy, start: Any, tmp_path: Path) -> None:
    uri = toy.run("killed", train=SLOW)
    process = start(uri, 2, **ONE)
    read(process, r"checkpoint step-10:")
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGKILL)
    finish(process, ExitCode.HARDWARE)
    message = termination(tmp_path)
    assert message["exit_code"] == 21
    assert message["rank"] == 1
    assert "SIGKILL" in message["message"]
    assert all(gone(pid) for pid in ranks)
    # A peer's death starts no save: whatever is there was due.
    store = toy.files("killed")
    steps = {int(item.key.split("-")[1].split("/")[0]) for item in store.list("checkpoints/")}
    assert all(step % 5 == 0 for step in steps)

    text = resume(uri)  # two ranks before, one now
    newest = int(re.search(r"resuming from checkpoint step-(\d+)", text).group(1))  # type: ignore[union-attr]
    assert newest >= 10
    attempts = [json.loads(store.get(f"attempts/{number}.json")) for number in (1, 2)]
    assert [(item["ranks"], item["resumed_from"]) for item in attempts] == [(2, None), (1, newest)]


@pytest.mark.dist
def test_sigterm_to_the_launcher_saves_and_a_broken_newest_is_walked_back(toy: Toy, start: Any, tmp_path: Path) -> None:
    uri = toy.run("stopped", train=SLOW)
    process = start(uri, 1, **ONE)
    read(process, r"checkpoint step-5:")
    process.send_signal(signal.SIGTERM)
    finish(process, ExitCode.PREEMPTED)
    message = termination(tmp_path)
    assert kept(toy, "stopped")[-1] == f"[pod {POD}] run failed with exit code 20: {message['message']}"
    stopped = int(re.search(r"at step (\d+)", message["message"]).group(1))  # type: ignore[union-attr]
    weights = Path(toy.files("stopped").uri) / "checkpoints" / f"step-{stopped}" / "rank-0.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    text = resume(uri)
    assert f"step-{stopped} is broken" in text
    assert "resuming from checkpoint step-" in text
    assert f"resuming from checkpoint step-{stopped}" not in text


@pytest.mark.dist
def test_ranks_do_not_outlive_a_killed_launcher(toy: Toy, start: Any) -> None:
    process = start(toy.run("orphans", train=SLOW), 1, **ONE)
    read(process, r'^@progress {"step": \d+, "steps": 4000, "loss"')
    [rank] = ranks_of(process)
    process.kill()
    process.wait(20)
    with contextlib.suppress(ProcessLookupError):  # it may be gone already
        descriptor = os.pidfd_open(rank)
        select.select([descriptor], [], [], 20)
        os.close(descriptor)
    assert gone(rank)


@pytest.fixture
def handlers() -> Any:
    """Give the signal handler back that a rank in this process replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_stop_at_the_very_end_changes_no_verdict_and_makes_the_rest_short(handlers: None) -> None:
    terminator = launch.Terminator()
    terminator.install()
    terminator.grace = 5
    assert terminator.left() == float("inf")
    terminator.over = True
    os.kill(os.getpid(), signal.SIGTERM)  # would be SystemExit before
    assert 0 < terminator.left() <= 5


def test_a_stop_while_the_run_is_fetched_is_heard(
    handlers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMINATION_LOG", str(tmp_path / "termination.json"))

    def fetch(root: str) -> Any:
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, "SIGTERM would end this process, or be lost"
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the stop was not heard")

    monkeypatch.setattr(launch, "open_store", fetch)
    assert launch.main([f"{tmp_path}/runs/r/run.json"]) == ExitCode.PREEMPTED
    assert termination(tmp_path)["exit_code"] == ExitCode.PREEMPTED


def test_a_rank_that_was_killed_at_the_end_of_the_grace_may_have_saved() -> None:
    """It can be held by something else, as a server of metrics that is away, once its checkpoint is sealed."""
    message = judge([Ended(0, -9)], stopped=True).message
    assert "no new checkpoint" not in message
    assert "may be whole" in message


def test_a_store_that_does_not_answer_is_told_in_the_termination_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("TERMINATION_LOG", str(tmp_path / "termination.json"))
    before = signal.getsignal(signal.SIGTERM)
    assert launch.main(["s3://bucket/runs/r/run.json"]) == 1
    signal.signal(signal.SIGTERM, before)
    assert "127.0.0.1:9" in termination(tmp_path)["message"]


@pytest.mark.dist
def test_a_log_that_cannot_be_written_neither_stops_nor_fails_a_run(toy: Toy, tmp_path: Path) -> None:
    uri = toy.run("mute", train={"max_steps": 4})
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "AWS_", "PET_"))}
    env |= {"TERMINATION_LOG": str(tmp_path / "termination.json"), **ONE}
    with Path("/dev/full").open("w") as full:  # every write says that no space is left
        done = subprocess.run(
            [sys.executable, "-m", "trainer.launch", uri],
            env=env, cwd=REPOSITORY, stdout=full, stderr=full, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0
    assert termination(tmp_path)["message"] == "done"
    assert toy.files("mute").stat("report.json") is not None
    assert any(line.startswith("[rank 0] step 4/4") for line in kept(toy, "mute"))


@pytest.mark.dist
def test_divergence_ends_the_run_with_its_own_code(toy: Toy, start: Any, tmp_path: Path) -> None:
    uri = toy.run("bad", train={"max_steps": 200, "learning_rate": 1e3, "clip": 1e3})
    finish(start(uri, 1, **ONE), ExitCode.DIVERGED)
    message = termination(tmp_path)
    assert kept(toy, "bad")[-1] == f"[pod {POD}] run failed with exit code 12: {message['message']}"
    assert message["exit_code"] == 12
    assert message["rank"] == 0
    assert "in a row" in message["message"]


@pytest.mark.dist
def test_a_local_run_needs_neither_pydantic_nor_boto3_nor_mlflow(toy: Toy, tmp_path: Path) -> None:
    blocker = """
import sys
from importlib.machinery import PathFinder
class Hide(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split('.')[0] in {'pydantic', 'boto3', 'botocore', 'mlflow', 'datasets', 'pandas', 'airflow'}:
            return None
        return PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Hide if finder is PathFinder else finder for finder in sys.meta_path]
from trainer.rank import main
sys.exit(main([sys.argv[1]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", blocker, toy.run("lean", train={"max_steps": 2})],
        cwd=REPOSITORY,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **ONE},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert toy.files("lean").stat("report.json")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("master", "other"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("named", "127.0.0.1"), ("named", "::1")]
)
def test_nodes_meet_by_ipv4_and_by_ipv6(master: str, other: str) -> None:
    first = Rendezvous(socket.gethostname() if master == "named" else master, 0, 0, 2, "met", 20)
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(first.next_rendezvous)
        while not first.master_port and not served.done():
            time.sleep(0.01)
        Rendezvous(other, first.master_port, 1, 2, "met", 20).next_rendezvous()
        assert served.result().world_size == 2


def test_a_node_that_waits_for_the_others_hears_a_stop(toy: Toy, start: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start(toy.run("lonely"), 1, PET_NNODES="2", PET_NODE_RANK="0", PET_MASTER_PORT=str(port), **ONE)
    while process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
    process.send_signal(signal.SIGTERM)
    finish(process, ExitCode.PREEMPTED)
    assert "before the ranks were started" in termination(tmp_path)["message"]
