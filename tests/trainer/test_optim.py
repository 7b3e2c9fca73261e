"""Each optimizer keeps what it says, learns what it should, and goes on after a resume as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer.config import read_settings
from trainer.loop import compact, eightbit
from trainer.loop.compact import CompactAdamW
from trainer.loop.eightbit import EightBitAdamW
from trainer.loop.optim import BETAS, first_state, make_optimizer, optimizer_tensors, state_bytes
from trainer.state.compare import changes, facts

from .test_loop import bench, trained, weights  # noqa: F401 - a fixture
from .test_model import small
from .toy import recipe

OPTIMIZERS = ("adamw", "adamw-bf16", "adamw-8bit", "sgd")


def make(model: nn.Module, **train: Any) -> torch.optim.Optimizer:
    return make_optimizer(model, read_settings(recipe(train=train)).train)


def noise(steps: int, *shape: int) -> list[torch.Tensor]:
    """Gradients around a slowly turning mean, as those of a training are."""
    generator = torch.Generator().manual_seed(3)
    mean = torch.randn(shape, generator=generator)
    return [mean * (0.97**step) + torch.randn(shape, generator=generator) for step in range(steps)]


def after(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradients: list[torch.Tensor]) -> torch.Tensor:
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach().clone()


def group(weight: nn.Parameter) -> list[dict[str, Any]]:
    return [{"params": [weight], "weight_decay": 0.1}]


def test_the_default_is_torchs_fused_adamw() -> None:
    optimizer = make(small("llama"))
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"]
    assert optimizer.defaults["betas"] == BETAS


def test_moments_in_bf16_lead_where_those_in_fp32_lead() -> None:
    gradients, start = noise(100, 40, 30), torch.randn(40, 30)
    one, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    wide = after(torch.optim.AdamW(group(one), lr=1e-2, betas=BETAS, fused=True), one, gradients)
    optimizer = CompactAdamW(group(other), lr=1e-2, betas=BETAS)
    narrow = after(optimizer, other, gradients)
    assert {str(value.dtype) for value in optimizer.state[other].values()} == {"torch.bfloat16", "torch.float32"}
    distance = (wide - start).norm()
    assert 0 < (narrow - wide).norm() < 5e-3 * distance  # bf16 it was
    assert optimizer.state[other]["step"] == 100


@pytest.mark.parametrize("shape", [(40, 30), (7,), ()])
def test_large_weights_go_in_pieces_and_come_to_the_same(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    gradients, start = noise(3, *shape), torch.randn(shape)
    found = []
    for size in (1 << 22, 64, 1):
        monkeypatch.setattr(compact, "PIECE", size)
        weight = nn.Parameter(start.clone())
        found.append(after(CompactAdamW(group(weight), lr=1e-2, betas=BETAS), weight, gradients))
    assert (found[0] - start).abs().max() > 1e-2
    # The kernel rounds the end of what it is given otherwise, and a moment may then be rounded to its other neighbour.
    assert all(torch.allclose(found[0], other, rtol=0, atol=1e-4) for other in found[1:])


def test_a_weight_of_another_layout_moves_as_any_other() -> None:
    gradients, start = noise(3, 40, 30), torch.randn(40, 30)
    plain, turned = nn.Parameter(start.clone()), nn.Parameter(start.t().contiguous().t())
    assert not turned.is_contiguous()
    found = after(CompactAdamW(group(plain), lr=1e-2, betas=BETAS), plain, gradients)
    assert torch.equal(after(CompactAdamW(group(turned), lr=1e-2, betas=BETAS), turned, gradients), found)


def test_rounded_moments_follow_gradients_that_become_smaller() -> None:
    """Where a step's change is less than half a unit of bf16, a moment stands still: within 5 % of where it belongs."""
    weight = nn.Parameter(torch.zeros(1000))
    optimizer = CompactAdamW(group(weight), lr=1e-3, betas=BETAS)
    aim = torch.linspace(0.01, 0.1, 1000)
    after(optimizer, weight, [torch.ones(1000)] * 20 + [aim] * 400)
    state = optimizer.state[weight]
    assert torch.allclose(state["exp_avg"].float(), aim, rtol=0.05)
    assert torch.allclose(state["exp_avg_sq"].float().sqrt(), aim, rtol=0.05)


