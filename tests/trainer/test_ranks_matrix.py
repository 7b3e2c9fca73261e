"""Each cell of the matrix comes to what one rank does: losses, gradients, weights, samples, order, rates, counters."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dropforge.store import open_store
from trainer.loop.schedule import learning_rate

from .matrix import Cell, cells, cover, pairs, valid, wide_cells
from .ranks import Ranks
from .ranks_course import Course, run_course
from .ranks_loop import Stage, make_base, make_stage
from .test_ranks_parity import apart, apart_together
from .toy import Toy, chat, write_dataset

ALL = cells()
WIDE = wide_cells()
COVER = cover(WIDE)
ROWS = 5  # of a step: no number of ranks here divides it, and the last step has fewer than four ranks want
STOP = 3
STEPS: dict[str, Any] = {  # of a training in a cell
    "tokens_per_step": None,
    "rows_per_step": ROWS,
    "max_steps": None,
    "learning_rate": 2e-3,
    "warmup": 2,
    "clip": 0.5,
    "eval_every": 3,
    "checkpoint_every": 2,
}
# So many training rows make five to eight steps, with both tokenizers; the last step is never a whole one.
TRAIN_ROWS = {("packed", 1.0): 44, ("packed", 2.5): 24, ("padded", 1.0): 28, ("padded", 2.5): 11}
WORDS = ["the", "red", "cat", "sees", "a", "green", "bird", "under", "old", "tree"]


def short_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Chats of which several fit into a row."""
    generator = random.Random(seed)
    found = [[generator.choice(WORDS) for _ in range(generator.randint(1, 9))] for _ in range(count)]
    return [chat(" ".join(words), " ".join(reversed(words))) for words in found]


def test_the_cover_holds_every_pair_that_a_valid_cell_holds() -> None:
    assert len(ALL) == 288
    assert len({replace(cell, epochs=1.0) for cell in ALL}) == 288  # no other factor is left out for the epochs
    plain = [
        cell for cell in WIDE if (cell.optimizer, cell.recompute) == ("adamw", "none") and cell.precision != "fp16"
    ]
    assert set().union(*map(pairs, ALL)) == set().union(*map(pairs, plain))
    assert len(COVER) == len(set(COVER)) < 40
    assert all(map(valid, COVER))
    assert set(ALL) < set(WIDE)
    assert set().union(*map(pairs, COVER)) == set().union(*map(pairs, WIDE))


@pytest.fixture(scope="module")
def stage_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Cell], Stage]:
    folder = tmp_path_factory.mktemp("matrix")
    root = str(folder / "bucket")
    toy = Toy(root, write_dataset(open_store(root), {"train": short_rows(60, 0), "eval": short_rows(9, 1)}))
    base = make_base(folder / "base")
    known: dict[tuple[Any, ...], Stage] = {}

    def find(cell: Cell) -> Stage:
        """What its steps depend on; one rank alone is compared with."""
        key = (cell.method, cell.rows, cell.epochs)
        if cell.optimizer != "adamw" and (*key, cell.optimizer) not in known:
            rate = 5e-2 if cell.optimizer == "sgd" else 2e-3
            made = find(replace(cell, optimizer="adamw")).change(optimizer=cell.optimizer, learning_rate=rate)
            known[*key, cell.optimizer] = made
        if cell.optimizer != "adamw":
            return known[*key, cell.optimizer]
        if key not in known:
            name = "-".join(map(str, key))
            known[key] = make_stage(
                toy,
                name,
                folder / name,
                base={"scratch": {"architecture": "gpt2"}}
                if cell.method == "config"
                else {"model": base, "scratch": None},
                train={
                    "method": "lora" if cell.method == "lora" else "full",
                    "lora": {"r": 3, "alpha": 6, "dropout": 0.0, "targets": ["q_proj", "v_proj"]},
                    "max_rows": TRAIN_ROWS[cell.rows, cell.epochs],
                    "epochs": cell.epochs,
                    **STEPS,
                },
                evaluate={"max_rows": 5},
            )
        return known[key]

    return find


