"""A base model whose weights stay in its files until each rank reads its shard of them.

No rank holds the whole of it: a model of 70 billion weights is 282 GB in fp32. It is made with everything but its
weights (torch's meta device holds their shapes), sharded, and filled slice by slice. What is decided before that, how
it attends, whether it packs, which loss is its own, is decided on its own first blocks, with their weights: it follows
from the model's code, and two blocks are enough to show it. What reading and sharding might break is held against the
whole model, which the first rank reads block after block: a sum over all bits of each weight and their rows, which
the shards must have together, and the loss of the first rows, which the sharded model must have too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dropforge import methods
from trainer.config import Settings, Train
from trainer.data.batch import Batch
from trainer.model.build import Built
from trainer.model.few import shortened_config
from trainer.model.fill import sum_of
from trainer.model.loss import LossModel
from trainer.model.method import apply_method
from trainer.model.mixture import settle_router
from trainer.model.slices import Slices, UnsliceableError
from trainer.pretrained import check_files, load_config, load_generation_config, make_random


def why_whole(settings: Settings, mode: str) -> str | None:
    """Why each rank reads the whole base model before it is shared; None where it need not.

    :param mode: how the ranks share it.
    """
    base, train = settings.base, settings.train
    return methods.why_whole(
        task=settings.task,
        model=base.model,
        new_tokens=bool(base.new_tokens),
        method=train.method,
        offload=train.offload,
        sharded=mode not in ("auto", "ddp"),
    )


def make_hollow(folder: str | Path, settings: Settings) -> Built:
    """The base model as the recipe trains it, with weights that are still in its files; adapters have theirs.

    :raises UnsliceableError: if its files do not give each weight by itself.
    :raises RecipeError: if the model has not what the recipe names, or its files lie elsewhere.
    """
    check_files(Path(folder))
    try:
        config = load_config(folder, settings.base.revision)
    except (OSError, ValueError, KeyError) as error:
        raise UnsliceableError("its config cannot be read") from error  # who reads the whole model tells it
    if getattr(config, "quantization_config", None) is not None:
        raise UnsliceableError("it is quantised")
    model = _empty(config)
    if any(str(name).endswith("ForSequenceClassification") for name in config.architectures or ()):
        raise UnsliceableError("it is a classifier")
    slices = Slices(folder, model)
    _fill_buffers(model, slices)
    with suppress(OSError, ValueError):  # it may have none, and what follows from its config stays
        model.generation_config = load_generation_config(folder)
    settle_router(model, settings.train.router_loss)
    known = slices.identities()
    built = _as_trained(model, settings.train)
    slices.rename(known, built.model)
    missing = [name for name, weight in built.model.named_parameters() if weight.is_meta and name not in slices.names]
    if missing:
        raise UnsliceableError(f"{missing[0]} has no values of its own")
    built.slices = slices
    return built


def few_blocks(built: Built, settings: Settings) -> Built:
    """The first blocks of a hollow model and what is around them, with their weights.

    :raises UnsliceableError: if its config does not tell how a shorter one is made.
    """
    assert built.slices is not None
    config, _ = shortened_config(built.model.config)
    model = _empty(config)
    slices = Slices(built.slices.folder, model)
    _fill_buffers(model, slices)
    _fill(model, slices, torch.device("cpu"))
    if settings.train.method == "full":  # what is frozen may be more blocks than there are
        return Built(model)
    return apply_method(model, settings.train)


def sums_of_files(built: Built) -> dict[str, int]:
    """For each weight that is in the files a sum that no other rows have, nor these in another order."""
    assert built.slices is not None
    return {name: sum_of(built.slices.read(name), 0) for name in built.slices.names}


@torch.no_grad()
def first_loss(built: Built, loss: LossModel, batch: Batch, blocks: list[nn.Module]) -> float:
    """The loss summed over a batch's targets, without dropout, of a model whose blocks are read one after another.

    :param loss: with the hollow model in it. :param blocks: its transformer blocks.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    hooks = []
    try:
        with loss.without_dropout("fp32"), _lent(built, lambda module: id(module) not in inside):
            for block in blocks:
                own = _Loan(built, block)
                hooks += [block.register_forward_pre_hook(own.begin), block.register_forward_hook(own.end)]
            return float(loss(batch.ids, batch.positions, batch.places, batch.targets))
    finally:
        for hook in hooks:
            hook.remove()


