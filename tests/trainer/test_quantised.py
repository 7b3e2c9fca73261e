"""A base in 4 bits: its bytes are those of bitsandbytes, its layers compute what they stand for, a run keeps both."""

from __future__ import annotations

import copy
import json
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import PeftModel
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from dropforge.errors import RecipeError
from dropforge.estimate import base_bytes
from dropforge.methods import nf4_bytes
from dropforge.recipes.load import build_recipe
from dropforge.run import RunSpec
from trainer import compat
from trainer.assembly import frozen_digest
from trainer.commands.dry import count_weights
from trainer.config import Lora, read_settings
from trainer.data.batch import make_batch
from trainer.evaluate import evaluation_rows, measure_model
from trainer.model.adapters import add_adapters
from trainer.model.build import Built, head_modules, load_classifier
from trainer.model.loss import choose_way, loss_model
from trainer.model.method import apply_method
from trainer.model.quantised import Nf4Linear, dequantise, pack, quantise, unpack
from trainer.model.recompute import recompute
from trainer.model.shard import find_blocks
from trainer.rank import run
from trainer.report.console import Console
from trainer.report.flops import model_flops
from trainer.restore import Choice, export
from trainer.state.compare import changes, facts
from trainer.state.stop import StopSignal

from .classes import LABELS, classifier_base
from .pairs import KINDS, make_pairs
from .ranks_loop import make_base
from .test_estimate import config_of, model_of, recipe_of, shape
from .test_model import small, tokens
from .toy import Toy, recipe

QLORA: dict[str, Any] = {"method": "qlora", "lora": {"r": 3, "alpha": 6}, "max_steps": 4, "checkpoint_every": 2,
                         "learning_rate": 2e-2}  # fmt: skip


def matrix(*shape: int, scale: float = 0.02) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) * scale


def in_four_bits(model: Any) -> Any:
    quantise(model, find_blocks(model))
    return model


@pytest.mark.parametrize("shape", [(64, 64), (33, 47), (33, 46), (300, 200), (1, 1), (1, 2)])
def test_a_matrix_is_what_bitsandbytes_makes_of_it(shape: tuple[int, int]) -> None:
    """Double quantisation loses a little of each scale; the values are the same to the bit."""
    weight = matrix(*shape)
    packed = pack(weight)
    assert packed.dtype == torch.int8
    assert len(packed) == nf4_bytes(weight.numel())
    values, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    assert torch.equal(packed[: values.numel()].view(torch.uint8), values.view(-1))
    found = unpack(packed, shape, torch.float32)
    state.shape = (1, 2 * values.numel())  # of odd widths it knows only a way through torch.compile
    same = dequantize_4bit(values.view(-1), state).reshape(-1)[: weight.numel()].view(shape)
    assert torch.allclose(found, same, rtol=1e-5, atol=1e-8)
    assert (found - weight).abs().max() < 0.2 * weight.abs().max()
    half = unpack(packed, shape, torch.bfloat16)
    assert torch.equal(half, found.bfloat16())


def test_a_small_matrix_costs_its_scales_and_a_large_one_half_a_byte_a_value() -> None:
    assert nf4_bytes(1 << 24) == (1 << 23) + (1 << 18) + (1 << 12) + 4
    assert nf4_bytes(1) == 1 + 1 + 4 + 4


def test_bytes_do_not_depend_on_the_number_of_threads() -> None:
    """torch's mean does, and ranks of two machines would hold two models."""
    weight = matrix(1600, 1601)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(pack(weight))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def layer(request: pytest.FixtureRequest) -> Nf4Linear:
    bias = nn.Parameter(matrix(24, scale=1.0), requires_grad=False) if request.param else None
    return Nf4Linear(40, 24, nn.Parameter(pack(matrix(24, 40)), requires_grad=False), bias)


