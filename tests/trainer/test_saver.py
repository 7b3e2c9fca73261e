"""Saving beside the training: what the step waits for, what it does not, and how a save that fails is told."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dropforge.store import FolderStore, open_store
from trainer.gang import Gang
from trainer.rank import main
from trainer.state.checkpoint import Checkpoints
from trainer.state.saver import Saver

from .test_checkpoint import newest
from .test_checkpoint import snapshot as two_ranks
from .test_shared import Ranks
from .toy import Toy, sample_rows, write_dataset


class Gate(FolderStore):
    """A store whose writes wait until they are let through; `order` is what was written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.open_ = threading.Event()
        self.order: list[str] = []
        self.fails: set[str] = set()

    def put(self, key: str, data: bytes | memoryview) -> None:
        assert self.open_.wait(20)
        if key.rpartition("/")[2] in self.fails:
            raise OSError(28, "No space left on device")
        self.order.append(key)
        super().put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.order.append(key)
        if key.rpartition("/")[2] in self.fails:
            raise OSError(28, "No space left on device")
        return super().put_if_absent(key, data)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def saver(store: FolderStore, said: list[str] | None = None, **more: Any) -> Saver:
    checkpoints = Checkpoints(store, "run", "plan", {}, (said if said is not None else []).append, pause=0.0)
    return Saver(checkpoints, Gang(), **{"keep": 2, "best": 1, "before_seal": lambda: None, **more})


def snapshot(step: int) -> Any:
    made = two_ranks(step)
    return type(made)(made.step, made.weights, made.moments, made.generators[:1], {**made.progress, "tokens": 7})


def test_the_step_goes_on_while_the_state_as_it_was_is_written(gate: Gate) -> None:
    one = saver(gate)
    taken = snapshot(4)
    one.begin(taken)
    for tensor in (*taken.weights.values(), *taken.moments.values()):  # the next step changes it
        tensor += 1
    assert one.poll() is None
    assert one.step == 4
    gate.open_.set()
    ended = one.wait()
    assert ended is not None
    assert ended.error is None
    assert ended.seal is not None
    assert (ended.seal.step, ended.seal.tokens, ended.seals) == (4, 7, [ended.seal])
    found = newest(Checkpoints(gate, "run", "plan", {}))
    assert found is not None
    assert torch.equal(found.weights["w"], torch.full((3, 4), 4.0))
    assert torch.equal(found.moments["w:exp_avg"], torch.full((3, 4), 4.0))
    assert one.poll() is None  # told once


def test_the_manifest_comes_last_and_after_what_must_be_sent_before(gate: Gate) -> None:
    gate.open_.set()
    one = saver(gate, before_seal=lambda: gate.order.append("sent"))
    one.begin(snapshot(4))
    one.wait()
    names = [key.rpartition("/")[2] for key in gate.order]
    assert sorted(names[:2]) == ["progress.json", "rank-0.safetensors"]
    assert names[2:] == ["sent", "manifest.json"]


def test_a_write_that_fails_is_told_leaves_no_files_and_the_next_one_succeeds(gate: Gate, tmp_path: Path) -> None:
    gate.open_.set()
    one = saver(gate)
    one.begin(snapshot(4))
    assert one.wait().error is None  # type: ignore[union-attr]
    gate.fails = {"rank-0.safetensors"}
    one.begin(snapshot(8))
    ended = one.wait()
    assert ended is not None
    assert "No space left" in (ended.error or "")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-4"]
    gate.fails = set()
    one.begin(snapshot(12))
    ended = one.wait()
    assert ended is not None
    assert [seal.step for seal in ended.seals] == [4, 12]


