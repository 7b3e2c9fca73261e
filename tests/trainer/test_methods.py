"""Parts that are frozen, adapters by name, rows for new tokens: found in the model, or refused with what is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dropforge.errors import RecipeError
from dropforge.run import RunSpec
from dropforge.store import open_store
from trainer.assembly import build
from trainer.commands.dry import rehearse
from trainer.config import Freeze, Lora, Prefix, read_settings
from trainer.data.batch import make_batch
from trainer.data.chat import make_encoder
from trainer.data.rows import Row
from trainer.data.tokenizer import add_tokens, is_ours, load_tokenizer, token_ids
from trainer.data.tokens import occurring
from trainer.evaluate import evaluation_rows, measure_model
from trainer.gang import Gang
from trainer.model.adapters import add_adapters
from trainer.model.build import Built, check_context, context_of
from trainer.model.freeze import decoder_blocks, freeze_part
from trainer.model.loss import choose_way, loss_model
from trainer.model.prefix import add_prefix, bare, open_model
from trainer.model.vocabulary import add_rows
from trainer.prepare import await_prepared
from trainer.rank import run
from trainer.report.console import Console
from trainer.restore import Choice, export
from trainer.state.stop import StopSignal

from .ranks_loop import make_base, make_stage
from .test_base import seeing_base
from .test_model import loss_of, small, tokens
from .toy import Toy, chat, write_dataset

CALLS = ("<call>", "</call>")


def lora(*targets: str) -> Lora:
    return Lora(r=2, alpha=4, dropout=0.0, targets=targets)


def test_a_target_that_no_module_has_is_refused_with_those_there_are() -> None:
    """peft passes over a name that is not there as long as another one is."""
    with pytest.raises(RecipeError, match=r"`q_prj`.*down_proj, embed_tokens, gate_proj, k_proj, lm_head, o_proj"):
        add_adapters(small("llama"), lora("q_prj", "v_proj"), 3)
    with pytest.raises(RecipeError, match=r"`mlp`"):  # a block of layers is no layer
        add_adapters(small("llama"), lora("mlp"), 3)


def test_adapters_on_a_tied_weight_are_refused_and_on_one_of_its_own_taken() -> None:
    with pytest.raises(RecipeError, match=r"`lm_head` has the weight of `model\.embed_tokens`"):
        add_adapters(small("llama", tie_word_embeddings=True), lora("lm_head"), 3)
    built = add_adapters(small("llama", tie_word_embeddings=False), lora("lm_head"), 3)
    assert [name for name, _ in built.trainable()] == [f"lm_head.lora_{part}.default.weight" for part in "AB"]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral", "gpt_neox", "opt", "bloom", "qwen3", "gemma2"])
def test_all_linear_finds_the_layers_of_each_block_and_not_the_head(architecture: str) -> None:
    model = small(architecture)
    built = add_adapters(model, Lora(r=2, alpha=4, dropout=0.0, targets="all-linear"), 3)
    names = {name for name, _ in built.trainable()}
    assert all(any(f".{index}." in name for name in names) for index in range(len(decoder_blocks(model) or ())))
    assert not any(name.startswith(("lm_head", "embed_out")) for name in names)


def test_dora_learns_magnitudes_that_begin_as_the_norms_of_the_weights() -> None:
    built = add_adapters(small("llama"), lora("q_proj"), 3, dora=True)
    named = dict(built.model.named_parameters())
    magnitudes = [name for name, _ in built.trainable() if "magnitude" in name]
    assert len(magnitudes) == len(decoder_blocks(built.model) or ())
    for name in magnitudes:
        weight = named[name.replace("lora_magnitude_vector.default.weight", "base_layer.weight")]
        assert torch.allclose(named[name], weight.norm(dim=1))
        assert named[name].requires_grad


def frozen(model: Any) -> set[str]:
    return {name for name, weight in model.named_parameters() if not weight.requires_grad}


@pytest.mark.parametrize(
    ("architecture", "block", "tables"),
    [
        ("llama", "model.layers.0.", {"model.embed_tokens.weight"}),
        ("gpt2", "transformer.h.0.", {"transformer.wte.weight", "transformer.wpe.weight"}),
        (
            "opt",
            "model.decoder.layers.0.",
            {"model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"},
        ),
        ("mixtral", "model.layers.0.", {"model.embed_tokens.weight"}),
    ],
)
def test_the_first_blocks_and_the_embeddings_are_frozen_and_nothing_else(
    architecture: str, block: str, tables: set[str]
) -> None:
    model = small(architecture)
    freeze_part(model, Freeze(blocks=1, embeddings=True))
    assert frozen(model) == tables | {name for name, _ in model.named_parameters() if name.startswith(block)}
    model = small(architecture)
    freeze_part(model, Freeze(blocks=0, embeddings=True))
    assert frozen(model) == tables


def test_the_blocks_of_a_model_that_sees_are_those_that_text_passes(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(seeing_base(tmp_path))
    freeze_part(model, Freeze(blocks=2, embeddings=False))
    names = frozen(model)
    assert {name.split(".layers.")[1].split(".")[0] for name in names} == {"0", "1"}
    assert not any("vision" in name for name in names)


def test_a_list_within_a_block_is_no_list_of_blocks() -> None:
    model = small("llama")
    model.model.layers[1].experts = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    assert decoder_blocks(model) is model.model.layers


def test_what_cannot_be_frozen_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"5 are to be frozen, and the model has 2.*Set it to 2"):
        freeze_part(small("llama"), Freeze(blocks=5, embeddings=False))
    model = small("llama")
    model.model.layers = torch.nn.ModuleDict({str(index): layer for index, layer in enumerate(model.model.layers)})
    with pytest.raises(RecipeError, match="no one list of as many blocks"):
        freeze_part(model, Freeze(blocks=1, embeddings=False))
    freeze_part(model, Freeze(blocks=0, embeddings=True))
    assert "model.embed_tokens.weight" in frozen(model)


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_new_tokens_are_the_mean_of_the_others(tied: bool) -> None:
    model = small("llama", tie_word_embeddings=tied)
    before = [part.weight.detach().clone() for part in (model.get_input_embeddings(), model.get_output_embeddings())]
    add_rows(model, [97, 98])
    assert model.config.vocab_size == 99
    for part, was in zip((model.get_input_embeddings(), model.get_output_embeddings()), before, strict=True):
        assert part.weight.shape == (99, was.shape[1])
        assert torch.equal(part.weight[:97], was)
        assert torch.allclose(part.weight[97:], was.mean(0).expand(2, -1), atol=1e-7)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied


def test_spare_rows_are_used_and_a_tokenizer_beyond_the_model_is_refused() -> None:
    model = small("llama")
    was = model.get_input_embeddings().weight[:90].detach().clone()
    add_rows(model, [90, 91])
    assert model.config.vocab_size == 97
    assert torch.allclose(model.get_input_embeddings().weight[91], was.mean(0), atol=1e-7)
    with pytest.raises(RecipeError, match="97 embeddings"):
        add_rows(model, [120])


@pytest.mark.parametrize("ours", [True, False])
def test_a_new_token_is_read_as_one_wherever_text_has_it(tmp_path: Path, ours: bool) -> None:
    """By our own tokenizers too, for which text never turns into a special token."""
    tokenizer = load_tokenizer(make_base(tmp_path))
    if not ours:
        tokenizer.chat_template = tokenizer.chat_template.replace("bos_token }}", "bos_token}}")
    assert is_ours(tokenizer) is ours
    add_tokens(tokenizer, CALLS)
    row = Row(b"k" * 16, (("user", "a<|eos|>"), ("assistant", "<call>red</call>")), None)
    [[found]] = make_encoder(tokenizer, "answers").encode([row])  # type: ignore[misc]
    learned = [index for index, trained in zip(found.ids, found.trained, strict=True) if trained]
    first, last = token_ids(tokenizer, CALLS)
    assert (learned[0], learned[-2]) == (first, last)
    assert tokenizer.decode(learned, skip_special_tokens=True) == "<call>red</call>"
    with pytest.raises(RecipeError, match=rf"'<call>' is token {first} of the base model already"):
        add_tokens(tokenizer, ["<new>", "<call>"])


def test_which_new_tokens_occur_is_told() -> None:
    ids = np.arange(3_000_000, dtype=np.int32) % 50
    ids[-1] = 77
    assert occurring(ids, [76, 77, 3]) == {77, 3}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Rows of which each answer is a call."""
    root = str(tmp_path_factory.mktemp("calls") / "bucket")
    rows = {
        split: [chat(f"{split} {index} cat", f"<call>red {index}</call>") for index in range(count)]
        for split, count in (("train", 40), ("eval", 6))
    }
    return Toy(root, write_dataset(open_store(root), rows))