@pytest.mark.parametrize("arithmetic", ["fp32", "autocast", "bf16"])
def test_a_layer_computes_what_its_bytes_stand_for(layer: Nf4Linear, arithmetic: str) -> None:
    plain = layer.plain()
    assert (plain.weight.shape, plain.weight.dtype, type(plain)) == ((24, 40), torch.float32, nn.Linear)
    kind = torch.bfloat16 if arithmetic == "bf16" else torch.float32
    found = []
    for module in (copy.deepcopy(layer), plain):
        if arithmetic == "bf16":
            for weight in module.parameters():
                weight.data = weight.data.to(kind) if weight.is_floating_point() else weight.data
        x = matrix(2, 5, 40, scale=1.0).to(kind).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=arithmetic == "autocast"):
            y = module(x)
        (gradient,) = torch.autograd.grad(y.float().square().sum(), x)
        found.append((y, gradient))
    (y, gradient), (wanted, theirs) = found
    assert y.dtype == wanted.dtype
    assert gradient.dtype == theirs.dtype
    assert torch.equal(y, wanted)
    assert torch.equal(gradient, theirs)
    assert y.abs().max() > 0.1


def test_a_layer_keeps_its_bytes_for_the_backward_pass_and_nothing_else(layer: Nf4Linear) -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(matrix(2, 40).requires_grad_())
    assert [tensor.data_ptr() for tensor in kept] == [layer.weight.data_ptr()]


def test_no_pass_changes_a_layer(layer: Nf4Linear) -> None:
    """bitsandbytes' own layer casts its bias for good, and may lay out its bytes anew where no gradient is needed."""
    before = {name: weight.detach().clone() for name, weight in layer.named_parameters()}
    layer.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer(matrix(2, 40))
        layer(matrix(1, 40).bfloat16())
    after = dict(layer.named_parameters())
    assert after.keys() == before.keys()
    for name, weight in before.items():
        assert after[name].dtype == weight.dtype
        assert torch.equal(after[name], weight)


def test_the_layers_of_the_blocks_are_in_four_bits_and_nothing_else() -> None:
    model = small("llama", tie_word_embeddings=False)
    whole = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    in_four_bits(model)
    packed = {name for name, module in model.named_modules() if isinstance(module, Nf4Linear)}
    assert {name.rpartition(".")[2] for name in packed} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert len(packed) == 7 * model.config.num_hidden_layers
    for name, weight in model.named_parameters():
        if name.rpartition(".")[0] in packed:
            assert (weight.dtype, weight.requires_grad) == (torch.int8, False)
            assert len(weight) == nf4_bytes(whole[name].numel())
        else:
            assert torch.equal(weight, whole[name])


def test_the_weights_that_bytes_stand_for_make_the_same_model() -> None:
    model = in_four_bits(small("llama"))
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        before = model.eval()(input_ids=ids).logits
        dequantise(model)
        assert not any(isinstance(module, Nf4Linear) for module in model.modules())
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize(
    ("architecture", "cause"),
    [("gpt2", "GPT2LMHeadModel 0 are in such layers"), ("mixtral", "MixtralForCausalLM")],
)
def test_a_model_that_is_not_made_of_linear_layers_is_refused(architecture: str, cause: str) -> None:
    """GPT-2 has layers of another kind, a mixture holds its experts in one tensor."""
    with pytest.raises(RecipeError, match=rf"train\.method`: `qlora` puts linear layers .*{cause}.*Use `lora`"):
        in_four_bits(small(architecture))


def test_a_model_that_does_not_call_its_layers_is_refused() -> None:
    model = small("llama")

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + functional.linear(x, self.inner.weight)

    model.model.layers[1].post_attention_layernorm = Odd()
    with pytest.raises(RecipeError, match="LlamaForCausalLM cannot be held in 4 bits"):
        in_four_bits(model)


def test_a_weight_of_two_layers_stays_as_it_is() -> None:
    model = small("llama")
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    second.up_proj.weight = first.up_proj.weight
    in_four_bits(model)
    assert type(first.up_proj) is type(second.up_proj) is nn.Linear
    assert first.up_proj.weight is second.up_proj.weight
    assert type(first.gate_proj) is Nf4Linear


def theirs(base: str) -> Any:
    """A base as transformers loads it in 4 bits."""
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    return AutoModelForCausalLM.from_pretrained(base, quantization_config=asked, dtype=torch.float32)


