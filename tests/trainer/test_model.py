"""The model: packing only where it is proven, the loss the model's own, the right weights decayed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dropforge.errors import DropforgeError, RecipeError
from trainer.config import Lora, Scratch, read_settings
from trainer.data.batch import make_batch
from trainer.data.tokenizer import SPECIAL
from trainer.data.tokens import Tokens
from trainer.loop.optim import decays, make_optimizer
from trainer.model.adapters import add_adapters
from trainer.model.build import (
    Built,
    check_context,
    check_vocabulary,
    load_model,
)
from trainer.model.isolation import Isolation, check_isolation, document_lengths, widest_window
from trainer.model.loss import LossModel, check_first_loss, choose_way, loss_model, shortened
from trainer.model.scratch import make_scratch

from .toy import recipe

pytestmark = pytest.mark.compat
CHEAPEST = {"fused"}
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small(kind: str, **more: Any) -> Any:
    width = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
    gemma = {**SMALL, "head_dim": 8, "query_pre_attn_scalar": 8}
    kinds = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "moe_layers": []}
    own: dict[str, dict[str, Any]] = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 97},
        "opt": {**width, "ffn_dim": 48, "word_embed_proj_dim": 32},
        "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97},
        "falcon": {**width, "alibi": True, "new_decoder_architecture": False},
        "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 97, "max_seq_len": 128},
        "gemma2": gemma,
        "gemma3_text": {**gemma, "layer_types": ["sliding_attention", "full_attention"]},
        "qwen3": {**SMALL, "head_dim": 8},
        "llama4_text": {**SMALL, **kinds, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
        "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97, "state_size": 4},
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**own.get(kind, SMALL), **more})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weight in model.parameters():  # large enough that a leak or a softcap shows
        torch.nn.init.normal_(weight, std=0.3) if weight.ndim > 1 else None
    return model


def tokens(lengths: list[int], seed: int = 0, untrained: tuple[int, ...] = ()) -> Tokens:
    generator = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    trained = generator.random(offsets[-1]) < 0.6
    trained[offsets[1:] - 1] = True
    for index in untrained:
        trained[offsets[index] : offsets[index + 1]] = False
    trained[offsets[:-1]] = False
    ids = generator.integers(3, 97, offsets[-1]).astype(np.int32)
    return Tokens(ids, trained, offsets, np.arange(len(lengths)), {"rows": len(lengths)})


def isolated(model: Any, length: int) -> Isolation:
    return check_isolation(LossModel(model, True), length)


def loss_of(loss: LossModel, batch: Any) -> torch.Tensor:
    return loss(batch.ids, batch.positions, batch.places, batch.targets)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gpt2", "gemma2"])
def test_models_that_keep_documents_apart_may_pack(kind: str) -> None:
    more = {"sliding_window": 16} if kind in ("mistral", "gemma2") else {}
    found = isolated(small(kind, **more), 96)
    assert found.packs, found.reason


@pytest.mark.parametrize("kind", ["opt", "bloom", "mamba"])
def test_models_that_leak_or_cannot_tell_are_refused(kind: str) -> None:
    found = isolated(small(kind), 96)
    assert not found.packs
    assert found.reason


def test_a_model_that_ignores_boundaries_is_refused() -> None:
    """A recurrence behind an ordinary forward that takes position ids and does nothing with them."""
    model = small("llama")
    model.model.layers[0].self_attn.forward = _running_mean(model.model.layers[0].self_attn)
    found = isolated(model, 96)
    assert not found.packs
    assert "see each other" in found.reason


def _running_mean(layer: Any) -> Any:
    def forward(hidden_states: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, None]:
        count = torch.arange(1, hidden_states.shape[1] + 1)[None, :, None]
        return hidden_states.cumsum(1) / count, None

    return forward


def test_a_dropped_sliding_window_would_be_seen() -> None:
    """The window counts within a document: the check uses documents longer than it."""
    model = small("mistral", sliding_window=8)
    batch = make_batch(tokens([60]), [np.array([0])], 0)
    wide = small("mistral", sliding_window=None)
    narrow_logits, wide_logits = (item(input_ids=batch.ids, use_cache=False).logits for item in (model, wide))
    assert (narrow_logits - wide_logits).abs().max() > 1e-3
    assert isolated(model, 96).packs


@pytest.mark.parametrize(("window", "length"), [(16, 96), (16, 25), (60, 100), (80, 96), (80, 8192)])
def test_packing_is_tried_beyond_a_window_wherever_a_row_is_longer(window: int, length: int) -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(attention_chunk_size=window))
    assert widest_window(config, length) == window
    first, second = document_lengths(length, window)
    assert second > window
    assert first >= 8
    assert first + second <= min(length, 2 * window + 24)


def test_a_window_that_no_row_goes_beyond_costs_nothing() -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(sliding_window=4096))
    assert widest_window(config, 2048) == 0
    assert sum(document_lengths(2048, 0)) == 64


def test_the_check_computes_no_whole_logits() -> None:
    model = small("mistral", sliding_window=200, max_position_embeddings=512)
    places, reached = [], []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: places.append(inputs[0].shape[1]))
    model.model.register_forward_pre_hook(
        lambda _, __, named: reached.append(int(named["position_ids"].max())), with_kwargs=True
    )
    assert isolated(model, 512).packs
    assert max(places) <= 128
    assert max(reached) > 200


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory: you tried")])
def test_out_of_memory_is_no_reason_against_packing(error: Exception) -> None:
    model = small("llama")

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    model.lm_head.forward = fail
    with pytest.raises(type(error)):
        isolated(model, 96)


def test_the_loss_is_chosen_on_a_few_tokens_with_targets() -> None:
    data = tokens([400, 120, 90])
    data.trained[:350] = False  # a long prompt
    batch = make_batch(data, [np.array([0]), np.array([1, 2])], 0)
    part = shortened(batch)
    assert part.ids.shape == (2, 256)
    assert len(part.targets)
    flat = part.ids.view(-1)
    assert torch.equal(flat[part.places + 1], part.targets)
    alone = shortened(make_batch(data, [np.array([0])], 0))
    assert torch.equal(alone.ids.view(-1)[alone.places + 1], alone.targets)
    assert len(alone.targets)
    model = small("llama", max_position_embeddings=512)
    seen: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel() // 32))
    choose_way(loss_model(model, True, False), batch)
    assert max(seen) <= 512


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_packed_rows_give_loss_and_gradient_of_single_documents(kind: str) -> None:
    model, data = small(kind), tokens([5, 17, 9, 30, 2, 11])
    loss = loss_model(model, True, False).eval()  # gpt2 has dropout
    packed = make_batch(data, [np.array([3, 0, 2]), np.array([1, 4, 5])], 0)
    assert packed.tokens == 74
    choose_way(loss, packed)

    def gradients(batches: list[Any]) -> tuple[float, list[torch.Tensor]]:
        model.zero_grad()
        total = 0.0
        for batch in batches:
            value = loss_of(loss, batch)
            value.backward()
            total += float(value.detach())
        return total, [weight.grad.clone() for weight in model.parameters()]

    whole, together = gradients([packed])
    parts, apart = gradients([make_batch(data, [np.array([index])], 0) for index in range(6)])
    assert whole == pytest.approx(parts, rel=1e-6)
    for left, right in zip(together, apart, strict=True):
        assert torch.allclose(left, right, atol=1e-4 * max(1.0, float(right.abs().max())))
    # The first token of a document is no target of the one before.
    assert len(packed.targets) == int(data.targets.sum())


def test_a_neighbour_changes_nothing() -> None:
    model, data = small("llama"), tokens([20, 20])
    other = tokens([20, 20])
    other.ids[:20] = (other.ids[:20] + 7) % 90 + 3
    loss = loss_model(model, True, False)
    first, second = (make_batch(item, [np.array([0, 1])], 0) for item in (data, other))
    mine = first.documents == 1
    with torch.no_grad():
        left = loss.logits(first.ids, first.positions, first.places)[mine]
        right = loss.logits(second.ids, second.positions, second.places)[second.documents == 1]
    assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("kind", "more", "ways"),
    [
        ("llama", {}, CHEAPEST),
        ("gpt2", {}, CHEAPEST),
        ("gemma2", {"final_logit_softcapping": 5.0}, {"own"}),
        ("cohere", {"logit_scale": 0.06}, {"own"}),
        ("granite", {"logits_scaling": 8.0}, {"own"}),
    ],
)
def test_the_loss_is_always_the_models_own(kind: str, more: dict[str, Any], ways: set[str]) -> None:
    model = small(kind, **more).eval()
    data = tokens([9, 14])
    batch = make_batch(data, [np.array([0]), np.array([1])], 0)
    loss = loss_model(model, True, False).eval()
    assert choose_way(loss, batch) in ways
    inputs = {"input_ids": batch.ids, "position_ids": batch.positions, "use_cache": False}
    labels = torch.full_like(batch.ids, -100)
    labels.view(-1)[batch.places + 1] = batch.targets
    own = model(**inputs, labels=labels).loss * len(batch.targets)
    assert loss_of(loss, batch).item() == pytest.approx(own.item(), rel=1e-4)


@pytest.mark.parametrize("way", ["fused", "places", "own"])
def test_a_batch_without_targets_gives_zero_and_touches_every_weight(way: Any) -> None:
    model = small("llama")
    loss = LossModel(model, True, way=way)
    value = loss_of(loss, make_batch(tokens([4]), [], 0))
    value.backward()
    assert value.item() == 0.0
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())


def test_decay_is_on_matrices_only_by_name() -> None:
    model = small("llama", tie_word_embeddings=True)
    optimizer = make_optimizer(model, read_settings(recipe()).train)
    names = {id(weight): name for name, weight in model.named_parameters()}
    decayed = {names[id(weight)] for weight in optimizer.param_groups[0]["params"]}
    assert all("proj" in name for name in decayed)
    assert len(decayed) == 14
    rest = {names[id(weight)] for weight in optimizer.param_groups[1]["params"]}
    assert "model.embed_tokens.weight" in rest
    assert "model.norm.weight" in rest
    assert not decays("h.0.bias", torch.zeros(3), set())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral", "gpt2"])
def test_every_architecture_from_a_config_packs_and_trains(architecture: Any) -> None:
    scratch = Scratch(architecture, hidden_size=32, layers=2, heads=2, vocab_size=320, context=64)
    special = {token: index for index, token in enumerate(SPECIAL)}
    first, again = make_scratch(scratch, special, 5), make_scratch(scratch, special, 5)
    assert all(torch.equal(*pair) for pair in zip(first.model.parameters(), again.model.parameters(), strict=True))
    assert isolated(first.model, 64).packs
    assert all(weight.dtype == torch.float32 for _, weight in first.trainable())


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("hidden", [32, 512])
def test_a_new_model_guesses_and_a_broken_one_is_refused(architecture: Any, hidden: int) -> None:
    scratch = Scratch(architecture, hidden_size=hidden, layers=2, heads=2, vocab_size=320, context=64)
    model = make_scratch(scratch, {token: index for index, token in enumerate(SPECIAL)}, 5).model
    loss, batch = loss_model(model, True, False).eval(), make_batch(tokens([40, 21]), [np.array([0, 1])], 0)

    def check() -> None:
        check_first_loss(float(loss_of(loss, batch).detach()), len(batch.targets), 320)

    check()
    head = model.get_output_embeddings().weight
    made = head.detach().clone()
    for broken in (made * 40, torch.full_like(made, float("nan"))):
        with torch.no_grad():
            head.copy_(broken)
        with pytest.raises(DropforgeError, match=r"a guess among 320 tokens has 5\.768"):
            check()
    with pytest.raises(DropforgeError):  # the labels are the ids themselves
        check_first_loss(1.2 * len(batch.targets), len(batch.targets), 320)
    check_first_loss(0.0, 0, 320)  # nothing to look at


def test_adapters_are_fp32_equal_on_all_ranks_and_get_gradients_with_frozen_embeddings() -> None:
    lora = Lora(r=4, alpha=8, dropout=0.0, targets="all-linear")
    built, other = add_adapters(small("llama"), lora, 3), add_adapters(small("llama"), lora, 3)
    names = [name for name, _ in built.trainable()]
    assert names
    assert all("lora_" in name for name in names)
    assert all(torch.equal(left[1], right[1]) for left, right in zip(built.trainable(), other.trainable(), strict=True))
    loss = loss_model(built.model, True, False)
    batch = make_batch(tokens([9, 14]), [np.array([0, 1])], 0)
    optimizer = make_optimizer(built.model, read_settings(recipe()).train)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(loss, batch).backward()
        optimizer.step()
    assert all(weight.abs().max() > 0 for name, weight in built.trainable() if "lora_B" in name)


def test_adapters_on_names_that_do_not_exist_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"train\.lora\.targets"):
        add_adapters(small("llama"), Lora(4, 8, 0.0, ("nothing",)), 3)


def test_a_loaded_model_is_fp32_whatever_the_file_holds(tmp_path: Any) -> None:
    small("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert {weight.dtype for weight in load_model(tmp_path).parameters()} == {torch.float32}


def test_a_token_beyond_the_embedding_is_refused() -> None:
    check_vocabulary(small("llama"), 96)
    with pytest.raises(RecipeError, match="97 embeddings"):
        check_vocabulary(small("llama"), 97)


def test_rows_longer_than_the_context_of_a_loaded_model_are_refused() -> None:
    model = small("llama", max_position_embeddings=64)
    check_context(model, 64)
    with pytest.raises(RecipeError, match="longer than the base model's context of 64"):
        check_context(model, 65)


def test_a_folder_without_a_model_is_refused(tmp_path: Any) -> None:
    with pytest.raises(RecipeError, match=r"base\.model"):
        load_model(tmp_path)


def test_built_lists_tied_weights_once() -> None:
    names = [name for name, _ in Built(small("llama", tie_word_embeddings=True)).trainable()]
    assert "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names
