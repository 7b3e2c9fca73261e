"""Weights that no text reaches, such as the vision part of a model that sees pictures too: they are frozen.

Their gradient is never there. AdamW keeps no moments for them, DDP would wait for them, and weight decay must not
shrink them.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch

from dropforge.errors import RecipeError
from trainer.data.batch import Batch
from trainer.model.build import Built
from trainer.model.loss import LossModel

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def freeze_unreached(built: Built, loss: LossModel, batch: Batch, ranks: int) -> list[str]:
    """Freeze the trainable weights that the loss does not depend on; their names, in order.

    Where another weight of the same kind is reached, as an expert of a router is, other data may reach it: it stays.

    :param batch: with targets, the same on every rank.
    :raises RecipeError: if nothing could be trained, or several ranks would wait for gradients that come at times only.
    """
    training = loss.training
    loss.eval()  # dropped layers would seem not to be reached
    try:
        with torch.enable_grad():
            found = reached(loss(batch.ids, batch.positions, batch.places, batch.targets))
    finally:
        loss.train(training)
    named = built.trainable()
    kinds = {_kind(name) for name, weight in named if id(weight) in found}
    if not kinds:
        raise RecipeError(
            "recipe key `base.model`", "its loss depends on none of the weights to be trained", "Choose another model"
        )
    frozen = []
    for name, weight in named:
        if id(weight) in found:
            continue
        if _kind(name) not in kinds:
            weight.requires_grad_(False)
            frozen.append(name)
        elif ranks > 1:
            raise RecipeError(
                "recipe key `base.model`",
                f"{name} gets a gradient from some of the data only, and several ranks would wait for it",
                "Train with one rank, or choose another model",
            )
    return frozen


def freeze_kinds(built: Built, frozen: Collection[str]) -> list[str]:
    """Freeze the trainable weights that are of the kinds of some that were frozen in a shorter model; their names."""
    kinds = {_kind(name) for name in frozen}
    found = [(name, weight) for name, weight in built.trainable() if _kind(name) in kinds]
    for _, weight in found:
        weight.requires_grad_(False)
    return [name for name, _ in found]


def reached(loss: torch.Tensor) -> set[int]:
    """`id` of each leaf that gets a gradient of `loss`; nothing is computed for it."""
    found: set[int] = set()
    seen = set()
    ahead = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        ahead += [before for before, _ in node.next_functions]
    return found


def _kind(name: str) -> str:
    return _NUMBER.sub("*", name)
