"""Each method on any number of ranks and in any way to share the model: what one rank learns, and an exact resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from dropforge.store import open_store
from trainer.gang import Gang
from trainer.loop.optim import optimizer_tensors
from trainer.model.quantised import Nf4Linear

from .ranks import Ranks
from .ranks_loop import Outcome, Stage, copied, make_base, make_loop, make_stage, take_steps, train_in_parts
from .test_ranks_parity import apart
from .toy import Toy, write_dataset

pytestmark = pytest.mark.dist
STEPS = 3
ROWS = 5  # of a step: no number of ranks here divides it
MODES = {"ddp": 2, "fsdp": 2, "fsdp-no-reshard": 4, "hybrid": 4}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dora": ({}, {"method": "dora", "lora": {"r": 3, "alpha": 6}}),
    "qlora": ({}, {"method": "qlora", "lora": {"r": 3, "alpha": 6}}),
    "8bit": ({}, {"optimizer": "adamw-8bit"}),
    "dora-tokens": ({"new_tokens": ["likes", "river"]}, {"method": "dora", "lora": {"r": 3, "alpha": 6}}),
    "full-tokens": ({"new_tokens": ["likes", "river"]}, {}),
    "prefix": (
        {},
        {"method": "prefix", "prefix": {"tokens": 3}, "sequence_length": 48, "learning_rate": 1e-2},
    ),
    "freeze": ({}, {"freeze": {"blocks": 2, "embeddings": False}}),
    "freeze-embeddings": ({}, {"freeze": {"blocks": 1, "embeddings": True}}),
}


@pytest.fixture(scope="module")
def stage_of(tmp_path_factory: pytest.TempPathFactory, toy_rows: dict[str, Any]) -> Any:
    folder = tmp_path_factory.mktemp("methods")
    root = str(folder / "bucket")
    toy = Toy(root, write_dataset(open_store(root), toy_rows))
    model = make_base(folder / "base", tie_word_embeddings=False, vocab_size=293)
    known: dict[str, Stage] = {}

    def find(method: str) -> Stage:
        if method not in known:
            base, train = METHODS[method]
            given = {"tokens_per_step": None, "rows_per_step": ROWS, "max_steps": STEPS, "warmup": 0.0, "clip": 0.5}
            known[method] = make_stage(
                toy,
                method,
                folder / method,
                base={"model": model, "scratch": None, **base},
                train={**given, "weight_decay": 0.5, **train},
            )
        return known[method]

    return find


@pytest.fixture(scope="module")
def alone(ranks: Ranks, stage_of: Any) -> Any:
    """What one rank in fp32 with one forward pass a step makes of a method; computed once."""
    known: dict[tuple[str, bool], Outcome] = {}

    def find(method: str, packs: bool) -> Outcome:
        if (method, packs) not in known:
            [known[method, packs]] = ranks(take_steps, 1, stage_of(method).change(micro_batch=ROWS), packs, STEPS)
        return known[method, packs]

    return find


ALWAYS = [
    ("dora-tokens", "fsdp", True, "fp32"),
    ("qlora", "fsdp", True, "bf16"),
    ("prefix", "fsdp", False, "bf16"),
    ("freeze", "fsdp", False, "fp32"),
    ("freeze-embeddings", "ddp", True, "fp32"),
]


@pytest.mark.parametrize(
    ("method", "mode", "packs", "precision"),
    [
        *ALWAYS,
        *(
            pytest.param(*cell, marks=pytest.mark.exact)
            for cell in (
                (method, mode, packs and method != "prefix", precision)  # each document has its own prefix
                for row, method in enumerate(METHODS)
                for column, mode in enumerate(MODES)
                # packed in one precision and padded in the other, in turn: every two values meet
                for packs, precision in zip(
                    ((row + column) % 2 == 0, (row + column) % 2 == 1), ("fp32", "bf16"), strict=True
                )
            )
            if cell not in ALWAYS
        ),
    ],
)
def test_ranks_learn_by_each_method_what_one_rank_learns(
    ranks: Ranks, stage_of: Any, alone: Any, method: str, mode: str, packs: bool, precision: str
) -> None:
    world, group = MODES[mode], 2 if mode == "hybrid" else None
    stage = stage_of(method).change(parallel=mode, shard_group=group, micro_batch=2, precision=precision)
    leader: Outcome = ranks(take_steps, world, stage, packs, STEPS)[0]
    one = alone(method, packs)
    exact = precision == "fp32"
    assert leader.ran["parallel"] == mode
    rounded = method == "8bit"  # what differs in the last bit of fp32 may be rounded to the next of 256 steps
    assert leader.losses == pytest.approx(one.losses, rel=(1e-4 if rounded else 1e-5) if exact else 1e-2)
    assert leader.evaluated == pytest.approx(one.evaluated, rel=1e-6)
    assert apart(leader.gradients, one.gradients) < (1e-5 if exact else 5e-2)
    assert {weight.dtype for weight in leader.weights.values()} == {torch.float32}
    if exact:
        assert leader.norms == pytest.approx(one.norms, rel=1e-3 if rounded else 1e-5)
        # AdamW divides by the size of what it gets, rounding too.
        assert apart(leader.weights, one.weights) < (1e-3 if rounded else 1e-4)


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        ("dora-tokens", "fsdp"),
        *(
            pytest.param(method, mode, marks=pytest.mark.exact)
            for row, method in enumerate(METHODS)
            for column, mode in enumerate(MODES)
            if (row + column) % 2 == 0 and (method, mode) != ("dora-tokens", "fsdp")
        ),
    ],
)
def test_a_resume_by_each_method_is_exact_to_the_bit(ranks: Ranks, stage_of: Any, method: str, mode: str) -> None:
    world, group = MODES[mode], 2 if mode == "hybrid" else None
    stage = stage_of(method).change(parallel=mode, shard_group=group, schedule="constant", micro_batch=2)
    name = f"{method}-{mode}"
    packs = method != "prefix"
    whole = ranks(train_in_parts, world, stage, f"{name}-whole", [STEPS], packs)[0]
    parts = ranks(train_in_parts, world, stage, f"{name}-parts", [1, STEPS], packs)[0]
    for left, right in zip(whole, parts, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


def shares(gang: Gang, stage: Stage) -> tuple[int, int]:
    """Bytes in 4 bits of the whole model, and those that this rank holds of them."""
    loop = make_loop(gang, stage, True)
    packed = [part.weight for part in loop.built.model.modules() if isinstance(part, Nf4Linear)]
    assert all(isinstance(weight, DTensor) for weight in packed)
    return sum(weight.numel() for weight in packed), sum(weight.to_local().numel() for weight in packed)


@pytest.mark.exact
def test_each_rank_holds_its_share_of_a_base_in_four_bits(ranks: Ranks, stage_of: Any) -> None:
    found = ranks(shares, 2, stage_of("qlora").change(parallel="fsdp"))
    assert found[0][0] == found[1][0] > 10_000
    assert sum(own for _, own in found) == found[0][0]
    assert max(own for _, own in found) < 0.51 * found[0][0]


def read(gang: Gang, stage: Stage, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a resume has read: weights and moments, whole."""
    loop = make_loop(gang, stage, True, folder)
    loop.resume()
    named = loop.wrapped.trainable()
    moments = loop.wrapped.full(optimizer_tensors(loop.optimizer, named))
    return copied(loop.wrapped.full(dict(named))), copied(moments)


@pytest.mark.parametrize(
    ("method", "world", "mode"),
    [
        ("8bit", 1, "auto"),
        pytest.param("8bit", 4, "hybrid", marks=pytest.mark.exact),
        pytest.param("8bit", 3, "fsdp", marks=pytest.mark.exact),
        pytest.param("qlora", 3, "fsdp", marks=pytest.mark.exact),
    ],
)
def test_what_is_quantised_is_read_by_other_ranks_in_another_mode(
    ranks: Ranks, stage_of: Any, method: str, world: int, mode: str
) -> None:
    """Moments in 8 bits, and their scales, to the bit by ranks that cut them elsewhere."""
    stage = stage_of(method).change(schedule="constant", micro_batch=2)
    name = f"{method}-{mode}-{world}"
    wrote = ranks(train_in_parts, 2, stage.change(parallel="fsdp"), name, [1])[0]
    group = 2 if mode == "hybrid" else None
    found = ranks(read, world, stage.change(parallel=mode, shard_group=group), name)[0]
    for left, right in zip(found, wrote, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
    kinds = {tensor.dtype for tensor in found[1].values()}
    assert kinds == ({torch.uint8, torch.float32} if method == "8bit" else {torch.float32})
