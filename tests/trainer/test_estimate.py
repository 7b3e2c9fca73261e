"""The estimate's figures are those of the models: weights, adapters, and what a pass keeps for its backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from dropforge.activations import one_block_bytes, passes_bytes
from dropforge.estimate import check_memory, estimate, memory_text
from dropforge.recipe import Freeze, Recipe
from dropforge.recipes import load_recipe
from dropforge.recipes.load import build_recipe
from dropforge.shape import ENCODERS, KINDS, Shape, shape_of_config
from trainer.config import Lora
from trainer.model.adapters import add_adapters
from trainer.model.build import name_labels
from trainer.model.loss import LabelLoss, loss_model

LENGTH = 80  # no width below
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "vocab_size": 400,
    "max_position_embeddings": 128,
    "num_local_experts": 4,
}
GPT2 = {"n_embd": 96, "n_inner": 208, "n_head": 6, "vocab_size": 400, "n_positions": 128,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
DISTILBERT = {"dim": 96, "hidden_dim": 208, "n_heads": 6, "vocab_size": 400, "max_position_embeddings": 128,
              "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}  # fmt: skip
TINY = load_recipe("tiny")


def config_of(kind: str, layers: int = 2, **more: Any) -> dict[str, Any]:
    if kind == "gpt2":
        return {"model_type": kind, **GPT2, "n_layer": layers, **more}
    if kind == "distilbert":
        return {"model_type": kind, **DISTILBERT, "n_layers": layers, **more}
    sizes = {key: value for key, value in SIZES.items() if key != "num_local_experts" or kind == "mixtral"}
    if kind == "qwen2":  # it has no head size of its own
        del sizes["head_dim"]
    return {"model_type": kind, **sizes, "num_hidden_layers": layers, **more}


def model_of(config: dict[str, Any]) -> Any:
    plain = dict(config)
    kind = plain.pop("model_type")
    made = AutoConfig.for_model(kind, **plain)
    of_task: Any = AutoModelForCausalLM
    if kind in ENCODERS:
        name_labels(made, ("a", "b", "c"), 0)
        of_task = AutoModelForSequenceClassification
    return of_task.from_config(made, dtype=torch.float32)


def shape(config: dict[str, Any]) -> Shape:
    found = shape_of_config(config)
    assert found is not None
    return found


WAYS = [(kind, more) for kind in KINDS for more in ({}, {"tie_word_embeddings": True})]


@pytest.mark.parametrize(("kind", "more"), [*WAYS, ("llama", {"attention_bias": True, "mlp_bias": True})])
def test_weights_are_counted_exactly(kind: str, more: dict[str, Any]) -> None:
    config = config_of(kind, **more)
    with torch.device("meta"):
        model = model_of(config)
    assert shape(config).parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("kind", ENCODERS)
def test_the_body_of_an_encoder_is_counted_exactly(kind: str) -> None:
    config = config_of(kind)
    with torch.device("meta"):
        body = AutoModel.from_config(model_of(config).config)
    assert shape(config).parameters == sum(weight.numel() for weight in body.parameters())
    assert estimate(recipe_of("full", "fp32", config)).parameters == shape(config).parameters


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_counted_as_peft_makes_them(kind: str, targets: Any) -> None:
    if kind == "gpt2" and targets != "all-linear":
        targets = ("c_attn",)
    config = config_of(kind)
    with torch.device("meta"):
        built = add_adapters(model_of(config), Lora(4, 8, 0.0, targets), 1)
    expected = shape(config).adapted(4, None if targets == "all-linear" else targets)
    assert expected == sum(weight.numel() for _, weight in built.trainable())


def kept(config: dict[str, Any], method: str, bf16: bool, rows: int) -> int:
    """Bytes that a forward pass over two rows of a classifier, or one of text, keeps; weights and casts left out."""
    model = model_of(config)
    model.config.use_cache = False
    if method in ("lora", "dropout", "dora"):
        lora = Lora(8, 16, 0.1 if method == "dropout" else 0.0, "all-linear")
        model = add_adapters(model, lora, 1, dora=method == "dora").model
    elif method == "frozen":
        for weight in model.parameters():
            weight.requires_grad_(weight is model.get_input_embeddings().weight)
    loss = LabelLoss(model, bf16) if rows > 1 else loss_model(model, True, bf16)
    loss.way = "places"
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    found: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and {LENGTH, rows * LENGTH} & set(tensor.shape):
            found[storage.data_ptr()] = storage.nbytes(), tensor  # kept, so that nothing else gets its place
        return tensor

    ids = (torch.arange(LENGTH)[None] + 5).repeat(rows, 1)
    positions = torch.cat([torch.arange(32), torch.arange(LENGTH - 32)])[None].repeat(rows, 1)
    places = torch.arange(0, LENGTH - 1, 2)
    targets = ids.view(-1)[places + 1]
    if rows > 1:  # of which one is padded
        places, targets = torch.tensor([LENGTH - 1, LENGTH + 40]), torch.tensor([0, 2])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(ids, positions, places, targets)
    return sum(size for size, _ in found.values())


def recipe_of(method: str, precision: str, config: dict[str, Any]) -> Recipe:
    changed: dict[str, Any] = {"precision": precision, "sequence_length": LENGTH, "micro_batch": 1}
    changed |= {
        "frozen": {"freeze": Freeze(blocks=9, embeddings=False)},
        "dropout": {"method": "lora", "lora": TINY.train.lora.model_copy(update={"dropout": 0.1})},
    }.get(method, {"method": method})
    found = TINY.model_copy(update={"train": TINY.train.model_copy(update=changed)})
    if config["model_type"] not in ENCODERS:
        return found
    short = {"train": {"sequence_length": LENGTH}}
    base = build_recipe({"task": "classification", "base": {"scratch": {"config": config}}, **short}).base
    return found.model_copy(update={"task": "classification", "base": base})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["full", "frozen", "lora", "dropout", "dora"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "distilbert"])
def test_what_a_block_keeps_is_what_the_estimate_says(kind: str, method: str, precision: str) -> None:
    two, three = config_of(kind, 2), config_of(kind, 3)
    rows = 2 if kind in ENCODERS else 1
    seen = kept(three, method, precision == "bf16", rows) - kept(two, method, precision == "bf16", rows)
    recipe = recipe_of(method, precision, three)
    said = passes_bytes(recipe, shape(three), rows)[0] - passes_bytes(recipe, shape(two), rows)[0]
    assert said == pytest.approx(seen, rel=0.02)


BERT = {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 300}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "distilbert", "bert"])
def test_a_classifier_has_no_logits_of_tokens_and_an_unknown_encoder_no_figures(kind: str) -> None:
    scratch = {"config": BERT} if kind == "bert" else {"architecture": kind}
    asked = {"base": {"scratch": scratch}, "task": "classification", "promote": {"metric": "eval/loss"}}
    recipe = build_recipe(asked)
    found = estimate(recipe, 10_000)
    check_memory(recipe, found)
    if kind == "bert":
        assert (found.parameters, found.memory) == (None, None)
        assert memory_text(recipe, found).startswith("unknown for an encoder")
        return
    assert found.memory is not None
    assert (found.memory.logits, found.memory.evaluation) == (0, 0)
    assert ("like a Llama" in memory_text(recipe, found)) == (kind != "distilbert")


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_one_block_that_learns_is_there_as_long_as_one_does(kind: str) -> None:
    """What is offloaded is never the block that computes, whichever blocks are frozen."""
    sizes = {"model_type": "t5", "vocab_size": 400, "num_layers": 3} if kind == "t5" else config_of(kind, 6)
    alone = {}
    for blocks in (0, 1, 5, 6):
        recipe = recipe_of("full", "fp32", sizes)
        freeze = Freeze(blocks=blocks, embeddings=True)
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"freeze": freeze})})
        alone[blocks] = one_block_bytes(recipe, shape(sizes), 1)
        if blocks == 6:  # nothing is kept, so nothing is computed again
            again = recipe.train.model_copy(update={"activation_checkpointing": "full"})
            again_too = recipe.model_copy(update={"train": again})
            assert passes_bytes(again_too, shape(sizes), 1) == passes_bytes(recipe, shape(sizes), 1)
    assert alone[0] == alone[1] == alone[5] > alone[6]
