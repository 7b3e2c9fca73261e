"""SIGKILL at random moments, in the middle of saves too: nothing is lost, nothing left lying, nothing different."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dropforge import store as stores
from dropforge.store import FolderStore, open_store
from trainer.config import FastCheckpoints
from trainer.gang import Gang
from trainer.state.checkpoint import Checkpoints, Seal

from .ranks import Ranks, RanksError
from .ranks_loop import Stage, Tensors, copied, make_loop, make_stage
from .toy import Toy, write_dataset

pytestmark = pytest.mark.dist
STEPS, SEEDS = 8, 20


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, toy_rows: dict[str, Any]) -> Stage:
    folder = tmp_path_factory.mktemp("kills")
    toy = Toy(str(folder / "bucket"), write_dataset(open_store(str(folder / "bucket")), toy_rows))
    train = {"max_steps": STEPS, "checkpoint_every": 2, "keep_checkpoints": 1, "keep_best": 0}
    return make_stage(toy, "kills", folder / "scratch", train=train)


class Killer:
    """Ends this rank at a moment that its seed chooses: some time into a step, or in the middle of a write."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rank = self.chance.randrange(2)
        self.at_step = self.chance.randrange(3, STEPS)
        self.kind = ("time", "write", "half", "sealed")[seed % 4]
        self.armed = False

    def after_step(self, result: Any, progress: Any, log: bool) -> None:
        if result.step == self.at_step:
            self.armed = True
            if self.kind == "time":
                threading.Timer(self.chance.random() * 0.3, self.now).start()

    def now(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        write, seal = stores._temporary, Checkpoints.seal

        def temporary(path: Path, data: Any) -> Path:
            if self.armed and self.kind == "write":
                self.now()
            if self.armed and self.kind == "half":
                write(path, bytes(data)[: len(data) // 2])
                self.now()
            return write(path, data)

        def sealed(*values: Any, **named: Any) -> Seal:
            found = seal(*values, **named)
            if self.armed and self.kind == "sealed":
                self.now()  # before what is older is deleted
            return found

        stores._temporary = temporary
        Checkpoints.seal = sealed  # type: ignore[method-assign]


def train_to_the_end(gang: Gang, stage: Stage, folder: str, journal: Path, seed: int | None) -> tuple[Any, Tensors]:
    """Train, with or without a kill; where it was resumed from, and the weights."""
    loop = make_loop(gang, stage, True, folder)
    put = FolderStore.put_if_absent

    def noted(self: FolderStore, key: str, data: bytes) -> bool:
        found = put(self, key, data)
        if key.endswith("manifest.json"):
            with journal.open("a") as lines:
                lines.write(f"{key.partition('step-')[2].partition('/')[0]}\n")
        return found

    FolderStore.put_if_absent = noted  # type: ignore[method-assign]
    step = loop.resume()
    if seed is not None:
        killer = Killer(seed)
        if killer.kind == "sealed" or killer.rank == gang.rank:
            loop.observers.append(killer)
            killer.install()
    loop.start()
    loop.run()
    loop.saving.saver.wait()
    return step, copied(loop.wrapped.full(dict(loop.wrapped.trainable())))


def settings(stage: Stage, seed: int, fast: Path) -> Stage:
    fast.mkdir(parents=True, exist_ok=True)
    changed = stage.change(parallel="fsdp" if seed // 4 % 2 else "ddp")
    return changed.change(fast_checkpoints=FastCheckpoints(str(fast), 1, 1)) if seed // 8 % 2 else changed


_undisturbed: dict[str, Tensors] = {}


def undisturbed(ranks: Ranks, stage: Stage, place: Path) -> Tensors:
    mode = stage.settings.parallel
    if mode not in _undisturbed:
        plain = stage.change(fast_checkpoints=None)
        _undisturbed[mode] = ranks(train_to_the_end, 2, plain, f"whole-{mode}", place / "journal", None)[0][1]
    return _undisturbed[mode]


@pytest.mark.parametrize(
    "seed", [2, *(pytest.param(seed, marks=pytest.mark.exact) for seed in range(SEEDS) if seed != 2)]
)
def test_a_kill_loses_nothing_and_leaves_nothing(ranks: Ranks, stage: Stage, tmp_path: Path, seed: int) -> None:
    chosen, folder = settings(stage, seed, tmp_path / "fast"), f"seed-{seed}"
    whole = undisturbed(ranks, chosen, tmp_path)
    journal = tmp_path / "seals"
    journal.touch()
    with pytest.raises(RanksError):
        ranks(train_to_the_end, 2, chosen, folder, journal, seed)
    place = Path(stage.spec.root) / folder
    there = Checkpoints(FolderStore(place), "ranks", "", {})
    sealed = [int(step) for step in journal.read_text().split()]
    if sealed:  # the newest that was ever sealed is there, and it is whole
        newest = there.seals()[-1]
        there.read(newest)
        assert newest.step == max(sealed)
    (resumed, weights), _ = ranks(train_to_the_end, 2, chosen, folder, journal, None)
    assert (resumed or 0) >= max(sealed, default=0)  # or newer: a fast tier may have had more
    assert weights.keys() == whole.keys()
    assert all(torch.equal(weights[name], whole[name]) for name in whole)
    steps = [seal.step for seal in there.seals()]
    assert steps[-1] == STEPS
    assert len(steps) == (2 if resumed == STEPS else 1)  # only a save deletes, and there was none to make
    files = {path.name for path in place.rglob("*") if path.is_file()}
    assert files == {"manifest.json", "progress.json", "rank-0.safetensors", "rank-1.safetensors"}
    left = [path for path in (tmp_path / "fast").rglob("*") if path.is_file()]
    assert len({path.parent for path in left}) <= 1
    assert not [path for path in left if path.name.startswith(".")]
