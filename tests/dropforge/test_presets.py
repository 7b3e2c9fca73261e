"""Presets of published models: their shipped configs have the sizes and counts below, and each can be planned.

No weights and no hub. Sizes of Llama 3.1 8B, 3.2 3B and Qwen3 4B were read in copies of their config.json that others
keep; those of the rest, and all counts, were written down as known, and not looked up at their makers'. An encoder is
counted without a head.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dropforge.cli.app import app
from dropforge.errors import RecipeError
from dropforge.estimate import check_memory, estimate, largest_micro_batch, memory_of, shape_of
from dropforge.placement.catalogue import read
from dropforge.placement.pods import told
from dropforge.recipes import load_recipe, presets
from dropforge.shape import Shape, published, shape_of_config

# Preset: id, weights; width, MLP, layers, heads, key heads, head; vocabulary, context, base of the rotation; tied.
MODELS: dict[str, tuple[str, int, tuple[int, ...], tuple[int, int, float | None], bool]] = {
    "distilbert": ("distilbert/distilbert-base-uncased", 66_362_880,
                   (768, 3072, 6, 12, 12, 64), (30522, 512, None), True),
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", 6_738_415_616,
                   (4096, 11008, 32, 32, 32, 128), (32000, 4096, 1e4), False),
    "llama-2-13b": ("meta-llama/Llama-2-13b-hf", 13_015_864_320,
                    (5120, 13824, 40, 40, 40, 128), (32000, 4096, 1e4), False),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf", 68_976_648_192,
                    (8192, 28672, 80, 64, 8, 128), (32000, 4096, 1e4), False),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", 8_030_261_248,
                     (4096, 14336, 32, 32, 8, 128), (128256, 131072, 5e5), False),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B", 70_553_706_496,
                      (8192, 28672, 80, 64, 8, 128), (128256, 131072, 5e5), False),
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", 1_235_814_400,
                     (2048, 8192, 16, 32, 8, 64), (128256, 131072, 5e5), True),
    "llama-3.2-3b": ("meta-llama/Llama-3.2-3B", 3_212_749_824,
                     (3072, 8192, 28, 24, 8, 128), (128256, 131072, 5e5), True),
    "mathstral-7b": ("mistralai/Mathstral-7B-v0.1", 7_248_023_552,
                     (4096, 14336, 32, 32, 8, 128), (32768, 32768, 1e6), False),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704,
                     (4096, 14336, 32, 32, 8, 128), (32000, 32768, 1e6), False),
    "qwen3-4b-instruct": ("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096,
                          (2560, 9728, 36, 32, 8, 128), (151936, 262144, 5e6), True),
}  # fmt: skip


def test_every_preset_of_a_published_model_is_in_the_table() -> None:
    assert set(MODELS) == set(presets()) - {"full", "lora", "sample", "tiny", "t5-small"}


@pytest.mark.parametrize("preset", MODELS)
def test_a_preset_is_the_published_model(preset: str) -> None:
    name, weights, sizes, (vocabulary, context, rotation), tied = MODELS[preset]
    recipe = load_recipe(preset)
    assert recipe.base.model == name
    config = published(name)
    assert config is not None
    shape = shape_of_config(config)
    assert shape is not None
    assert (shape.hidden, shape.mlp, shape.layers, shape.heads, shape.kv_heads, shape.head) == sizes
    assert (shape.vocab, config["max_position_embeddings"], config.get("rope_theta"), shape.tied) == (
        vocabulary, context, rotation, tied,
    )  # fmt: skip
    assert shape.parameters == weights
    assert recipe.train.sequence_length <= context
    assert _of_the_library(config) == weights


def _of_the_library(config: dict[str, Any]) -> int:
    """Weights of the model that transformers makes of a config: those of one block, times the blocks, and the rest."""
    pytest.importorskip("transformers")
    import torch
    from transformers import AutoConfig, AutoModel

    from trainer.commands.dry import make_model

    kind, rest = config["model_type"], {key: value for key, value in config.items() if key != "model_type"}
    encodes = kind == "distilbert"
    depth = "n_layers" if encodes else "num_hidden_layers"

    def count(layers: int) -> int:
        made = AutoConfig.for_model(kind, **{**rest, depth: layers})
        with torch.device("meta"):
            model = AutoModel.from_config(made) if encodes else make_model(made)
        return sum(weight.numel() for weight in model.parameters())

    one, two = count(1), count(2)
    return one + (int(config[depth]) - 1) * (two - one)


@pytest.mark.parametrize("preset", MODELS)
def test_a_preset_plans_and_renders_without_a_hub(preset: str) -> None:
    planned = CliRunner().invoke(app, ["plan", preset], env={"COLUMNS": "400"})
    assert planned.exit_code == 0, planned.output
    assert f"{MODELS[preset][1]:,}" in planned.output
    assert "unknown" not in planned.output
    rendered = CliRunner().invoke(app, ["render", preset, "--family", "fam"])
    assert rendered.exit_code == 0, rendered.output
    assert yaml.safe_load(rendered.output)["kind"] == "PyTorchJob"


@pytest.mark.parametrize("preset", [name for name in presets() if load_recipe(name).compute.gpus])
def test_the_pods_of_a_preset_fit_on_an_instance_with_such_gpus(preset: str) -> None:
    compute = load_recipe(preset).compute
    assert compute.gpu_memory_gb is not None
    assert "have room for a pod" in told(compute, read({}))


def test_the_adapters_of_a_mixture_are_on_its_attention() -> None:
    """With all linear layers peft would adapt the experts too, and hold all of them once more."""
    recipe = load_recipe("mixtral-8x7b")
    shape = shape_of(recipe)
    assert shape is not None
    assert estimate(recipe).trained == 32 * 8 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    assert shape.adapted(8, None) > 10 * shape.adapted(8, ("q_proj", "k_proj", "v_proj", "o_proj"))


@pytest.mark.parametrize("preset", ["llama-3.1-8b", "llama-3.2-3b", "sample"])
def test_the_largest_micro_batch_fits_and_one_row_more_does_not(preset: str) -> None:
    recipe = load_recipe(preset)
    shape, most = shape_of(recipe), estimate(recipe).most_rows
    assert shape is not None
    assert most
    compute = recipe.compute
    room = 1e9 * (compute.gpu_memory_gb or compute.memory_gb / compute.processes_per_node)
    assert memory_of(recipe, shape, most).total <= room < memory_of(recipe, shape, most + 1).total
    assert largest_micro_batch(recipe, shape, 1e9 / 2) == 0


def test_a_gpu_that_is_too_small_is_refused_before_the_start() -> None:
    small = load_recipe("llama-2-7b", {"compute": {"gpu_memory_gb": 16}})
    with pytest.raises(RecipeError, match=r"`compute.gpu_memory_gb`: a GPU of 16 GB is too small"):
        check_memory(small, estimate(small))
    pod = load_recipe("llama-2-13b", {"compute": {"memory_gb": 40}})
    with pytest.raises(RecipeError, match=r"`compute.memory_gb`: a pod of 40 GB .* 2 ranks that hold the model"):
        check_memory(pod, estimate(pod))
    unknown = load_recipe("llama-2-7b", {"compute": {"gpu_memory_gb": None}})
    check_memory(unknown, estimate(unknown))
    with pytest.raises(RecipeError, match=r"`compute.gpu_memory_gb`: `compute.gpus` is 0"):
        load_recipe("sample", {"compute": {"gpu_memory_gb": 80}})


def test_the_whole_model_is_on_each_gpu_only_where_ranks_do_not_read_their_shards() -> None:
    whole = 4 * MODELS["llama-2-70b"][1]
    sliced = estimate(load_recipe("llama-2-70b"))
    assert sliced.memory is not None
    assert sliced.memory.total < whole / 4
    read = estimate(load_recipe("llama-2-70b", {"train": {"method": "dora"}}))
    assert read.memory is not None
    assert read.memory.total >= whole
    assert read.memory.weights < whole / 7
    assert sliced.host is not None
    assert read.host is not None
    assert read.host > 7 * sliced.host


def test_shapes_without_a_head_size_divide_the_width() -> None:
    shape = shape_of_config({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 300})
    assert isinstance(shape, Shape)
    assert (shape.head, shape.kv_heads, shape.mlp, shape.tied) == (16, 4, 256, False)


def test_presets_are_listed_with_what_they_take() -> None:
    done = CliRunner().invoke(app, ["presets", "-o", "json"])
    rows = {row["preset"]: row for row in json.loads(done.stdout)}
    assert tuple(rows) == presets()
    for name, row in rows.items():
        about = row["about"]
        assert (about[:1].isupper(), about.endswith(".")) == (True, True), name
    assert (rows["lora"]["base"], rows["lora"]["parameters"]) == (None, None)
    assert (rows["llama-3.1-8b"]["parameters"], rows["llama-3.1-8b"]["gpus"]) == (8_030_261_248, 1)
    (line,) = (one for one in CliRunner().invoke(app, ["presets"]).stdout.splitlines() if "llama-3.1-8b" in one)
    assert line.split()[:6] == ["llama-3.1-8b", "lora", "8.03B", "1", "64.1", "GB"]
