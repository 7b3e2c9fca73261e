"""What of a base model is trained, by the recipe's method: all of it, a part, or adapters beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.config import Train
from trainer.model.adapters import add_adapters
from trainer.model.build import Built
from trainer.model.freeze import freeze_part
from trainer.model.prefix import add_prefix
from trainer.model.quantised import quantise
from trainer.model.shard import find_blocks


def apply_method(model: Any, train: Train, new: Sequence[int] = ()) -> Built:
    """A base model as the recipe trains it, the same on every rank.

    :param model: on the CPU, or on torch's meta device. :param new: ids of its new tokens, whose rows it has.
    :raises RecipeError: if the model has not what the recipe names.
    """
    if train.method == "prefix":
        return add_prefix(model, train.prefix, train.seed)
    if train.method == "qlora":  # on the CPU, whatever device comes later: each has kernels of its own
        quantise(model, find_blocks(model, "recipe key `train.method`", "to put into 4 bits", "lora"))
    if train.method != "full":
        return add_adapters(model, train.lora, train.seed, dora=train.method == "dora", new=new)
    if train.freeze is not None:
        freeze_part(model, train.freeze)
    return Built(model)
