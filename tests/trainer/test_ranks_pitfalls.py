"""Known mistakes of trainers that show on several ranks only. `docs/internals/training-coverage.md` lists them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch.distributed.tensor import DTensor

from dropforge.store import open_store
from trainer.assembly import weights_digest
from trainer.gang import Gang
from trainer.loop.optim import optimizer_tensors

from .ranks import Ranks
from .ranks_loop import Stage, Tensors, copied, make_base, make_loop, make_stage
from .toy import Toy, write_dataset

pytestmark = [pytest.mark.dist, pytest.mark.compat]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, toy_rows: dict[str, Any]) -> dict[str, Stage]:
    folder = tmp_path_factory.mktemp("pitfalls")
    root = str(folder / "bucket")
    toy = Toy(root, write_dataset(open_store(root), toy_rows))
    lora = {"method": "lora", "lora": {"r": 3, "alpha": 6, "dropout": 0.3, "targets": ["q_proj", "v_proj"]}}
    found = {"full": make_stage(toy, "full", folder / "full")}
    for name, tied in (("tied", True), ("untied", False)):
        base = {"model": make_base(folder / f"base-{name}", tie_word_embeddings=tied), "scratch": None}
        found[name] = make_stage(toy, name, folder / name, base=base, train=lora)
    return found


def bad_gradient(gang: Gang, stage: Stage, value: float) -> tuple[list[Tensors], list[Tensors], int, list[float]]:
    """Three steps; in the second one rank's loss is finite and its gradient is not."""
    loop = make_loop(gang, stage, True)
    loop.start()
    loop.loss.train()
    weights, moments = [], []
    losses: list[float] = []
    take = loop.step.take

    def noted(*values: Any) -> Any:
        result = take(*values)
        losses.append(result.own_nats)
        return result

    loop.step.take = noted  # type: ignore[method-assign]
    forward = loop.loss.forward
    for index in range(3):
        if (index, gang.rank) == (1, 1):
            loop.loss.forward = lambda *inputs: Poison.apply(forward(*inputs), value)  # type: ignore[method-assign]
        loop._step()
        loop.loss.forward = forward  # type: ignore[method-assign]
        named = loop.wrapped.trainable()
        weights.append(copied(loop.wrapped.full(dict(named))))
        moments.append(copied(loop.wrapped.full(optimizer_tensors(loop.optimizer, named))))
    return weights, moments, loop.progress.skipped, losses


class Poison(torch.autograd.Function):
    """The loss itself, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.value, None


@pytest.mark.parametrize(
    ("name", "mode", "value"),
    [
        ("full", "ddp", float("inf")),
        ("full", "fsdp", float("nan")),
        ("tied", "ddp", float("nan")),
        ("tied", "fsdp", float("inf")),
    ],
)
def test_a_gradient_that_is_not_finite_on_one_rank_reaches_no_weight(
    ranks: Ranks, stages: dict[str, Stage], name: str, mode: str, value: float
) -> None:
    found = ranks(bad_gradient, 2, stages[name].change(parallel=mode), value)
    (weights, moments, skipped, losses), (_, _, skipped_too, losses_too) = found
    assert skipped == skipped_too == 1
    assert all(torch.tensor([*losses, *losses_too]).isfinite())  # no loss would have told
    for one, two, three in (weights, moments):
        assert all(torch.equal(one[key], two[key]) for key in one)
        assert not all(torch.equal(two[key], three[key]) for key in two)
        assert all(bool(tensor.isfinite().all()) for tensor in three.values())


def adapters_there_and_back(gang: Gang, stage: Stage) -> tuple[bool, int, set[str]]:
    """Fill each rank's shards with values of its own, save, forget, load; whether they are what they were."""
    loop = make_loop(gang, stage, True, "adapters")
    loop.start()
    loop.loss.train()
    loop.step.take(0, 1e-3)
    generator = torch.Generator().manual_seed(100 + gang.rank)
    own = [weight.to_local() if isinstance(weight, DTensor) else weight for _, weight in loop.wrapped.trainable()]
    with torch.no_grad():
        for local in own:
            local.copy_(torch.randn(local.shape, generator=generator))
        before = [local.clone() for local in own]
        loop.progress.step = 1
        loop.saving.begin()
        assert loop.saving.saver.wait().error is None  # type: ignore[union-attr]
        for local in own:
            local.zero_()
    assert loop.resume() == 1
    same = all(torch.equal(left, right) for left, right in zip(own, before, strict=True))
    return same, sum(local.numel() for local in own), names_in_checkpoint(stage, "adapters")


def names_in_checkpoint(stage: Stage, folder: str) -> set[str]:
    found: set[str] = set()
    for path in (Path(stage.spec.root) / folder / "checkpoints" / "step-1").glob("rank-*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            found |= {key for key in file.keys() if not key.startswith("random/")}  # noqa: SIM118 - no mapping
    return found


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_every_ranks_shard_of_the_adapters_is_kept_and_nothing_else(
    ranks: Ranks, stages: dict[str, Stage], name: str
) -> None:
    (same, size, keys), (same_too, size_too, _) = ranks(
        adapters_there_and_back, 2, stages[name].change(parallel="fsdp")
    )
    assert same
    assert same_too
    assert min(size, size_too) > 0
    assert all(".lora_" in key for key in keys)  # no frozen head, tied or not


def begins(gang: Gang, stage: Stage) -> tuple[str, list[float], list[float]]:
    loop = make_loop(gang, stage, True)
    digest = weights_digest(loop.built)
    loop.start()
    loop.loss.train()
    module = next(part for part in loop.built.model.modules() if isinstance(part, torch.nn.Dropout) and part.p)
    dropped = module(torch.ones(64))
    return digest, dropped.tolist(), torch.rand(4).tolist()


def test_ranks_begin_with_one_model_and_drop_out_each_for_itself(ranks: Ranks, stages: dict[str, Stage]) -> None:
    """Adapters too, on one rank and on two; and a second start is the first one again."""
    stage = stages["tied"].change(parallel="ddp")
    [(alone, _, _)] = ranks(begins, 1, stages["tied"])
    first, second = ranks(begins, 2, stage)
    assert first[0] == second[0] == alone
    assert first[1] != second[1]
    assert first[2] != second[2]
    assert ranks(begins, 2, stage) == [first, second]