@pytest.fixture(scope="module")
def alone(ranks: Ranks, stage_of: Callable[[Cell], Stage]) -> Callable[[Cell], Course]:
    """What one rank in fp32 with one forward pass a step makes of a cell's rows; computed once."""
    known: dict[Stage, Course] = {}

    def find(cell: Cell) -> Course:
        stage = stage_of(cell)
        if id(stage) not in known:
            [known[id(stage)]] = ranks(
                run_course, 1, stage.change(micro_batch=ROWS), cell.rows == "packed", f"alone-{cell.optimizer}"
            )
        return known[id(stage)]

    return find


@pytest.fixture
def check(ranks: Ranks, stage_of: Callable[[Cell], Stage], alone: Callable[[Cell], Course]) -> Callable[[Cell], None]:
    return lambda cell: check_cell(ranks, stage_of(cell), alone(cell), cell)


@pytest.mark.dist
@pytest.mark.compat
@pytest.mark.parametrize("cell", COVER, ids=str)
def test_a_cell_of_the_matrix(check: Callable[[Cell], None], cell: Cell) -> None:
    check(cell)


@pytest.mark.dist
@pytest.mark.exact
@pytest.mark.parametrize("cell", [cell for cell in ALL if cell not in set(COVER)], ids=str)
def test_the_rest_of_the_matrix(check: Callable[[Cell], None], cell: Cell) -> None:
    check(cell)


def check_cell(ranks: Ranks, stage: Stage, one: Course, cell: Cell) -> None:
    packs = cell.rows == "packed"
    steps = len(one.losses)
    assert steps > STOP + 1
    stage = stage.change(precision=cell.precision, micro_batch=2, activation_checkpointing=cell.recompute)
    here, there = shared(stage, cell.mode), shared(stage, cell.mode)
    world = cell.ranks
    if cell.resume == "other":
        world = {1: 2, 2: 4, 4: 1}[cell.ranks]
        there = shared(stage, {1: "auto", 2: "ddp", 4: "fsdp" if cell.mode == "ddp" else "ddp"}[world])
    folder = str(cell)
    first = begun(ranks, here, one, cell)
    shutil.copytree(f"{stage.spec.root}/{begun_in(cell)}", f"{stage.spec.root}/{folder}")
    if cell.resume == "broken":
        damage(Path(stage.spec.root) / folder / "checkpoints" / f"step-{STOP}" / "rank-0.safetensors")
    # Elsewhere only what begins is probed, whose steps those of the others are compared with.
    probes = cell in COVER
    second: list[Course] = ranks(run_course, world, there, packs, folder, None, probes)
    begin = second[0].resumed
    assert begin == (STOP - 1 if cell.resume == "broken" else STOP)
    assert any(f"step-{STOP} is broken" in line for line in second[0].said) is (cell.resume == "broken")
    expect(second, one, stage, range(begin + 1, steps + 1))
    expect_end(second, one, stage, cell)
    if cell.resume == "broken":  # what is done a second time is the same to the bit
        for again, before in zip(second, first, strict=True):
            for key in ("losses", "norms", "rates", "took"):
                assert getattr(again, key)[STOP] == getattr(before, key)[STOP]
    if cell.resume == "same":  # and a stop and a resume change nothing at all, neither do checkpoints
        whole: list[Course] = ranks(
            run_course, world, here.change(checkpoint_every=100), packs, f"{folder}-whole", None, probes
        )
        for ran, before, after in zip(whole, first, second, strict=True):
            assert (ran.counters, ran.evaluations) == (after.counters, after.evaluations)
            for key in ("losses", "norms", "rates", "took"):
                assert getattr(ran, key) == {**getattr(before, key), **getattr(after, key)}
            for left, right in ((ran.weights, after.weights), (ran.moments, after.moments)):
                assert left.keys() == right.keys()
                assert all(torch.equal(left[name], right[name]) for name in left)


_BEGUN: dict[tuple[Path, str], list[Course]] = {}