def weights_of(built: Built) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight that is not trained, whole, and no longer in memory than it is looked at."""
    for name, weight in built.model.named_parameters():
        if not weight.requires_grad:
            yield name, built.slices.read(name) if weight.is_meta else weight.detach()


def to_device(built: Built, device: torch.device) -> None:
    """Move what has values."""
    built.model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


class _Loan:
    """The weights of a block while it computes."""

    def __init__(self, built: Built, block: nn.Module) -> None:
        self.built, self.inside = built, {id(module) for module in block.modules()}
        self.lent: AbstractContextManager[None] | None = None

    def begin(self, *_: Any) -> None:
        self.lent = _lent(self.built, lambda module: id(module) in self.inside)
        self.lent.__enter__()

    def end(self, *_: Any) -> None:
        assert self.lent is not None
        self.lent.__exit__(None, None, None)


@contextmanager
def _lent(built: Built, chosen: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Within it, the chosen modules have their weights, on the device where those are that have values anyway."""
    assert built.slices is not None
    device = next((tensor.device for tensor in built.model.buffers()), torch.device("cpu"))
    empty = [(holder, key, weight) for holder, key, weight, _ in _empty_weights(built.model) if chosen(holder)]
    try:
        _fill(built.model, built.slices, device, chosen)
        yield
    finally:
        for holder, key, weight in empty:
            holder._parameters[key] = weight


def _fill(
    model: nn.Module, slices: Slices, device: torch.device, chosen: Callable[[nn.Module], bool] = lambda _: True
) -> None:
    """Give the chosen modules the values of their weights; those that are one weight stay one."""
    made: dict[int, nn.Parameter] = {}
    for holder, key, weight, name in list(_empty_weights(model)):
        if chosen(holder):
            if id(weight) not in made:
                made[id(weight)] = nn.Parameter(slices.read(name).to(device), weight.requires_grad)
            holder._parameters[key] = made[id(weight)]


def _empty_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter, str]]:
    """Each weight without values: who holds it, by which key, and its name in the model."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    for module in model.modules():
        for key, weight in module._parameters.items():
            if weight is not None and weight.is_meta:
                yield module, key, weight, names[id(weight)]


def _empty(config: Any) -> Any:
    """A causal language model of a config, with its buffers, and without values of its weights."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    try:
        with init_empty_weights(include_buffers=False):
            model = make_random(AutoModelForCausalLM, config)
    except Exception as error:  # whatever a config that was shortened leads to
        raise UnsliceableError(f"it cannot be made without weights ({' '.join(str(error).split())[:200]})") from error
    model.tie_weights()
    if any(buffer.is_meta for buffer in model.buffers()):
        raise UnsliceableError("it cannot be made without its buffers")
    return model.eval()


def _fill_buffers(model: Any, slices: Slices) -> None:
    """Buffers that the files have; all others are made with the model."""
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, buffer in model.state_dict().items():
        if name not in weights and name in slices:
            buffer.copy_(slices.read(name))


def _as_trained(model: Any, train: Train) -> Built:
    """A hollow model with what the recipe's method adds to it, which has its values.

    peft puts adapters where the weights are that they adapt. For that time these are tensors of one value, which take
    no memory.
    """
    seeming: dict[int, nn.Parameter] = {}
    empty: dict[int, nn.Parameter] = {}
    for holder, key, weight, _ in list(_empty_weights(model)):
        if id(weight) not in seeming:
            seeming[id(weight)] = nn.Parameter(torch.zeros(1).expand(weight.shape), weight.requires_grad)
            empty[id(seeming[id(weight)])] = weight
        holder._parameters[key] = seeming[id(weight)]
    built = apply_method(model, train)
    for module in built.model.modules():
        for key, found in module._parameters.items():
            if found is not None and id(found) in empty:
                module._parameters[key] = empty[id(found)].requires_grad_(found.requires_grad)
    return built
