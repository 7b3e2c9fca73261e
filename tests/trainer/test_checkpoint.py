"""Checkpoints: complete or absent, checked byte for byte, never the last good one deleted."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from dropforge.errors import DropforgeError, RecipeError
from dropforge.run import ExitCode
from dropforge.store import FolderStore
from trainer.gang import Gang
from trainer.loop.optim import first_state
from trainer.rank import ending
from trainer.state.checkpoint import Checkpoints, Snapshot, StorageError
from trainer.state.generators import generators, seed_generators, set_generators
from trainer.state.resume import Restored, restore
from trainer.state.retention import which_go

from .test_shared import Ranks

FILES = ("rank-0.safetensors", "rank-1.safetensors", "progress.json")
ADAMW = partial(first_state, torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
RECIPE = {"train.learning_rate": "0.1", "train.micro_batch": "2"}


def snapshot(step: int) -> Snapshot:
    weights = {"w": torch.full((3, 4), float(step)), "v": torch.arange(5.0)}
    moments = {
        f"{name}:{key}": torch.ones_like(weight) * step
        for name, weight in weights.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    return Snapshot(
        step,
        weights,
        {**moments, "w:step": torch.tensor(float(step)), "v:step": torch.tensor(float(step))},
        [{"torch": torch.get_rng_state()}, {"torch": torch.arange(8, dtype=torch.uint8)}],
        {"step": step, "loss": 0.1 + 0.2},
    )


def newest(checkpoints: Checkpoints) -> Restored | None:
    """What one rank alone resumes from."""
    return restore(checkpoints, Gang(), {"w": torch.zeros(3, 4), "v": torch.zeros(5)}, ADAMW)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def checkpoints(tmp_path: Path, said: list[str]) -> Checkpoints:
    return Checkpoints(FolderStore(tmp_path), "run", "plan", RECIPE, said.append, pause=0.0)


def path(tmp_path: Path, step: int, name: str) -> Path:
    return tmp_path / "checkpoints" / f"step-{step}" / name


def test_what_was_saved_comes_back_to_the_bit(checkpoints: Checkpoints) -> None:
    assert newest(checkpoints) is None
    seal = checkpoints.save(snapshot(4), eval_loss=1.5)
    found = newest(checkpoints)
    assert found is not None
    assert found.seal == seal
    assert (seal.world, seal.eval_loss, seal.step) == (2, 1.5, 4)
    restored = found
    assert restored.progress == snapshot(4).progress
    assert torch.equal(restored.weights["w"], snapshot(4).weights["w"])
    assert torch.equal(restored.moments["w:step"], torch.tensor(4.0))
    assert restored.generators is None  # two ranks wrote it
    assert torch.equal(checkpoints.read(seal).generators[1]["torch"], torch.arange(8, dtype=torch.uint8))


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
    found = newest(checkpoints)
    assert found is not None
    assert found.seal.step == 4
    checkpoints.seals()
    assert len([line for line in said if "step-8" in line]) == 1


def resealed(tmp_path: Path, step: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest as somebody who may write there can: it agrees with itself again."""
    manifest = path(tmp_path, step, "manifest.json")
    values = json.loads(manifest.read_text())
    change(values)
    lines = sorted(f"{name} {facts['sha256']} {facts['bytes']}" for name, facts in values["files"].items())
    values["digest"] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    content = json.dumps({key: value for key, value in values.items() if key != "check"}, sort_keys=True)
    manifest.write_text(json.dumps({**values, "check": hashlib.sha256(content.encode()).hexdigest()}))


@pytest.mark.parametrize(
    ("field", "value"), [("plan", None), ("recipe", [1]), ("eval_loss", "x"), ("eval_loss", [1]), ("tokens", "x")]
)
def test_a_manifest_of_other_types_is_passed_over_by_resume_and_retention(
    checkpoints: Checkpoints, tmp_path: Path, said: list[str], field: str, value: object
) -> None:
    checkpoints.save(snapshot(4))
    checkpoints.save(snapshot(8))
    resealed(tmp_path, 8, lambda values: values.update({field: value}))
    assert newest(checkpoints).seal.step == 4  # type: ignore[union-attr]
    checkpoints.prune(keep=1, step=8, best=1)
    assert any("step-8 is broken" in line and field in line for line in said)


BLOCKS = {"weights/w": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 1 << 42]}}


