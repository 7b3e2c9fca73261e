"""What a run takes from its base model and does not train: frozen with a word, and the same on a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from dropforge.errors import RecipeError
from trainer.assembly import frozen_digest
from trainer.gang import Gang
from trainer.loop.optim import load_optimizer, make_optimizer, optimizer_tensors
from trainer.model.build import Built
from trainer.model.loss import LossModel
from trainer.model.unreached import freeze_unreached, reached
from trainer.node.heart import Heart
from trainer.report.console import Console
from trainer.restore import Choice, export
from trainer.state.stop import StopSignal
from trainer.training import FROZEN, train

from .ranks import Ranks, RanksError
from .ranks_loop import Stage, make_base, make_stage
from .test_schedule import train as train_settings
from .toy import Toy


def told(gang: Gang, stage: Stage) -> list[str]:
    """All of a rank's way, and what it said on it."""
    said: list[str] = []
    console = Console(quiet=True)
    console.say = said.append  # type: ignore[method-assign,assignment]
    train(stage.spec, stage.settings, gang, stage.scratch, StopSignal(), console, Heart())
    return said


def seeing_base(folder: Path) -> str:
    """A small model that takes pictures too."""
    make_base(folder)  # for its tokenizer
    text = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": 64,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    tokens = {"image_token_index": 319, "boi_token_index": 318, "eoi_token_index": 317, "mm_tokens_per_image": 4}
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, **tokens)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.dist
def test_a_model_that_sees_pictures_trains_on_text_and_resumes(ranks: Ranks, toy: Toy, tmp_path: Path) -> None:
    """Two ranks, of which DDP would wait for gradients of its eyes; then one, which looks for moments."""
    base = seeing_base(tmp_path / "base")
    before = safetensors.torch.load_file(Path(base) / "model.safetensors")
    stage = make_stage(toy, "seeing", tmp_path / "scratch", base={"model": base, "scratch": None},
                       train={"max_steps": 3, "weight_decay": 0.5})  # fmt: skip
    first = ranks(told, 2, stage)[0]
    assert any("weights are frozen, because the text does not reach them: model.vision_tower" in line for line in first)
    again = ranks(told, 1, stage)[0]
    assert any("step-3" in line for line in checkpoint_files(toy, "seeing"))
    assert not any("skipped" in line for line in again)
    after = safetensors.torch.load_file(Path(toy.root) / "runs/seeing/model/model.safetensors")
    said: list[str] = []
    assert export(stage.spec, Choice(), tmp_path / "exported", said.append)[0].step == 3
    exported = safetensors.torch.load_file(tmp_path / "exported/model.safetensors")
    assert all(torch.equal(after[name], exported[name]) for name in after)
    eyes = [name for name in before if "vision" in name]
    assert eyes
    assert all(torch.equal(before[name], after[name]) for name in eyes)
    assert any(not torch.equal(before[name], after[name]) for name in before if "vision" not in name)


def checkpoint_files(toy: Toy, run: str) -> list[str]:
    return [item.key for item in toy.files(run).list("checkpoints/")]


@pytest.mark.dist
def test_a_resume_is_refused_over_another_base(ranks: Ranks, toy: Toy, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    stage = make_stage(toy, "other", tmp_path / "scratch", base={"model": base, "scratch": None},
                       train={"method": "lora", "max_steps": 2})  # fmt: skip
    ranks(told, 1, stage)
    ranks(told, 1, stage)  # the same one goes on
    file = Path(base) / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-3
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    with pytest.raises(RanksError, match="it is of another recipe") as caught:
        ranks(told, 1, stage)
    assert FROZEN in str(caught.value)
    with pytest.raises(RecipeError, match="not those of the run's base model"):
        export(stage.spec, Choice(), tmp_path / "exported", print)


class Routed(nn.Module):
    """One of two experts at a time, and something nobody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.eyes = nn.Linear(4, 4)


def routed(expert: int) -> tuple[Built, Any]:
    model = Routed()

    class Loss(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return model.experts[expert](torch.ones(4)).sum()  # type: ignore[no-any-return]

    return Built(model), Loss()


class Nothing:
    ids = positions = places = targets = torch.zeros(1)


def test_only_what_no_text_reaches_is_frozen_not_an_expert_that_waits_for_its_turn() -> None:
    built, loss = routed(0)
    assert freeze_unreached(built, loss, Nothing(), 1) == ["eyes.weight", "eyes.bias"]  # type: ignore[arg-type]
    assert [name for name, _ in built.trainable()] == [
        f"experts.{index}.{part}" for index in range(2) for part in ("weight", "bias")
    ]
    built, loss = routed(0)
    with pytest.raises(RecipeError, match=r"experts\.1\.weight gets a gradient from some of the data only"):
        freeze_unreached(built, loss, Nothing(), 2)  # type: ignore[arg-type]
    for weight in built.model.experts.parameters():
        weight.requires_grad_(False)
    built.model.eyes.weight.requires_grad_(True)
    with pytest.raises(RecipeError, match="depends on none of the weights"):
        freeze_unreached(built, loss_of_what_is_frozen(built), Nothing(), 1)  # type: ignore[arg-type]


def loss_of_what_is_frozen(built: Built) -> LossModel:
    class Loss(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return torch.ones((), requires_grad=True) * built.model.experts[0](torch.ones(4)).sum()  # type: ignore[no-any-return]

    return Loss()  # type: ignore[return-value]


def test_what_is_reached_is_what_gets_a_gradient() -> None:
    one, two = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert reached((one * two.detach() + 0 * one).sum()) == {id(one)}
    assert reached(torch.ones(())) == set()
    assert reached(one.sum() + two.sum()) == {id(one), id(two)}


def test_a_weight_without_a_gradient_so_far_has_the_moments_that_it_would_begin_with() -> None:
    model = nn.Linear(3, 2)
    settings = train_settings()
    optimizer = make_optimizer(model, settings)
    named = list(model.named_parameters())
    assert optimizer_tensors(optimizer, named) == {}
    model.weight.sum().backward()
    optimizer.step()
    kept = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, named).items()}
    assert set(kept) == {f"{name}:{key}" for name in ("weight", "bias") for key in ("exp_avg", "exp_avg_sq", "step")}
    copied = nn.Linear(3, 2)
    copied.load_state_dict(model.state_dict())
    other = make_optimizer(copied, settings)
    load_optimizer(other, copied.named_parameters(), kept)
    for one, its in ((model, optimizer), (copied, other)):
        its.zero_grad()
        (one.weight.sum() + 2 * one.bias.sum()).backward()
        its.step()
    assert torch.equal(model.bias, copied.bias)
    assert torch.equal(model.weight, copied.weight)


def test_the_digest_of_frozen_weights_sees_every_bit_of_them_and_nothing_else() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    built = Built(model)
    assert frozen_digest(built) is None
    model[0].weight.requires_grad_(False)
    found = frozen_digest(built)
    with torch.no_grad():
        model[1].weight += 1
        assert frozen_digest(built) == found
        model[0].weight[7, 3] = torch.nextafter(model[0].weight[7, 3], torch.tensor(9.0))
    assert frozen_digest(built) != found