def test_sgd_is_that_of_the_books() -> None:
    weight = nn.Parameter(torch.tensor([[1.0, 2.0]]))
    model = nn.Module()
    model.weight = weight
    optimizer = make(model, optimizer="sgd", momentum=0.5, learning_rate=0.1, weight_decay=0.0)
    first, second = torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0, 0.0]])
    found = after(optimizer, weight, [first, second])
    assert torch.allclose(found, torch.tensor([[1.0, 2.0]]) - 0.1 * first - 0.1 * (0.5 * first + second))


@pytest.mark.parametrize(
    ("train", "kept"),
    [({}, 8), ({"optimizer": "adamw-bf16"}, 4), ({"optimizer": "sgd"}, 4), ({"optimizer": "sgd", "momentum": 0.0}, 0)],
)
def test_what_is_kept_is_what_was_said(bench: Any, train: dict[str, Any], kept: int) -> None:  # noqa: F811
    loop = trained(bench(train={"max_steps": 2, "checkpoint_every": 2, **train}).loop())
    values = sum(weight.numel() for weight in weights(loop).values())
    found = [tensor for state in loop.optimizer.state.values() for tensor in state.values() if tensor.ndim]
    told = state_bytes(loop.optimizer, weights(loop).values())
    assert sum(tensor.nbytes for tensor in found) == kept * values == told
    tensors = optimizer_tensors(loop.optimizer, loop.wrapped.trainable())
    wanted = {key for name, weight in loop.wrapped.trainable() for key in first_state(loop.optimizer, weight)}
    assert {name.split(":")[1] for name in tensors} == wanted
    [seal] = loop.checkpoints.seals()
    assert kept * values <= seal.bytes - 4 * values < kept * values + 60_000  # headers, counters, random state


def test_a_run_whose_optimizer_keeps_nothing_is_resumed_to_the_bit(bench: Any) -> None:  # noqa: F811
    """The others are in the matrix."""
    one = bench(train={"max_steps": 4, "checkpoint_every": 2, "optimizer": "sgd", "momentum": 0.0})
    whole = trained(one.loop(folder="whole"))
    first = one.loop(folder="parts")
    first.steps = 2
    trained(first)
    second = one.loop(folder="parts")
    assert second.resume() == 2
    trained(second)
    assert not optimizer_tensors(second.optimizer, second.wrapped.trainable())
    left, right = weights(whole), weights(second)
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("key", "value"),
    [("optimizer", "adamw-bf16"), ("optimizer", "adamw-8bit"), ("optimizer", "sgd"), ("momentum", 0.5)],
)
def test_a_resume_with_another_optimizer_is_refused(key: str, value: Any) -> None:
    [change] = changes(facts(recipe()), facts(recipe(train={key: value})))
    assert (change.key, change.safe) == (f"train.{key}", False)
    [harmless] = changes(facts(recipe()), facts(recipe(train={"activation_checkpointing": "full"})))
    assert harmless.safe


def test_a_training_with_each_of_them_learns(bench: Any, tmp_path: Path) -> None:  # noqa: F811
    found = {}
    for name in OPTIMIZERS:
        rate = {"learning_rate": 0.2} if name == "sgd" else {}
        loop = trained(bench(train={"optimizer": name, "max_steps": 8, **rate}).loop(folder=name))
        first, *_, last = [one["eval/loss"] for one in loop.progress.evaluations]
        found[name] = last
        assert last < first - 0.2
    assert found["adamw-bf16"] == pytest.approx(found["adamw"], rel=2e-3)
    assert found["adamw-8bit"] == pytest.approx(found["adamw"], rel=1e-2)


def test_moments_in_eight_bits_lead_where_those_in_fp32_lead_and_where_bitsandbytes_leads() -> None:
    """Its own 8-bit AdamW has the same blocks where a row is one: what is left is how a last bit is rounded."""
    from bitsandbytes.optim import AdamW8bit

    gradients, start = noise(60, 40, 256), torch.randn(40, 256)
    found = {}
    for name, make_one in {
        "fp32": lambda weight: torch.optim.AdamW(group(weight), lr=1e-2, betas=BETAS, fused=True),
        "ours": lambda weight: EightBitAdamW(group(weight), lr=1e-2, betas=BETAS),
        "theirs": lambda weight: AdamW8bit(group(weight), lr=1e-2, betas=BETAS),
    }.items():
        weight = nn.Parameter(start.clone())
        optimizer = make_one(weight)
        found[name] = after(optimizer, weight, gradients)
        if name == "ours":
            kept = {key: value.dtype for key, value in optimizer.state[weight].items()}
            assert kept["exp_avg"] == kept["exp_avg_sq"] == torch.uint8
    distance = (found["fp32"] - start).norm()
    assert 1e-4 * distance < (found["ours"] - found["fp32"]).norm() < 3e-2 * distance
    assert (found["ours"] - found["theirs"]).norm() < 1e-2 * distance


