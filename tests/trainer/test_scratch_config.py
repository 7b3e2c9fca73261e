"""A new model from any causal config: unknown keys are refused by name, weights are made, and it trains to a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dropforge.errors import DropforgeError, RecipeError
from trainer.config import Scratch
from trainer.data.batch import make_batch
from trainer.data.tokenizer import SPECIAL
from trainer.model.loss import check_first_loss, loss_model
from trainer.model.scratch import _marked_memory, check_initialised, check_scratch, longest, make_scratch
from trainer.rank import run
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .ranks import Ranks
from .ranks_loop import make_stage, take_steps
from .test_model import loss_of, tokens
from .toy import Toy

TOKENS = {token: index for index, token in enumerate(SPECIAL)}
LLAMA_LIKE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip


def scratch(kind: str = "llama", **more: Any) -> Scratch:
    sizes = {**LLAMA_LIKE, "head_dim": 16} if kind in ("gemma2", "qwen3", "mixtral") else LLAMA_LIKE
    return Scratch(None, None, None, None, None, None, {"model_type": kind, "vocab_size": 320, **sizes, **more})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (scratch(hidden_sise=64), r"config\.hidden_sise`: llama has no such key\. Did you mean `hidden_size`"),
        (scratch("lama"), r"config\.model_type`: .* has no 'lama'\. Did you mean `llama`"),
        (scratch(num_attention_heads=3), r"config`: llama does not take it .*multiple of the number of"),
        (scratch(hidden_size="wide"), r"config`: llama does not take it .*expected int"),
        (scratch(eos_token_id=2), r"config\.eos_token_id`: the tokenizer is trained"),
        (scratch(torch_dtype="bfloat16"), r"config\.torch_dtype`: weights are fp32"),
        (scratch(num_local_experts=4), r"config\.num_local_experts`: llama has no such key"),
        (
            Scratch(None, None, None, None, None, None, {"model_type": "t5", "vocab_size": 320}),
            r"config\.model_type`: t5 is an encoder-decoder, and no causal language model",
        ),
        (
            Scratch(None, None, None, None, None, None,
                    {"model_type": "mpt", "vocab_size": 320, "attn_config": {"alibbi": True}}),
            r"config\.attn_config\.alibbi`: .*Did you mean `alibi`",
        ),
    ],
)  # fmt: skip
def test_what_a_config_does_not_have_is_refused_by_name(config: Scratch, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_scratch(config)


def test_a_published_config_is_taken_as_it_stands() -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}  # fmt: skip
    config = scratch(rope_theta=500000.0, rope_scaling=rope, rms_norm_eps=1e-5, hidden_act="silu", attention_bias=False)
    check_scratch(config)
    assert longest(config) == 64
    model = make_scratch(config, TOKENS, 1).model
    assert model.config.rope_parameters["rope_theta"] == 500000.0
    assert model.config.rope_parameters["factor"] == 8.0


KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "attention_bias": True},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "mixtral": {"num_local_experts": 4},
    "phi3": {"resid_pdrop": 0.0},
    "olmo2": {},
    "gpt_neox": {"num_key_value_heads": None},
    "opt": {"intermediate_size": None, "num_key_value_heads": None, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"intermediate_size": None, "num_key_value_heads": None, "max_position_embeddings": None},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_model_of_any_kind_is_made_whole_and_guesses(kind: str) -> None:
    made = scratch(kind, **KINDS[kind])
    assert made.config is not None
    config = Scratch(None, None, None, None, None, None, {k: v for k, v in made.config.items() if v is not None})
    check_scratch(config)
    built, again = make_scratch(config, TOKENS, 5), make_scratch(config, TOKENS, 5)
    assert all(torch.equal(*pair) for pair in zip(built.model.parameters(), again.model.parameters(), strict=True))
    other = make_scratch(config, TOKENS, 6)
    assert not all(torch.equal(*pair) for pair in zip(built.model.parameters(), other.model.parameters(), strict=True))
    batch = make_batch(tokens([40, 21]), [np.array([0]), np.array([1])], 0)
    loss = loss_model(built.model, False, False).eval()
    check_first_loss(float(loss_of(loss, batch).detach()), len(batch.targets), 320)
    assert built.model.generation_config.eos_token_id == [TOKENS["<|eos|>"], TOKENS["<|im_end|>"]]


def test_an_encoder_that_reads_its_answers_is_refused_and_its_decoder_is_not() -> None:
    config = {"model_type": "bert", "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2,
              "num_attention_heads": 2, "intermediate_size": 64}  # fmt: skip
    with pytest.raises(RecipeError, match=r"config\.model_type`: bert looks at what comes after"):
        make_scratch(Scratch(None, None, None, None, None, None, config), TOKENS, 1)
    decoder = Scratch(None, None, None, None, None, None, {**config, "is_decoder": True})
    check_scratch(decoder)
    make_scratch(decoder, TOKENS, 1)


def test_a_weight_that_nobody_initialised_is_named() -> None:
    model = make_scratch(scratch(), TOKENS, 1).model
    before = torch.are_deterministic_algorithms_enabled()
    with _marked_memory():
        forgotten = torch.empty(32)
    assert torch.are_deterministic_algorithms_enabled() is before
    assert math.isnan(float(forgotten[0]))
    model.model.norm.weight = torch.nn.Parameter(forgotten)
    with pytest.raises(DropforgeError, match=r"weight model\.norm\.weight"):
        check_initialised(model)


CONFIG = {"model_type": "qwen3", "vocab_size": 320, **LLAMA_LIKE, "head_dim": 16}


def test_a_run_from_a_config_ends_with_a_model_that_has_it(toy: Toy) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run(
        toy.run("any", base={"scratch": {"config": CONFIG}}, train={"max_steps": 3}),
        StopSignal(),
        Console(quiet=True),
    )
    folder = Path(toy.files("any").uri) / "model"
    made = json.loads((folder / "config.json").read_text())
    assert {key: made[key] for key in CONFIG} == CONFIG
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 64
    ids = torch.arange(10)[None]
    assert AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits.shape == (1, 10, 320)
    card = (folder / "README.md").read_text()
    assert "a new qwen3 model (width 32, 2 layers, vocabulary of 320)" in card


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("mixtral", "fsdp"),
        *(pytest.param(kind, mode, marks=pytest.mark.exact) for kind, mode in (("mixtral", "ddp"), ("qwen3", "fsdp"))),
    ],
)
def test_ranks_that_share_a_model_from_a_config_train_what_one_trains(
    kind: str, mode: str, ranks: Ranks, toy: Toy, tmp_path: Path
) -> None:
    config = scratch(kind, **KINDS[kind]).config
    stage = make_stage(toy, "any", tmp_path / "scratch", base={"scratch": {"config": config}})
    [alone] = ranks(take_steps, 1, stage, True, 3)
    together = ranks(take_steps, 2, stage.change(parallel=mode), True, 3)[0]
    assert together.losses == pytest.approx(alone.losses, rel=1e-5)
    assert all(torch.allclose(weight, alone.weights[name], atol=1e-4) for name, weight in together.weights.items())
