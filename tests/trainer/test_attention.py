"""Attention and packing: what is chosen for each kind of model, that it is exact, and that ranks agree on it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dropforge.errors import DropforgeError, RecipeError
from trainer.data.batch import make_batch
from trainer.gang import Gang
from trainer.model import attention as module
from trainer.model.attention import Attention, agree_packing, candidates, choose, windowed
from trainer.model.isolation import Isolation, largest_difference
from trainer.model.loss import LossModel, block_causal, choose_way, loss_model

from .ranks import Ranks
from .test_model import loss_of, small, tokens

CPU = torch.device("cpu")
WINDOW = {"sliding_window": 16}
LENGTHS = [37, 59, 20]  # together a row of 116 tokens; two of them are longer than any window here


def chosen(model: Any, asked: Any = "auto", length: int = 116, pack: bool = True) -> Attention:
    return choose(model, asked=asked, precision="fp32", length=length, pack=pack)


KINDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("llama", {}, "sdpa", "positions"),
    ("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 0}, "sdpa", "positions"),
    ("qwen3", {}, "sdpa", "positions"),
    ("mistral", WINDOW, "sdpa", "positions"),
    ("gemma2", WINDOW, "eager", "positions"),
    ("gemma3_text", WINDOW, "sdpa", "positions"),
    ("gpt2", {}, "sdpa", "positions"),
    ("llama4_text", {"attention_chunk_size": 16}, "sdpa", "positions"),
    ("opt", {}, "sdpa", "mask"),
    ("mpt", {}, "eager", "mask"),
    ("bloom", {}, "eager", "padded"),
    ("falcon", {}, "sdpa", "padded"),
    ("mamba", {}, "eager", "padded"),
]


@pytest.mark.parametrize(("kind", "more", "name", "packing"), KINDS, ids=[kind for kind, *_ in KINDS])
def test_rows_are_exact_in_the_way_that_was_chosen(kind: str, more: dict[str, Any], name: str, packing: str) -> None:
    """Logits and gradients equal those of each document alone, and a neighbour changes none of them by a bit."""
    model = small(kind, **more).eval()
    found = chosen(model)
    assert (found.name, found.packing) == (name, packing)
    assert found.name == model.config._attn_implementation
    assert bool(found.isolation.reason) is (packing == "padded")
    assert found.packs is False or found.isolation.difference <= 1e-4
    loss = loss_model(model, found.packs, False, found.masked).eval()
    data = tokens(LENGTHS)
    rows = [np.arange(3)] if found.packs else [np.array([index]) for index in range(3)]
    batch = make_batch(data, rows, 0)
    choose_way(loss, batch)

    def gradients(*batches: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        for item in batches:
            loss_of(loss, item).backward()
        logits = torch.cat([loss.logits(item.ids, item.positions, item.places).detach() for item in batches])
        return logits, [torch.zeros(1) if weight.grad is None else weight.grad.clone() for weight in model.parameters()]

    alone = [make_batch(data, [np.array([index])], 0) for index in range(3)]
    (logits, together), (expected, apart) = gradients(batch), gradients(*alone)
    assert torch.allclose(logits, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.abs().max())))
    for left, right in zip(together, apart, strict=True):
        assert torch.allclose(left, right, rtol=0, atol=1e-4 * max(1.0, float(right.abs().max())))

    data.trained[: LENGTHS[0]] = False  # whatever the first document does now comes through the others
    _, before = gradients(make_batch(data, rows, 0))
    data.ids[: LENGTHS[0]] = (data.ids[: LENGTHS[0]] + 7) % 90 + 3
    changed = make_batch(data, rows, 0)
    assert not torch.equal(changed.ids, batch.ids)
    _, after = gradients(changed)
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


def test_an_own_mask_would_drop_a_window_and_is_not_used_there() -> None:
    model = small("mistral", **WINDOW)
    assert largest_difference(LossModel(model, True, masked=True), 116) < 1e-4  # alike, and both wrong
    alone = make_batch(tokens([59]), [np.array([0])], 0)
    plain, masked = (LossModel(model, True, masked=own).eval() for own in (False, True))
    args = (alone.ids, alone.positions, alone.places)
    assert (plain.logits(*args) - masked.logits(*args)).abs().max() > 0.1
    assert windowed(model.config)


@pytest.mark.parametrize(("window", "packing"), [(16, "padded"), (None, "mask")])
def test_a_model_with_a_window_that_ignores_positions_is_padded(window: int | None, packing: str) -> None:
    model = small("mistral", sliding_window=window)
    forward = model.forward

    def blind(input_ids: Any, position_ids: Any = None, logits_to_keep: Any = 0, **rest: Any) -> Any:
        return forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **rest)

    model.forward = blind
    assert chosen(model).packing == packing


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, False),
        ({"sliding_window": None, "layer_types": ["full_attention"]}, False),
        ({"sliding_window": 8}, True),
        ({"attention_chunk_size": 8}, True),
        ({"layer_types": ["full_attention", "chunked_attention"]}, True),
        ({"layer_types": ["linear_attention"]}, True),
    ],
)
def test_windows_are_found_in_a_composite_models_decoder_too(config: dict[str, Any], found: bool) -> None:
    decoder = SimpleNamespace(**config)
    assert windowed(SimpleNamespace(get_text_config=lambda: decoder)) is found


def test_the_mask_lets_a_token_see_its_document_up_to_itself() -> None:
    seen = block_causal(torch.tensor([[0, 1, 0, 0, 1]]), additive=False)[0, 0].int().tolist()
    assert seen == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    added = block_causal(torch.tensor([[0, 1, 0]]), additive=True)
    assert added[0, 0].tolist()[1] == [0.0, 0.0, torch.finfo(torch.float32).min]


def test_what_is_named_is_what_runs_or_it_is_refused() -> None:
    assert chosen(small("llama"), "eager").name == "eager"
    model = small("gpt2")
    assert chosen(model, "eager").name == model.config._attn_implementation == "eager"
    with pytest.raises(RecipeError, match=r"train\.attention.*Gemma2ForCausalLM does not run `sdpa`.*Use `auto`"):
        chosen(small("gemma2"), "sdpa")
    for name in ("flash_attention_2", "flex_attention"):
        with pytest.raises(RecipeError, match="it needs a GPU"):
            chosen(small("llama"), name)


def test_a_library_that_takes_the_request_and_does_nothing_is_found_out() -> None:
    model = small("llama")
    model.set_attn_implementation = lambda name: None
    with pytest.raises(RecipeError, match="the library runs `sdpa` instead"):
        chosen(model, "eager")


def test_an_implementation_that_leaves_something_out_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As attention without soft-capping is, which isolates documents as well as any."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._local_mapping,
        "sdpa",
        lambda *args, **rest: plain(*args, **{**rest, "scaling": 0.5 * rest["scaling"]}),
    )
    model = small("llama")
    found = chosen(model)
    assert (found.name, found.packing) == ("eager", "positions")
    assert found.passed_over[0].startswith("sdpa: its logits differ from eager attention's by ")
    assert "skipped sdpa" in str(found)
    with pytest.raises(RecipeError, match="it leaves out a part of this model"):
        chosen(small("llama"), "sdpa")


def test_the_model_is_left_in_its_mode_and_padding_needs_no_trial() -> None:
    model = small("llama").train()
    found = chosen(model, pack=False)
    assert (found.packing, found.isolation.reason) == ("padded", "as the recipe sets it")
    assert model.training
    assert found.deviation is not None
    assert found.deviation <= 1e-4
    assert found.plain()["attention"] == "sdpa"


def test_a_gpu_with_flash_attention_tries_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.import_utils.is_flash_attn_2_available", lambda: True)
    cuda = torch.device("cuda")
    assert candidates("auto", "sdpa", "bf16", cuda, False) == ("flash_attention_2", "sdpa", "eager")
    assert candidates("auto", "sdpa", "fp32", cuda, False) == ("sdpa", "eager")
    assert candidates("auto", "eager", "bf16", CPU, False) == ("eager",)
    assert candidates("flex_attention", "sdpa", "bf16", cuda, False) == ("flex_attention",)


def test_rows_laid_end_to_end_for_varlen_kernels_are_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = small("llama"), tokens([9, 14, 30, 5])
    loss = loss_model(model, True, False).eval()
    batch = make_batch(data, [np.array([0, 1]), np.array([2, 3])], 0)
    args = (batch.ids, batch.positions, batch.places)
    for way in ("own", "places"):
        loss.way = way  # type: ignore[assignment]
        rows, value = loss.logits(*args), loss_of(loss, batch)
        with monkeypatch.context() as patch:
            patch.setattr(LossModel, "_attention", lambda self: "flash_attention_2")
            assert torch.allclose(loss.logits(*args), rows, atol=1e-4 * float(rows.detach().abs().max()))
            assert loss_of(loss, batch).item() == pytest.approx(value.item(), rel=1e-5)


@pytest.mark.parametrize("packs", [True, False])
def test_padding_beyond_an_odd_context_is_not_read(packs: bool) -> None:
    """Rows are rounded up to 8 tokens, a model of 13 learned positions has no more."""
    model, data = small("gpt2", n_positions=13), tokens([13, 2])
    batch = make_batch(data, [np.array([0]), np.array([1])], 0)
    assert batch.ids.shape[1] == 16
    loss = loss_model(model, packs, False).eval()
    alone = [make_batch(data, [np.array([index])], 0) for index in (0, 1)]
    for way in ("own", "places"):
        loss.way = way  # type: ignore[assignment]
        assert loss_of(loss, batch).item() == pytest.approx(sum(loss_of(loss, item).item() for item in alone), rel=1e-5)


SOUND = Attention("sdpa", "positions", Isolation(True, 1e-7, ""))


def together(gang: Gang, found: list[Attention]) -> Attention:
    return agree_packing(gang, found[gang.rank])


@pytest.mark.dist
def test_one_rank_that_pads_has_all_pad(ranks: Ranks) -> None:
    padded = replace(SOUND, packing="padded", isolation=Isolation(False, 1.0, "they see each other"))
    for found in ranks(together, 2, [SOUND, padded]):
        assert found.packing == "padded"
        assert found.isolation.reason == "rank 1 cannot do as the others (they see each other)"
    assert ranks(together, 2, [SOUND, SOUND]) == [SOUND, SOUND]


def test_ranks_that_attend_differently_are_refused() -> None:
    gang = SimpleNamespace(gather=lambda mine: [mine, ("eager", *mine[1:])])
    with pytest.raises(DropforgeError, match=r"they attend differently: sdpa, eager"):
        agree_packing(gang, SOUND)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("asked", ["auto", "flex_attention"])
def test_on_a_gpu_what_is_chosen_packs(asked: Any) -> None:
    model = small("llama", num_attention_heads=2, num_key_value_heads=2, head_dim=16).cuda()
    found = choose(model, asked=asked, precision="bf16", length=116, pack=True)
    assert found.packs, found.isolation.reason
    assert module.ON_GPU  # flash attention is `auto`'s where its package is there
