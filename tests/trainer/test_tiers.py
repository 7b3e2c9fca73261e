"""A fast place beside the durable one: what goes where, what a resume takes from which, and every way to lose one."""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from dropforge.errors import RecipeError
from dropforge.store import FolderStore
from trainer.config import FastCheckpoints
from trainer.gang import Gang
from trainer.state.checkpoint import Checkpoints
from trainer.state.fast import Fast, open_fast, own_folder
from trainer.state.grace import LastSave, last_save
from trainer.state.resume import Restored, restore
from trainer.state.saver import Saver
from trainer.state.stop import PreemptedError

from .test_checkpoint import ADAMW
from .test_loop import Bench, at_step, trained, weights
from .test_saver import Gate, snapshot
from .test_shared import Ranks
from .toy import Toy


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def durable(tmp_path: Path, said: list[str]) -> Checkpoints:
    return Checkpoints(FolderStore(tmp_path / "durable"), "run", "plan", {}, said.append, pause=0.0)


@pytest.fixture
def fast(tmp_path: Path, durable: Checkpoints) -> Fast:
    (tmp_path / "fast").mkdir()
    return Fast(durable, str(tmp_path / "fast"), 1)


def saver(durable: Checkpoints, fast: Fast) -> Saver:
    return Saver(durable, Gang(), keep=9, best=0, before_seal=lambda: None, fast=fast)


def save(one: Saver, step: int, to_durable: bool) -> None:
    one.begin(snapshot(step), durable=to_durable)
    there = one.wait()
    assert there is not None
    if to_durable:
        one.uploads.wait()


def found(durable: Checkpoints, fast: Fast | None) -> Restored | None:
    return restore(durable, Gang(), {"w": torch.zeros(3, 4), "v": torch.zeros(5)}, ADAMW, fast)


def rank_path(place: Checkpoints, step: int) -> Path:
    assert isinstance(place.store, FolderStore)
    return place.store.root / "checkpoints" / f"step-{step}" / "rank-0.safetensors"


