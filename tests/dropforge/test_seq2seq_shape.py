"""Encoder-decoders are counted as the library makes them: weights, adapters, frozen parts, and what passes keep."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForSeq2SeqLM
from typer.testing import CliRunner

from dropforge.cli.app import app
from dropforge.estimate import estimate, memory_text, shape_of
from dropforge.recipes import load_recipe
from dropforge.recipes.load import build_recipe
from dropforge.seq2seq_shape import Seq2SeqShape
from dropforge.shape import published, shape_of_config
from trainer.config import Freeze, Lora
from trainer.model.adapters import add_adapters
from trainer.model.freeze import freeze_part
from trainer.model.seq2seq import Seq2SeqLoss

T5: dict[str, Any] = {
    "model_type": "t5",
    "d_model": 48,
    "d_kv": 20,
    "d_ff": 112,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "vocab_size": 400,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
BART: dict[str, Any] = {
    "model_type": "bart",
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 112,
    "decoder_ffn_dim": 144,
    "max_position_embeddings": 128,
    "vocab_size": 400,
    "dropout": 0.0,
}
KINDS: dict[str, dict[str, Any]] = {"t5": T5, "t5-gated": {**T5, "feed_forward_proj": "gated-gelu"}, "bart": BART}
SOURCE, TARGET = 71, 45  # tokens; no width


def model_of(config: dict[str, Any]) -> Any:
    plain, make = dict(config), cast(Any, AutoModelForSeq2SeqLM)
    return make.from_config(AutoConfig.for_model(plain.pop("model_type"), **plain), dtype=torch.float32)


def shape(config: dict[str, Any]) -> Seq2SeqShape:
    found = shape_of_config(config)
    assert isinstance(found, Seq2SeqShape)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_weights_adapters_and_frozen_parts_are_counted_exactly(kind: str) -> None:
    config = KINDS[kind]
    with torch.device("meta"):
        whole = sum(weight.numel() for weight in model_of(config).parameters())
        assert shape(config).parameters == whole
        some = ("q_proj", "fc2") if kind == "bart" else ("q", "wo")
        for targets in ("all-linear", some):
            built = add_adapters(model_of(config), Lora(4, 8, 0.0, targets), 1)
            found = shape(config).adapted(4, None if targets == "all-linear" else some)
            assert found == sum(weight.numel() for _, weight in built.trainable())
        for blocks, embeddings in ((1, False), (3, True)):
            model = model_of(config)
            freeze_part(model, Freeze(blocks, embeddings))
            still = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
            assert shape(config).frozen(blocks, embeddings) == still


def kept(config: dict[str, Any], method: str, arithmetic: str) -> int:
    """Bytes that a forward pass of one row keeps, weights and their casts left out."""
    model = model_of(config)
    if method == "lora":
        model = add_adapters(model, Lora(8, 16, 0.0, "all-linear"), 1).model
    if arithmetic == "bf16":
        model.to(torch.bfloat16)
    loss = Seq2SeqLoss(model, arithmetic == "cast", "places")
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    casts = {weight.numel() for weight in model.parameters()}
    found: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.numel() not in casts:
            found[storage.data_ptr()] = storage.nbytes(), tensor  # kept, so that nothing else gets its place
        return tensor

    ids = torch.arange(SOURCE + TARGET)[None] + 5
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(ids, torch.arange(SOURCE)[None], SOURCE - 1 + torch.arange(TARGET), ids[0, SOURCE:])
    return sum(size for size, _ in found.values())


def estimated(config: dict[str, Any], method: str, arithmetic: str) -> int:
    width, sizes = 4 if arithmetic == "fp32" else 2, shape(config)
    linears = (sizes.encoder_linears, sizes.decoder_linears)
    first, second = (8 * width * len(found) if method == "lora" else 0 for found in linears)
    return sizes.kept(method, arithmetic, (first, second), "none", SOURCE, TARGET)


DROPS = {"t5": {"dropout_rate": 0.1}, "bart": {"dropout": 0.1}}


@pytest.mark.parametrize(
    ("kind", "method", "arithmetic", "drops"),
    [
        *((kind, method, arithmetic, {}) for kind in KINDS for method in ("full", "lora") for arithmetic in
          ("fp32", "cast", "bf16")),
        *((kind, "full", "fp32", drops) for kind, drops in DROPS.items()),
    ],
)  # fmt: skip
def test_what_blocks_keep_is_what_the_estimate_says(
    kind: str, method: str, arithmetic: str, drops: dict[str, float]
) -> None:
    """A block more of the encoder, and one more of the decoder."""
    for name in ("num_layers", "num_decoder_layers") if kind != "bart" else ("encoder_layers", "decoder_layers"):
        less = {**KINDS[kind], **drops}
        more = {**less, name: less[name] + 1}
        seen = kept(more, method, arithmetic) - kept(less, method, arithmetic)
        large, small = (estimated(one, method, arithmetic) for one in (more, less))
        assert large - small == pytest.approx(seen, rel=0.05), (name, (seen - large + small) / seen)


def test_the_preset_is_the_published_t5_and_plans_and_renders_without_a_hub() -> None:
    recipe = load_recipe("t5-small")
    config = published(str(recipe.base.model))
    assert config is not None
    found = shape_of(recipe)
    assert isinstance(found, Seq2SeqShape)
    assert (found.hidden, found.encoder, found.decoder, found.heads, found.head, found.mlp, found.vocab) == (
        512, 6, 6, 8, 64, 2048, 32128,
    )  # fmt: skip
    with torch.device("meta"):
        library = sum(weight.numel() for weight in model_of(config).parameters())
    assert found.parameters == library == 60_506_624
    planned = CliRunner().invoke(app, ["plan", "t5-small"], env={"COLUMNS": "400"})
    assert planned.exit_code == 0, planned.output
    assert "60,506,624" in planned.output
    assert "unknown" not in planned.output
    assert "built like a Llama" not in planned.output
    rendered = CliRunner().invoke(app, ["render", "t5-small", "--family", "fam"])
    assert yaml.safe_load(rendered.output)["kind"] == "PyTorchJob"


def test_of_other_encoder_decoders_and_other_tasks_nothing_is_known() -> None:
    config = {"model_type": "pegasus", "vocab_size": 400}
    other = build_recipe({"task": "sequence-to-sequence", "base": {"scratch": {"config": config}}})
    assert (estimate(other).parameters, estimate(other).memory) == (None, None)
    assert memory_text(other, estimate(other)).startswith("unknown for another encoder-decoder than T5 and BART")
    asked = {"task": "classification", "base": {"scratch": {"config": BART}}, "train": {"sequence_length": 64}}
    labels = build_recipe(asked)
    assert estimate(labels).parameters is None
