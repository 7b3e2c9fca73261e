"""A resume on the same ranks or others: each reads its own part, and all of them agree on whether it is good."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dropforge.store import FolderStore, open_store
from trainer.config import FastCheckpoints
from trainer.data.plan import Pack
from trainer.gang import Gang
from trainer.loop.optim import optimizer_tensors
from trainer.restore import open_checkpoints
from trainer.state.checkpoint import Checkpoints
from trainer.state.stop import PreemptedError

from .ranks import Ranks
from .ranks_loop import Stage, Tensors, copied, make_base, make_loop, make_stage, train_whole
from .toy import Toy, write_dataset

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory, toy_rows: dict[str, Any]) -> Toy:
    root = str(tmp_path_factory.mktemp("resume") / "bucket")
    return Toy(root, write_dataset(open_store(root), toy_rows))


@pytest.fixture(scope="module")
def stages(bucket: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stage]:
    folder = tmp_path_factory.mktemp("stages")
    train = {"max_steps": 8, "checkpoint_every": 2, "keep_checkpoints": 9, "micro_batch": 2}
    base = {"base": {"model": make_base(folder / "base"), "scratch": None}}
    return {
        "full": make_stage(bucket, "full", folder / "full", train=train),
        "lora": make_stage(bucket, "lora", folder / "lora", train={**train, "method": "lora"}, **base),
    }


MODES = {
    "one": (1, {}),
    "ddp": (2, {"parallel": "ddp"}),
    "fsdp": (2, {"parallel": "fsdp"}),
    "fsdp4": (4, {"parallel": "fsdp"}),
    "hybrid": (4, {"parallel": "hybrid", "shard_group": 2}),
}


def begin(gang: Gang, stage: Stage, folder: str, stop: int) -> None:
    loop = make_loop(gang, stage, True, folder)
    loop.resume()
    loop.steps = stop
    loop.start()
    loop.run()


def resumed(gang: Gang, stage: Stage, folder: str) -> tuple[int | None, set[str], Tensors, Tensors, dict[str, Any]]:
    """The step, the files that this rank read, and on the leader what it holds now."""
    loop = make_loop(gang, stage, True, folder)
    read: set[str] = set()
    visit = Checkpoints.visit

    def noting(self: Checkpoints, seal: Any, name: str, *more: Any) -> None:
        read.add(name)
        visit(self, seal, name, *more)

    Checkpoints.visit = noting  # type: ignore[method-assign]
    step = loop.resume()
    named = loop.wrapped.trainable()
    moments = loop.wrapped.full(optimizer_tensors(loop.optimizer, named))
    return step, read, copied(loop.wrapped.full(dict(named))), copied(moments), loop.progress.plain()


@pytest.mark.parametrize(
    ("method", "writes", "reads"),
    [
        ("full", "fsdp", "one"),
        ("full", "hybrid", "hybrid"),
        pytest.param("lora", "ddp", "fsdp", marks=pytest.mark.smoke),
        *(
            pytest.param(method, writes, reads, marks=pytest.mark.exact)
            for method in ("full", "lora")
            for writes in MODES
            for reads in MODES
        ),
    ],
)
def test_each_rank_reads_its_part_of_what_others_wrote(
    ranks: Ranks, stages: dict[str, Stage], tmp_path: Path, method: str, writes: str, reads: str
) -> None:
    stage, folder = stages[method], tmp_path.name
    world, change = MODES[writes]
    ranks(begin, world, stage.change(**change), folder, 2)
    checkpoints = Checkpoints(open_store(f"{stage.spec.root}/{folder}"), "ranks", "", {})
    (seal,) = checkpoints.seals()
    whole = checkpoints.read(seal)
    others, change = MODES[reads]
    found = ranks(resumed, others, stage.change(**change), folder)
    step, _, weights, moments, _ = found[0]
    assert step == 2
    for expected, there in ((whole.weights, weights), (whole.moments, moments)):
        assert expected.keys() == there.keys()
        assert all(torch.equal(there[name], expected[name]) for name in expected)
    assert all(one[4] == whole.progress | {"resumed": [2]} for one in found)
    if writes == reads and reads.startswith("fsdp"):
        assert [one[1] for one in found] == [{f"rank-{rank}.safetensors"} for rank in range(others)]


def resumed_bad(gang: Gang, stage: Stage, folder: str, bad: str, fault: str) -> tuple[int | None, list[str]]:
    """A resume of which a rank reads one file badly."""
    said: list[str] = []
    loop = make_loop(gang, stage, True, folder)
    loop.checkpoints.say = said.append
    loop.checkpoints.pause = 0.0
    opened = FolderStore.open

    def away(self: FolderStore, key: str, etag: str | None = None) -> Any:
        if key.endswith(bad) and gang.rank == 1:
            raise OSError(5, "Input/output error")
        return opened(self, key, etag)

    if fault == "away":
        FolderStore.open = away  # type: ignore[method-assign]
    try:
        return loop.resume(), said
    except Exception as error:
        return None, [f"{type(error).__name__}: {error}"]


@pytest.mark.parametrize("fault", ["flip", "away"])
def test_what_one_rank_cannot_read_is_told_on_all(
    ranks: Ranks, stages: dict[str, Stage], tmp_path: Path, fault: str
) -> None:
    """Broken bytes have all ranks go back; what cannot be read now ends all of them, to be tried again."""
    stage, folder = stages["full"].change(parallel="fsdp"), tmp_path.name
    ranks(begin, 2, stage, folder, 4)
    bad = "step-4/rank-1.safetensors"  # rank 0 has no need of it
    path = Path(stage.spec.root) / folder / "checkpoints" / bad
    if fault == "flip":
        data = bytearray(path.read_bytes())
        data[-9] ^= 4
        path.write_bytes(bytes(data))
    found = ranks(resumed_bad, 2, stage, folder, bad, fault)
    if fault == "flip":
        assert [step for step, _ in found] == [2, 2]
        assert "step-4 is broken (rank 1: " in found[0][1][0]
    else:
        assert all("StorageError: rank 1: " in said[0] for _, said in found)


def course(gang: Gang, stage: Stage, folder: str, stop: int) -> dict[int, tuple[Any, ...]]:
    """For each step the documents of this rank, its rate and its counters."""
    loop = make_loop(gang, stage, True, folder)
    loop.resume()
    mine: list[int] = []
    shares = loop.plan.share

    def noting(*inputs: Any) -> list[list[Pack]]:
        found = shares(*inputs)
        mine[:] = [int(document) for part in found for pack in part for document in pack]
        return found

    loop.plan.share = noting  # type: ignore[method-assign]
    seen: dict[int, tuple[Any, ...]] = {}

    class Watch:
        def after_step(self, result: Any, progress: Any, log: bool) -> None:
            seen[result.step] = ([*mine], result.rate, progress.tokens, progress.targets, result.loss)
            if result.step == stop - 1 and gang.leader:
                loop.stop.since = time.monotonic()

    loop.observers.append(Watch())
    loop.start()
    with suppress(PreemptedError):
        loop.run()
    return seen


def test_another_number_of_ranks_sees_the_same_samples_rates_and_counters(
    ranks: Ranks, stages: dict[str, Stage], tmp_path: Path
) -> None:
    stage = stages["full"]
    alone = ranks(course, 1, stage, f"{tmp_path.name}-alone", 8)[0]
    parts: dict[int, tuple[Any, ...]] = {}
    for stop, world, mode in ((2, 2, "ddp"), (5, 4, "fsdp"), (8, 1, "auto")):
        found = ranks(course, world, stage.change(parallel=mode), tmp_path.name, stop)
        for step, facts in found[0].items():
            documents = [document for one in found for document in one[step][0]]
            parts[step] = (documents, *facts[1:])
    assert list(parts) == list(alone) == list(range(1, 9))
    for step, (documents, rate, tokens, targets, loss) in alone.items():
        other = parts[step]
        assert sorted(other[0]) == sorted(documents)
        assert other[1:4] == (rate, tokens, targets)
        assert other[4] == pytest.approx(loss, rel=1e-4)


def tiered(gang: Gang, stage: Stage, folder: str, fast: Path, nodes: list[int]) -> Any:
    """A loop of ranks on nodes that have a fast folder each. :param nodes: that of each rank."""
    node = nodes[gang.rank]
    gang = replace(gang, local_rank=nodes[: gang.rank].count(node), local_world=nodes.count(node))
    place = fast / f"node-{node}"
    place.mkdir(parents=True, exist_ok=True)
    return make_loop(gang, stage.change(fast_checkpoints=FastCheckpoints(str(place), 1, 1)), True, folder)


def save_in_tiers(gang: Gang, stage: Stage, folder: str, fast: Path, nodes: list[int]) -> list[int]:
    """Step 2 goes to both tiers, step 3 to the fast one alone."""
    loop = tiered(gang, stage, folder, fast, nodes)
    loop.start()
    loop.loss.train()
    for owed in (False, True, False):
        loop._step()
        loop.saving.save(loop.progress.step, owed)
        loop.saving.collect(loop.saving.saver.wait())
        loop.saving.collect(loop.saving.saver.uploads.wait())
    assert (loop.saving.saved, loop.saving.saved_fast) == (2, 3)
    return [seal.step for seal in loop.checkpoints.seals()]


def resume_in_tiers(
    gang: Gang, stage: Stage, folder: str, fast: Path, nodes: list[int]
) -> tuple[int | None, bool, Tensors, list[str]]:
    said: list[str] = []
    loop = tiered(gang, stage, folder, fast, nodes)
    loop.checkpoints.say = loop.fast.checkpoints.say = said.append
    step = loop.resume()
    return step, loop.saving.saved == step, copied(loop.wrapped.full(dict(loop.wrapped.trainable()))), said


@pytest.mark.parametrize(
    "mode", ["ddp", pytest.param("hybrid", marks=pytest.mark.exact), pytest.param("fsdp", marks=pytest.mark.exact)]
)
def test_what_only_the_fast_tiers_of_all_nodes_have_is_resumed_from_if_it_is_whole(
    ranks: Ranks, stages: dict[str, Stage], tmp_path: Path, mode: str
) -> None:
    stage, folder = stages["full"].change(parallel=mode, shard_group=2 if mode == "hybrid" else None), tmp_path.name
    nodes = [0, 0, 1, 1]
    assert ranks(save_in_tiers, 4, stage, folder, tmp_path / "fast", nodes)[0] == [2]

    def attempt(nodes: list[int], lost: int | None = None, stage: Stage = stage) -> Any:
        place = tmp_path / f"fast-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tmp_path / "fast", place)
        if lost is not None:
            shutil.rmtree(place / f"node-{lost}")
        return ranks(resume_in_tiers, len(nodes), stage, folder, place, nodes)[0]

    step, durable, there, said = attempt(nodes)
    assert (step, durable) == (3, False), said
    step, durable, older, said = attempt(nodes, lost=1)
    assert (step, durable) == (2, True)
    assert any("step-3 is not in the fast tier of ranks 2, 3" in line for line in said)
    assert not all(torch.equal(there[name], older[name]) for name in there)
    assert attempt([1, 1, 0, 0])[0] == 2  # each rank's random state is on the other node
    step, _, alone, _ = attempt([1, 1], stage=stage.change(parallel="ddp", shard_group=None))
    if mode == "fsdp":  # one node has half of the state
        assert step == 2
    else:
        assert step == 3
        assert all(torch.equal(there[name], alone[name]) for name in there)


def test_a_run_puts_its_checkpoints_where_the_recipe_says(ranks: Ranks, bucket: Toy, tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    train = {
        "max_steps": 4,
        "checkpoint_every": 3,
        "checkpoints": str(tmp_path / "place"),
        "fast_checkpoints": {"folder": str(tmp_path / "fast"), "every": 1},
    }
    stage = make_stage(bucket, "placed", tmp_path / "scratch", train=train)
    ranks(train_whole, 2, stage)
    there = [f"{tmp_path}/place/placed/checkpoints/step-{step}" for step in (3, 4)]
    report = json.loads(bucket.files("placed").get("report.json"))
    assert [row["uri"] for row in report["checkpoints"]] == there
    assert all((Path(uri) / "manifest.json").exists() for uri in there)
    assert not list(bucket.files("placed").list("checkpoints/"))
    assert not list((tmp_path / "fast").iterdir())  # a run that is done leaves nothing on its nodes
    assert [seal.step for seal in open_checkpoints(stage.spec, print).seals()] == [3, 4]  # the commands look there
