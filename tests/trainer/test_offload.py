"""What waits in the host's memory changes no bit. Here there is a host only: what moves is copied there and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dropforge.store import open_store
from trainer.config import read_settings
from trainer.data.batch import make_batch
from trainer.gang import Gang
from trainer.model import offload
from trainer.model.build import Built
from trainer.model.loss import loss_model
from trainer.model.offload import ActivationsOnHost
from trainer.model.shard import find_blocks, wrap

from .ranks import Ranks
from .ranks_loop import Outcome, Stage, make_base, make_stage, take_steps, train_in_parts
from .test_compiled import packs_of
from .test_fp16 import same
from .test_model import loss_of, small, tokens
from .toy import Toy, recipe, write_dataset

STEPS = 2


@pytest.mark.parametrize(("kind", "lengths"), [("llama", [[20, 24], [11]]), ("gpt2", [[30], [9]])])
def test_activations_come_back_as_they_were_and_weights_stay(
    monkeypatch: pytest.MonkeyPatch, kind: str, lengths: list[list[int]]
) -> None:
    monkeypatch.setattr(offload, "LEAST", 0)
    model = small(kind)
    loss = loss_model(model, True).train()
    batch = make_batch(tokens([length for row in lengths for length in row]), packs_of(lengths), 0)
    torch.manual_seed(5)  # GPT-2 drops out
    loss_of(loss, batch).backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    host = ActivationsOnHost([loss, *find_blocks(model)])
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    moved: list[int] = []
    back = offload._back

    def noted(kept: tuple[Any, torch.Tensor]) -> torch.Tensor:
        if kept[0] is not None:
            assert kept[1].untyped_storage().data_ptr() not in weights
            moved.append(kept[1].numel())
        return back(kept)

    monkeypatch.setattr(offload, "_back", noted)
    loss.zero_grad()
    torch.manual_seed(5)
    with host.keeping():
        value = loss_of(loss, batch)
    value.backward()
    assert len(moved) > 10
    assert same({name: weight.grad for name, weight in model.named_parameters()}, expected)
    moved.clear()
    monkeypatch.setattr(offload, "LEAST", 1 << 20)  # small ones stay
    with host.keeping():
        value = loss_of(loss, batch)
    value.backward()
    assert not moved


def test_nothing_is_moved_that_was_not_asked_for() -> None:
    model = small("llama")
    settings = read_settings(recipe())
    assert wrap(settings, Gang(), Built(model), loss_model(model, True)).host is None


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, toy_rows: dict[str, Any]) -> dict[str, Stage]:
    folder = tmp_path_factory.mktemp("offload")
    root = str(folder / "bucket")
    toy = Toy(root, write_dataset(open_store(root), toy_rows))
    base = make_base(folder / "base")
    return {
        method: make_stage(
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
                "checkpoint_every": 1,
            },
        )
        for method in ("full", "lora")
    }


def all_moved(gang: Gang, stage: Stage, *rest: Any) -> Outcome:
    offload.LEAST = 0  # the process is this test's own
    return take_steps(gang, stage, *rest)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("method", "mode", "precision", "recompute", "asked", "there"),
    [
        ("lora", "fsdp", "bf16", "full", "all", "activations and states"),
        *(
            pytest.param(*values, marks=pytest.mark.exact)
            for values in (
                ("full", "ddp", "fp32", "none", "activations", "activations"),
                ("full", "ddp", "fp16", "full", "activations", "activations"),
                ("full", "fsdp", "fp32", "none", "states", "states"),
                ("full", "fsdp-no-reshard", "fp16", "selective", "states", "states"),
                ("full", "fsdp-no-reshard", "fp32", "none", "all", "activations and states"),
                ("lora", "hybrid", "fp32", "none", "all", "activations and states"),
            )
        ),
    ],
)
def test_ranks_learn_to_the_bit_what_they_learn_without(
    ranks: Ranks,
    stages: dict[str, Stage],
    method: str,
    mode: str,
    precision: str,
    recompute: str,
    asked: str,
    there: str,
) -> None:
    world, group = (4, 2) if mode == "hybrid" else (2, None)
    stage = stages[method].change(
        parallel=mode, shard_group=group, precision=precision, activation_checkpointing=recompute
    )
    plain: Outcome = ranks(take_steps, world, stage, True, STEPS)[0]
    found: Outcome = ranks(all_moved, world, stage.change(offload=asked), True, STEPS)[0]
    assert (plain.ran["on_the_host"], found.ran["on_the_host"]) == ("none", there)
    assert (found.losses, found.norms, found.evaluated) == (plain.losses, plain.norms, plain.evaluated)
    for left, right in zip(
        (found.gradients, found.weights, found.moments), (plain.gradients, plain.weights, plain.moments), strict=True
    ):
        assert same(left, right)


@pytest.mark.dist
@pytest.mark.exact
def test_a_run_may_begin_on_the_gpu_and_go_on_from_the_host(ranks: Ranks, stages: dict[str, Stage]) -> None:
    stage = stages["full"].change(parallel="fsdp")
    whole = ranks(train_in_parts, 2, stage, "whole", [STEPS])[0]
    ranks(train_in_parts, 2, stage, "parts", [1])
    parts = ranks(train_in_parts, 2, stage.change(offload="states"), "parts", [STEPS])[0]
    assert all(same(left, right) for left, right in zip(whole, parts, strict=True))
