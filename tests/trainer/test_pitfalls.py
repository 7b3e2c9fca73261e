"""Known mistakes of trainers, one test each where no other file has one.

`docs/internals/training-coverage.md` lists them all.
"""

from __future__ import annotations

import json
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from tokenizers.processors import TemplateProcessing
from torch import nn

from dropforge.errors import RecipeError
from dropforge.run import RunSpec
from trainer import training
from trainer.config import read_settings
from trainer.data.batch import make_batch
from trainer.data.chat import make_encoder
from trainer.data.tokenizer import train_tokenizer, wrap_tokenizer
from trainer.gang import Gang
from trainer.loop.optim import load_optimizer, make_optimizer, optimizer_tensors
from trainer.measure import measure
from trainer.model.loss import loss_model
from trainer.model.recompute import recompute
from trainer.model.shard import find_blocks
from trainer.node.heart import Heart
from trainer.prepare import prepare
from trainer.rank import run
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .ranks_loop import make_base
from .test_data import CHAT, NO_MARKERS, TEXTS, row
from .test_loop import Bench, trained
from .test_model import loss_of, small, tokens
from .toy import Toy, recipe


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("way", "again"),
    [("fused", "none"), ("places", "none"), ("own", "none"), ("fused", "full"), ("fused", "selective")],
)
def test_a_neighbour_changes_no_bit_of_a_gradient(attention: str, way: Any, again: Any) -> None:
    """The gradient of one document's loss, with another one before it in the row, and with a third one there."""
    model = small("llama", attn_implementation=attention)
    if again != "none":
        recompute(find_blocks(model), again)
    loss = loss_model(model, True, False)
    loss.way = way
    found = []
    for shift in (0, 7):
        data = tokens([20, 24], untrained=(0,))
        data.ids[:20] = (data.ids[:20] + shift) % 90 + 3
        model.zero_grad()
        loss_of(loss, make_batch(data, [np.array([0, 1])], 0)).backward()
        found.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
    assert any(gradient.any() for gradient in found[0].values())
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_accuracy_is_a_fraction_of_the_targets_of_five_rows(toy: Toy, tmp_path: Path) -> None:
    loop = Bench(toy, tmp_path / "scratch", evaluate={"max_rows": 5}, promote={"better_than_base": False}).loop()
    right = targets = 0
    for index in range(len(loop.eval)):
        batch = make_batch(loop.eval, [np.array([index])], 0)
        right += int((loop.loss.logits(batch.ids, batch.positions, batch.places).argmax(-1) == batch.targets).sum())
        targets += len(batch.targets)
    found = measure(loop.loss, loop.eval, Gang(), size=64, micro=3, pad=0)
    assert found is not None
    assert (found.rows, found.targets) == (5, targets)
    assert Fraction(found.accuracy).limit_denominator(targets) == Fraction(right, targets)


@pytest.mark.parametrize("template", ["{{ bos_token }}" + NO_MARKERS.replace("{{ bos_token }}", ""), NO_MARKERS])
def test_a_tokenizer_that_adds_a_begin_token_doubles_none(template: str) -> None:
    made = wrap_tokenizer(train_tokenizer(TEXTS, 320), 64)
    made.chat_template = template
    bos = made.bos_token_id
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{made.bos_token} $A", special_tokens=[(made.bos_token, bos)]
    )
    assert made("the cat")["input_ids"][0] == bos  # it does add one
    for one in (CHAT, row(text="the cat")):
        [[found]] = make_encoder(made, "answers").encode([one])
        assert list(found.ids).count(bos) == 1
        assert found.ids[0] == bos


def test_moments_follow_names_and_not_places() -> None:
    """The same weights in another order, with a frozen module more."""

    class Model(nn.Module):
        def __init__(self, names: list[str]) -> None:
            super().__init__()
            for name in names:
                setattr(self, name, nn.Linear(3, 3, bias=False))
            if "frozen" in names:
                self.frozen.requires_grad_(False)

    train = read_settings(recipe()).train
    one, other = Model(["a", "b", "c"]), Model(["c", "frozen", "b", "a"])
    optimizers = [make_optimizer(model, train) for model in (one, other)]
    for scale, weight in enumerate(one.parameters(), 1):
        weight.grad = torch.full_like(weight, float(scale))
    optimizers[0].step()
    named = [(name, weight) for name, weight in other.named_parameters() if weight.requires_grad]
    load_optimizer(optimizers[1], named, optimizer_tensors(optimizers[0], one.named_parameters()))
    for name, weight in one.named_parameters():
        mine, theirs = optimizers[0].state[weight], optimizers[1].state[dict(named)[name]]
        assert all(torch.equal(mine[key], theirs[key]) for key in ("exp_avg", "exp_avg_sq", "step"))
    with pytest.raises(KeyError, match=r"b\.weight"):
        load_optimizer(optimizers[1], named, {"a.weight:exp_avg": torch.ones(3, 3)} | _of("ca", optimizers[0], one))


