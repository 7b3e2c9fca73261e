"""A SIGTERM in each phase of a run: every one ends within the grace, with the code of a preempted run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from dropforge.run import ExitCode
from trainer.node.agent import _PEER_SECONDS
from trainer.state.stop import PreemptedError

from .faults import fault
from .test_launch import ONE, finish, gone, ranks_of, read, termination
from .test_loop import Bench
from .toy import Toy

GRACE = 30.0


def test_a_save_that_cannot_end_is_not_begun(toy: Toy, tmp_path: Path) -> None:
    """The grace is 30 seconds, and saves were seen to take 28: the checkpoint before stays, and is named."""
    loop = Bench(toy, tmp_path / "scratch", train={"checkpoint_every": 2, "eval_every": 0}).loop()
    loop.start()
    after = loop.observers[0].after_step

    def stop_at_four(result: Any, *arguments: Any) -> None:
        after(result, *arguments)
        if result.step == 3:
            loop.stop.since = time.monotonic()
            loop.saving.saver.slowest = 28.0

    loop.observers[0].after_step = stop_at_four  # type: ignore[method-assign]
    with pytest.raises(PreemptedError, match="step 4, and out of time to save it: checkpoint step-2 is the newest"):
        loop.run()
    assert any("a save takes 28 s" in line and "checkpoint step-2 stays" in line for line in loop_said(loop))
    assert [seal.step for seal in loop.checkpoints.seals()] == [2]


def loop_said(loop: Any) -> list[str]:
    return list(loop.console.say.__self__)


def hold(process: subprocess.Popen[str]) -> None:
    read(process, r"HOLD \d")


def stop(process: subprocess.Popen[str], pid: int | None = None) -> float:
    """Send a SIGTERM to the launcher, or to one rank; the seconds until the launcher has ended."""
    began = time.monotonic()
    os.kill(pid or process.pid, signal.SIGTERM)
    finish(process, ExitCode.PREEMPTED)
    return time.monotonic() - began


@pytest.mark.dist
@pytest.mark.parametrize("whom", ["rank", pytest.param("launcher", marks=pytest.mark.exact)])
def test_a_stop_while_ranks_meet(toy: Toy, start: Any, tmp_path: Path, whom: str) -> None:
    """Rank 0 waits for its peer in the store."""
    code = """
connect = Gang.connect
def late(self, *arguments):
    hold(300 if self.rank == 1 else 0)
    connect(self, *arguments)
Gang.connect = late
"""
    process = start(toy.run("meets"), 2, **ONE, **fault(tmp_path, "trainer.gang", code))
    hold(process)
    hold(process)  # both are there, and rank 0 waits
    ranks = ranks_of(process)
    seconds = stop(process, ranks[1] if whom == "rank" else None)
    assert seconds < _PEER_SECONDS
    assert termination(tmp_path)["exit_code"] == 20
    assert all(gone(pid) for pid in ranks)


@pytest.mark.dist
def test_a_rank_that_ignores_the_end_of_its_peer_is_killed_soon(toy: Toy, start: Any, tmp_path: Path) -> None:
    """torch alone would wait for 30 seconds, and then tell the kill as the cause."""
    code = """
def prepared(*arguments):
    hold()
if os.environ["RANK"] == "1":
    await_prepared = prepared
"""
    process = start(toy.run("deaf"), 2, **ONE, **fault(tmp_path, "trainer.training", code))
    hold(process)
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGSTOP)  # it hears nothing
    seconds = stop(process, ranks[0])
    assert _PEER_SECONDS - 1 < seconds < _PEER_SECONDS + 8
    assert termination(tmp_path)["message"] == "asked to stop before training began"
    assert gone(ranks[1])


PHASES = {
    "preparation": (
        "trainer.prepare",
        "def write_tokens(*arguments, **options): hold()",
        r"asked to stop before training began",
    ),
    "evaluation": (
        "trainer.measure",
        """
make = make_batch
def make_batch(*arguments):
    hold(0.3)
    return make(*arguments)
""",
        r"asked to stop",
    ),
    "save": (
        "dropforge.store",
        """
put = FolderStore.put
def slow(self, key, *arguments):
    if key.startswith("checkpoints/step-"):
        hold(1)
    return put(self, key, *arguments)
FolderStore.put = slow
""",
        r"asked to stop at step \d+",
    ),
}


@pytest.mark.dist
@pytest.mark.exact
@pytest.mark.parametrize("phase", list(PHASES))
def test_a_stop_in_a_phase(toy: Toy, start: Any, tmp_path: Path, phase: str) -> None:
    module, code, words = PHASES[phase]
    uri = toy.run("stops", train={"max_steps": 4000, "checkpoint_every": 4, "eval_every": 2})
    process = start(uri, 1, **ONE, **fault(tmp_path, module, code))
    hold(process)
    assert stop(process) < GRACE / 2
    message = termination(tmp_path)["message"]
    assert re.fullmatch(words, message.strip()) or re.match(words, message)
    step = re.search(r"step (\d+)", message)
    if step:
        assert toy.files("stops").stat(f"checkpoints/step-{step[1]}/manifest.json")


@pytest.mark.dist
@pytest.mark.exact
@pytest.mark.parametrize("seconds", [1, 300])
def test_a_stop_while_the_model_is_written(toy: Toy, start: Any, tmp_path: Path, seconds: int) -> None:
    """An export that ends within the grace ends the run; one that does not is begun again."""
    code = f"""
export = export_model
def export_model(*arguments):
    hold({seconds})
    return export(*arguments)
"""
    uri = toy.run("writes", train={"max_steps": 2}, compute={"grace_seconds": 8})
    process = start(uri, 1, **ONE, **fault(tmp_path, "trainer.training", code))
    hold(process)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    finish(process, ExitCode.DONE if seconds == 1 else ExitCode.PREEMPTED)
    assert time.monotonic() - began < 8
    assert (toy.files("writes").stat("report.json") is not None) == (seconds == 1)
    assert toy.files("writes").stat("checkpoints/step-2/manifest.json")