def test_eight_bits_are_kept_of_rows_worth_the_name_and_a_scale_of_each_block() -> None:
    optimizer = EightBitAdamW(group(nn.Parameter(torch.zeros(1))), lr=1e-2, betas=BETAS)
    for shape, blocks in [((5, 8), 1), ((5, 64), 1), ((5, 65), 1), ((5, 256), 1), ((5, 257), 2), ((5, 3, 200), 3)]:
        kept = first_state(optimizer, torch.zeros(shape))
        assert (kept["exp_avg"].shape, kept["exp_avg"].dtype) == (shape, torch.uint8)
        assert kept["exp_avg_sq_scale"].shape == (5, blocks)
        size = 2 * torch.Size(shape).numel() + 2 * 4 * 5 * blocks
        assert state_bytes(optimizer, [torch.zeros(shape)]) == size
    for shape in [(5, 7), (400,), ()]:
        kept = first_state(optimizer, torch.zeros(shape))
        assert (kept.keys(), kept["exp_avg"].dtype) == ({"exp_avg", "exp_avg_sq", "step"}, torch.float32)


@pytest.mark.parametrize("shape", [(40, 30), (3, 700), (6, 4, 20), (7,), ()])
def test_eight_bits_go_in_pieces_and_rows_and_come_to_the_same(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    gradients, start = noise(3, *shape), torch.randn(shape)
    found = []
    for size in (1 << 22, 64, 1):
        monkeypatch.setattr(eightbit, "PIECE", size)
        weight = nn.Parameter(start.clone())
        found.append(after(EightBitAdamW(group(weight), lr=1e-2, betas=BETAS), weight, gradients))
    assert (found[0] - start).abs().max() > 1e-2
    assert all(torch.allclose(found[0], other, rtol=0, atol=1e-3) for other in found[1:])
    assert sum(int((found[0] != other).sum()) for other in found[1:]) < 0.05 * max(40, start.numel())
    if len(shape) == 2:
        turned = nn.Parameter(start.t().contiguous().t())
        assert torch.equal(after(EightBitAdamW(group(turned), lr=1e-2, betas=BETAS), turned, gradients), found[-1])


def test_a_weight_without_a_gradient_for_once_is_not_thrown_far() -> None:
    """Beside large neighbours its second moment is less than the smallest step, and its first one is not."""
    weight = nn.Parameter(torch.zeros(4, 256))
    optimizer = EightBitAdamW(group(weight), lr=1e-3, betas=BETAS)
    gradient = torch.ones(4, 256)
    gradient[:, ::2] = 1e-5
    after(optimizer, weight, [gradient] * 3)
    assert (optimizer.state[weight]["exp_avg_sq"] > 0).all()
    before = weight.detach().clone()
    moved = after(optimizer, weight, [torch.zeros(4, 256)]) - before
    assert 0 < moved.abs().max() < 5e-3


def test_a_run_in_eight_bits_is_resumed_to_the_bit_and_its_checkpoint_is_small(bench: Any) -> None:  # noqa: F811
    one = bench(train={"max_steps": 4, "checkpoint_every": 2, "optimizer": "adamw-8bit"})
    whole = trained(one.loop(folder="whole"))
    first = one.loop(folder="parts")
    first.steps = 2
    trained(first)
    second = one.loop(folder="parts")
    assert second.resume() == 2
    trained(second)
    pairs = [(weights(run), optimizer_tensors(run.optimizer, run.wrapped.trainable())) for run in (whole, second)]
    for left, right in zip(*pairs, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
    values = sum(weight.numel() for weight in weights(whole).values())
    assert state_bytes(whole.optimizer, weights(whole).values()) < 2.5 * values
