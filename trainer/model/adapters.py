"""Adapters: small trained weights beside a base model that keeps its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from dropforge.errors import RecipeError
from trainer.config import Lora
from trainer.model.build import Built, head_modules, is_classifier, is_seq2seq

_TARGETS: Final = "recipe key `train.lora.targets`"


def add_adapters(model: Any, lora: Lora, seed: int, *, dora: bool = False, new: Sequence[int] = ()) -> Built:
    """Freeze the model and inject fp32 low-rank adapters, the same on every rank. A classifier's head is trained whole.

    :param dora: weights' magnitudes are learned apart from their directions (https://arxiv.org/abs/2402.09353).
    :param new: ids of new tokens, whose rows in the embedding, and in a head that is not tied to it, are trained too.
    :raises RecipeError: if a target is not there or cannot be adapted.
    """
    from peft import LoraConfig, get_peft_model

    check_targets(model, lora.targets)
    head = head_modules(model) if is_classifier(model) else None
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        use_dora=dora,
        trainable_token_indices={name: list(new) for name in _tables(model)} if new else None,
        task_type="SEQ_2_SEQ_LM" if is_seq2seq(model) else "CAUSAL_LM" if head is None else "SEQ_CLS",
        modules_to_save=head,  # a head is new: adapters on random weights would leave them random
    )
    torch.manual_seed(seed)
    try:
        whole = get_peft_model(model, config)
    except (ValueError, TypeError, NotImplementedError) as error:
        cause = " ".join(str(error).split())[:300]
        raise RecipeError(_TARGETS, cause, "Use `all-linear` or the model's names") from error
    return Built(whole.get_base_model(), whole)


def check_targets(model: Any, targets: Sequence[str] | str) -> None:
    """See that adapters on the modules that are named can be made, and merged again.

    :raises RecipeError: for a name that no module ends with, with those that are there; peft passes it over as long as
        another name fits. For a weight that is tied to another module's, which a merge would change too.
    """
    from transformers.pytorch_utils import Conv1D

    kinds = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)
    known = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    there = ", ".join(sorted({name.rpartition(".")[2] for name in known}))
    if isinstance(targets, str):
        return
    holders: dict[int, list[str]] = {}
    for name, module in known.items():
        holders.setdefault(id(module.weight), []).append(name)
    for target in targets:
        found = [name for name in known if name == target or name.endswith(f".{target}")]
        if not found:
            raise RecipeError(
                _TARGETS,
                f"no linear layer of {type(model).__name__} has the name `{target}`",
                f"Use `all-linear`, or names that are there: {there}",
            )
        for name in found:
            tied = [other for other in holders[id(known[name].weight)] if other != name]
            if tied:
                raise RecipeError(
                    _TARGETS,
                    f"`{target}` has the weight of `{tied[0]}` as well, which merged adapters would change too",
                    f"Leave it out; there are: {there}",
                )


def _tables(model: Any) -> list[str]:
    """Names of the modules that hold a row for each token: the embedding, and a head that is not tied to it."""
    names = {id(module): name for name, module in model.named_modules()}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    return [names[id(table)], *([names[id(head)]] if head is not None and head.weight is not table.weight else [])]
