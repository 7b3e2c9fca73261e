"""Combinations of settings that cannot work, each with its mend, refused before any pod exists."""

from __future__ import annotations

import difflib
from typing import get_args

from dropforge.errors import RecipeError
from dropforge.model_files import odd_amount
from dropforge.profiling import Span
from dropforge.recipe import LARGEST, Compute, Recipe, Score, Scratch
from dropforge.recipes.cost_rules import check_costs
from dropforge.recipes.network_rules import check_network
from dropforge.recipes.place_rules import check_place
from dropforge.recipes.pod_rules import check_pods
from dropforge.recipes.promotion_rules import check_promotion
from dropforge.recipes.storage_rules import check_storage
from dropforge.run import wrong_address
from dropforge.volumes import nearest

SIZES = ("architecture", "hidden_size", "layers", "heads", "vocab_size", "context")  # of `base.scratch`
PLACEHOLDER = "set-base-model"  # in presets for a model of one's own
SCORES: tuple[str, ...] = get_args(Score)


def check_startable(recipe: Recipe) -> Recipe:
    """Return a recipe that a run can start from.

    :raises RecipeError: if the preset's placeholder was left in place.
    """
    if recipe.base.model == PLACEHOLDER:
        raise RecipeError(
            "recipe key `base.model`",
            "this preset trains a model of your own, and none is named",
            "Set it to a Hugging Face id, a local folder or `s3://...`",
        )
    return recipe


def check_combinations(recipe: Recipe) -> None:
    """:raises RecipeError: for the first combination that cannot work."""
    base, train, compute = recipe.base, recipe.train, recipe.compute
    _check_task(recipe)
    if (base.model is None) == (base.scratch is None):
        given = "both are given" if base.model else "neither is given"
        raise RecipeError("recipe keys `base.model` and `base.scratch`", given, "Give exactly one of them")
    _check_method(recipe)
    if base.scratch is not None:
        scratch = base.scratch
        check_scratch(scratch)
        context, key = scratch.longest, "context" if scratch.config is None else "config"
        if context is not None and train.sequence_length > context:
            raise RecipeError(
                "recipe key `train.sequence_length`",
                f"{train.sequence_length} is longer than the model's context of {context}",
                f"Raise `base.scratch.{key}` or shorten the sequence",
            )
    if base.revision is not None and (base.model is None or base.model.startswith(("s3://", "/", "."))):
        raise RecipeError("recipe key `base.revision`", "only a Hugging Face id has revisions", "Remove it")
    check_place(compute)
    check_pods(compute)
    check_train(recipe)
    _check_generation(recipe)
    check_promotion(recipe)
    check_costs(recipe)
    _check_attention(recipe)
    _check_compile(recipe)
    _check_caches(compute)
    check_storage(recipe)
    _check_offload(recipe)
    if compute.gpus and compute.gpus != compute.processes_per_node:
        raise RecipeError(
            "recipe key `compute.processes_per_node`",
            f"{compute.processes_per_node} ranks cannot share {compute.gpus} GPUs one to one",
            f"Set it to {compute.gpus}",
        )
    if compute.gpu_memory_gb is not None and not compute.gpus:
        raise RecipeError("recipe key `compute.gpu_memory_gb`", "`compute.gpus` is 0", "Remove it, or ask for GPUs")
    for key, precision in (("train", recipe.train.precision), ("evaluate", recipe.evaluate.precision)):
        if precision == "tf32" and not compute.gpus:
            cause = "a CPU has no `tf32`, and `compute.gpus` is 0"
            raise RecipeError(f"recipe key `{key}.precision`", cause, "Set it to `fp32`, or ask for GPUs")
    if compute.idle is not None and not compute.gpus:
        raise RecipeError(
            "recipe key `compute.idle`",
            "`compute.gpus` is 0, and there are no GPUs that could be idle",
            "Remove it, or ask for GPUs",
        )
    check_network(compute)
    _check_parallel(recipe)
    if compute.backend == "local" and compute.image != Recipe.model_fields["compute"].default.image:
        raise RecipeError(
            "recipe key `compute.image`",
            "the local backend runs no image",
            "Remove it, or use `backend: kubernetes`",
        )
    if compute.priority is not None and compute.queue is None:
        raise RecipeError(
            "recipe key `compute.priority`",
            "it is one of a queue, and `compute.queue` names none",
            "Set `compute.queue`, or remove it",
        )
    if compute.topology is not None and compute.queue is None:
        raise RecipeError(
            "recipe key `compute.topology`",
            "Kueue does the gang scheduling, and `compute.queue` names none of its queues",
            "Set `compute.queue`, or remove it",
        )
    if compute.topology_required and compute.topology is None:
        raise RecipeError(
            "recipe key `compute.topology_required`", "`compute.topology` names no label", "Set it, or remove this"
        )
    if compute.backend == "local" and (compute.volumes or compute.queue or compute.service_account):
        raise RecipeError(
            "recipe keys `compute.volumes`, `compute.queue` and `compute.service_account`",
            "the local backend has neither claims nor queues nor accounts",
            "Remove them, or use `backend: kubernetes`",
        )


