"""Keys that no recipe has, each with the one that is probably meant: one misspelled, or another tool's word for it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from dropforge.errors import RecipeError
from dropforge.recipe import Recipe

#: What Hugging Face's Trainer, TRL, PEFT, Axolotl and LLaMA-Factory call what a recipe has under another name.
WORDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("model_name_or_path", "model_name", "base_model", "model_id", "pretrained_model"), "base.model"),
    **dict.fromkeys(("dataset", "datasets", "dataset_name", "dataset_path", "data_files", "train_file"), "data.source"),
    **dict.fromkeys(("val_set_size", "validation_split", "test_size", "val_size"), "data.eval_fraction"),
    **dict.fromkeys(("dataset_text_field", "text_field"), "data.text_column"),
    **dict.fromkeys(("adapter", "finetuning_type", "peft", "load_in_4bit", "load_in_8bit"), "train.method"),
    **dict.fromkeys(("lora_r", "lora_rank", "rank"), "train.lora.r"),
    "lora_alpha": "train.lora.alpha",
    "lora_dropout": "train.lora.dropout",
    **dict.fromkeys(
        ("lora_target_modules", "target_modules", "lora_target", "lora_target_linear"), "train.lora.targets"
    ),
    **dict.fromkeys(
        ("max_seq_length", "max_seq_len", "max_length", "sequence_len", "seq_len", "cutoff_len", "block_size"),
        "train.sequence_length",
    ),
    **dict.fromkeys(("sample_packing", "pack"), "train.packing"),
    **dict.fromkeys(
        ("attn_implementation", "flash_attention", "flash_attn", "use_flash_attention_2"), "train.attention"
    ),
    **dict.fromkeys(
        ("batch_size", "per_device_train_batch_size", "per_device_batch_size", "train_batch_size", "micro_batch_size"),
        "train.micro_batch",
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "gradient_accumulation", "global_batch_size"), "train.tokens_per_step"
    ),
    **dict.fromkeys(("gradient_checkpointing", "use_gradient_checkpointing"), "train.activation_checkpointing"),
    "torch_compile": "train.compile",
    **dict.fromkeys(("num_train_epochs", "num_epochs", "n_epochs", "epoch"), "train.epochs"),
    **dict.fromkeys(("steps", "num_steps", "max_train_steps", "total_steps"), "train.max_steps"),
    **dict.fromkeys(("optim", "optimiser"), "train.optimizer"),
    **dict.fromkeys(("lr", "max_lr", "peak_lr"), "train.learning_rate"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "scheduler"), "train.schedule"),
    **dict.fromkeys(("warmup_ratio", "warmup_steps", "num_warmup_steps"), "train.warmup"),
    "min_lr": "train.min_rate",
    "wd": "train.weight_decay",
    **dict.fromkeys(("max_grad_norm", "gradient_clipping", "grad_clip", "clip_grad_norm"), "train.clip"),
    **dict.fromkeys(("bf16", "fp16", "tf32", "dtype", "torch_dtype", "mixed_precision", "amp"), "train.precision"),
    **dict.fromkeys(
        ("train_on_inputs", "train_on_prompt", "completion_only_loss", "assistant_only_loss"), "train.loss_on"
    ),
    "logging_steps": "train.log_every",
    **dict.fromkeys(("eval_steps", "eval_strategy", "evaluation_strategy", "evals_per_epoch"), "train.eval_every"),
    **dict.fromkeys(("save_steps", "save_strategy", "saves_per_epoch"), "train.checkpoint_every"),
    "save_total_limit": "train.keep_checkpoints",
    "load_best_model_at_end": "train.keep_best",
    "early_stopping_patience": "train.early_stopping.patience",
    **dict.fromkeys(("resume_from_checkpoint", "checkpoint"), "base.start"),
    **dict.fromkeys(("num_nodes", "nnodes"), "compute.nodes"),
    **dict.fromkeys(("num_gpus", "n_gpu", "nproc_per_node", "num_processes", "gpus_per_node"), "compute.gpus"),
    **dict.fromkeys(("fsdp", "deepspeed", "fsdp_config", "ddp"), "compute.parallel"),
    **dict.fromkeys(("eval_samples", "max_eval_samples"), "evaluate.max_rows"),
}
_MOST: Final = 20  # faults that are told at once
_LONGEST: Final = 100  # characters of a key


class Fault(NamedTuple):
    """What is wrong with a key. :param key: with dots."""

    key: str
    cause: str
    hint: str


def find_unknown(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield every key that no recipe has; with a hint those that are told, for thousands of hints take a minute."""
    for number, (key, model, path) in enumerate(_unknown(values, Recipe, "")):
        yield Fault(f"{path}{key[:_LONGEST]}", "it is unknown", _hint(key, model, path) if number < _MOST else "")


def _unknown(
    values: Mapping[str, Any], model: type[BaseModel], path: str
) -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield every key that its section has not, with the section and what stands before the key."""
    known = model.model_fields
    for key, value in values.items():
        if key not in known:
            yield str(key), model, path
            continue
        inner = inner_model(known[key].annotation)
        if inner is not None and isinstance(value, Mapping):
            yield from _unknown(value, inner, f"{path}{key}.")


def without_unknown(values: Mapping[str, Any], model: type[BaseModel] = Recipe) -> dict[str, Any]:
    """Return the values of the keys that a recipe has."""
    found = {}
    for key, value in values.items():
        if key in model.model_fields:
            inner = inner_model(model.model_fields[key].annotation)
            within = inner is not None and isinstance(value, Mapping)
            found[key] = without_unknown(value, inner) if within else value  # type: ignore[arg-type]
    return found


def _hint(key: str, model: type[BaseModel], path: str) -> str:
    key = key[:_LONGEST]
    word = key.lower().replace("-", "_")
    names = [*paths(model), *(() if path else ("extends",))]
    elsewhere = [name for name in paths(Recipe) if name.rpartition(".")[2] == word]
    near = difflib.get_close_matches(key, names, 1, 0.5)
    meant = WORDS.get(word) or (f"{path}{near[0]}" if near else elsewhere[0] if elsewhere else None)
    return f"Did you mean `{meant}`?" if meant else f"Known here: {', '.join(model.model_fields)}"


def recipe_error(faults: list[Fault]) -> RecipeError:
    """Return one error for all faults of a recipe's keys."""
    if len(faults) == 1:
        key, cause, hint = faults[0]
        return RecipeError(f"recipe key `{key}`", cause, hint)
    lines = [f"`{key}`: {cause}. {hint}" for key, cause, hint in faults[:_MOST]]
    more = [f"and {len(faults) - _MOST} more"] if len(faults) > _MOST else []
    return RecipeError("recipe", "\n- ".join([f"{len(faults)} keys are wrong:", *lines, *more]), "Correct all of them")


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a key's own keys, if it has any."""
    options = [annotation, *getattr(annotation, "__args__", ())]
    return next((item for item in options if isinstance(item, type) and issubclass(item, BaseModel)), None)


@cache
def paths(model: type[BaseModel], prefix: str = "") -> tuple[str, ...]:
    """Return all dotted keys of a model, sections among them."""
    names: list[str] = []
    for key, info in model.model_fields.items():
        names.append(prefix + key)
        inner = inner_model(info.annotation)
        if inner is not None:
            names += paths(inner, f"{prefix}{key}.")
    return tuple(names)