def begun(ranks: Ranks, stage: Stage, one: Course, cell: Cell) -> list[Course]:
    """A cell's run up to its stop, which is the same however it is resumed: it is run and looked at once."""
    key = (stage.scratch, begun_in(cell))
    if key not in _BEGUN:
        first: list[Course] = ranks(run_course, cell.ranks, stage, cell.rows == "packed", begun_in(cell), STOP)
        expect(first, one, stage, range(1, STOP + 1))
        _BEGUN[key] = first
    return _BEGUN[key]


def begun_in(cell: Cell) -> str:
    return str(replace(cell, resume="begun"))


def shared(stage: Stage, mode: str) -> Stage:
    return stage.change(parallel=mode, shard_group=2 if mode == "hybrid" else None)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def expect(found: list[Course], one: Course, stage: Stage, numbers: range) -> None:
    """Every step of some is the one rank's: its samples, its rate, its loss and norm."""
    train, leader = stage.settings.train, found[0]
    fine = train.precision == "fp32"
    assert list(leader.losses) == list(numbers)
    for number in numbers:
        took = sorted(row for rank in found for row in rank.took[number])
        assert took == sorted(one.took[number])  # nobody's rows twice, nobody's left out
        assert leader.rates[number] == one.rates[number] == learning_rate(train, number - 1, len(one.losses))
        assert leader.losses[number] == pytest.approx(one.losses[number], rel=1e-5 if fine else 1e-2)
        assert leader.norms[number] == pytest.approx(one.norms[number], rel=1e-4 if fine else 5e-2)
    for rank in found[1:]:
        assert (rank.losses, rank.norms, rank.rates) == (leader.losses, leader.norms, leader.rates)
        assert (rank.counters, rank.evaluations) == (leader.counters, leader.evaluations)
    if numbers[0] == 1:
        distance = apart_together if not fine and (cancels(stage) or has_relu(one)) else apart
        assert distance(leader.gradients, one.gradients) < (1e-5 if fine else 5e-2)
        assert fine or apart(leader.gradients, one.gradients) > 1e-5  # it was bf16


def cancels(stage: Stage) -> bool:
    """A new classifier gives all rows of a step nearly the same state, so that what their labels say nearly cancels.

    Shards in bf16 were seen to be a fifth off in single tensors there, a fortieth in all together.
    """
    return stage.settings.task == "classification" and stage.settings.base.scratch is not None


def has_relu(one: Course) -> bool:
    """A ReLU in bf16 lets through or not by a hair: it moves gradients of a T5's MLPs by a tenth on one rank too.

    Ranks in bf16 were within half a percent of one rank in bf16.
    """
    return any("DenseReluDense" in name for name in one.gradients)


def expect_end(found: list[Course], one: Course, stage: Stage, cell: Cell) -> None:
    leader, fine = found[0], cell.precision == "fp32"
    assert leader.counters == one.counters
    assert leader.counters["passes"] == pytest.approx(cell.epochs, abs=0.1)  # half an epoch is a whole number of rows
    if fine:
        assert apart(leader.weights, one.weights) < 1e-4
    else:
        # AdamW moves a weight by its rate whatever the gradient's size: tensors that began at zero tell nothing
        assert apart_together(leader.weights, one.weights) < (3e-2 if cancels(stage) else 1e-2)
    assert {weight.dtype for weight in leader.weights.values()} == {torch.float32}
    for found_here, found_alone in zip(leader.evaluations, one.evaluations, strict=True):
        for key in ("step", "rows", "target_tokens", "precision"):
            assert found_here[key] == found_alone[key]
        # Before the first step all have the same weights, and evaluations are in fp32 whatever the training is in.
        near = 1e-6 if found_here["step"] == 0 else 1e-5 if fine else 1e-2
        assert found_here["eval/loss"] == pytest.approx(found_alone["eval/loss"], rel=near)
        for key in ("eval/accuracy", "eval/macro_f1"):
            assert found_here["step"] or found_here.get(key) == found_alone.get(key)
