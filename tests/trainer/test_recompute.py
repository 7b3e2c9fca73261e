"""Activation checkpointing takes less memory, and changes no bit of anything else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from transformers import AutoConfig

from dropforge.errors import RecipeError
from dropforge.store import open_store
from trainer.__main__ import main
from trainer.config import Lora, read_settings
from trainer.data.batch import make_batch
from trainer.gang import Gang
from trainer.model.adapters import add_adapters
from trainer.model.build import Built
from trainer.model.fit import check_fit
from trainer.model.loss import loss_model
from trainer.model.recompute import everything_kept, policy, recompute
from trainer.model.shard import find_blocks, wrap
from trainer.rank import run
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .ranks import Ranks
from .ranks_loop import Stage, make_base, make_stage, take_steps
from .test_loop import bench, trained, weights  # noqa: F401 - a fixture
from .test_model import loss_of, small, tokens
from .toy import Toy, recipe, write_dataset

MODES = ("selective", "full")
STEPS = 2
Tensors = dict[str, torch.Tensor]


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def gradients(mode: str, kind: str, lora: bool, bf16: bool, way: Any, **more: Any) -> tuple[float, Tensors, float]:
    """Loss, gradients, and the random number that comes next, of a model with dropout."""
    model = small(kind, num_hidden_layers=3, **more)
    built = add_adapters(model, Lora(4, 8, 0.2, "all-linear"), 1) if lora else Built(model)
    if mode != "none":
        recompute(find_blocks(built.model), mode)  # type: ignore[arg-type]
    loss = loss_model(built.model, True, bf16).train()
    loss.way = way
    torch.manual_seed(5)
    value = loss_of(loss, make_batch(tokens([20, 24, 11]), [np.array([0, 1]), np.array([2])], 0))
    value.backward()
    found = {name: weight.grad for name, weight in built.trainable() if weight.grad is not None}
    assert len(found) == len(built.trainable())
    return float(value.detach()), found, float(torch.rand(()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "lora", "bf16", "way", "more"),
    [
        ("llama", False, False, "fused", {"attention_dropout": 0.2}),
        ("llama", True, True, "places", {"attention_dropout": 0.2, "attn_implementation": "eager"}),
        ("gpt2", False, True, "own", {"resid_pdrop": 0.2}),
        ("gemma2", False, False, "own", {}),
        ("mamba", False, False, "own", {}),
    ],
)
def test_gradients_and_what_dropout_draws_are_those_without_it_to_the_bit(
    mode: str, kind: str, lora: bool, bf16: bool, way: Any, more: dict[str, Any]
) -> None:
    kept, again = (gradients(each, kind, lora, bf16, way, **more) for each in ("none", mode))
    assert (kept[0], kept[2]) == (again[0], again[2])
    assert any(gradient.any() for gradient in kept[1].values())
    assert same(kept[1], again[1])


def test_a_block_does_its_work_twice_where_gradients_are_taken_and_once_elsewhere() -> None:
    model = small("llama")
    passes: list[int] = []
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(lambda *_: passes.append(1))
    recompute(find_blocks(model), "full")
    loss = loss_model(model, True, False).eval()
    batch = make_batch(tokens([20]), [np.array([0])], 0)

    def count() -> int:
        passes.clear()
        value = loss_of(loss, batch)
        if value.requires_grad:
            value.backward()
        return len(passes)

    assert count() == 4
    with everything_kept(loss):
        assert count() == 2
    assert count() == 4
    with torch.no_grad():
        assert count() == 2


def test_products_with_weights_are_kept_and_scores_and_what_drops_out_are_not() -> None:
    aten = torch.ops.aten
    fused = aten._scaled_dot_product_flash_attention.default
    efficient = aten._scaled_dot_product_efficient_attention.default
    keeps = CheckpointPolicy.MUST_SAVE
    assert policy(None, aten.mm.default) is policy(None, aten.addmm.default) is keeps
    assert policy(None, fused, 1, 2, 3) is policy(None, fused, 1, 2, 3, 0.0) is keeps
    assert policy(None, efficient, 1, 2, 3, None, True) is keeps
    # What is kept draws no random number the second time, so all that are drawn after it would be others.
    for again in (policy(None, fused, 1, 2, 3, 0.1), policy(None, fused, 1, 2, 3, dropout_p=0.1),
                  policy(None, efficient, 1, 2, 3, None, True, 0.1),
                  policy(None, aten.bmm.default), policy(None, aten.silu.default)):  # fmt: skip
        assert again is CheckpointPolicy.PREFER_RECOMPUTE


def needed(gang: Gang, mode: str) -> int:
    """Bytes that a row of 512 tokens takes in eight blocks, as a training finds out before its first step."""
    model = small("llama", num_hidden_layers=8, hidden_size=128, intermediate_size=352, max_position_embeddings=512)
    settings = read_settings(recipe(train={"activation_checkpointing": mode}))
    built = Built(model)
    wrapped = wrap(settings, gang, built, loss_model(model, True, False).train())
    found = check_fit(gang, wrapped, tokens([512]), rows=1, tokens=512, share=0.1, extra=0)
    assert found is not None
    return found.need


def test_less_memory_is_needed(ranks: Ranks) -> None:
    none, selective, full = (ranks(needed, 1, mode)[0] for mode in ("none", *MODES))
    # Of resident memory, which has holes: seen were 0.34 and 0.72.
    assert full < 0.5 * none
    assert full < selective < 0.85 * none


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, toy_rows: dict[str, Any]) -> dict[str, Stage]:
    """Three blocks with dropout, all weights and adapters."""
    folder = tmp_path_factory.mktemp("recompute")
    root = str(folder / "bucket")
    toy = Toy(root, write_dataset(open_store(root), toy_rows))
    base = make_base(folder / "base", attention_dropout=0.1)
    made = {}
    for method in ("full", "lora"):
        made[method] = make_stage(
            toy,
            method,
            folder / method,
            base={"model": base, "scratch": None},
            train={
                "method": method,
                "lora": {"r": 3, "alpha": 6, "dropout": 0.1},
                "tokens_per_step": 64 * 5,
                "max_steps": STEPS,
                "schedule": "constant",
            },
        )
    return made


@pytest.mark.dist
@pytest.mark.parametrize(
    ("method", "parallel", "world", "precision", "mode"),
    [
        ("lora", "ddp", 2, "bf16", "full"),
        ("lora", "fsdp", 2, "fp32", "selective"),
        *(
            pytest.param(*values, marks=pytest.mark.exact)
            for values in (
                ("full", "auto", 1, "fp32", "full"),
                ("full", "ddp", 2, "fp32", "selective"),
                ("full", "fsdp", 2, "bf16", "full"),
                ("full", "fsdp-no-reshard", 2, "bf16", "full"),
                ("lora", "fsdp-no-reshard", 2, "bf16", "selective"),
                ("full", "hybrid", 4, "bf16", "selective"),
                ("lora", "hybrid", 4, "fp32", "full"),
            )
        ),
    ],
)
def test_steps_of_ranks_are_those_without_it_to_the_bit(
    ranks: Ranks, stages: dict[str, Stage], method: str, parallel: str, world: int, precision: str, mode: str
) -> None:
    group = 2 if parallel == "hybrid" else None
    stage = stages[method].change(parallel=parallel, shard_group=group, precision=precision)
    kept, again = (
        ranks(take_steps, world, stage.change(activation_checkpointing=each), parallel != "ddp", STEPS)[0]
        for each in ("none", mode)
    )
    assert (kept.losses, kept.norms, kept.evaluated) == (again.losses, again.norms, again.evaluated)
    assert same(kept.gradients, again.gradients)
    assert same(kept.weights, again.weights)
    assert [one.ran["activation_checkpointing"] for one in (kept, again)] == ["none", f"{mode}, 3 blocks"]


def test_a_run_may_begin_without_it_and_go_on_with_it(bench: Any) -> None:  # noqa: F811
    one = bench(train={"max_steps": 4, "checkpoint_every": 2})
    again = replace(one.settings, train=replace(one.settings.train, activation_checkpointing="full"))
    whole = trained(one.loop(folder="whole", dropout=0.1))
    first = one.loop(folder="parts", dropout=0.1)
    first.steps = 2
    trained(first)
    second = one.loop(again, folder="parts", dropout=0.1)
    assert second.resume() == 2
    trained(second)
    assert same(weights(whole), weights(second))


def test_a_block_that_does_not_do_the_same_again_is_refused(bench: Any) -> None:  # noqa: F811
    one = bench(train={"activation_checkpointing": "full"})
    loop = one.loop()
    loop.start()
    layer, own = loop.built.model.model.layers[1], torch.Generator().manual_seed(1)
    through = layer.mlp.forward
    layer.mlp.forward = lambda states: through(states) * (1 + 0.2 * torch.rand((), generator=own))
    with pytest.raises(RecipeError, match=r"activation_checkpointing.*do not compute the same a second time \(grad"):
        loop.start()
    seen: list[int] = []
    layer.mlp.forward = lambda states: through(states * 1.0 if seen.append(1) or len(seen) % 2 else states)
    with pytest.raises(RecipeError, match="do not compute the same a second time"):
        loop.start()


def test_a_model_without_blocks_is_refused() -> None:
    settings = read_settings(recipe(train={"activation_checkpointing": "full"}))
    model: Any = nn.Linear(2, 2)
    model.config = AutoConfig.for_model("llama")
    with pytest.raises(RecipeError, match=r"activation_checkpointing.*Linear has no blocks.*Use `none`"):
        wrap(settings, Gang(), Built(model), loss_model(model, False, False))


def test_plan_and_report_say_what_is_not_kept(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    uri = toy.run(train={"activation_checkpointing": "selective", "max_steps": 2})
    assert main(["plan", uri.removesuffix("/run.json")]) == 0
    assert "full, fp32, activation checkpointing: selective" in capsys.readouterr().out
    run(uri, StopSignal(), Console(quiet=True))
    report = json.loads(toy.files().get("report.json"))
    assert report["distribution"]["activation_checkpointing"] == "selective, 2 blocks"