@pytest.mark.parametrize(
    ("size", "header"),
    [
        (1 << 60, b"{}"),
        ((1 << 64) - 1, b"{}"),
        (200_000, b"[" * 200_000),
        (None, json.dumps({"__metadata__": {"blocks": "[" * 100_000}}).encode()),
        (None, json.dumps({"__metadata__": {"blocks": "{}"}, **BLOCKS}).encode()),
        (None, json.dumps({"__metadata__": {"blocks": '{"weights/w": {"shape": [1e999], "offsets": [-5]}}'}}).encode()),
    ],
)
def test_a_file_that_says_more_than_it_holds_is_passed_over(
    checkpoints: Checkpoints, tmp_path: Path, said: list[str], size: int | None, header: bytes
) -> None:
    checkpoints.save(snapshot(4))
    checkpoints.save(snapshot(8))
    name = "rank-0.safetensors"
    data = (len(header) if size is None else size).to_bytes(8, "little") + header
    path(tmp_path, 8, name).write_bytes(data)
    facts = {"bytes": 1 << 62, "sha256": hashlib.sha256(data).hexdigest()}
    resealed(tmp_path, 8, lambda values: values["files"].update({name: facts}))
    assert newest(checkpoints).seal.step == 4  # type: ignore[union-attr]
    assert any("step-8 is broken" in line for line in said)


@pytest.mark.parametrize("name", ["rank-0.safetensors", "progress.json"])
@pytest.mark.parametrize("sealed", [False, True])
def test_no_more_is_read_of_a_file_than_was_sealed(
    checkpoints: Checkpoints, tmp_path: Path, name: str, sealed: bool
) -> None:
    """A file of a terabyte without a byte in it, which takes no disk, and a seal that says so too."""
    checkpoints.save(snapshot(4))
    checkpoints.save(snapshot(8))
    if sealed:
        facts = {"bytes": 1 << 40, "sha256": "0" * 64}
        resealed(tmp_path, 8, lambda values: values["files"].update({name: facts}))
    if not sealed or name == "progress.json":
        with path(tmp_path, 8, name).open("r+b") as file:
            file.truncate(1 << 40)
    assert newest(checkpoints).seal.step == 4  # type: ignore[union-attr]


def test_a_random_state_of_any_size_is_broken(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.save(replace(snapshot(4), generators=snapshot(4).generators[:1]))
    checkpoints.save(replace(snapshot(8), generators=snapshot(8).generators[:1]))
    file = path(tmp_path, 8, "rank-0.safetensors")
    size = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + size])
    blocks = json.loads(header["__metadata__"]["blocks"])
    [random_state] = [title for title in header if title.startswith("random/")]
    header["__metadata__"]["blocks"] = json.dumps({**blocks, random_state: {"shape": [10**15], "offsets": [0]}})
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written + file.read_bytes()[8 + size :])
    found = newest(checkpoints)
    assert found is not None
    assert found.seal.step == 4