def test_a_manifest_that_cannot_be_written_leaves_no_files_either(gate: Gate, tmp_path: Path) -> None:
    gate.open_.set()
    one = saver(gate)
    gate.fails = {"manifest.json"}
    one.begin(snapshot(4))
    ended = one.wait()
    assert ended is not None
    assert "No space left" in (ended.error or "")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_checkpoint_of_another_process_is_not_taken_away(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came between the files and the manifest of this one."""
    gate.open_.set()
    one = saver(gate)
    monkeypatch.setattr(gate, "put_if_absent", lambda *_: False)
    one.begin(snapshot(4))
    ended = one.wait()
    assert ended is not None
    assert "another process wrote it" in (ended.error or "")
    assert (tmp_path / "checkpoints" / "step-4" / "rank-0.safetensors").is_file()


def test_ranks_wait_for_the_slowest_write_and_not_half_an_hour(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The default of a process group would end the save of a large model on a slow store."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "new_group", lambda **more: asked.append(more))
    checkpoints = Checkpoints(FolderStore(tmp_path), "run", "plan", {})
    Saver(checkpoints, Gang(0, 2, 0, 2), keep=1, best=0, before_seal=lambda: None)
    assert asked[0]["timeout"] >= timedelta(hours=12)


def test_what_fails_after_the_manifest_takes_no_checkpoint_back(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.open_.set()

    def broken(*_: Any) -> list[int]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Checkpoints, "prune", broken)
    one = saver(gate)
    one.begin(snapshot(4))
    ended = one.wait()
    assert ended is not None
    assert (ended.error, ended.step) == (None, 4)
    assert "Input/output" in (ended.trouble or "")


def test_a_wait_ends_with_the_time_there_is(gate: Gate) -> None:
    one = saver(gate)
    one.begin(snapshot(4))
    end = time.monotonic() + 0.2
    assert one.wait(lambda: end - time.monotonic()) is None
    assert one.step == 4
    gate.open_.set()
    assert one.wait() is not None


@pytest.mark.parametrize("fails", [None, 0, 1])
def test_a_rank_that_cannot_write_fails_the_save_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int | None
) -> None:
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    ranks = Ranks(nodes=1, per_node=2)
    savers = []
    for rank in range(2):
        gate = Gate(tmp_path)
        gate.open_.set()
        gate.fails = {f"rank-{rank}.safetensors"} if rank == fails else set()
        gang = ranks.rank(rank)
        one = Saver(Checkpoints(gate, "run", "plan", {}), gang, keep=1, best=0, before_seal=lambda: None)
        monkeypatch.setattr(one, "gather", gang.gather)
        savers.append(one)
    for one in savers:
        one.begin(two_ranks(4))
    ended = [one.wait() for one in savers]
    if fails is None:
        assert [saved.error for saved in ended if saved] == [None, None]
        assert [saved.seal is None for saved in ended if saved] == [False, True]  # rank 0 seals
        found = newest(Checkpoints(FolderStore(tmp_path), "run", "plan", {}))
        assert found is not None
        assert torch.equal(found.weights["w"], two_ranks(4).weights["w"])
        assert found.seal.world == 2
    else:
        assert all("No space left" in (saved.error or "") for saved in ended if saved)
        assert newest(Checkpoints(FolderStore(tmp_path), "run", "plan", {})) is None


def test_a_thread_that_may_not_give_way_or_breaks_is_heard_of(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr("os.setpriority", forbidden)
    gate.open_.set()
    one = saver(gate)
    one.begin(snapshot(4))
    assert one.wait().error is None  # type: ignore[union-attr]
    monkeypatch.setattr(one, "_write", forbidden)
    one.begin(snapshot(8))
    assert "PermissionError" in (one.wait().error or "")  # type: ignore[union-attr]


def test_what_a_killed_attempt_had_still_to_remove_goes_without_another_save(tmp_path: Path) -> None:
    """As where it is killed between its last checkpoint and the removal of those before."""
    toy = Toy(
        str(tmp_path),
        write_dataset(open_store(str(tmp_path)), {"train": sample_rows(40), "eval": sample_rows(5, seed=1)}),
    )
    train = {"max_steps": 3, "checkpoint_every": 1, "keep_best": 0}

    def kept(keep: int) -> list[str]:
        assert main([toy.run(train={**train, "keep_checkpoints": keep})]) == 0
        folder = Path(toy.files().uri)
        (folder / "report.json").unlink()
        return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))

    assert kept(3) == ["step-1", "step-2", "step-3"]
    assert kept(1) == ["step-3"]