@pytest.mark.parametrize("tied", [True, False])
def test_dora_and_rows_of_new_tokens_are_one_with_the_merged_model(calls: Toy, tmp_path: Path, tied: bool) -> None:
    """The adapter's file has peft's keys, the new rows among them; on the base, grown, it gives the merged logits."""
    from peft import PeftModel, get_peft_model_state_dict

    base = make_base(tmp_path / "base", tie_word_embeddings=tied, vocab_size=293)
    name = f"dora-{tied}"
    train = {"method": "dora", "lora": {"r": 3, "alpha": 6}, "max_steps": 3, "learning_rate": 2e-2}
    given = {"model": base, "scratch": None, "new_tokens": [*CALLS, "<never>"]}
    console = Console(quiet=True)
    said: list[str] = []
    console.say = said.append  # type: ignore[method-assign,assignment]
    run(calls.run(name, base=given, train=train), StopSignal(), console)
    assert any(line.endswith("rows stay as they begin: <never>") for line in said)
    folder = Path(calls.files(name).uri) / "model"
    report = json.loads(calls.files(name).get("report.json"))
    assert report["model"]["max_logit_difference"] < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(folder)
    new = token_ids(tokenizer, given["new_tokens"])
    assert new == [293, 294, 295]
    grown = AutoModelForCausalLM.from_pretrained(base)
    grown.resize_token_embeddings(len(tokenizer))
    adapted = PeftModel.from_pretrained(grown, folder / "adapter").eval()
    found = safetensors.torch.load_file(folder / "adapter" / "adapter_model.safetensors")
    assert found.keys() == get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    assert sum("trainable_tokens" in key for key in found) == (1 if tied else 2)
    assert sum("magnitude" in key for key in found) == 7 * 3
    merged = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([[1, *new, *range(40, 60)]])
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=ids).logits, adapted(input_ids=ids).logits, atol=1e-4)
    begun = AutoModelForCausalLM.from_pretrained(base)
    add_rows(begun, new)
    assert (merged.get_input_embeddings().weight is merged.get_output_embeddings().weight) is tied
    for part in ("get_input_embeddings", "get_output_embeddings"):
        was, now = getattr(begun, part)().weight, getattr(merged, part)().weight
        assert torch.equal(was[:293], now[:293])  # the rows of all other tokens are the base's
        assert not torch.allclose(was[293:295], now[293:295], atol=1e-3)
    [again] = [line for line in calls.files(name).get("model/README.md").decode().splitlines() if "new tokens" in line]
    assert "DoRA" in again