def test_a_broken_one_is_replaced_when_its_step_comes_again(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.save(snapshot(4))
    checkpoints.save(snapshot(8))
    path(tmp_path, 8, "rank-0.safetensors").write_bytes(b"")
    assert newest(checkpoints).seal.step == 4  # type: ignore[union-attr]
    checkpoints.save(snapshot(8))
    assert newest(checkpoints).seal.step == 8  # type: ignore[union-attr]


def test_another_plan_is_refused(checkpoints: Checkpoints) -> None:
    checkpoints.save(snapshot(4))
    with pytest.raises(DropforgeError, match="plan"):
        newest(replace(checkpoints, plan="another"))


def test_another_recipe_is_refused_with_its_differences(checkpoints: Checkpoints) -> None:
    checkpoints.save(snapshot(4))
    other = {**RECIPE, "train.learning_rate": "0.2", "train.micro_batch": "8"}
    with pytest.raises(RecipeError) as refused:
        newest(replace(checkpoints, recipe=other))
    assert str(refused.value).endswith(
        "this run's:\n  train.learning_rate: 0.1 -> 0.2\n  train.micro_batch: 2 -> 8 (may change)"
    )
    assert re.search(r"Free to change are .*compute\.\*", str(refused.value))


def test_harmless_changes_of_the_recipe_go_on_with_a_word(checkpoints: Checkpoints, said: list[str]) -> None:
    checkpoints.save(snapshot(4))
    other = {**RECIPE, "train.micro_batch": "8", "train.keep_best": "3", "compute.nodes": "2"}
    assert newest(replace(checkpoints, recipe=other)) is not None
    assert "train.micro_batch: 2 -> 8" in said[-1]


@pytest.mark.parametrize(
    ("key", "old", "new", "schedule"),
    [
        ("data.mix.chats.jsonl", "1.0", "2.0", "cosine"),
        ("data.mix.wiki", "nothing", "0.5", "cosine"),
        ("train.eval_every", "2", "4", "plateau"),  # the rate follows from the evaluations
    ],
)
def test_a_change_of_what_is_trained_on_or_how_fast_is_refused(
    checkpoints: Checkpoints, key: str, old: str, new: str, schedule: str
) -> None:
    recipe = {**RECIPE, "train.schedule": repr(schedule)}
    replace(checkpoints, recipe={**recipe, key: old} if old != "nothing" else recipe).save(snapshot(4))
    with pytest.raises(RecipeError) as refused:
        newest(replace(checkpoints, recipe={**recipe, key: new}))
    free, _, differs = str(refused.value).partition("What differs")
    assert f"\n  {key}: {old} -> {new}" in differs
    assert "may change" not in differs
    assert key not in free


@pytest.mark.parametrize(
    "key",
    [
        "data.eval_fraction",
        "data.max_left_out",
        "data.max_row_bytes",
        "data.split_salt",
        "data.text_column",
        "data.prompt_template",
    ],
)
def test_rows_are_held_by_the_datasets_digest_and_not_by_how_they_were_read(
    checkpoints: Checkpoints, said: list[str], key: str
) -> None:
    replace(checkpoints, recipe={**RECIPE, key: "1"}).save(snapshot(4))
    assert newest(replace(checkpoints, recipe={**RECIPE, key: "2"})) is not None
    assert f"{key}: 1 -> 2" in said[-1]


def test_how_often_is_evaluated_may_change_where_no_rate_follows_from_it(
    checkpoints: Checkpoints, said: list[str]
) -> None:
    recipe = {**RECIPE, "train.schedule": "'cosine'", "train.eval_every": "2"}
    replace(checkpoints, recipe=recipe).save(snapshot(4))
    assert newest(replace(checkpoints, recipe={**recipe, "train.eval_every": "4"})) is not None
    assert "train.eval_every: 2 -> 4" in said[-1]


def test_a_change_that_led_to_another_plan_is_named(checkpoints: Checkpoints) -> None:
    """Attention that keeps no documents apart pads: the same rows come at other steps."""
    replace(checkpoints, recipe={**RECIPE, "train.attention": "'sdpa'"}).save(snapshot(4))
    with pytest.raises(DropforgeError, match=r"plan.*give back.*train\.attention: 'sdpa' -> 'eager'"):
        newest(replace(checkpoints, plan="another", recipe={**RECIPE, "train.attention": "'eager'"}))


@pytest.mark.parametrize("folder", ["best", "checkpoints/step-4", "model", "plan/abc/train"])
def test_what_killed_writes_left_goes_before_a_new_attempt_writes(
    checkpoints: Checkpoints, tmp_path: Path, folder: str
) -> None:
    checkpoints.save(snapshot(4))
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / ".tmp-abc").write_bytes(b"half")
    checkpoints.sweep()
    assert not list(tmp_path.rglob(".tmp-*"))
    assert newest(checkpoints) is not None