def flip(path: Path, place: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 8
    path.write_bytes(bytes(data))


def test_the_newest_of_both_tiers_is_resumed_from(durable: Checkpoints, fast: Fast) -> None:
    one = saver(durable, fast)
    save(one, 4, True)
    save(one, 6, False)
    there = found(durable, fast)
    assert there is not None
    assert (there.seal.step, there.durable) == (6, False)
    assert torch.equal(there.weights["w"], torch.full((3, 4), 6.0))
    save(one, 8, True)
    there = found(durable, fast)
    assert there is not None
    assert (there.seal.step, there.durable) == (8, True)
    there = found(durable, None)
    assert there is not None
    assert there.seal.step == 8


def test_the_same_bytes_are_in_both_and_each_tier_keeps_its_own_number(durable: Checkpoints, fast: Fast) -> None:
    one = saver(durable, fast)
    for step in (4, 6, 8):
        save(one, step, step != 6)
    assert [seal.step for seal in durable.seals()] == [4, 8]
    assert [seal.step for seal in fast.checkpoints.seals()] == [8]
    assert durable.seals()[-1].digest == fast.checkpoints.seals()[-1].digest


def test_a_save_goes_on_while_an_upload_hangs_and_its_source_stays(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "durable")
    slow = Checkpoints(gate, "run", "plan", {}, pause=0.0)
    (tmp_path / "fast").mkdir()
    fast = Fast(slow, str(tmp_path / "fast"), 1)
    one = saver(slow, fast)
    one.begin(snapshot(4))
    assert one.wait() is not None
    for step in (6, 8):  # the upload of 4 still hangs
        assert one.uploads.step == 4
        one.begin(snapshot(step), durable=False)
        ended = one.wait()
        assert ended is not None
        assert ended.error is None
    assert [seal.step for seal in fast.checkpoints.seals()] == [4, 8]
    gate.open_.set()
    ended = one.uploads.wait()
    assert ended is not None
    assert (ended.error, ended.fast, ended.step) == (None, False, 4)
    there = found(slow, None)
    assert there is not None
    assert torch.equal(there.weights["w"], torch.full((3, 4), 4.0))


@pytest.mark.parametrize("place", [4, 30, -3])  # in the length of the header, in the header, in the data
def test_a_broken_fast_copy_is_read_from_the_durable_place(
    durable: Checkpoints, fast: Fast, said: list[str], place: int
) -> None:
    save(saver(durable, fast), 4, True)
    flip(rank_path(fast.checkpoints, 4), place)
    there = found(durable, fast)
    assert there is not None
    assert torch.equal(there.weights["w"], torch.full((3, 4), 4.0))
    assert any("fast tier's copy of rank-0.safetensors cannot be used" in line for line in said)


def test_a_good_fast_copy_mends_a_broken_durable_file(durable: Checkpoints, fast: Fast) -> None:
    save(saver(durable, fast), 4, True)
    flip(rank_path(durable, 4))
    there = found(durable, fast)
    assert there is not None
    assert there.seal.step == 4


def test_a_manifest_of_the_fast_tier_that_cannot_be_read_ends_no_resume(
    durable: Checkpoints, fast: Fast, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = saver(durable, fast)
    save(one, 4, True)
    opened = fast.store.open

    def dying(key: str, etag: str | None = None, version: str | None = None) -> BinaryIO:
        if key.endswith("manifest.json"):
            raise OSError(5, "Input/output error")
        return opened(key, etag, version)

    monkeypatch.setattr(fast.store, "open", dying)
    there = found(durable, fast)
    assert there is not None
    assert there.seal.step == 4
    assert any("cannot be read" in line and "continuing without it" in line for line in said)


@pytest.mark.parametrize("harm", ["flip", "delete", "all"])
def test_a_checkpoint_in_the_fast_tier_only_is_whole_or_none(
    durable: Checkpoints, fast: Fast, said: list[str], harm: str
) -> None:
    one = saver(durable, fast)
    save(one, 4, True)
    save(one, 6, False)
    path = rank_path(fast.checkpoints, 6)
    if harm == "flip":
        flip(path)
    elif harm == "delete":
        path.unlink()
    else:
        shutil.rmtree(fast.store.root)
    there = found(durable, fast)
    assert there is not None
    assert (there.seal.step, there.durable) == (4, True)
    assert harm == "all" or any("step-6 is broken" in line for line in said)
    assert fast.checkpoints.steps() == []  # nobody can go on from what is left of it


def test_a_full_fast_disk_sends_the_save_to_the_durable_place(
    durable: Checkpoints, fast: Fast, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = FolderStore.put

    def full(self: FolderStore, key: str, data: bytes) -> None:
        if self.root == fast.store.root and "rank" in key:
            raise OSError(28, "No space left on device")
        put(self, key, data)

    monkeypatch.setattr(FolderStore, "put", full)
    one = saver(durable, fast)
    one.begin(snapshot(4))
    ended = one.wait()
    assert ended is not None
    assert (ended.error, ended.fast) == (None, False)
    assert "No space left" in (ended.fast_error or "")
    assert [seal.step for seal in durable.seals()] == [4]
    one.begin(snapshot(6), durable=False)
    ended = one.wait()
    assert ended is not None
    assert "fast tier" in (ended.error or "")
    assert "No space left" in (ended.error or "")
    assert fast.checkpoints.steps() == []


def test_rot_in_the_fast_tier_does_not_become_a_durable_checkpoint(durable: Checkpoints, fast: Fast) -> None:
    one = saver(durable, fast)
    begin = one.uploads.start

    def spoiled(*values: Any) -> None:
        flip(rank_path(fast.checkpoints, 4))
        begin(*values)

    one.uploads.start = spoiled  # type: ignore[method-assign]
    one.begin(snapshot(4))
    one.wait()
    ended = one.uploads.wait()
    assert ended is not None
    assert "copy in the fast tier is broken" in (ended.error or "")
    assert durable.seals() == []


def test_a_fast_folder_that_cannot_be_read_costs_only_itself(
    durable: Checkpoints, fast: Fast, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(saver(durable, fast), 4, True)
    listing = Checkpoints._listing

    def dying(self: Checkpoints) -> Any:
        if self is fast.checkpoints:
            raise OSError(5, "Input/output error")
        return listing(self)

    monkeypatch.setattr(Checkpoints, "_listing", dying)
    there = found(durable, fast)
    assert there is not None
    assert there.seal.step == 4
    assert any("cannot be read" in line for line in said)


def test_a_fast_folder_that_is_not_there_is_refused_on_every_rank(tmp_path: Path, durable: Checkpoints) -> None:
    (tmp_path / "one").mkdir()
    ranks, told = Ranks(nodes=2, per_node=1), []

    def ask(rank: int) -> None:
        with pytest.raises(RecipeError, match=r"train\.fast_checkpoints\.folder.*no such folder"):
            open_fast(durable, ranks.rank(rank), str(tmp_path / ("one", "none")[rank]), 1)
        told.append(rank)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ask, range(2)))
    assert sorted(told) == [0, 1]


def test_a_fast_folder_that_others_may_write_is_left_alone(
    tmp_path: Path, durable: Checkpoints, said: list[str]
) -> None:
    """In a folder that all share, another user's link in it would lead a training to files of this one; and who makes
    it first ends no training."""
    own = own_folder(str(tmp_path))

    def none() -> bool:
        said.clear()
        return open_fast(durable, Gang(), str(tmp_path), 1) is None and "was made by another user, or" in said[0]

    own.symlink_to(tmp_path)
    assert none()
    own.unlink()
    own.mkdir()
    own.chmod(0o777)
    assert none()
    own.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(own, 12345, 12345)
        assert none()
    shutil.rmtree(own)
    found = open_fast(durable, Gang(), str(tmp_path), 1)
    assert found is not None
    assert found.store.root.parent == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("left", "fast", "upload", "uploading", "chosen"),
    [
        (30.0, 1.0, 20.0, False, LastSave.BOTH),
        (20.0, 1.0, 20.0, False, LastSave.FAST),
        (30.0, 1.0, 20.0, True, LastSave.FAST),
        (1.0, 1.0, 20.0, False, LastSave.NONE),
        (5.0, 0.0, 0.0, False, LastSave.BOTH),  # nothing was measured yet: it is tried
        (0.0, 0.0, 0.0, True, LastSave.NONE),
    ],
)
def test_what_still_fits_into_the_grace(
    left: float, fast: float, upload: float, uploading: bool, chosen: LastSave
) -> None:
    assert last_save(left, fast, upload, uploading) is chosen


@pytest.fixture
def bench(toy: Toy, tmp_path: Path) -> Any:
    return lambda **overrides: Bench(toy, tmp_path / "scratch", **overrides)


def tiered(made: Bench, folder: Path, every: int | str = 2) -> Any:
    folder.mkdir(exist_ok=True)
    asked = FastCheckpoints(str(folder), every, 1)
    return made.loop(replace(made.settings, train=replace(made.settings.train, fast_checkpoints=asked)))


def test_the_loop_saves_often_and_uploads_as_the_recipe_says(bench: Any, tmp_path: Path) -> None:
    made = bench(train={"max_steps": 10, "checkpoint_every": 4, "keep_checkpoints": 9})
    loop = tiered(made, tmp_path / "fast")
    begun = []
    loop.start()
    begin = loop.saving.saver.begin

    def noting(snapshot: Any, eval_loss: Any, durable: bool) -> None:
        loop.saving.collect(loop.saving.saver.uploads.wait())  # so that which upload is going on is no matter of luck
        begun.append((snapshot.step, durable))
        begin(snapshot, eval_loss, durable)

    loop.saving.saver.begin = noting
    loop.run()
    assert begun[0] == (2, False)
    assert [step for step, _ in begun] == [2, 4, 6, 8, 10]
    assert {4, 10} <= {step for step, durable in begun if durable}
    assert loop.checkpoints.seals()[-1].step == loop.saving.saved == 10


def test_a_stop_leaves_the_state_where_there_is_time_for_it(bench: Any, tmp_path: Path) -> None:
    """The upload takes longer than the grace: the fast tier alone has the last step, and a resume goes on from it."""
    made = bench(train={"max_steps": 10, "checkpoint_every": 4})
    whole = trained(made.loop(folder="whole"))
    loop = tiered(made, tmp_path / "fast")

    def ask() -> None:
        loop.saving.collect(loop.saving.saver.wait())
        loop.saving.collect(loop.saving.saver.uploads.wait())
        loop.stop.since = time.monotonic()
        loop.saving.saver.uploads.slowest = 1000.0

    at_step(loop, 6, ask)
    loop.start()
    with pytest.raises(PreemptedError, match="step 7"):
        loop.run()
    assert loop.checkpoints.seals()[-1].step == 4
    assert any("the durable place has checkpoint step-4, step-7 is in the fast tier" in line for line in made.said)
    second = tiered(made, tmp_path / "fast")
    assert second.resume() == 7
    trained(second)
    assert second.checkpoints.seals()[-1].step == 10
    assert all(torch.equal(weight, weights(whole)[name]) for name, weight in weights(second).items())


def test_a_stop_uploads_what_the_fast_tier_alone_has_of_this_step(bench: Any, tmp_path: Path) -> None:
    """Step 6 was for the fast tier only; the grace is long enough for the durable place, which outlives the node."""
    made = bench(train={"max_steps": 10, "checkpoint_every": 4, "keep_checkpoints": 9})
    loop = tiered(made, tmp_path / "fast")
    save, written = loop.saving.save, list[Any]()

    def ask(step: int, due: bool) -> bool:
        stopping = save(step, due)
        if step == 6:
            loop.saving.land()
            assert (loop.saving.saved, loop.saving.saved_fast) == (4, 6)
            loop.stop.since = time.monotonic()
            stopping = True
            loop.saving.saver.begin = lambda *more: written.append(more)
        return bool(stopping)

    loop.saving.save = ask
    loop.start()
    with pytest.raises(PreemptedError, match="step 6"):
        loop.run()
    assert [seal.step for seal in loop.checkpoints.seals()] == [4, 6]
    assert written == []  # the copy in the fast tier is what goes up
    shutil.rmtree(tmp_path / "fast")  # the node is lost
    assert tiered(made, tmp_path / "fast").resume() == 6


def test_a_stop_leaves_in_the_fast_tier_what_it_has_no_time_to_upload(bench: Any, tmp_path: Path) -> None:
    made = bench(train={"max_steps": 10, "checkpoint_every": 4})
    loop = tiered(made, tmp_path / "fast")
    save = loop.saving.save

    def ask(step: int, due: bool) -> bool:
        stopping = save(step, due)
        if step == 6:
            loop.saving.land()
            loop.stop.since = time.monotonic()
            loop.saving.saver.uploads.slowest = 1000.0
            stopping = True
        return bool(stopping)

    loop.saving.save = ask
    loop.start()
    with pytest.raises(PreemptedError, match="step 6"):
        loop.run()
    assert [seal.step for seal in loop.checkpoints.seals()] == [4]
    assert tiered(made, tmp_path / "fast").resume() == 6


def test_an_upload_that_hangs_stops_no_step(bench: Any, tmp_path: Path) -> None:
    made = bench(train={"max_steps": 12, "checkpoint_every": 4, "keep_checkpoints": 9})
    loop = tiered(made, tmp_path / "fast")
    go = threading.Event()
    write = loop.checkpoints.write

    def held(step: int, name: str, data: bytes) -> Any:
        assert go.wait(60)
        return write(step, name, data)

    loop.checkpoints.write = held
    at_step(loop, 11, go.set)  # the loop would never come here if it waited
    trained(loop)
    assert [seal.step for seal in loop.checkpoints.seals()] == [4, 12]
    assert any("step-8 stays in the fast tier, because the upload of step-4" in line for line in made.said)
