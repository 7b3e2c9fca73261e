"""What ranks of the tests do with the product's own loop: take steps and tell what came of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dropforge.run import RunSpec
from dropforge.store import open_store
from trainer.assembly import begin, build, look_at_all, make_plan, pad_id, same_loss
from trainer.config import Settings, read_settings
from trainer.data.batch import make_batch
from trainer.data.tokenizer import train_tokenizer, wrap_tokenizer
from trainer.gang import Gang
from trainer.loop.loop import Loop
from trainer.loop.optim import optimizer_tensors
from trainer.model.loss import choose_way, loss_model
from trainer.node.heart import Heart
from trainer.prepare import await_prepared, prepare
from trainer.report.console import Console
from trainer.report.tracking import Tracker
from trainer.state.checkpoint import Checkpoints
from trainer.state.fast import Fast
from trainer.state.stop import StopSignal
from trainer.training import train

from .toy import Toy

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Stage:
    """A run whose data is prepared: ranks begin with the model.

    :param change: other settings than the run's recipe has, by their names in `Settings` and `Train`.
    """

    spec: RunSpec
    settings: Settings
    scratch: Path

    def change(self, **values: Any) -> Stage:
        own = {key: values.pop(key) for key in list(values) if hasattr(self.settings, key)}
        return replace(self, settings=replace(self.settings, train=replace(self.settings.train, **values), **own))


def make_stage(toy: Toy, name: str, scratch: Path, **overrides: Any) -> Stage:
    spec = RunSpec.from_json(Path(toy.run(name, **overrides)).read_bytes())
    settings = read_settings(spec.recipe)
    scratch.mkdir(parents=True)
    prepare(spec, settings, scratch, lambda: None, lambda _: None)
    return Stage(spec, settings, scratch)


def make_base(folder: Path, kind: str = "llama", **config: Any) -> str:
    """A small base model with its tokenizer, as from a hub; its embeddings are tied, if `config` says nothing else."""
    text = "the red cat sees a green bird under the old tree"
    tokenizer = wrap_tokenizer(train_tokenizer(iter([text] * 40), 320), 64)
    shape = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
             "tie_word_embeddings": True}  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**shape, **config})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_loop(gang: Gang, stage: Stage, packs: bool, folder: str = "loop", sliced: bool = False) -> Loop:
    """:param sliced: whether the base is read in slices, else whole."""
    settings = stage.settings
    prepared = await_prepared(settings, stage.spec, stage.scratch, lambda: None)
    if sliced:
        built, look = begin(settings, prepared, gang, Console(quiet=True))
        assert built.slices is not None
    else:
        look = built = build(settings, prepared, gang)
    plan = make_plan(settings, prepared, packs)
    loss = loss_model(look.model, packs)
    loss.precision = settings.train.precision
    pad = pad_id(prepared.tokenizer)
    first = make_batch(prepared.train, plan.step(0)[:1], pad).to(gang.device)
    choose_way(loss, first)
    if sliced:
        loss = same_loss(built, loss)
        look_at_all(built, loss, first, gang)
    said: list[str] = []
    store = open_store(f"{stage.spec.root}/{folder}")
    checkpoints = Checkpoints(store, "ranks", plan.digest("x"), {}, said.append)
    fast = settings.train.fast_checkpoints
    return Loop(
        gang=gang,
        settings=settings,
        built=built,
        loss=loss,
        plan=plan,
        train=prepared.train,
        eval=prepared.eval,
        pad=pad,
        checkpoints=checkpoints,
        fast=Fast(checkpoints, fast.folder, fast.keep) if fast else None,
        stop=StopSignal(),
        console=Console(quiet=True),
        tracker=Tracker(None, said.append),
        prompts=prepared.prompts,
        tokenizer=prepared.tokenizer,
    )


@dataclass(frozen=True)
class Outcome:
    """What came of some steps; tensors are whole, and the leader's alone.

    :param losses, norms: of each step. :param evaluated: loss before the first step.
    :param gradients: of the first step, after clipping.
    """

    losses: list[float]
    norms: list[float]
    evaluated: float
    gradients: Tensors
    weights: Tensors
    moments: Tensors
    ran: dict[str, Any]


def take_steps(gang: Gang, stage: Stage, packs: bool, count: int, sliced: bool = False) -> Outcome:
    loop = make_loop(gang, stage, packs, sliced=sliced)
    loop.start()
    found = loop.evaluate("before")
    assert found is not None
    loop.loss.train()
    gradients: Tensors = {}
    losses: list[float] = []
    norms: list[float] = []
    update = loop.optimizer.step

    def seen() -> None:
        if not losses:  # the first step; all ranks gather
            named = loop.wrapped.trainable()
            gradients.update(copied(loop.wrapped.full({name: weight.grad for name, weight in named})))
        update()

    loop.optimizer.step = seen  # type: ignore[method-assign,assignment]
    for index in range(count):
        result = loop.step.take(index, stage.settings.train.learning_rate)
        losses.append(result.loss or float("nan"))
        norms.append(result.norm)
    named = loop.wrapped.trainable()
    return Outcome(
        losses,
        norms,
        found.loss,
        gradients,
        copied(loop.wrapped.full(dict(named))),
        copied(loop.wrapped.full(optimizer_tensors(loop.optimizer, named))),
        loop.wrapped.ran(),
    )


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def train_in_parts(
    gang: Gang, stage: Stage, folder: str, stops: list[int], packs: bool = True
) -> tuple[Tensors, Tensors]:
    """Train up to each stop with a new loop, from the newest checkpoint if there is one; weights and moments then."""
    for stop in stops:
        loop = make_loop(gang, stage, packs, folder)
        loop.resume()
        loop.steps = stop
        loop.start()
        loop.run()
    named = loop.wrapped.trainable()
    weights, moments = loop.wrapped.full(dict(named)), loop.wrapped.full(optimizer_tensors(loop.optimizer, named))
    return copied(weights), copied(moments)


def train_whole(gang: Gang, stage: Stage) -> None:
    """All of a rank's way: training, evaluation, export, report."""
    train(stage.spec, stage.settings, gang, stage.scratch, StopSignal(), Console(quiet=gang.rank != 0), Heart())