def test_another_layout_is_refused_and_not_taken_for_a_broken_one(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.save(snapshot(4))
    checkpoints.save(snapshot(8))
    manifest = path(tmp_path, 8, "manifest.json")
    manifest.write_text(manifest.read_text().replace('"schema": 2', '"schema": 9'))
    with pytest.raises(DropforgeError, match="layout 9"):
        newest(checkpoints)
    assert [seal.step for seal in checkpoints.seals()] == [4]


@pytest.mark.parametrize("times", [1, 9])
def test_what_cannot_be_reached_is_not_broken(
    checkpoints: Checkpoints, said: list[str], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """A fault that passes costs nothing; one that stays ends the attempt, and no older checkpoint takes its place."""
    checkpoints.save(snapshot(4))
    checkpoints.save(snapshot(8))
    opened, left = FolderStore.open, [times]

    def away(self: FolderStore, key: str, etag: str | None = None) -> Any:
        if "rank-1" in key and left[0] > 0:
            left[0] -= 1
            raise OSError(5, "Input/output error")
        return opened(self, key, etag)

    monkeypatch.setattr(FolderStore, "open", away)
    if times == 1:
        assert newest(checkpoints).seal.step == 8  # type: ignore[union-attr]
    else:
        with pytest.raises(StorageError, match=r"Input/output error.*remove checkpoints/step-8/"):
            newest(checkpoints)
    assert not said


def test_retention_keeps_the_newest(checkpoints: Checkpoints) -> None:
    for step in (4, 8, 12):
        checkpoints.save(snapshot(step))
    assert checkpoints.prune(2, 12) == [4]
    assert [seal.step for seal in checkpoints.seals()] == [8, 12]


def test_retention_never_deletes_the_only_good_one(checkpoints: Checkpoints, tmp_path: Path, said: list[str]) -> None:
    checkpoints.save(snapshot(4))
    checkpoints.save(snapshot(8))
    path(tmp_path, 8, "rank-0.safetensors").write_bytes(b"rot")
    assert checkpoints.prune(1, 8) == []
    assert newest(checkpoints).seal.step == 4  # type: ignore[union-attr]
    # Resumed from 4, saved at 6: the broken 8 must not count as one of the kept.
    checkpoints.save(snapshot(6))
    assert checkpoints.prune(1, 6) == [4]
    assert newest(checkpoints).seal.step == 6  # type: ignore[union-attr]
    assert any("step-8" in line for line in said)


def test_the_best_one_is_never_deleted(checkpoints: Checkpoints) -> None:
    for step, loss in ((4, 2.0), (8, 1.0), (12, 3.0), (16, float("nan")), (20, None)):
        checkpoints.save(snapshot(step), eval_loss=loss)
        checkpoints.prune(1, step, best=1)
    assert [seal.step for seal in checkpoints.seals()] == [8, 20]


@pytest.mark.parametrize(
    ("last", "best", "gone"), [(1, 0, [1, 2, 3]), (2, 1, [2]), (1, 2, [2]), (9, 0, []), (1, 9, []), (3, 1, [])]
)
def test_which_checkpoints_go(last: int, best: int, gone: list[int]) -> None:
    @dataclass
    class One:
        step: int
        eval_loss: float | None

    assert which_go([One(1, 0.5), One(2, 0.9), One(3, 0.7), One(4, 0.8)], last, best) == gone


def test_what_kills_left_behind_goes(checkpoints: Checkpoints, tmp_path: Path, said: list[str]) -> None:
    """Half of a checkpoint, and the hidden file of a write that was cut off."""
    checkpoints.save(snapshot(4))
    half = path(tmp_path, 8, "rank-0.safetensors")
    half.parent.mkdir()
    half.write_bytes(b"half")
    path(tmp_path, 8, ".tmp123").write_bytes(b"a quarter")
    checkpoints.sweep()
    assert sorted(item.name for item in (tmp_path / "checkpoints").iterdir()) == ["step-4"]
    half.parent.mkdir()
    half.write_bytes(b"half")
    checkpoints.save(snapshot(12))
    assert checkpoints.prune(2, 12) == []
    assert not half.parent.exists()


def test_a_save_reads_no_checkpoint_back(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(snapshot(4))
    read: list[str] = []
    opened = FolderStore.open
    monkeypatch.setattr(FolderStore, "open", lambda self, key, etag=None: read.append(key) or opened(self, key, etag))
    monkeypatch.setattr(FolderStore, "list", None)  # it computes the tag of every byte
    checkpoints.save(snapshot(8))
    checkpoints.prune(1, 8)
    checkpoints.seals()
    assert {key.rpartition("/")[2] for key in read} == {"manifest.json"}


def test_a_checkpoint_appears_only_with_its_manifest(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(snapshot(4))
    put = FolderStore.put

    def fail(self: FolderStore, key: str, data: bytes) -> None:
        if "rank-1" in key:
            raise OSError(28, "No space left on device")
        put(self, key, data)

    monkeypatch.setattr(FolderStore, "put", fail)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(snapshot(8))
    assert newest(checkpoints).seal.step == 4  # type: ignore[union-attr]


def test_all_generators_go_on_where_they_were() -> None:
    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(),
            float(np.random.rand()),
            float(np.random.randn()),
            float(torch.rand(1)),
        ]

    seed_generators(2**40 + 3)
    random.gauss(), np.random.randn()  # each keeps a second value for the next call
    states = generators(torch.device("cpu"))
    first = draw()
    draw()
    set_generators(states, torch.device("cpu"))
    assert draw() == first
    seed_generators(2**40 + 3)
    again = draw()
    seed_generators(2**40 + 3)
    assert draw() == again


@pytest.mark.parametrize("fault", [OSError(5, "Input/output error"), RuntimeError("who knows")])
def test_storage_that_cannot_be_looked_at_ends_every_rank_alike(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """Rank 0 tells the others, with an error that can be sent, and the launcher tries again."""
    ranks, told = Ranks(nodes=1, per_node=2), []
    monkeypatch.setattr(Checkpoints, "_listing", Mock(side_effect=fault))

    def choose(rank: int) -> None:
        with pytest.raises(StorageError, match=str(fault.args[-1])) as ended:
            restore(checkpoints, ranks.rank(rank), {}, ADAMW)
        told.append(ending(ended.value))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(choose, range(2)))
    assert [code for code, _ in told] == [ExitCode.HARDWARE] * 2
