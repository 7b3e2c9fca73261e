"""Model FLOPs against counts by hand, and utilisation only where somebody has said what a device can do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config import Lora
from trainer.model.adapters import add_adapters
from trainer.report.flops import PEAKS, Flops, Gauge, make_gauge, mean_context, model_flops, peak_flops

WIDTH, MLP, LAYERS, VOCABULARY = 32, 48, 3, 64


def made(kind: str = "llama", **config: Any) -> Any:
    shape = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **config))


# Of a layer: query, output, key and value for half of the heads, and the three matrices of a gated MLP.
BLOCK = WIDTH * WIDTH * 3 + 3 * WIDTH * MLP
ONE = np.array([16])


@pytest.mark.parametrize("tied", [True, False])
def test_a_full_training_costs_six_per_weight_and_token(tied: bool) -> None:
    found = model_flops(made(tie_word_embeddings=tied), ONE)
    assert found == Flops(6 * LAYERS * BLOCK, 6 * WIDTH * VOCABULARY, 12 * LAYERS * WIDTH * 16)
    assert found.of(tokens=10, targets=4) == 10 * (found.token + found.attention) + 4 * found.target


def test_it_is_what_torch_counts_in_the_passes_themselves() -> None:
    """With every token a target and no causal half left out by the count: three times the forward pass."""
    model = made(attn_implementation="eager")
    ids = torch.randint(0, VOCABULARY, (1, 16))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert model_flops(model, ONE).of(16, 16) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_frozen_weights_cost_no_gradient_of_their_own() -> None:
    model = made()
    model.requires_grad_(False)
    built = add_adapters(model, Lora(r=2, alpha=4, dropout=0.0, targets=("q_proj", "v_proj")), 0)
    found = model_flops(built.model, ONE)
    adapters = LAYERS * 2 * (WIDTH + WIDTH + WIDTH + WIDTH // 2)
    first = WIDTH * WIDTH  # below the first adapter nothing needs a gradient
    assert found.token == 4 * LAYERS * BLOCK - 2 * first + 6 * adapters
    assert found.target == 4 * WIDTH * VOCABULARY
    assert found.attention == 12 * LAYERS * WIDTH * 16


def test_layers_below_all_that_is_trained_go_forward_only() -> None:
    model = made()
    model.requires_grad_(False)
    model.model.layers[2].requires_grad_(True)
    found = model_flops(model, ONE)
    assert found.token == (2 + 2 + 6) * BLOCK
    assert found.attention == (4 + 4 + 12) * WIDTH * 16


def test_a_token_passes_through_its_experts_only() -> None:
    model = made("mixtral", num_local_experts=4, num_experts_per_tok=2)
    router = WIDTH * 4
    attention = 3 * WIDTH * WIDTH
    assert model_flops(model, ONE).token == 6 * LAYERS * (attention + router + 2 * 3 * WIDTH * MLP)


def test_attention_reaches_as_far_as_document_and_window_do() -> None:
    lengths = np.array([10, 30])
    assert mean_context(lengths) == (100 + 900) / 40
    assert mean_context(lengths, 20) == (100 + 600) / 40
    assert mean_context(np.array([], dtype=np.int64)) == 0.0
    windowed = model_flops(made("mistral", sliding_window=8), np.array([16]))
    assert windowed.attention == 12 * LAYERS * WIDTH * 8
    mixed = made("gemma2", sliding_window=8, head_dim=16)
    kinds = [8 if kind == "sliding_attention" else 16 for kind in mixed.config.layer_types]
    assert 8 in kinds
    assert 16 in kinds
    assert model_flops(mixed, np.array([16])).attention == sum(12 * 4 * 16 * reach for reach in kinds)


def test_gpt2_is_counted_though_its_matrices_are_no_linear_layers() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    found = model_flops(AutoModelForCausalLM.from_config(config), ONE)
    assert found.token == 6 * 2 * 12 * 32 * 32


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 66.9e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "bf16", 835.5e12),
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A10G", "bf16", 70e12),
        ("NVIDIA A10", "bf16", 125e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("Tesla T4", "bf16", None),
        ("Tesla T4", "fp16", 65e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-PCIE-16GB", "fp16", 112e12),
        ("NVIDIA H200", "fp16", 989.4e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("Some GPU 9000", "bf16", None),
        ("cpu", "fp32", None),
    ],
)
def test_peaks_are_those_of_the_data_sheets(device: str, precision: str, expected: float | None) -> None:
    assert peak_flops(device, precision, {}) == (None if expected is None else pytest.approx(expected))


def test_no_name_is_hidden_behind_a_pattern_before_it() -> None:
    assert len({pattern for pattern, _, _ in PEAKS}) == len(PEAKS)
    assert peak_flops("cpu", "bf16", {"DROPFORGE_PEAK_TFLOPS": "2.5"}) == 2.5e12


def test_utilisation_is_the_share_of_all_devices_peaks() -> None:
    gauge = Gauge(Flops(token=100, target=10), peak=1000.0, devices=2)
    assert gauge.mfu(tokens=20, targets=10, seconds=2.0) == (20 * 100 + 10 * 10) / 2.0 / 2000.0
    assert Gauge(Flops(1.0), None).mfu(1, 1, 1.0) is None
    assert Gauge(None, 1.0).mfu(1, 1, 1.0) is None


@pytest.mark.parametrize("told", ["many", "0", "-3", "inf", "nan"])
def test_what_cannot_be_told_is_said_and_ends_nothing(told: str) -> None:
    said: list[str] = []
    gauge = make_gauge(
        made(), ONE, device="cpu", devices=1, precision="fp32", env={"DROPFORGE_PEAK_TFLOPS": told}, say=said.append
    )
    assert gauge.peak is None
    assert gauge.flops is not None
    assert said
    assert "DROPFORGE_PEAK_TFLOPS" in said[0]


def test_a_model_of_no_known_kind_has_no_figure() -> None:
    said: list[str] = []
    odd = torch.nn.Linear(2, 2)
    odd.config = SimpleNamespace()  # type: ignore[assignment]
    gauge = make_gauge(odd, ONE, device="New GPU", devices=1, precision="bf16", env={}, say=said.append)
    assert gauge == Gauge(None, None, 1)
    assert "Linear" in said[0]
    assert "New GPU" in said[1]