def _of(names: str, optimizer: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    found = optimizer_tensors(optimizer, model.named_parameters())
    return {key: value for key, value in found.items() if key[0] in names}


def test_a_run_cannot_be_made_longer_behind_its_schedule(toy: Toy, tmp_path: Path) -> None:
    """A cosine that ends at step 4 is another one than a cosine that ends at step 8: it is refused, by its key."""
    made = Bench(toy, tmp_path / "scratch", train={"max_steps": 4, "checkpoint_every": 2})
    trained(made.loop(folder="a"))
    uri = toy.run("longer", train={"max_steps": 4, "checkpoint_every": 2})
    run(uri, StopSignal(), Console(quiet=True))
    (Path(toy.files("longer").uri) / "report.json").unlink()
    with pytest.raises(RecipeError, match=r"train\.max_steps: 4 -> 8"):
        run(toy.run("longer", train={"max_steps": 8, "checkpoint_every": 2}), StopSignal(), Console(quiet=True))


def test_no_group_waits_for_the_data(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the preparation takes, no collective's timeout runs meanwhile: the ranks meet after it."""
    spec = RunSpec.from_json(Path(toy.run("slow", train={"max_steps": 1})).read_bytes())
    settings, scratch = read_settings(spec.recipe), tmp_path / "scratch"
    scratch.mkdir()
    looks, met = threading.Semaphore(0), threading.Event()

    class Watched(StopSignal):
        def check(self) -> None:
            looks.release()

    monkeypatch.setattr(Gang, "connect", lambda *_: met.set())
    rank = threading.Thread(
        target=training.train,
        args=(spec, settings, Gang(), scratch, Watched(), Console(quiet=True), Heart()),
        daemon=True,
    )
    rank.start()
    for _ in range(3):
        assert looks.acquire(timeout=20)
    assert not met.is_set()
    prepare(spec, settings, scratch, lambda: None, lambda _: None)
    rank.join(60)
    assert met.is_set()
    assert toy.files("slow").stat("report.json") is not None


def test_ties_outlive_a_resume(toy: Toy, tmp_path: Path) -> None:
    made = Bench(toy, tmp_path / "scratch", train={"max_steps": 3, "checkpoint_every": 3})
    first = trained(made.loop(folder="t"))
    again = made.loop(folder="t")
    assert again.resume() == 3
    model = again.built.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, first.built.model.model.embed_tokens.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_the_adapter_and_the_merged_model_are_one(tied: bool, toy: Toy, tmp_path: Path) -> None:
    """The adapter's file has peft's keys and no others; on its base it gives the logits of the merged model."""
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base = make_base(tmp_path / "base", tie_word_embeddings=tied)
    lora = {"method": "lora", "lora": {"r": 3, "alpha": 6}, "max_steps": 3, "learning_rate": 2e-2}
    run(toy.run("merged", base={"model": base, "scratch": None}, train=lora), StopSignal(), Console(quiet=True))
    folder = Path(toy.files("merged").uri) / "model"
    report = json.loads(toy.files("merged").get("report.json"))
    assert report["model"]["max_logit_difference"] < 1e-4
    with safetensors.safe_open(folder / "adapter" / "adapter_model.safetensors", "pt") as file:
        keys = set(file.keys())
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder / "adapter").eval()
    assert keys == set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    assert all("lora_" in key for key in keys)
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118 - no mapping
    ids = torch.arange(40)[None]
    with torch.no_grad():
        merged, alone = (
            model(input_ids=ids).logits for model in (AutoModelForCausalLM.from_pretrained(folder).eval(), adapted)
        )
        bare = AutoModelForCausalLM.from_pretrained(base).eval()(input_ids=ids).logits
    assert torch.allclose(merged, alone, atol=1e-4)
    assert not torch.allclose(merged, bare, atol=1e-3)  # it learned something
