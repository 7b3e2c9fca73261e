"""The loss of a mixture's router: which models have one, whether a training adds it, and what it is of single rows.

A router that sends most tokens to few experts is led back by a loss that grows with the imbalance (Switch Transformer,
https://arxiv.org/abs/2101.03961, equations 4 to 6). The library takes it over all tokens of a forward pass, padding
among them, so that it would depend on micro-batches and ranks. Here the same function is taken of each row of the plan
by itself, up to the last token that is learned there, and weighs as much as the row has targets. Rows are the plan's,
and so is a sum over them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dropforge.errors import RecipeError
from trainer.model.build import is_classifier, is_seq2seq

Balance = Callable[..., torch.Tensor]
_KEY = "recipe key `train.router_loss`"


def coefficient(config: Any) -> float:
    """What the router's loss is multiplied by in training; 0 where none is added."""
    for part in (config, config.get_text_config()):  # a composite model keeps its decoder's settings apart
        if getattr(part, "output_router_logits", False):
            return float(getattr(part, "router_aux_loss_coef", 0.0) or 0.0)
    return 0.0


def core_of(model: Any) -> Any:
    """The library's own model, without what peft puts around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def balance_of(model: Any) -> Balance | None:
    """The function of the library that a mixture's own loss calls with its router's logits; None without one."""
    found = getattr(sys.modules.get(type(core_of(model)).__module__), "load_balancing_loss_func", None)
    return found if callable(found) and hasattr(core_of(model), "router_aux_loss_coef") else None


def chosen_of(model: Any) -> int:
    """Experts that each token passes."""
    core = core_of(model)
    found = getattr(core, "num_experts_per_tok", None) or core.config.get_text_config().num_experts_per_tok
    return int(found)


def settle_router(model: Any, asked: float | None) -> None:
    """Have the model's config say whether a training adds the router's loss, and how much of it.

    :param asked: the recipe's coefficient; without one the config stays as it is.
    :raises RecipeError: if it is to be added, and the model has none, or none that can be taken of single rows.
    """
    config = model.config.get_text_config()
    known = not is_classifier(model) and not is_seq2seq(model) and balance_of(model) is not None
    if (asked if asked is not None else coefficient(model.config)) and not known:
        whose = "it asks for" if asked else "the base model's config turns on"
        raise RecipeError(
            _KEY, f"{whose} a router's loss, and {type(model).__name__} has none that is known here", "Set it to 0"
        )
    if asked is None:
        return
    for part in {id(part): part for part in (model.config, config)}.values():
        if hasattr(part, "output_router_logits"):
            part.output_router_logits = asked > 0
    if asked:
        config.router_aux_loss_coef = asked
        core_of(model).router_aux_loss_coef = asked  # what the model was made with is what its forward reads


def balance_rows(logits: Sequence[torch.Tensor], learned: torch.Tensor, balance: Balance, chosen: int) -> torch.Tensor:
    """The loss of the router, of each row up to its last target, times the row's targets, summed.

    :param logits: of each layer, (B * L, experts) or (B, L, experts). :param learned: (B, L) int64, 1 at each target.
    :param balance: see `balance_of`. :param chosen: see `chosen_of`.
    :returns: a scalar in fp32; evenly used experts give `chosen` for each target.
    """
    (rows, width), experts = learned.shape, logits[0].shape[-1]
    seen = learned.flip(1).cumsum(1).flip(1) > 0
    seen[:, 0] = True  # a row without targets weighs nothing, and must be no 0 / 0
    layers = [layer.float().reshape(rows, width, experts) for layer in logits]
    each = [
        balance(tuple(layer[row] for layer in layers), experts, chosen, seen[row : row + 1].long())
        for row in range(rows)
    ]
    return (torch.stack(each) * learned.sum(1)).sum()
