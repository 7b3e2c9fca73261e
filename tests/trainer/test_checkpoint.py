"""Checkpoints: complete or absent, checked byte for byte, never the last good one deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dropforge.errors import DropforgeError
from dropforge.store import FolderStore
from trainer.state.checkpoint import Checkpoints, Snapshot

FILES = ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "progress.json")


def snapshot(step: int) -> Snapshot:
    return Snapshot(
        step,
        {"w": torch.full((3, 4), float(step)), "v": torch.arange(5.0)},
        {"w:exp_avg": torch.ones(3, 4) * step, "w:step": torch.tensor(float(step))},
        [{"torch": torch.get_rng_state()}, {"torch": torch.arange(8, dtype=torch.uint8)}],
        {"step": step, "loss": 0.1 + 0.2},
    )


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def checkpoints(tmp_path: Path, said: list[str]) -> Checkpoints:
    return Checkpoints(FolderStore(tmp_path), "run", "plan", "recipe", said.append)


def path(tmp_path: Path, step: int, name: str) -> Path:
    return tmp_path / "checkpoints" / f"step-{step}" / name


def test_what_was_saved_comes_back_to_the_bit(checkpoints: Checkpoints) -> None:
    assert checkpoints.newest() is None
    seal = checkpoints.save(snapshot(4), eval_loss=1.5)
    found = checkpoints.newest()
    assert found is not None
    assert found[0] == seal
    assert (seal.world, seal.eval_loss, seal.step) == (2, 1.5, 4)
    restored = found[1]
    assert restored.progress == snapshot(4).progress
    assert torch.equal(restored.weights["w"], snapshot(4).weights["w"])
    assert torch.equal(restored.moments["w:step"], torch.tensor(4.0))
    assert torch.equal(restored.generators[1]["torch"], torch.arange(8, dtype=torch.uint8))


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "delete"])
def test_a_broken_newest_is_passed_over_with_a_word(
    checkpoints: Checkpoints, tmp_path: Path, said: list[str], name: str, harm: str
) -> None:
    checkpoints.save(snapshot(4))
    checkpoints.save(snapshot(8))
    target = path(tmp_path, 8, name)
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 0x10
    if harm == "flip":
        target.write_bytes(bytes(data))
    elif harm == "truncate":
        target.write_bytes(bytes(data[:-7]))
    else:
        target.unlink()
    found = checkpoints.newest()
    assert found is not None
    assert found[0].step == 4
    checkpoints.seals()
    assert len([line for line in said if "step-8" in line]) == 1


def test_a_broken_one_is_replaced_when_its_step_comes_again(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.save(snapshot(4))
    checkpoints.save(snapshot(8))
    path(tmp_path, 8, "model.safetensors").write_bytes(b"")
    assert checkpoints.newest()[0].step == 4  # type: ignore[index]
    checkpoints.save(snapshot(8))
    assert checkpoints.newest()[0].step == 8  # type: ignore[index]


@pytest.mark.parametrize("other", [{"plan": "another"}, {"recipe": "another"}])
def test_another_plan_or_recipe_is_refused(checkpoints: Checkpoints, other: dict[str, Any]) -> None:
    checkpoints.save(snapshot(4))
    values = {"plan": "plan", "recipe": "recipe", **other}
    with pytest.raises(DropforgeError, match=next(iter(other))):
        Checkpoints(checkpoints.store, "run", **values).newest()


def test_retention_keeps_the_newest(checkpoints: Checkpoints) -> None:
    for step in (4, 8, 12):
        checkpoints.save(snapshot(step))
    assert checkpoints.prune(2, 12) == [4]
    assert [seal.step for seal in checkpoints.seals()] == [8, 12]


def test_retention_never_deletes_the_only_good_one(checkpoints: Checkpoints, tmp_path: Path, said: list[str]) -> None:
    checkpoints.save(snapshot(4))
    checkpoints.save(snapshot(8))
    path(tmp_path, 8, "model.safetensors").write_bytes(b"rot")
    assert checkpoints.prune(1, 8) == []
    assert checkpoints.newest()[0].step == 4  # type: ignore[index]
    # Resumed from 4, saved at 6: the broken 8 must not count as one of the kept.
    checkpoints.save(snapshot(6))
    assert checkpoints.prune(1, 6) == [4]
    assert checkpoints.newest()[0].step == 6  # type: ignore[index]
    assert any("step-8" in line for line in said)


def test_a_checkpoint_appears_only_with_its_manifest(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(snapshot(4))
    put = FolderStore.put

    def fail(self: FolderStore, key: str, data: bytes) -> None:
        if "rng" in key:
            raise OSError(28, "No space left on device")
        put(self, key, data)

    monkeypatch.setattr(FolderStore, "put", fail)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(snapshot(8))
    assert checkpoints.newest()[0].step == 4  # type: ignore[index]
