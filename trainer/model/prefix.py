"""A prefix: learned keys and values that every layer attends to before each document (https://arxiv.org/abs/2101.00190).

It is no change of weights, so it cannot be merged: what is exported is the prefix alone, in peft's format, and the
address of its base.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch

from dropforge.errors import RecipeError
from trainer.config import Prefix
from trainer.data.node_cache import NodeCache
from trainer.model.build import PREFIX_CONFIG, Built, fetch_base, load_model, prefix_length
from trainer.pretrained import load_prefix

_SPREAD: Final = 0.02  # of the first values, as of the weights of most models: at 1, peft's own, they drown the text
_LOOK: Final = 8  # tokens that show whether the model attends to a prefix


def add_prefix(model: Any, prefix: Prefix, seed: int) -> Built:
    """Freeze the model and put an fp32 prefix before whatever it reads, the same on every rank.

    :param model: on the CPU, or on torch's meta device, where it is not tried.
    :raises RecipeError: if the model's layers take no keys and values from outside.
    """
    from peft import PrefixTuningConfig, get_peft_model

    torch.manual_seed(seed)
    try:
        whole = get_peft_model(model, PrefixTuningConfig(num_virtual_tokens=prefix.tokens, task_type="CAUSAL_LM"))
        [weight] = [weight for weight in whole.parameters() if weight.requires_grad]
        if not weight.is_meta:
            torch.nn.init.normal_(weight, std=1.0)
            if not _attends(whole, model):
                raise ValueError("its logits are the same with and without one")
            torch.nn.init.normal_(weight, std=_SPREAD)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, NotImplementedError) as error:
        cause = " ".join(str(error).split())[:200]
        raise RecipeError(
            "recipe key `train.method`", f"{type(model).__name__} takes no prefix ({cause})", "Use `lora`"
        ) from error
    return _built(whole)


def _built(whole: Any) -> Built:
    # What lies below the head is not all: whoever asked it alone would leave out the prefix.
    whole.base_model_prefix = ""
    return Built(whole, whole)


@torch.no_grad()
def _attends(whole: Any, model: Any) -> bool:
    ids = torch.arange(_LOOK)[None] % model.get_input_embeddings().weight.shape[0]
    training = whole.training
    whole.eval()
    try:
        found = whole(input_ids=ids, use_cache=False).logits
        same = whole(input_ids=ids[:, : _LOOK // 2], use_cache=False).logits
        if not torch.allclose(found[:, : _LOOK // 2], same, atol=1e-4 * max(1.0, float(found.abs().max()))):
            raise ValueError("with one, what comes later changes what came before")
        return not torch.allclose(found, model(input_ids=ids, use_cache=False).logits, atol=1e-4)
    finally:
        whole.train(training)


def bare(model: Any) -> AbstractContextManager[Any]:
    """The model without its prefix, as it was before the training: a new prefix is noise, and no adapter of zeros."""
    found: AbstractContextManager[Any] = model.disable_adapter() if prefix_length(model) else nullcontext()
    return found


def open_model(
    folder: str | Path,
    local: str = "",
    *,
    node: NodeCache | None = None,
    check: Callable[[], None] = lambda: None,
) -> Any:
    """A causal language model as it was exported: whole, or a prefix on its base, which is fetched.

    :param local: the base's folder, where it is on this machine already. :param node, check: as of `fetch_base`.
    :raises RecipeError: if it, or its base, cannot be loaded.
    """
    path = Path(folder) / PREFIX_CONFIG
    if not path.is_file():
        return load_model(folder)
    try:
        config = json.loads(path.read_text())
        base, revision = str(config["base_model_name_or_path"]), config.get("revision")
        if config["peft_type"] != "PREFIX_TUNING":
            raise ValueError(f"it is of type {config['peft_type']}")
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(
            f"model {folder}", f"its {PREFIX_CONFIG} is no prefix's ({error})", "Export it again"
        ) from error
    with tempfile.TemporaryDirectory(prefix="dropforge-base-") as name:
        found = local or fetch_base(base, revision, Path(name), node=node, check=check)
        whole = load_prefix(load_model(found, revision), folder)
    return _built(whole).model