def test_the_model_is_the_one_that_transformers_loads_in_four_bits(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    ours = in_four_bits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = torch.arange(5, 45)[None]
    found, same, whole = (model(input_ids=ids, use_cache=False).logits for model in (ours, theirs(base).train(), plain))
    assert torch.allclose(found, same, atol=1e-4 * float(same.detach().abs().max()))
    assert not torch.allclose(found, whole, atol=1e-2 * float(whole.detach().abs().max()))


def test_adapters_begin_as_on_a_base_of_full_precision_and_alone_are_trained() -> None:
    lora = Lora(r=2, alpha=4, dropout=0.0, targets="all-linear")
    plain = add_adapters(small("llama"), lora, 3)
    packed = add_adapters(in_four_bits(small("llama")), lora, 3)
    assert [name for name, _ in plain.trainable()] == [name for name, _ in packed.trainable()]
    for (_, left), (_, right) in zip(plain.trainable(), packed.trainable(), strict=True):
        assert torch.equal(left, right)
        assert right.dtype == torch.float32
    lengths = np.array([16])
    assert model_flops(packed.model, lengths) == model_flops(plain.model, lengths)


def test_the_loss_is_the_models_own_and_reaches_the_adapters_alone() -> None:
    built = add_adapters(in_four_bits(small("llama")), Lora(r=2, alpha=4, dropout=0.0, targets="all-linear"), 3)
    built.model.config.use_cache = False
    loss = loss_model(built.model, True, False)
    batch = make_batch(tokens([9, 12]), [np.arange(2)], 0)
    choose_way(loss, batch)
    loss(batch.ids, batch.positions, batch.places, batch.targets).backward()
    for name, weight in built.model.named_parameters():
        assert (weight.grad is not None) is ("lora_" in name)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_base(tmp_path_factory.mktemp("quantised") / "base", tie_word_embeddings=False)


def on(toy: Toy, name: str, base: str, **train: Any) -> str:
    return toy.run(name, base={"model": base, "scratch": None}, train={**QLORA, **train})


def test_a_run_is_measured_exported_and_resumed_as_the_model_that_trained(toy: Toy, tmp_path: Path, base: str) -> None:
    """Merged is the adapter with what its 4 bits stand for, and not with the base that they were made of."""
    uri = on(toy, "four", base)
    run(uri, StopSignal(), Console(quiet=True))
    files = toy.files("four")
    report = json.loads(files.get("report.json"))
    folder = Path(files.uri) / "model"
    assert report["model"]["max_logit_difference"] < 1e-4
    assert report["environment"]["bitsandbytes"]
    whole = safetensors.torch.load_file(Path(base) / "model.safetensors")
    merged = safetensors.torch.load_file(folder / "model.safetensors")
    adapter = safetensors.torch.load_file(folder / "adapter" / "adapter_model.safetensors")
    assert merged.keys() == whole.keys()
    moved = 0
    for name, weight in merged.items():
        assert weight.dtype == torch.float32
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" not in adapter:
            assert torch.equal(weight, whole[name])
            continue
        stands_for = unpack(pack(whole[name]), tuple(weight.shape), torch.float32)
        learned = adapter[f"{key}B.weight"] @ adapter[f"{key}A.weight"] * 2
        assert torch.allclose(weight, stands_for + learned, atol=1e-6)
        assert learned.abs().max() > 1e-3
        moved += 1
    assert moved == 7 * 3
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert "base in 4 bits (NF4)" in files.get("model/README.md").decode()

    adapted = PeftModel.from_pretrained(theirs(base), folder / "adapter")  # on what transformers puts into 4 bits
    ids = torch.arange(5, 45)[None]
    wanted = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits
    found = adapted.train()(input_ids=ids, use_cache=False).logits
    assert torch.allclose(found, wanted, atol=1e-4 * float(wanted.detach().abs().max()))

    spec = RunSpec.from_json(Path(uri).read_bytes())
    settings = read_settings(spec.recipe)
    rows = evaluation_rows(spec, settings)
    figures = measure_model("model", str(folder), rows, settings, StopSignal(), Console(quiet=True)).figures
    assert figures["eval/loss"] == pytest.approx(report["eval"]["after"]["eval/loss"], rel=1e-5)
    assert figures["eval/loss"] < report["eval"]["before"]["eval/loss"]
    bare = measure_model("model", base, rows, settings, StopSignal(), Console(quiet=True)).figures
    assert bare["eval/loss"] != pytest.approx(report["eval"]["before"]["eval/loss"], rel=1e-6)

    export(spec, Choice(step=2), tmp_path / "exported", print)
    shutil.rmtree(Path(files.uri) / "checkpoints" / "step-4")
    files.delete("report.json")
    run(uri, StopSignal(), Console(quiet=True))
    again = safetensors.torch.load_file(folder / "model.safetensors")
    assert all(torch.equal(again[name], merged[name]) for name in merged)
    half = safetensors.torch.load_file(tmp_path / "exported" / "model.safetensors")
    assert not torch.equal(half["model.layers.0.mlp.up_proj.weight"], merged["model.layers.0.mlp.up_proj.weight"])


def test_a_base_of_other_bytes_is_refused_by_a_resume(toy: Toy, tmp_path: Path, base: str) -> None:
    own = str(shutil.copytree(base, tmp_path / "own"))
    uri = on(toy, "other", own, max_steps=2)
    run(uri, StopSignal(), Console(quiet=True))
    toy.files("other").delete("report.json")
    path = Path(own) / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][3] *= 1.5
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    with pytest.raises(RecipeError, match=r"base\.frozen_weights"):
        run(uri, StopSignal(), Console(quiet=True))


