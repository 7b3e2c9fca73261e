"""Signs of life: what counts as one, and where none can be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer import rank
from trainer.gang import Gang
from trainer.loop.loop import Loop
from trainer.measure import measure
from trainer.node.heart import Bounds, Heart, read_beat, write_beat
from trainer.rank import _leave_at_once, leave_word

from .ranks import Ranks
from .ranks_loop import Stage, make_loop, make_stage
from .toy import REPOSITORY, Toy


@pytest.fixture
def stage(toy: Toy, tmp_path: Path) -> Stage:
    return make_stage(toy, "signs", tmp_path / "scratch").change(micro_batch=1)


def beating(loop: Loop) -> Heart:
    loop.heart = Heart(0, Bounds(), lambda: loop.stop.looks)
    return loop.heart


def test_each_micro_batch_is_a_sign_of_life(stage: Stage) -> None:
    """A step of many long micro-batches is no hang: the bound is for each of them."""
    loop = make_loop(Gang(), stage, packs=True)
    heart, marks, backward = beating(loop), list[tuple[int, str]](), loop.wrapped.backward

    def seen(*arguments: Any, **more: Any) -> Any:
        beat = heart.beat(0)
        marks.append((beat.mark, beat.phase))
        return backward(*arguments, **more)

    loop.wrapped.backward = seen  # type: ignore[method-assign]
    loop.start()
    before, marks[:] = list(marks), []
    assert len({mark for mark, _ in before[-3:]}) == 3  # the whole micro-batch and its halves
    heart.step(1)
    loop.step.take(0, 1e-3)
    assert len(marks) > 2
    assert len({mark for mark, _ in marks}) == len(marks)
    assert {phase for _, phase in marks} == {"step 1"}


def test_each_batch_of_an_evaluation_is_a_sign_of_life(stage: Stage) -> None:
    loop = make_loop(Gang(), stage, packs=True)
    heart, marks, logits = beating(loop), list[int](), loop.loss.logits

    def seen(*arguments: Any) -> Any:
        marks.append(heart.beat(0).mark)
        return logits(*arguments)

    loop.loss.logits = seen  # type: ignore[method-assign]
    heart.evaluation(0)
    measure(loop.loss, loop.eval, Gang(), size=64, micro=1, pad=loop.pad, stop=lambda: loop.stop.asked)
    assert len(marks) > 2
    assert len(set(marks)) == len(marks)


def test_a_rank_on_a_full_disk_goes_on_showing_that_it_runs(tmp_path: Path) -> None:
    """A last sign that stays the same would say that the process does not run, and end a healthy run."""
    script = f"""
import sys
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from trainer.node.heart import Heart, read_beat
folder = Path({str(tmp_path)!r})
heart = Heart(0)
heart.step(7)
heart.start(folder)
while (first := read_beat(folder, 0)) is None:
    pass
try:
    with (folder / "rest").open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))
except OSError as error:
    print(error)
try:
    (folder / "more").write_bytes(bytes(100))
    sys.exit("there is room")
except OSError:
    pass
first = read_beat(folder, 0)
while (now := read_beat(folder, 0)) is not None and now.pulse == first.pulse:
    pass
print(now.phase)
"""
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=64k none "$0" && exec "$@"', str(tmp_path)]
    if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no small disk can be mounted here")
    done = subprocess.run(
        [*mount, sys.executable, "-c", script],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert "No space left" in done.stdout
    assert done.stdout.endswith("step 7\n"), done.stderr


def test_a_sign_that_cannot_be_written_takes_the_one_before_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_beat(tmp_path, Heart().beat(1))
    assert read_beat(tmp_path, 0) == Heart().beat(1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    write_beat(tmp_path, Heart().beat(2))
    assert read_beat(tmp_path, 0) is None


def test_a_shorter_sign_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    long = replace(Heart().beat(1), place="x" * 5000)
    for beat in (long, Heart().beat(2)):
        write_beat(tmp_path, beat)
        assert read_beat(tmp_path, 0) == beat


def test_a_full_disk_changes_no_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last word cannot be left, in the main thread or in the one that ends a rank at a SIGTERM."""
    monkeypatch.setenv("DROPFORGE_SCRATCH", str(tmp_path))
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    _leave_at_once(0)
    assert ended == [20]
    leave_word(0, 0, "done")


def lose_a_peer(gang: Gang, folder: Path) -> list[str]:
    """Rank 1 ends; what rank 0 leaves when it notices."""
    os.environ |= {"DROPFORGE_SCRATCH": str(folder), "RANK": str(gang.rank)}

    def run(*_: object) -> None:
        gang.barrier()
        if gang.rank == 1:
            os._exit(0)
        gang.barrier()

    rank.run = run
    assert rank.main(["x"]) == 21
    found = [json.loads(path.read_text()) for path in folder.glob("flight-gloo-0.json")]
    (folder / "found").write_text(json.dumps([entry["profiling_name"] for one in found for entry in one["entries"]]))
    os._exit(0)


def test_who_loses_a_peer_leaves_its_last_collectives(ranks: Ranks, tmp_path: Path) -> None:
    with suppress(FileNotFoundError):  # neither rank returns
        ranks(lose_a_peer, 2, tmp_path)
    assert json.loads((tmp_path / "found").read_text())[-1] == "gloo:all_reduce"