def test_what_is_frozen_stays_and_a_resume_and_an_export_know_of_it(toy: Toy, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=False)
    train = {"freeze": {"blocks": 2, "embeddings": True}, "max_steps": 4, "checkpoint_every": 2, "weight_decay": 0.5}
    uri = toy.run("frozen", base={"model": base, "scratch": None}, train=train)
    run(uri, StopSignal(), Console(quiet=True))
    files = toy.files("frozen")
    model = Path(files.uri) / "model" / "model.safetensors"
    before, after = (safetensors.torch.load_file(path) for path in (Path(base) / "model.safetensors", model))
    same = {name for name in before if torch.equal(before[name], after[name])}
    kept = ("model.embed_tokens.", "model.layers.0.", "model.layers.1.")
    assert same == {name for name in before if name.startswith(kept)}
    assert "all weights but its first 2 blocks and its embeddings" in files.get("model/README.md").decode()
    step = Path(files.uri) / "checkpoints" / "step-4" / "rank-0.safetensors"
    with safetensors.safe_open(step, "pt") as file:
        assert not any(part in key for key in file.keys() for part in kept)  # noqa: SIM118 - no mapping
    spec = RunSpec.from_json(Path(uri).read_bytes())
    export(spec, Choice(), tmp_path / "exported", print)
    exported = safetensors.torch.load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(exported[name], after[name]) for name in after)
    shutil.rmtree(Path(files.uri) / "checkpoints" / "step-4")
    files.delete("report.json")
    run(uri, StopSignal(), Console(quiet=True))
    again = safetensors.torch.load_file(model)
    assert all(torch.equal(again[name], after[name]) for name in after)
    files.delete("report.json")
    with pytest.raises(RecipeError, match=r"train\.freeze\.blocks: 2 -> 1"):
        run(
            toy.run("frozen", base={"model": base, "scratch": None}, train={**train, "freeze": {"blocks": 1}}),
            StopSignal(),
            Console(quiet=True),
        )


