"""A mixture's router: its loss is the model's own of each row, and a step does not depend on how it is cut."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from dropforge.errors import RecipeError
from dropforge.store import open_store
from trainer.data.batch import Batch, make_batch
from trainer.model import router
from trainer.model.loss import LossModel, choose_way, loss_model
from trainer.model.mixture import coefficient, settle_router
from trainer.model.router import RouterLoss

from .ranks import Ranks
from .ranks_loop import Outcome, Stage, make_base, make_stage, take_steps, train_in_parts, train_whole
from .test_model import loss_of, small, tokens
from .test_ranks_parity import apart
from .toy import Toy, write_dataset

MIXTURES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                  "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "head_dim": 8,
                  "decoder_sparse_step": 1},
}  # fmt: skip
ROWS = [[0, 1], [2], [3, 4]]  # of documents; the second row is far shorter than the widest
DATA = tokens([9, 30, 6, 17, 20])


def mixture(kind: str, **more: Any) -> Any:
    return small(kind, **{**MIXTURES[kind], "output_router_logits": True, "router_aux_loss_coef": 0.5, **more}).eval()


def batch_of(*rows: int) -> Batch:
    return make_batch(DATA, [np.array(ROWS[row]) for row in rows], 0)


def passed(model: Any, way: Any, *batches: Batch) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Text's loss, router's loss and the gradient of both, summed over forward passes."""
    loss = RouterLoss(model, True, way=way)
    model.zero_grad()
    text = router = 0.0
    for batch in batches:
        value = loss_of(loss, batch)
        value.backward()
        assert loss.router is not None
        text, router = text + float(loss.told(value)), router + float(loss.router)
        assert float(value.detach()) == pytest.approx(float(loss.told(value)) + 0.5 * float(loss.router), rel=1e-6)
    return text, router, {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.compat
@pytest.mark.parametrize("kind", MIXTURES)
def test_no_cut_of_a_step_changes_the_routers_loss(kind: str) -> None:
    model = mixture(kind)
    whole, first = batch_of(0, 1, 2), batch_of(0)
    one = passed(model, "places", whole)
    assert one[1] > 0.0
    for way in ("places", "own", "fused"):
        for cut in ((whole,), (first, batch_of(1, 2)), tuple(batch_of(row) for row in range(3)), (whole, make_empty())):
            other = passed(model, way, *cut)
            assert other[:2] == pytest.approx(one[:2], rel=1e-5)
            for name, gradient in one[2].items():
                assert (other[2][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


def make_empty() -> Batch:
    """What a rank without rows runs."""
    return make_batch(DATA, [], 0)


@pytest.mark.compat
@pytest.mark.parametrize("kind", MIXTURES)
def test_of_one_row_it_is_what_the_model_itself_makes_of_it(kind: str) -> None:
    model, batch = mixture(kind), batch_of(0)
    loss = loss_model(model, True, False)
    assert isinstance(loss, RouterLoss)
    assert choose_way(loss, batch) == "fused"
    end = int(batch.places.max()) + 2
    labels = torch.full_like(batch.ids, -100)
    labels.view(-1)[batch.places + 1] = batch.targets
    own = model(
        input_ids=batch.ids[:, :end], position_ids=batch.positions[:, :end], labels=labels[:, :end], use_cache=False
    )
    theirs = float(own.loss.detach()) * len(batch.targets)
    assert float(loss_of(loss, batch).detach()) == pytest.approx(theirs, rel=1e-5)
    assert loss.router is not None
    assert float(loss.router) == pytest.approx(float(own.aux_loss) * len(batch.targets), rel=1e-5)
    with torch.no_grad():  # logits, and so evaluations, know nothing of it
        plain = LossModel(model, True, way=loss.way)
        places = (batch.ids, batch.positions, batch.places)
        assert torch.equal(loss.logits(*places), plain.logits(*places))
    assert model.router_aux_loss_coef == 0.5


@pytest.mark.compat
def test_the_recipes_coefficient_goes_before_the_configs_and_travels_with_the_model() -> None:
    model = mixture("mixtral", output_router_logits=False)
    settle_router(model, None)
    assert coefficient(model.config) == 0.0
    assert type(loss_model(model, True, False)) is LossModel
    settle_router(model, 0.25)
    assert (coefficient(model.config), model.router_aux_loss_coef) == (0.25, 0.25)
    choose_way(loss_model(model, True, False), batch_of(0, 1))
    settle_router(model, 0.0)
    assert not model.config.output_router_logits
    settle_router(small("llama"), 0.0)
    settle_router(small("llama"), None)
    with pytest.raises(RecipeError, match=r"train\.router_loss`: it asks for a router's loss, and LlamaForCausalLM"):
        settle_router(small("llama"), 0.1)
    other = small("llama4_text", output_router_logits=True)
    with pytest.raises(RecipeError, match=r"the base model's config turns on a router's loss.*Set it to 0"):
        settle_router(other, None)
    settle_router(other, 0.0)


def test_a_model_whose_own_loss_is_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixture("mixtral")
    monkeypatch.setattr(router, "balance_rows", lambda *_: torch.tensor(3.0))
    with pytest.raises(RecipeError, match=r"router_loss`: the router's loss of MixtralForCausalLM cannot be taken of"):
        choose_way(loss_model(model, True, False), batch_of(0))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, toy_rows: dict[str, Any]) -> Stage:
    folder = tmp_path_factory.mktemp("mixture")
    root = str(folder / "bucket")
    toy = Toy(root, write_dataset(open_store(root), toy_rows))
    base = make_base(folder / "base", kind="mixtral", **MIXTURES["mixtral"])
    train = {"tokens_per_step": 64 * 5, "max_steps": 3, "warmup": 0.0, "router_loss": 0.3, "schedule": "constant"}
    return make_stage(toy, "mixture", folder / "scratch", base={"model": base, "scratch": None}, train=train)


# Each number of ranks and each mode; five rows leave one of four ranks without a row in its second micro-batch.
CUTS = [("fsdp", 2, True, 2), ("ddp", 4, False, 1)]
MORE = [("fsdp-no-reshard", 2, False, 1), ("hybrid", 4, True, 2), ("fsdp", 4, False, 5), ("ddp", 2, True, 5)]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("mode", "world", "packs", "micro"), [*CUTS, *(pytest.param(*cut, marks=pytest.mark.exact) for cut in MORE)]
)
def test_ranks_learn_with_a_router_what_one_rank_learns(
    ranks: Ranks, stage: Stage, mode: str, world: int, packs: bool, micro: int
) -> None:
    [one] = ranks(take_steps, 1, stage.change(micro_batch=5), packs, 2)
    [plain] = ranks(take_steps, 1, stage.change(micro_batch=5, router_loss=0.0), packs, 1)
    group = 2 if mode == "hybrid" else None
    shared = stage.change(parallel=mode, shard_group=group, micro_batch=micro, activation_checkpointing="full")
    leader: Outcome = ranks(take_steps, world, shared, packs, 2)[0]
    assert leader.losses == pytest.approx(one.losses, rel=1e-5)
    assert leader.evaluated == pytest.approx(one.evaluated, rel=1e-6)
    assert apart(leader.gradients, one.gradients) < 1e-5
    assert apart(leader.weights, one.weights) < 1e-4
    assert plain.losses[0] == pytest.approx(one.losses[0], rel=1e-6)  # the text's alone
    assert plain.evaluated == one.evaluated
    assert apart(plain.gradients, one.gradients) > 1e-3  # it does something


@pytest.mark.dist
@pytest.mark.exact
def test_a_resumed_mixture_is_the_uninterrupted_one_to_the_bit(ranks: Ranks, stage: Stage) -> None:
    shared = stage.change(parallel="fsdp", micro_batch=2)
    whole = ranks(train_in_parts, 2, shared, "whole", [3])[0]
    parts = ranks(train_in_parts, 2, shared, "parts", [1, 3])[0]
    for left, right in zip(whole, parts, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.dist
def test_a_run_tells_both_losses_apart_and_its_model_asks_for_both(ranks: Ranks, stage: Stage) -> None:
    ranks(train_whole, 1, stage.change(log_every=1))
    files = open_store(stage.spec.root)
    assert json.loads(files.get("model/config.json"))["router_aux_loss_coef"] == 0.3
    assert json.loads(files.get("model/config.json"))["output_router_logits"] is True
    report = json.loads(files.get("report.json"))
    assert report["train"]["loss_first"] == pytest.approx(report["eval"]["before"]["eval/loss"], rel=0.1)
