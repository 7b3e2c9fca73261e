"""Any number of ranks and any way to share the model: the same loss, gradients, clipping and weights as one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dropforge.store import open_store
from trainer.gang import Gang

from .ranks import Ranks
from .ranks_loop import Outcome, Stage, Tensors, make_base, make_loop, make_stage, take_steps, train_in_parts
from .toy import Toy, write_dataset

# `make test-slow` runs a part of the matrix of test_ranks_matrix.py instead; these add ranks and more micro-batches.
pytestmark = [pytest.mark.dist, pytest.mark.exact]
STEPS = 3
ROWS = 11  # per step: no number of ranks here divides it, and with 4 ranks one of them has a micro-batch without rows


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, toy_rows: dict[str, Any]) -> dict[str, Stage]:
    folder = tmp_path_factory.mktemp("parity")
    root = str(folder / "bucket")
    toy = Toy(root, write_dataset(open_store(root), toy_rows))
    more = {"train": {"tokens_per_step": 64 * ROWS, "max_steps": STEPS, "warmup": 0.0, "clip": 0.5}}
    lora = {"method": "lora", "lora": {"r": 3, "alpha": 6}}  # no number of ranks divides it; of four, one holds nothing
    return {
        "full": make_stage(toy, "full", folder / "full", **more),
        "lora": make_stage(
            toy,
            "lora",
            folder / "lora",
            base={"model": make_base(folder / "base"), "scratch": None},
            train={**more["train"], **lora, "clip": 0.05},
        ),
    }


@pytest.fixture(scope="module")
def alone(ranks: Ranks, stages: dict[str, Stage]) -> Any:
    """What one rank in fp32 with large micro-batches makes of a stage; computed once."""
    known: dict[tuple[str, bool], Outcome] = {}

    def find(name: str, packs: bool) -> Outcome:
        if (name, packs) not in known:
            [known[name, packs]] = ranks(take_steps, 1, stages[name].change(micro_batch=ROWS), packs, STEPS)
        return known[name, packs]

    return find


# One vector added to all keys shifts a row of scores by one number, which softmax does not see: the gradient of a bias
# of keys is rounding and nothing else, and AdamW makes steps of its rate out of it.
NOTHING = ("k_lin.bias", "k_proj.bias")


def apart(left: Tensors, right: Tensors) -> float:
    """Largest distance of two tensors of a name, relative to the right one's norm; NaN if there is one."""
    assert left.keys() == right.keys()
    distances = [
        (left[name] - right[name]).norm() / (right[name].norm() + 1e-12) for name in right if not name.endswith(NOTHING)
    ]
    return float(torch.stack(distances).max())


def apart_together(left: Tensors, right: Tensors) -> float:
    """The same of all tensors as one, so that each counts by its size."""
    names = [name for name in right if not name.endswith(NOTHING)]
    mine, theirs = (torch.cat([tensors[name].ravel() for name in names]) for tensors in (left, right))
    return apart({"all": mine}, {"all": theirs})


ALL = [
    (method, mode, world, packs, micro)
    for method in ("full", "lora")
    for mode in ("ddp", "fsdp", "fsdp-no-reshard", "hybrid")
    for world in (2, 3, 4)
    for packs in (True, False)
    for turn, micro in enumerate((1, 2, ROWS))
    # of the three micro-batches one in each place, in turn, so that every two values meet
    if (mode != "hybrid" or world == 4) and (world + packs + turn) % 3 == 0
]


@pytest.mark.parametrize(
    ("method", "mode", "world", "packs", "micro"),
    ALL,
)
def test_ranks_learn_what_one_rank_learns(
    ranks: Ranks, stages: dict[str, Stage], alone: Any, method: str, mode: str, world: int, packs: bool, micro: int
) -> None:
    group = 2 if mode == "hybrid" else None
    stage = stages[method].change(parallel=mode, shard_group=group, micro_batch=micro)
    found: list[Outcome] = ranks(take_steps, world, stage, packs, STEPS)
    one, leader = alone(method, packs), found[0]
    assert leader.ran["parallel"] == mode
    assert leader.losses == pytest.approx(one.losses, rel=1e-5)
    assert leader.norms == pytest.approx(one.norms, rel=1e-5)
    assert max(one.norms) > stage.settings.train.clip  # so that clipping does something
    assert leader.evaluated == pytest.approx(one.evaluated, rel=1e-6)
    assert apart(leader.gradients, one.gradients) < 1e-5
    assert apart(leader.weights, one.weights) < 1e-4  # AdamW divides by the size of what it gets, rounding too
    assert apart(leader.moments, one.moments) < 1e-4
    for other in found[1:]:
        assert (other.losses, other.norms, other.evaluated) == (leader.losses, leader.norms, leader.evaluated)
        assert not other.weights