def test_the_digest_of_the_frozen_weights_sees_every_byte(base: str) -> None:
    built = Built(in_four_bits(AutoModelForCausalLM.from_pretrained(base)))
    built.model.requires_grad_(False)
    before = frozen_digest(built)
    layer = built.model.model.layers[2].mlp.down_proj
    for place in (0, len(layer.weight) // 2, len(layer.weight) - 1):
        layer.weight[place] += 1
        assert frozen_digest(built) != before
        layer.weight[place] -= 1
    assert frozen_digest(built) == before


def test_a_resume_by_another_method_is_refused() -> None:
    base = {"model": "/somewhere", "scratch": None}
    [change] = changes(
        facts(recipe(base=base, train={"method": "lora"})), facts(recipe(base=base, train={"method": "qlora"}))
    )
    assert (change.key, change.safe) == ("train.method", False)


def test_a_plan_counts_the_base_and_its_adapters_without_memory(base: str) -> None:
    from transformers import AutoConfig

    settings = read_settings(recipe(base={"model": base, "scratch": None}, train=QLORA))
    config = AutoConfig.from_pretrained(base)
    built = apply_method(AutoModelForCausalLM.from_pretrained(base), settings.train)
    parameters, trained = count_weights(config, settings, ())
    assert trained == sum(weight.numel() for _, weight in built.trainable())
    assert parameters == sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(base).parameters())


