"""The recipe of run.json is checked again, and no request is ignored."""

from __future__ import annotations

import copy
import typing
from typing import Any

import pytest

from dropforge import recipe as model
from dropforge.errors import RecipeError
from dropforge.recipes import load_recipe, presets
from dropforge.wheel import ANSWERS, TAKEN
from trainer import config
from trainer.config import read_settings
from trainer.scores import PREFIX, SCORES

from .toy import recipe


def change(path: str, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(recipe())
    *sections, key = path.split(".")
    target = values
    for section in sections:
        target = target[section]
    target[key] = value
    return values


def generation(**values: Any) -> dict[str, Any]:
    return {"rows": 3, "max_new_tokens": 8, "metrics": ["rouge-l"], "batch": 2, "every": 1, **values}


def test_the_same_metrics_are_known_to_both() -> None:
    assert set(SCORES) == set(typing.get_args(model.Score))
    ours, _ = typing.get_args(model.Promote.model_fields["metric"].annotation)  # or one of the user's
    promoted = typing.get_args(ours)
    assert {name.removeprefix(PREFIX) for name in promoted if name.startswith(PREFIX)} == set(SCORES)
    assert read_settings(change("evaluate.generation", generation())).generation is not None


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_understood(name: str) -> None:
    read_settings(load_recipe(name).plain())


@pytest.mark.parametrize(
    "section",
    ["Scratch", "Base", "Lora", "Prefix", "Freeze", "EarlyStopping", "FastCheckpoints", "Generation", "Train", "Code"],
)
def test_the_sections_have_the_keys_of_the_recipe(section: str) -> None:
    assert set(getattr(config, section).__dataclass_fields__) == set(getattr(model, section).model_fields)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train.learning_rat", 1.0),
        ("train.learning_rate", "fast"),
        ("train.learning_rate", float("nan")),
        ("train.learning_rate", 0.0),
        ("train.schedule", "stairs"),
        ("train.max_steps", 0),
        ("train.micro_batch", True),
        ("train.tokens_per_step", 32),
        ("train.tokens_per_step", 100),
        ("train.rows_per_step", 8),
        ("train.epochs", 1.0),
        ("train.max_rows", 0),
        ("train.warmup", 1.5),
        ("train.decay", 0.0),
        ("train.min_rate", 1.1),
        ("train.log_every", 0),
        ("train.checkpoint_every", 0),
        ("train.eval_every", "10 hours"),
        ("train.eval_every", "0 min"),
        ("train.schedule", "plateau"),
        ("train.early_stopping", {"patience": 0, "min_delta": 0.0}),
        ("train.export", "best"),
        ("train.profile", "1-3"),
        ("train.profile", "5-99"),
        ("train.profile", 5),
        ("train.checkpoints", "somewhere"),
        ("train.checkpoints", "s3://key:secret@bucket"),
        ("train.fast_checkpoints", {"folder": "s3://bucket", "every": 1, "keep": 1}),
        ("train.fast_checkpoints", {"folder": "/dev/shm", "every": 0, "keep": 1}),
        ("train.fast_checkpoints", {"folder": "/dev/shm", "every": 1, "keep": 0}),
        ("evaluate.max_batches", 0),
        ("evaluate.generation", {"rows": 3}),
        ("evaluate.generation", generation(rows=0)),
        ("evaluate.generation", generation(rows=31)),
        ("evaluate.generation", generation(max_new_tokens=64)),
        ("evaluate.generation", generation(metrics=["bleu"])),
        ("evaluate.generation", generation(metrics=["rouge-l", "rouge-l"])),
        ("evaluate.generation", generation(every=2)),
        ("train.sequence_length", 100_000),
        ("train.method", "lora"),
        ("train.method", "dora"),
        ("train.method", "kto"),
        ("train.freeze", {"blocks": 1, "embeddings": False}),
        ("base.new_tokens", ["<a>"]),
        ("base.model", "/somewhere"),
        ("base.scratch", None),
        ("base.scratch.layers", None),
        ("base.scratch.config", {"model_type": "llama", "vocab_size": 400}),
        ("base.scratch.config", []),
        ("evaluate.max_rows", 0),
        ("compute.parallel", "zero"),
        ("compute.shard_group", 2),
        ("train.attention", "flash_attention_2"),
        ("train.attention", "paged"),
        ("train.deterministic", "yes"),
        ("train.activation_checkpointing", "some"),
        ("train.compile", "yes"),
        ("train.offload", "states"),
        ("compute.compile_cache", "/cache"),
        ("train.precision", "fp8"),
        ("train.optimizer", "lion"),
        ("train.momentum", 1.0),
        ("train.router_loss", -0.1),
        ("train", None),
    ],
)
def test_what_cannot_work_is_refused_by_name(path: str, value: Any) -> None:
    with pytest.raises(RecipeError) as error:
        read_settings(change(path, value))
    assert path.split(".")[0] in str(error.value)


@pytest.mark.parametrize(
    ("tokens", "train", "cause"),
    [
        (["<a>", "<a>"], {}, r"base\.new_tokens`: one is there twice"),
        (["a b"], {}, r"base\.new_tokens`: .*white space"),
        (["<a>"], {"freeze": {"blocks": 0, "embeddings": True}}, r"base\.new_tokens`: `train\.freeze\.embeddings`"),
        (None, {"freeze": {"blocks": 0, "embeddings": False}}, r"train\.freeze`: it names neither"),
        (None, {"freeze": {"blocks": -1, "embeddings": True}}, r"train\.freeze`"),
        (None, {"method": "dora", "freeze": {"blocks": 1, "embeddings": False}}, r"`dora` freezes the whole base"),
        (["<a>"], {"method": "prefix"}, r"base\.new_tokens`: `train\.method: prefix` trains no row"),
        (None, {"method": "prefix", "prefix": {"tokens": 0}}, r"train\.prefix\.tokens`: it must be at least 1"),
        (None, {"method": "orpo"}, r"`orpo` learns from preferences or rewards, .* TRL's ORPOTrainer"),
    ],
)
def test_methods_that_contradict_the_base_are_refused(tokens: Any, train: dict[str, Any], cause: str) -> None:
    values = copy.deepcopy(recipe())
    values["base"] |= {"model": "/somewhere", "scratch": None}
    read_settings(values)
    values["base"]["new_tokens"] = tokens
    values["train"] |= train
    with pytest.raises(RecipeError, match=cause):
        read_settings(values)


def test_a_missing_key_is_named() -> None:
    values = recipe()
    del values["train"]["clip"]
    with pytest.raises(RecipeError, match=r"train\.clip"):
        read_settings(values)


def test_names_of_figures_that_are_ours_are_no_names_for_a_users() -> None:
    assert set(SCORES) < set(TAKEN[ANSWERS])