@pytest.mark.parametrize(
    ("method", "mode", "precision"),
    [
        (method, mode, precision)
        for precision in ("bf16", "fp16")
        for method in ("full", "lora")
        for mode in ("ddp", "fsdp", "fsdp-no-reshard")
    ],
)
def test_bf16_and_fp16_stay_close_tensor_by_tensor(
    ranks: Ranks, stages: dict[str, Stage], alone: Any, method: str, mode: str, precision: str
) -> None:
    stage = stages[method].change(parallel=mode, precision=precision)
    leader: Outcome = ranks(take_steps, 2, stage, True, 1)[0]
    one = alone(method, True)
    assert apart(leader.gradients, one.gradients) < 5e-2
    assert apart(leader.gradients, one.gradients) > 1e-5  # it was no fp32
    assert {weight.dtype for weight in leader.weights.values()} == {torch.float32}
    assert leader.losses[0] == pytest.approx(one.losses[0], rel=1e-2)
    assert leader.evaluated == pytest.approx(one.evaluated, rel=1e-6)  # in fp32 all the same
    if mode != "ddp":
        assert leader.ran["arithmetic"] == {"bf16": "bfloat16", "fp16": "float16"}[precision]


def evaluated(gang: Gang, stage: Stage) -> tuple[bool, float]:
    """Whether the shards that are trained are evaluated as they are, and the loss."""
    loop = make_loop(gang, stage, True)
    loop.start()
    found = loop.evaluate("before")
    assert found is not None
    return loop.wrapped.evaluator(stage.settings.eval_precision) is loop.loss, found.loss


@pytest.mark.parametrize(("precision", "exact"), [("bf16", 2e-4), ("fp16", 5e-5)])
def test_shards_are_evaluated_in_shards_where_the_precision_is_the_trainings(
    ranks: Ranks, stages: dict[str, Stage], alone: Any, precision: str, exact: float
) -> None:
    stage = stages["full"].change(parallel="fsdp", precision=precision)
    for apart_too, loss in ranks(evaluated, 2, stage.change(eval_precision=precision)):
        assert apart_too
        assert loss == pytest.approx(alone("full", True).evaluated, rel=exact)
    assert [same for same, _ in ranks(evaluated, 2, stage)] == [False, False]  # in fp32 each rank has the whole


@pytest.mark.parametrize(
    ("mode", "world"),
    [("fsdp", 2), ("ddp", 4), ("fsdp", 4), ("hybrid", 4)],
)
def test_a_resumed_run_of_ranks_is_the_uninterrupted_one_to_the_bit(
    ranks: Ranks, stages: dict[str, Stage], mode: str, world: int
) -> None:
    group = 2 if mode == "hybrid" else None
    stage = stages["full"].change(parallel=mode, shard_group=group, schedule="constant", micro_batch=2)
    name = f"{mode}-{world}"
    whole = ranks(train_in_parts, world, stage, f"{name}-whole", [STEPS])[0]
    parts = ranks(train_in_parts, world, stage, f"{name}-parts", [1, STEPS])[0]
    for left, right in zip(whole, parts, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_another_number_of_ranks_and_another_mode_go_on_where_a_run_stood(
    ranks: Ranks, stages: dict[str, Stage], alone: Any
) -> None:
    stage = stages["full"].change(schedule="constant", micro_batch=2)
    for world, mode, stop in ((2, "fsdp", 1), (4, "ddp", 2), (3, "fsdp-no-reshard", 3)):
        weights, _ = ranks(train_in_parts, world, stage.change(parallel=mode), "moving", [stop])[0]
    [(stayed, _)] = ranks(train_in_parts, 1, stage, "staying", [3])
    assert apart(weights, stayed) < 1e-4