@pytest.mark.parametrize(
    ("tokens", "train"),
    [
        (["<call>"], {"method": "dora", "lora": {"r": 3, "alpha": 6}}),
        (["<call>"], {"freeze": {"blocks": 2}}),
        (None, {"freeze": {"blocks": 3, "embeddings": True}}),
        (None, {"method": "prefix", "prefix": {"tokens": 4}, "sequence_length": 60, "tokens_per_step": 240}),
    ],
)
def test_a_plan_counts_the_weights_that_the_run_trains(
    calls: Toy, tmp_path: Path, tokens: list[str] | None, train: dict[str, Any]
) -> None:
    """Although it has no memory for them, and refuses what the run would refuse."""
    base = {"model": make_base(tmp_path / "base", vocab_size=293), "scratch": None, "new_tokens": tokens}
    stage = make_stage(calls, tmp_path.name, tmp_path / "scratch", base=base, train=train)
    planned = rehearse(stage.spec, stage.settings, tmp_path / "plan", print)
    prepared = await_prepared(stage.settings, stage.spec, stage.scratch, lambda: None)
    built = build(stage.settings, prepared, Gang())
    assert planned.trained == sum(weight.numel() for _, weight in built.trainable())
    assert 0 < planned.trained < planned.parameters
    for wrong, cause in (({"freeze": Freeze(9, False), "method": "full"}, "the model has 3"),
                         ({"method": "lora", "freeze": None, "lora": lora("wq")}, "has the name `wq`")):  # fmt: skip
        with pytest.raises(RecipeError, match=cause):
            rehearse(stage.spec, stage.change(**wrong).settings, tmp_path / cause[:3], print)


def with_prefix(architecture: str = "llama", count: int = 5, **more: Any) -> Built:
    return add_prefix(small(architecture, **more), Prefix(count), 3)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral", "qwen3", "gemma2", "bloom"])
def test_a_prefix_is_seen_by_every_token_and_alone_is_trained(architecture: str) -> None:
    built = with_prefix(architecture)
    assert [name for name, _ in built.trainable()] == ["prompt_encoder.default.embedding.weight"]
    model = built.model.eval()
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        with bare(model):
            assert not torch.equal(before, model(input_ids=ids, use_cache=False).logits)
        built.trainable()[0][1][2:3] += 1.0  # the key and value of one place
        changed = (model(input_ids=ids, use_cache=False).logits - before).abs().amax(-1)[0]
    assert bool((changed > 1e-6).all())