@pytest.mark.parametrize(
    ("train", "key"), [({"method": "qlora"}, "method"), ({"method": "lora", "optimizer": "adamw-8bit"}, "optimizer")]
)
def test_without_its_library_what_is_quantised_is_refused(
    toy: Toy, base: str, monkeypatch: pytest.MonkeyPatch, train: dict[str, Any], key: str
) -> None:
    """By the run before it reads a row, and by the plan."""
    real = compat.version

    def absent(name: str) -> str:
        if name == "bitsandbytes":
            raise PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(compat, "version", absent)
    uri = on(toy, "without", base, **train)
    cause = rf"train\.{key}`: `{train[key]}` needs .*bitsandbytes.*dropforge\[quantised\]"
    with pytest.raises(RecipeError, match=cause):
        run(uri, StopSignal(), Console(quiet=True))
    assert toy.files("without").stat("plan.json") is None
    monkeypatch.setattr(compat, "version", lambda name: "0.43.1" if name == "bitsandbytes" else real(name))
    with pytest.raises(RecipeError, match=r"from 0\.50 up to, not including, 1\.0, and 0\.43\.1 is installed"):
        compat.check_quantising(train["method"], train.get("optimizer", ""))
    monkeypatch.setattr(compat, "version", absent)
    compat.check_quantising("lora", "adamw")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_estimate_has_the_bytes_of_the_base(kind: str) -> None:
    config = config_of(kind)
    model = in_four_bits(model_of(config))
    held = sum(weight.nbytes for weight in model.parameters())
    assert base_bytes(recipe_of("qlora", "fp32", config), shape(config)) == held
    whole = base_bytes(recipe_of("lora", "fp32", config), shape(config))
    assert whole == 4 * shape(config).parameters
    assert held < 0.4 * whole  # of a small one most is embeddings


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("bf16", [False, True])
def test_what_is_computed_again_is_computed_from_the_same_bytes(mode: Any, bf16: bool) -> None:
    def gradients(again: bool) -> dict[str, torch.Tensor]:
        built = add_adapters(in_four_bits(small("llama")), Lora(r=2, alpha=4, dropout=0.2, targets="all-linear"), 3)
        if again:
            recompute(find_blocks(built.model), mode)
        loss = loss_model(built.model, True, bf16).train()
        batch = make_batch(tokens([20, 24, 11]), [np.arange(2), np.array([2])], 0)
        torch.manual_seed(5)
        loss(batch.ids, batch.positions, batch.places, batch.targets).backward()
        return {name: weight.grad for name, weight in built.trainable() if weight.grad is not None}

    kept, again = gradients(False), gradients(True)
    assert kept.keys() == again.keys()
    assert any(gradient.any() for gradient in kept.values())
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("kind", ["distilbert", "llama"])
def test_the_new_head_of_a_classifier_is_trained_in_full_precision(tmp_path: Path, kind: str) -> None:
    folder = classifier_base(tmp_path, kind)
    settings = read_settings(recipe(base={"model": folder, "scratch": None}, train=QLORA))
    built = apply_method(load_classifier(folder, labels=LABELS, pad=0), settings.train)
    heads = head_modules(built.whole.get_base_model())
    assert heads
    trained = {name for name, _ in built.trainable()}
    for name in heads:
        assert any(each.startswith(f"{name}.modules_to_save.") for each in trained)
        assert not any(isinstance(part, Nf4Linear) for part in built.model.get_submodule(name).modules())
    assert sum(isinstance(part, Nf4Linear) for part in built.model.modules()) == 3 * (6 if kind == "distilbert" else 7)


def test_compiled_blocks_are_refused_beside_four_bits() -> None:
    values = recipe(base={"model": "/somewhere", "scratch": None}, train={"method": "qlora"})
    values["train"]["compile"] = True
    cause = "`train.compile`: what unpacks 4 bits is bitsandbytes' own code"
    with pytest.raises(RecipeError, match=cause):
        build_recipe(values)
    with pytest.raises(RecipeError, match=cause):
        read_settings(values)


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_decoder_is_in_four_bits_on_both_sides(kind: str) -> None:
    """T5 casts what goes into a layer to the layer's own dtype, unless that is int8."""
    model = make_pairs(kind).eval()
    whole = {name for name, part in model.named_modules() if type(part) is nn.Linear and part.weight.shape[0] != 320}
    in_four_bits(model)
    packed = {name for name, part in model.named_modules() if isinstance(part, Nf4Linear)}
    assert packed == {name for name in whole if ".block" in name or ".layers" in name}
    assert all(any(f"{side}." in name for name in packed) for side in ("encoder", "decoder"))
    given = {"input_ids": torch.arange(5, 25)[None], "decoder_input_ids": torch.arange(7, 17)[None]}
    with torch.no_grad():
        before = model(**given).logits
        dequantise(model)
        assert torch.equal(model(**given).logits, before)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_the_estimate_has_the_bytes_of_both_sides(kind: str) -> None:
    model = make_pairs(kind)
    found = shape(model.config.to_dict())
    assert base_bytes(recipe_of("lora", "fp32", {"model_type": kind}), found) == 4 * found.parameters
    held = sum(weight.nbytes for weight in in_four_bits(model).parameters())
    assert base_bytes(recipe_of("qlora", "fp32", {"model_type": kind}), found) == held
