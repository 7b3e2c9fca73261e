"""A rehearsal: everything of a run up to its first step, without a GPU, a process group or a trace of it.

Data, tokenizer and plan are the run's own. The model is made of random weights with few of its layers, because
whether packed documents stay apart follows from its code; its whole size is counted without memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dropforge.errors import RecipeError
from dropforge.run import RunSpec
from dropforge.store import open_store
from trainer.assembly import examine, make_plan, pad_id, width
from trainer.config import Settings, Task, read_settings
from trainer.data.plan import Plan
from trainer.data.tokenizer import SPECIAL, token_ids
from trainer.model.attention import ON_GPU, Attention
from trainer.model.build import Built, check_context, check_vocabulary, name_labels
from trainer.model.few import shortened_config
from trainer.model.method import apply_method
from trainer.model.mixture import settle_router
from trainer.model.scratch import begin_decoder, scratch_config
from trainer.model.shard import blocks_to_compile, blocks_to_recompute
from trainer.model.vocabulary import add_rows
from trainer.prepare import TOKENIZER, Prepared, await_prepared, prepare
from trainer.pretrained import load_config, make_random
from trainer.restore import bring_start


@dataclass(frozen=True)
class Rehearsal:
    """What a run would begin with. :param layers: of the model, how many were tried for packing.

    :param parameters, trained: weights of the whole model. :param config: folder with the model's `config.json`.
    """

    prepared: Prepared
    plan: Plan
    attention: Attention
    layers: int
    parameters: int
    trained: int
    config: Path


def rehearse(spec: RunSpec, settings: Settings, scratch: Path, say: Callable[[str], None]) -> Rehearsal:
    """Prepare data and plan as the run does.

    :param scratch: an empty folder, which holds all that is made. :param say: takes notices.
    :raises RecipeError, DataError: what the run itself would be refused for.
    """
    from trainer.compat import check_versions, quiet_libraries

    check_versions()
    quiet_libraries()
    if settings.base.scratch is not None:
        # A tokenizer that the run has already is used; one that is trained here stays here.
        run = open_store(spec.root) if spec.root else None
        if run is not None and run.stat(TOKENIZER) is not None:
            run.download(TOKENIZER, scratch / "run" / TOKENIZER)
    if spec.start is not None:
        spec = bring_start(spec, say, folder=scratch / "start")
        settings = replace(settings, base=read_settings(spec.recipe).base)
    spec = replace(spec, root=str(scratch / "run"))
    prepare(spec, settings, scratch, lambda: None, say, keep=False, weights=False)
    prepared = await_prepared(settings, spec, scratch, lambda: None)
    config = _config(settings, prepared)
    if prepared.labels is not None:
        name_labels(config, prepared.labels, pad_id(prepared.tokenizer))
    new = token_ids(prepared.tokenizer, settings.base.new_tokens or ())
    parameters, trained = count_weights(config, settings, new)
    small, layers = _shortened(config, settings.task)
    add_rows(small, new)
    largest = max(int(part.ids.max()) if len(part.ids) else 0 for part in (prepared.train, prepared.eval))
    settle_router(small, settings.train.router_loss)
    check_vocabulary(small, largest)
    if settings.train.activation_checkpointing != "none":
        blocks_to_recompute(small)
    if settings.train.compile:
        blocks_to_compile(small)
    # Adapters change nothing of how documents are kept apart; a prefix stands before each of them.
    built = apply_method(small, settings.train) if settings.train.method == "prefix" else Built(small)
    check_context(built.model, settings.train.sequence_length)
    asked = settings.train.attention
    if asked in ON_GPU:  # none is needed here; what the model's own attention packs, these are tried with at the start
        settings = replace(settings, train=replace(settings.train, attention="auto"))
    attention = examine(built, settings)
    plan = make_plan(settings, prepared, attention.packs, width(built))
    folder = scratch / "config"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    return Rehearsal(prepared, plan, attention, layers, parameters, trained, folder)


def _config(settings: Settings, prepared: Prepared) -> Any:
    if settings.base.scratch is not None:
        vocabulary = prepared.tokenizer.get_vocab()
        special = {token: vocabulary[token] for token in SPECIAL}
        config = scratch_config(settings.base.scratch, special)
        if settings.task == "sequence-to-sequence":
            begin_decoder(config, special)
        return config
    try:
        return load_config(prepared.base, settings.base.revision)
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split())[:300]
        raise RecipeError(
            "recipe key `base.model`", f"{settings.base.model} has no config that can be read ({cause})", "Name another"
        ) from error


def count_weights(config: Any, settings: Settings, new: Sequence[int]) -> tuple[int, int]:
    """All weights, and those that the optimizer moves; counted on torch's meta device, so nothing is allocated.

    :param new: ids of new tokens.
    :raises RecipeError: if the model has not what the recipe's method names, or is of another kind than the task's.
    """
    import torch

    with torch.device("meta"):
        model = make_model(config, settings.task)
        add_rows(model, new)
        parameters = sum(weight.numel() for weight in model.parameters())
        built = Built(model) if settings.base.scratch else apply_method(model, settings.train, new)
    return parameters, sum(weight.numel() for _, weight in built.trainable())


def _shortened(config: Any, task: Task) -> tuple[Any, int]:
    """A model of the config with few layers; and how many."""
    import torch

    short, layers = shortened_config(config)
    torch.manual_seed(0)
    return make_model(short, task).eval(), layers


def make_model(config: Any, task: Task = "causal-lm") -> Any:
    """A causal language model of a config, a classifier, or an encoder-decoder, with random weights.

    :raises RecipeError: if the config is of another kind.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

    kinds: dict[Task, tuple[Any, str]] = {
        "causal-lm": (AutoModelForCausalLM, "no causal language model"),
        "classification": (AutoModelForSequenceClassification, "no model for sequence classification"),
        "sequence-to-sequence": (AutoModelForSeq2SeqLM, "no encoder-decoder"),
    }
    kind, what = kinds[task]
    try:
        if task != "sequence-to-sequence" and config.is_encoder_decoder:  # of some the library would take a part
            raise ValueError("it is an encoder-decoder, for `task: sequence-to-sequence`")
        return make_random(kind, config)
    except (ValueError, KeyError) as error:
        cause = " ".join(str(error).split())[:300]
        raise RecipeError("recipe key `base.model`", f"it is {what} ({cause})", "Name one") from error