def test_the_loss_with_a_prefix_is_the_model_s_own_and_never_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little the prefix does so far."""
    monkeypatch.setattr("trainer.model.loss.TOLERANCE", 1e9)
    built = with_prefix()
    loss = loss_model(built.model, False, False)
    batch = make_batch(tokens([9, 14]), [np.array([0]), np.array([1])], 0)
    assert choose_way(loss, batch) == "own"
    found = loss_of(loss, batch)
    ids, labels = batch.ids, torch.full_like(batch.ids, -100)
    labels.view(-1)[batch.places + 1] = batch.targets
    expected = built.model(input_ids=ids, labels=labels, use_cache=False).loss * len(batch.targets)
    assert torch.allclose(found, expected, rtol=1e-6)


def test_a_model_that_takes_no_prefix_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"`train\.method`: MambaForCausalLM takes no prefix"):
        with_prefix("mamba")
    deaf = small("llama")
    forward = deaf.forward
    deaf.forward = lambda past_key_values=None, **inputs: forward(**inputs)
    with pytest.raises(RecipeError, match="its logits are the same with and without one"):
        add_prefix(deaf, Prefix(5), 3)


def test_a_prefix_takes_places_of_the_context() -> None:
    model = with_prefix(max_position_embeddings=64).model
    assert context_of(model) == 59
    check_context(model, 59)
    with pytest.raises(RecipeError, match=r"context of 64 leaves beside a prefix of 5.*Set it to 59"):
        check_context(model, 60)


@pytest.mark.parametrize("place", ["folder", pytest.param("s3", marks=pytest.mark.exact)])
def test_a_prefix_is_exported_alone_and_measured_on_its_base(
    request: pytest.FixtureRequest, toy: Toy, tmp_path: Path, place: str
) -> None:
    """What was measured before the training is the base without it; peft alone loads what was exported."""
    from peft import AutoPeftModelForCausalLM

    base = make_base(tmp_path / "base")
    if place == "s3":
        store = request.getfixturevalue("s3_store")
        for path in Path(base).iterdir():
            store.upload(path, f"base/{path.name}")
        base = f"{store.uri}/base"
    train = {"method": "prefix", "prefix": {"tokens": 4}, "sequence_length": 60, "max_steps": 3, "learning_rate": 0.1,
             "tokens_per_step": 240}  # fmt: skip
    uri = toy.run("prefix", base={"model": base, "scratch": None}, train=train)
    run(uri, StopSignal(), Console(quiet=True))
    files = toy.files("prefix")
    folder = Path(files.uri) / "model"
    report = json.loads(files.get("report.json"))
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= report["model"]["files"].keys()
    assert not {"config.json", "model.safetensors"} & report["model"]["files"].keys()
    assert report["model"]["max_logit_difference"] < 1e-4
    assert "no merged form" in files.get("model/README.md").decode()
    assert report["packing"]["reason"] == "each document has its own prefix before it"
    figures = measured(uri, str(folder)).figures
    assert figures["eval/loss"] == pytest.approx(report["eval"]["after"]["eval/loss"], rel=1e-6)
    bases = measured(uri, base).figures
    assert bases["eval/loss"] == pytest.approx(report["eval"]["before"]["eval/loss"], rel=1e-6)
    assert figures["eval/loss"] < bases["eval/loss"]
    found = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {"prompt_embeddings": (4, 3 * 2 * 2 * 8)}
    export(RunSpec.from_json(Path(uri).read_bytes()), Choice(), tmp_path / "exported", print)
    again = safetensors.torch.load_file(tmp_path / "exported" / "adapter_model.safetensors")
    assert torch.equal(found["prompt_embeddings"], again["prompt_embeddings"])
    if place == "folder":
        ids = torch.arange(5, 25)[None]
        with torch.no_grad():
            theirs = AutoPeftModelForCausalLM.from_pretrained(folder).eval()(input_ids=ids, use_cache=False).logits
            assert torch.allclose(open_model(folder).eval()(input_ids=ids, use_cache=False).logits, theirs, atol=1e-6)


def measured(uri: str, model: str) -> tuple[dict[str, Any], str]:
    spec = RunSpec.from_json(Path(uri).read_bytes())
    settings = read_settings(spec.recipe)
    return measure_model("model", model, evaluation_rows(spec, settings), settings, StopSignal(), Console(quiet=True))