def check_scratch(scratch: Scratch) -> None:
    """:raises RecipeError: for sizes that no model has, and for those that are said twice or not at all."""
    if scratch.config is None:
        hidden, heads = scratch.hidden_size or 0, scratch.heads or 1
        if hidden % heads or (hidden // heads) % 2:
            raise RecipeError(
                "recipe key `base.scratch.heads`",
                f"{hidden} does not divide into {heads} heads of even width",
                "Choose heads so that hidden_size / heads is even",
            )
        return
    twice = next((name for name in SIZES if getattr(scratch, name) is not None), None)
    if twice:
        raise RecipeError(
            f"recipe key `base.scratch.{twice}`",
            "`base.scratch.config` is given too, and says the sizes",
            "Name it there, as that model's config.json does",
        )
    kind, words = scratch.config.get("model_type"), scratch.config.get("vocab_size")
    if not isinstance(kind, str) or not kind:
        raise RecipeError(
            "recipe key `base.scratch.config.model_type`", "it is missing", "Name transformers' type, as `llama`"
        )
    if not isinstance(words, int) or isinstance(words, bool) or not 300 <= words <= LARGEST:
        raise RecipeError(
            "recipe key `base.scratch.config.vocab_size`",
            "it must be a number from 300 on: the tokenizer is trained to that size",
            "Name it",
        )
    fault = odd_amount(scratch.config)
    if fault is not None:
        raise RecipeError(
            f"recipe key `base.scratch.config.{fault.key}`", fault.cause, "Name sizes that a model can have"
        )


def _check_method(recipe: Recipe) -> None:
    """:raises RecipeError: if what is trained and what is not contradict each other, or the base model."""
    base, train = recipe.base, recipe.train
    if base.scratch is not None:
        if train.method != "full":
            raise RecipeError(
                "recipe key `train.method`",
                "adapters on random weights leave those weights random",
                "Use `method: full` with `base.scratch`",
            )
        if train.freeze is not None:
            raise RecipeError(
                "recipe key `train.freeze`",
                "a new model's weights are random, and frozen they stay so",
                "Remove it, or name a `base.model`",
            )
        if base.new_tokens is not None:
            raise RecipeError(
                "recipe key `base.new_tokens`",
                "they are added to a tokenizer that is there, and a new model's is trained on the drop",
                "Remove it, or name a `base.model`",
            )
    if train.method == "prefix" and train.activation_checkpointing != "none":
        raise RecipeError(
            "recipe key `train.activation_checkpointing`",
            "a block that is computed again would meet the prefix twice",
            "Remove it, or use `lora`",
        )
    if train.method == "prefix" and recipe.evaluate.generation is not None:
        raise RecipeError(
            "recipe key `evaluate.generation`", "answers are not written with a prefix yet", "Remove it, or use `lora`"
        )
    freeze = train.freeze
    if freeze is not None and train.method != "full":
        raise RecipeError(
            "recipe key `train.freeze`", f"`{train.method}` freezes the whole base model anyway", "Remove it"
        )
    if freeze is not None and not freeze.blocks and not freeze.embeddings:
        raise RecipeError(
            "recipe key `train.freeze`", "it names neither blocks nor embeddings", "Give `blocks`, or remove it"
        )
    if base.new_tokens is None:
        return
    twice = sorted({name for name in base.new_tokens if base.new_tokens.count(name) > 1})
    if twice:
        raise RecipeError("recipe key `base.new_tokens`", f"{twice[0]!r} is there twice", "Remove one")
    if train.method == "prefix":
        raise RecipeError(
            "recipe key `base.new_tokens`",
            "`train.method: prefix` trains no row of the embedding, so theirs would stay as they begin",
            "Use `lora`, `dora` or `full`",
        )
    if freeze is not None and freeze.embeddings:
        raise RecipeError(
            "recipe key `base.new_tokens`",
            "with `train.freeze.embeddings` their rows would stay as they begin",
            "Freeze blocks only, or use tokens that the model knows",
        )


def _judged(recipe: Recipe) -> list[tuple[str, str]]:
    """The metrics that a promotion hangs on, each with the key that names it."""
    guards = [
        (f"recipe key `promote.guards[{n}].metric`", guard.metric) for n, guard in enumerate(recipe.promote.guards)
    ]
    sliced = [
        (f"recipe key `promote.slices[{n}].guards[{m}].metric`", guard.metric)
        for n, part in enumerate(recipe.promote.slices)
        for m, guard in enumerate(part.guards)
    ]
    return [("recipe key `promote.metric`", recipe.promote.metric), *guards, *sliced]


def _check_task(recipe: Recipe) -> None:
    """:raises RecipeError: for what the task has no use for, or nothing to measure by."""
    scratch = recipe.base.scratch
    for key, metric in _judged(recipe):
        if recipe.task != "classification" and metric == "eval/macro_f1":
            raise RecipeError(
                key,
                "`eval/macro_f1` is a mean over labels, and a language model has none",
                "Use `eval/loss`, or `task: classification`",
            )
    if recipe.task == "causal-lm":
        if scratch is not None and scratch.architecture == "distilbert":
            raise RecipeError(
                "recipe key `base.scratch.architecture`",
                "`distilbert` is an encoder, which cannot continue a text",
                "Set `task: classification`, or choose another architecture",
            )
        return
    if recipe.task == "sequence-to-sequence":
        _check_seq2seq(recipe)
        return
    if recipe.train.loss_on == "all":
        raise RecipeError(
            "recipe key `train.loss_on`",
            "a classifier learns the label of a row, and none of its tokens",
            "Leave it out with `task: classification`",
        )
    if recipe.train.router_loss:
        raise RecipeError(
            "recipe key `train.router_loss`", "a classifier's loss has no part of its router's", "Remove it"
        )
    for key, metric in _judged(recipe):
        if metric in ("eval/perplexity", "eval/bits_per_byte"):
            raise RecipeError(
                key,
                f"`{metric}` counts text that a model continues, and a classifier continues none",
                "Use `eval/loss`, `eval/accuracy` or `eval/macro_f1`",
            )
        if metric.startswith("gen/"):
            raise RecipeError(
                key,
                f"`{metric}` is of generated answers, and a classifier writes none",
                "Use `eval/loss`, `eval/accuracy` or `eval/macro_f1`",
            )
    if recipe.evaluate.generation is not None:
        raise RecipeError(
            "recipe key `evaluate.generation`", "a classifier gives labels, and writes no answers", "Remove it"
        )
    if recipe.train.method == "prefix":
        raise RecipeError(
            "recipe key `train.method`",
            "a classifier's head is new, and a prefix is all that would be trained",
            "Use `lora`, `dora` or `full` with `task: classification`",
        )


def _check_seq2seq(recipe: Recipe) -> None:
    """:raises RecipeError: for what an encoder-decoder has no use for."""
    base, train = recipe.base, recipe.train
    if base.scratch is not None and base.scratch.config is None:
        raise RecipeError(
            "recipe key `base.scratch`",
            "its sizes are those of a model without an encoder, or of one without a decoder",
            "Give `base.scratch.config` with a `model_type` such as t5 or bart",
        )
    if train.loss_on == "all":
        raise RecipeError(
            "recipe key `train.loss_on`",
            "the prompt is what the encoder reads, and is never learned",
            "Leave it out with `task: sequence-to-sequence`",
        )
    if train.method == "prefix":
        raise RecipeError(
            "recipe key `train.method`",
            "a prefix is trained for language models only",
            "Use `lora`, `dora` or `full` with `task: sequence-to-sequence`",
        )
    if train.compile:
        raise RecipeError(
            "recipe key `train.compile`",
            "blocks of encoder-decoders were not tried compiled: some hand the positions of the first on to the others",
            "Leave it out with `task: sequence-to-sequence`",
        )
    for key, precision in (("train.precision", train.precision), ("evaluate.precision", recipe.evaluate.precision)):
        if precision == "fp16":
            raise RecipeError(
                f"recipe key `{key}`",
                "encoder-decoders such as T5 were made in bf16, and leave the range of fp16",
                "Use `bf16` or `fp32` with `task: sequence-to-sequence`",
            )
    if train.method != "full" and base.new_tokens is not None:
        raise RecipeError(
            "recipe key `base.new_tokens`",
            f"with `{train.method}` their rows would be trained apart from those that encoder and decoder read",
            "Use `method: full`, or tokens that the model knows",
        )


def check_train(recipe: Recipe) -> None:
    """:raises RecipeError: for settings of the training that contradict each other."""
    train, compute = recipe.train, recipe.compute
    for one, other in (("epochs", "max_steps"), ("tokens_per_step", "rows_per_step")):
        if getattr(train, one) is not None and getattr(train, other) is not None:
            raise RecipeError(f"recipe keys `train.{one}` and `train.{other}`", "both are given", "Give one of them")
    tokens, length = train.tokens_per_step, train.sequence_length
    if tokens is not None and tokens < length:
        raise RecipeError(
            "recipe key `train.tokens_per_step`",
            f"{tokens} is less than one sequence of {length}",
            "Raise it to at least `train.sequence_length`",
        )
    if tokens is not None and tokens % length:
        low = tokens // length * length
        raise RecipeError(
            "recipe key `train.tokens_per_step`",
            f"{tokens} is no multiple of the {length} tokens of a sequence, and a step takes whole ones",
            f"Set it to {low} or {low + length}",
        )
    ranks = compute.nodes * compute.processes_per_node
    if train.rows < ranks:
        raise RecipeError(
            f"recipe key `train.{'tokens' if train.rows_per_step is None else 'rows'}_per_step`",
            f"{train.rows} sequences per step leave some of {ranks} ranks idle",
            "Raise it, or use fewer ranks",
        )
    for name in ("warmup", "decay", "drop_every"):
        value = getattr(train, name)
        if value >= 1 and value != int(value):
            raise RecipeError(
                f"recipe key `train.{name}`",
                f"{value:g} is neither a share of the steps nor a number of them",
                "Give a share below 1, or a whole number",
            )
    if train.profile is not None:
        try:
            Span.parse(train.profile)
        except ValueError as error:
            raise RecipeError("recipe key `train.profile`", str(error), "Name other steps, or leave it out") from None
    steps = train.max_steps
    spent = [part if part >= 1 else part * (steps or 1) for part in (train.warmup, train.decay)]
    if steps is not None and (spent[0] >= steps or (train.schedule == "wsd" and sum(spent) > steps)):
        raise RecipeError(
            "recipe key `train.warmup`",
            f"the warm-up, and the decay of `wsd`, do not fit into {steps} steps",
            "Shorten them, or raise `train.max_steps`",
        )
    fast = train.fast_checkpoints
    for name, value in (("checkpoints", train.checkpoints), ("fast_checkpoints.folder", fast.folder if fast else None)):
        if value is not None and (problem := wrong_address(value, folder=name != "checkpoints")):
            raise RecipeError(
                f"recipe key `train.{name}`",
                problem,
                "Give one such as /dev/shm" if "." in name else "Give such a place",
            )
    if fast is not None:
        if train.checkpoints is not None and fast.folder.rstrip("/") == train.checkpoints.rstrip("/"):
            raise RecipeError(
                "recipe key `train.fast_checkpoints.folder`",
                "it is the durable place, and a copy beside itself protects nothing",
                "Name a folder of the node's own such as /dev/shm, or leave `fast_checkpoints` out",
            )
        often, seldom = fast.every, train.checkpoint_every
        if isinstance(often, int) and isinstance(seldom, int) and often >= seldom:
            raise RecipeError(
                "recipe key `train.fast_checkpoints.every`",
                f"every {often} steps is no more often than `train.checkpoint_every` of {seldom}",
                "Lower it, raise `checkpoint_every`, or leave `fast_checkpoints` out",
            )
    judges = {
        "schedule: plateau": train.schedule == "plateau",
        "early_stopping": train.early_stopping is not None,
        "export: best": train.export == "best",
    }
    asked = next((name for name, given in judges.items() if given), None)
    if asked and train.eval_every == 0:
        raise RecipeError(
            "recipe key `train.eval_every`",
            f"`{asked}` needs evaluations on the way, and there are none",
            "Set it to a number of steps, or a time as in '10 min'",
        )
    if recipe.evaluate.max_batches is not None and recipe.promote.better_than_base:
        raise RecipeError(
            "recipe key `evaluate.max_batches`",
            "the base model would be measured on fewer rows than the candidate that must beat it",
            "Set `promote.better_than_base: false`, or limit `evaluate.max_rows` instead",
        )


def _check_generation(recipe: Recipe) -> None:
    """:raises RecipeError: if the evaluation by generation cannot be done as asked, or decides without being asked."""
    asked, train = recipe.evaluate.generation, recipe.train
    for named, metric in _judged(recipe):
        if metric.startswith("gen/") and (asked is None or metric.removeprefix("gen/") not in asked.metrics):
            raise RecipeError(
                named,
                f"`{metric}` is to decide, and nothing measures it",
                f"Add `{metric.removeprefix('gen/')}` to `evaluate.generation.metrics`",
            )
    if asked is None:
        return
    key = "recipe key `evaluate.generation"
    strange = next((name for name in asked.metrics if name not in SCORES), None)
    if strange is not None and recipe.code is None:
        near = difflib.get_close_matches(strange, SCORES, 1)
        raise RecipeError(
            f"{key}.metrics`",
            f"{strange!r} is none of ours, which are {', '.join(SCORES)}, and `code` names no wheel that has it",
            f"Did you mean {near[0]!r}?" if near else "Name the wheel under `code`",
        )
    if len(set(asked.metrics)) < len(asked.metrics):
        raise RecipeError(f"{key}.metrics`", "one of them is listed twice", "Name each once")
    if asked.rows > recipe.evaluate.max_rows:
        raise RecipeError(
            f"{key}.rows`",
            f"{asked.rows} rows are more than the {recipe.evaluate.max_rows} of `evaluate.max_rows`",
            f"Set it to {recipe.evaluate.max_rows} or less, or raise `evaluate.max_rows`",
        )
    if asked.every > 1 and train.eval_every == 0:
        raise RecipeError(
            f"{key}.every`", "there are no evaluations on the way", "Set `train.eval_every`, or leave it out"
        )
    if asked.every > 1 and (train.early_stopping is not None or train.export == "best"):
        raise RecipeError(
            f"{key}.every`",
            "with `early_stopping` or `export: best` each evaluation may be that of the model",
            "Leave it out",
        )
    context = recipe.base.scratch.longest if recipe.base.scratch else None
    if context is not None and asked.max_new_tokens >= context:
        raise RecipeError(
            f"{key}.max_new_tokens`",
            f"{asked.max_new_tokens} tokens leave no room for a prompt in a context of {context}",
            "Lower it, or raise `base.scratch.context`",
        )


def _check_attention(recipe: Recipe) -> None:
    """:raises RecipeError: if the named implementation cannot run on what the recipe asks for."""
    key, name = "recipe key `train.attention`", recipe.train.attention
    if name in ("flash_attention_2", "flex_attention") and not recipe.compute.gpus:
        raise RecipeError(key, f"`{name}` needs a GPU, and `compute.gpus` is 0", "Use `auto`, or ask for GPUs")
    if name == "flash_attention_2" and recipe.train.precision != "bf16":
        raise RecipeError(key, f"`{name}` is used in bf16 only", "Set `train.precision: bf16`, or use `auto`")
    if name == "flex_attention" and recipe.train.deterministic:
        raise RecipeError(key, f"`{name}` is not known to be deterministic", "Use `auto`, or `deterministic: false`")


def _check_compile(recipe: Recipe) -> None:
    """:raises RecipeError: if what is asked for cannot be compiled, or its cache is of no use."""
    train, compute = recipe.train, recipe.compute
    if train.compile and train.method == "prefix":
        raise RecipeError(
            "recipe key `train.compile`",
            "each block would be compiled for itself, because it writes into a cache behind the prefix",
            "Leave it out, or use `lora`",
        )
    if train.compile and train.method == "qlora":
        raise RecipeError(
            "recipe key `train.compile`",
            "what unpacks 4 bits is bitsandbytes' own code, which is not compiled",
            "Leave it out, or use `lora`",
        )
    if train.compile and train.activation_checkpointing == "selective":
        raise RecipeError(
            "recipe key `train.activation_checkpointing`",
            "compiled blocks choose themselves which cheap results are computed again",
            "Use `none`, or `full`",
        )
    if compute.compile_cache is not None and not train.compile:
        raise RecipeError("recipe key `compute.compile_cache`", "nothing is compiled", "Set `train.compile: true`")


def _check_caches(compute: Compute) -> None:
    """:raises RecipeError: for a folder where pods cannot keep anything."""
    for key, folder in (("compile_cache", compute.compile_cache), ("data_cache", compute.data_cache)):
        if folder is None:
            continue
        thing, held = f"recipe key `compute.{key}`", nearest(folder, compute.volumes)
        if held is not None and held.read_only:
            cause = f"pods may not write to {held.path}, where {held.claim} is mounted"
            raise RecipeError(thing, cause, "Give that volume `read_only: false`, or name another folder")
        if key == "data_cache" and compute.backend == "kubernetes" and held is None:
            cause = f"{folder} is in none of the `volumes`, and is lost with each pod"
            raise RecipeError(thing, cause, "Mount a claim there, with `read_only: false`")


def _check_offload(recipe: Recipe) -> None:
    """:raises RecipeError: if what is to be moved to the host is not moved by anything, or is there already."""
    key, offload = "recipe key `train.offload`", recipe.train.offload
    if offload == "none":
        return
    if not recipe.compute.gpus:
        raise RecipeError(
            key, "`compute.gpus` is 0, and there is no GPU whose memory it would spare", "Remove it, or ask for GPUs"
        )
    parallel = recipe.compute.parallel
    if offload != "activations" and parallel not in ("fsdp", "fsdp-no-reshard", "hybrid"):
        raise RecipeError(
            key,
            f"`compute.parallel: {parallel}` keeps weights, gradients and optimizer state on each GPU",
            "Use `fsdp` on several ranks, or `offload: activations`",
        )
    if offload != "activations" and (recipe.train.method == "qlora" or recipe.train.optimizer == "adamw-8bit"):
        raise RecipeError(
            key,
            "what bitsandbytes packs into 4 or 8 bits stays on the GPU",
            "Use `offload: activations`, or leave it out",
        )
    if offload != "states" and recipe.train.activation_checkpointing == "selective":
        raise RecipeError(
            key,
            "what `train.activation_checkpointing: selective` keeps stays on the GPU",
            "Use `full`, or `none`",
        )


def _check_parallel(recipe: Recipe) -> None:
    """:raises RecipeError: if these ranks cannot share a model as asked."""
    compute = recipe.compute
    ranks = compute.nodes * compute.processes_per_node
    if compute.parallel != "auto" and ranks == 1:
        raise RecipeError(
            "recipe key `compute.parallel`",
            f"`{compute.parallel}` needs several ranks, and there is one",
            "Use `auto`, or more `nodes` or `processes_per_node`",
        )
    if compute.parallel != "hybrid":
        if compute.shard_group is not None:
            raise RecipeError(
                "recipe key `compute.shard_group`", "only `compute.parallel: hybrid` has groups", "Remove it"
            )
        return
    group = compute.shard_group or compute.processes_per_node
    if not 1 < group < ranks or ranks % group:
        raise RecipeError(
            "recipe key `compute.shard_group`",
            f"{ranks} ranks do not make several groups of {group}",
            "Set it to a divisor of the ranks between 1 and all of them, or use `fsdp`",
        )
