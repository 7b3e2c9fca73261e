"""Classification: rows with labels become documents, a step is a sum over rows, and a row is pooled where it ends."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from dropforge.errors import DataError, RecipeError
from dropforge.promotion import decide, policy_of
from dropforge.run import RunSpec
from dropforge.store import open_store
from trainer.assembly import build, examine, pad_id
from trainer.config import Freeze, Lora, Scratch, read_settings
from trainer.data.batch import make_batch
from trainer.data.labels import choose_labels, find_labels, for_labels, labelled_documents, made_for
from trainer.data.rows import Row
from trainer.data.tokenizer import SPECIAL
from trainer.data.tokens import Tokens, collect
from trainer.evaluate import evaluate
from trainer.gang import Gang
from trainer.measure import macro_f1, measure
from trainer.model.adapters import add_adapters
from trainer.model.build import head_labels, head_modules, load_classifier, load_model
from trainer.model.export import as_reads
from trainer.model.fit import rehearsal
from trainer.model.freeze import freeze_part
from trainer.model.loss import LabelLoss, choose_way, loss_model, shortened
from trainer.model.recompute import recompute
from trainer.model.scratch import check_scratch, make_scratch
from trainer.model.shard import blocks_to_recompute
from trainer.model.vocabulary import add_rows
from trainer.prepare import await_prepared, prepare
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .classes import LABELS, classifier_base, labelled_rows, labelled_toy, small_tokenizer
from .ranks_loop import make_stage, train_whole
from .toy import Toy, recipe, write_dataset
from .waits import reads_of_steps


def row(text: str, label: str | None, key: int = 0) -> Row:
    return Row(key.to_bytes(16, "big"), None, text, "s", label)


def rows_of(count: int, seed: int = 3) -> list[Row]:
    found = []
    for number, values in enumerate(labelled_rows(count, seed)):
        messages = values.get("messages")
        pairs = None if messages is None else tuple((one["role"], one["content"]) for one in messages)
        found.append(Row(number.to_bytes(16, "big"), pairs, values.get("text"), "s", values["label"]))
    return found


def data_of(tokenizer: Any, count: int, length: int = 64) -> Tokens:
    facts: dict[str, Any] = {}
    return collect(labelled_documents(tokenizer, LABELS, rows_of(count), length, facts), facts, labelled=True)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bases")
    return {kind: classifier_base(folder / kind, kind) for kind in ("distilbert", "llama")}


def classifier(base: str) -> tuple[LabelLoss, Any]:
    tokenizer = for_labels(AutoTokenizer.from_pretrained(base))
    model = load_classifier(base, labels=LABELS, pad=pad_id(tokenizer), seed=5)
    loss = loss_model(model, True, False)
    assert isinstance(loss, LabelLoss)
    return loss.eval(), tokenizer


def gradients(loss: LabelLoss, data: Tokens, parts: list[list[int]]) -> dict[str, torch.Tensor]:
    loss.model.zero_grad()
    for part in parts:
        batch = make_batch(data, [np.array([index]) for index in part], 0)
        loss(batch.ids, batch.positions, batch.places, batch.targets).backward()
    return {name: weight.grad.clone() for name, weight in loss.model.named_parameters()}


@pytest.mark.parametrize("kind", ["distilbert", "llama"])
def test_eleven_rows_are_one_gradient_however_they_are_cut(bases: dict[str, str], kind: str) -> None:
    loss, tokenizer = classifier(bases[kind])
    data = data_of(tokenizer, 11)
    whole = gradients(loss, data, [list(range(11))])
    assert all(gradient.any() for name, gradient in whole.items() if "score" in name or "classifier" in name)
    for cut in ([6, 5], [4, 4, 3]):
        ends = np.cumsum([0, *cut]).tolist()
        parts = [list(range(low, high)) for low, high in pairwise(ends)]
        found = gradients(loss, data, [*parts, []])  # and a rank without a row touches every weight and changes none
        assert found.keys() == whole.keys()
        assert all(torch.allclose(found[name], whole[name], rtol=1e-5, atol=1e-6) for name in whole)


@pytest.mark.parametrize("kind", ["distilbert", "llama"])
def test_blocks_that_compute_again_give_the_same_gradients_to_the_bit(bases: dict[str, str], kind: str) -> None:
    loss, tokenizer = classifier(bases[kind])
    data = data_of(tokenizer, 11)
    kept = gradients(loss, data, [list(range(11))])
    for mode in ("selective", "full"):
        again, _ = classifier(bases[kind])
        recompute(blocks_to_recompute(again.model), mode)
        found = gradients(again, data, [list(range(11))])
        assert all(torch.equal(found[name], kept[name]) for name in kept)


@pytest.mark.parametrize("kind", ["distilbert", "llama"])
def test_rows_of_new_tokens_and_frozen_parts_are_those_of_a_classifier_too(bases: dict[str, str], kind: str) -> None:
    model = classifier(bases[kind])[0].model
    table = model.get_input_embeddings().weight.detach().clone()
    new = [len(table), len(table) + 1]
    add_rows(model, new)
    assert torch.equal(model.get_input_embeddings().weight[: len(table)], table)
    assert torch.allclose(model.get_input_embeddings().weight[new[0]], table.mean(0), atol=1e-6)
    built = add_adapters(model, Lora(2, 4, 0.0, "all-linear"), 1, dora=True, new=new)
    moved = [name for name, _ in built.trainable()]
    assert {name.split(".modules_to_save.")[0] for name in moved if ".modules_to_save." in name} == set(
        head_modules(classifier(bases[kind])[0].model)
    )
    assert [name for name in moved if "token_adapter" in name or "trainable_tokens" in name]

    frozen = classifier(bases[kind])[0].model
    freeze_part(frozen, Freeze(blocks=1, embeddings=True))
    still = {name for name, weight in frozen.named_parameters() if not weight.requires_grad}
    assert any(".0." in name for name in still)
    assert not any(".1." in name or name.split(".")[0] in head_modules(frozen) for name in still)
    assert not frozen.get_input_embeddings().weight.requires_grad


def test_a_new_classifier_may_be_of_any_config_that_transformers_has_a_head_for() -> None:
    tokens = {token: index for index, token in enumerate(SPECIAL)}
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    asked = {"model_type": "bert", "vocab_size": 400, **small}
    scratch = Scratch(None, None, None, None, None, None, asked)
    check_scratch(scratch, "classification")
    model = make_scratch(scratch, tokens, 1, LABELS).model
    assert model.config.id2label == dict(enumerate(LABELS))
    assert isinstance(loss_model(model, True, False), LabelLoss)
    vision = Scratch(None, None, None, None, None, None, {"model_type": "vit", "vocab_size": 400})
    with pytest.raises(RecipeError, match=r"base.scratch.config"):
        check_scratch(vision, "classification")


@pytest.mark.parametrize("kind", ["distilbert", "llama"])
def test_a_row_is_pooled_where_it_ends_with_padding_at_either_side_or_none(bases: dict[str, str], kind: str) -> None:
    loss, tokenizer = classifier(bases[kind])
    data = data_of(tokenizer, 9)
    batch = make_batch(data, [np.array([index]) for index in range(9)], pad_id(tokenizer))
    assert len(set(data.lengths.tolist())) > 4
    together = loss.logits(batch.ids, batch.positions, batch.places)
    assert together.shape == (9, 3)
    for index in range(9):
        ids = torch.from_numpy(data.document(index)[0].astype(np.int64))[None]
        with torch.no_grad():  # by transformers alone
            alone = loss.model(input_ids=ids).logits
            torch.testing.assert_close(together[index : index + 1], alone, rtol=0, atol=1e-5)
            if kind == "llama":  # rotary positions are relative, so padding may stand before the text too
                padded = torch.cat([torch.full((1, 5), pad_id(tokenizer)), ids], 1)
                mask = torch.tensor([[0] * 5 + [1] * ids.shape[1]])
                left = loss.model(input_ids=padded, attention_mask=mask).logits
                torch.testing.assert_close(left, alone, rtol=0, atol=1e-5)


def test_a_tokenizer_without_padding_pads_with_its_end_token_and_says_so_in_the_model(tmp_path: Path) -> None:
    base = classifier_base(tmp_path / "base", "llama", pad_token_id=None)
    plain = AutoTokenizer.from_pretrained(base)
    plain.pad_token = None
    end = plain.eos_token_id
    tokenizer = for_labels(plain)
    model = load_classifier(base, labels=LABELS, pad=pad_id(tokenizer), seed=1)
    assert (tokenizer.pad_token_id, model.config.pad_token_id, tokenizer.padding_side) == (end, end, "right")
    loss, data = loss_model(model, False, False).eval(), data_of(tokenizer, 5)
    batch = make_batch(data, [np.array([index]) for index in range(5)], end)
    for index, logits in enumerate(loss.logits(batch.ids, batch.positions, batch.places)):
        ids = torch.from_numpy(data.document(index)[0].astype(np.int64))[None]
        torch.testing.assert_close(logits, loss.model(input_ids=ids).logits[0], rtol=0, atol=1e-5)
    nothing = small_tokenizer()
    nothing.pad_token = nothing.eos_token = None
    with pytest.raises(DataError, match="neither a padding token nor an end token"):
        for_labels(nothing)


def test_labels_are_those_of_the_training_rows_in_an_order_that_no_shuffle_changes() -> None:
    rows = rows_of(40)
    assert find_labels(rows, "d") == LABELS
    random.Random(0).shuffle(rows)
    assert find_labels(iter(rows), "d") == LABELS
    for bad, match in (
        ([row("a", None)], "none of its rows has a label"),
        ([row("a", "x"), row("b", "x")], "all of its rows have the label 'x'"),
        ([row("a", "x"), row("b", "y")], "each of its 2 rows has a label of its own"),
    ):
        with pytest.raises(DataError, match=match):
            find_labels(bad, "d")


def test_uploaders_do_not_decide_how_large_a_classifier_is() -> None:
    most = [row(f"text {n}", f"l{n}") for n in range(10_000)]
    assert len(find_labels([*most, row("again", "l0")], "d")) == 10_000
    with pytest.raises(DataError, match=r"^d: its rows have more than 10,000 labels.*'l0', 'l1'.* and 9996 more"):
        find_labels([*most, row("again", "l0"), row("one more", "x")], "d")
    long = [row(f"text {n}", f"{n:060000}") for n in (*range(17), 0)]
    with pytest.raises(DataError, match=r"more than 1,000,000 characters of labels.*Give rows of a kind the same"):
        find_labels(long, "d")
    assert len(find_labels(long[1:16] * 2, "d")) == 15


def test_a_head_that_knows_the_labels_keeps_its_order_and_another_is_refused() -> None:
    assert choose_labels(("a", "b"), None) == ("a", "b")
    assert choose_labels(("a", "b"), ("b", "c", "a")) == ("b", "c", "a")
    with pytest.raises(RecipeError, match=r"knows the labels 'LABEL_0', 'LABEL_1', and 1 label\(s\).*'a'"):
        choose_labels(("LABEL_0", "a"), ("LABEL_0", "LABEL_1"))


def test_rows_are_read_as_transformers_reads_them_and_what_has_no_known_label_is_counted() -> None:
    tokenizer = for_labels(small_tokenizer())
    long = " ".join(["the cat"] * 30)
    rows = [row("the red cat", "animal"), row(long, "place"), row("a", "fish"), row("b", None)]
    rows.append(Row(bytes(16), (("user", "the cat"),), None, "s", "colour"))
    facts: dict[str, Any] = {}
    data = collect(labelled_documents(tokenizer, LABELS, rows, 16, facts), facts, labelled=True)
    assert data.labels is not None
    assert [LABELS[label] for label in data.labels] == ["animal", "place", "colour"]
    assert data.document(0)[0].tolist() == tokenizer("the red cat")["input_ids"]
    assert data.document(1)[0].tolist() == tokenizer(long, truncation=True, max_length=16)["input_ids"]
    assert data.document(1)[0][-1] == tokenizer.eos_token_id  # cut before the last token, as in use
    assert tokenizer.decode(data.document(2)[0]).startswith("<|bos|><|im_start|>user\nthe cat")
    assert {key: facts[key] for key in ("rows", "documents", "targets", "cut_rows", "unseen_labels")} == {
        "rows": 5, "documents": 3, "targets": 3, "cut_rows": 1, "unseen_labels": 1,
    }  # fmt: skip
    assert facts["labels"] == {"animal": 1, "colour": 1, "place": 1}
    assert [item["reason"] for item in facts["left_out"]] == ["no training row has its label 'fish'", "it has no label"]


def test_an_exported_classifier_reads_what_it_was_measured_on_and_may_learn_from_longer_texts(
    bases: dict[str, str], tmp_path: Path
) -> None:
    loss, tokenizer = classifier(bases["llama"])
    long = " ".join(["the cat"] * 30)
    for length in (16, 24, 64):  # each goes on from the one before, whose tokenizer it finds
        as_reads(loss.model, tokenizer, length).save_pretrained(tmp_path / str(length))
        words = AutoTokenizer.from_pretrained(tmp_path / str(length))
        facts: dict[str, Any] = {}
        (measured,) = labelled_documents(words, LABELS, [row(long, "animal")], length, facts)
        assert measured.ids.tolist() == words(long, truncation=True)["input_ids"]
        assert (len(measured.ids), words.model_max_length, made_for(words)) == (length, length, 64)
        tokenizer = for_labels(words)


def test_macro_f1_is_the_mean_over_labels_however_rare() -> None:
    # Truth a a a b c, guess a a b b a, and a label d that is nowhere: F1 of a 2/3, of b 2/3, of c 0.
    assert macro_f1([2, 1, 0, 0], [3, 2, 0, 0], [3, 1, 1, 0]) == pytest.approx(4 / 9)
    assert macro_f1([0], [0], [0]) != macro_f1([0], [0], [0])  # not a number


def test_an_evaluation_is_exact_for_every_batch_size(bases: dict[str, str]) -> None:
    loss, tokenizer = classifier(bases["llama"])
    data = data_of(tokenizer, 23)
    assert data.labels is not None
    guesses, nats = [], 0.0
    for index in range(23):
        with torch.no_grad():
            logits = loss.model(input_ids=torch.from_numpy(data.document(index)[0].astype(np.int64))[None]).logits[0]
        guesses.append(int(logits.argmax()))
        nats -= float(logits.log_softmax(-1)[data.labels[index]])
    truth = data.labels.tolist()
    f1 = []
    for label in range(3):
        both = sum(a == b == label for a, b in zip(guesses, truth, strict=True))
        f1.append(2 * both / max(1, guesses.count(label) + truth.count(label)))
    for micro in (1, 4, 16):
        found = measure(loss, data, Gang(), size=64, micro=micro, pad=pad_id(tokenizer))
        assert found is not None
        assert (found.rows, found.targets) == (23, 23)
        assert found.loss == pytest.approx(nats / 23, rel=1e-6)
        assert found.accuracy == sum(a == b for a, b in zip(guesses, truth, strict=True)) / 23
        assert found.macro_f1 == pytest.approx(sum(f1) / 3, rel=1e-12)
        assert set(found.metrics()) == {"eval/loss", "eval/accuracy", "eval/macro_f1"}
    # A user's own metric is given how many rows of each label were given each label.
    told: list[Any] = []

    def own(facts: Any) -> dict[str, float]:
        told.append(facts)
        return {"own": 0.5}

    found = measure(loss, data, Gang(), size=64, micro=4, pad=pad_id(tokenizer), own=own)
    assert found is not None
    assert found.metrics()["eval/own"] == 0.5
    pairs = list(zip(truth, guesses, strict=True))
    assert told[0]["confusion"] == [[pairs.count((a, b)) for b in range(3)] for a in range(3)]
    assert told[0]["labels"] == [loss.model.config.id2label[number] for number in range(3)]
    assert (told[0]["accuracy"], told[0]["rows"], "perplexity" in told[0]) == (found.accuracy, 23, False)


def test_a_loss_that_is_not_cross_entropy_is_refused_and_a_short_probe_keeps_its_rows(bases: dict[str, str]) -> None:
    loss, tokenizer = classifier(bases["distilbert"])
    data = data_of(tokenizer, 6)
    batch = make_batch(data, [np.array([index]) for index in range(6)], pad_id(tokenizer))
    part = shortened(batch)
    assert part.labelled
    assert part.targets.tolist() == batch.targets[:2].tolist()
    assert choose_way(loss, batch) == "own"
    loss.model.config.problem_type = None
    loss.model.num_labels = 3
    original = type(loss.model).forward

    def smoothed(self: Any, labels: Any = None, **inputs: Any) -> Any:
        found = original(self, labels=labels, **inputs)
        if labels is not None:
            found.loss = found.loss * 0.9
        return found

    loss.model.forward = smoothed.__get__(loss.model)
    with pytest.raises(RecipeError, match="not the cross entropy of its labels"):
        choose_way(loss, batch)


def test_attention_is_compared_and_nothing_packs(bases: dict[str, str], tmp_path: Path) -> None:
    toy = labelled_toy(str(tmp_path / "bucket"))
    base = {"model": bases["llama"], "scratch": None}
    stage = make_stage(toy, "run", tmp_path / "scratch", task="classification", base=base)
    prepared = await_prepared(stage.settings, stage.spec, stage.scratch, lambda: None)
    found = examine(build(stage.settings, prepared, Gang()), stage.settings)
    assert (found.packs, found.isolation.reason) == (False, "a classifier reads one document a row")
    assert found.deviation is not None
    assert found.deviation < 1e-4
    assert prepared.packs is None


def refused(tmp_path: Path, rows: dict[str, list[dict[str, Any]]] | None = None, **values: Any) -> None:
    root = str(tmp_path / "bucket")
    held = {"train": labelled_rows(60, 0), "eval": labelled_rows(17, 1), **(rows or {})}
    toy = Toy(root, write_dataset(open_store(root), held))
    values.setdefault("task", "classification")
    spec = RunSpec.from_json(Path(toy.run("run", **values)).read_bytes())
    settings = read_settings(spec.recipe)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    prepare(spec, settings, scratch, lambda: None, lambda _: None)
    build(settings, await_prepared(settings, spec, scratch, lambda: None), Gang())


def test_bad_rows_and_bases_are_refused_by_name(bases: dict[str, str], tmp_path: Path) -> None:
    fish = [{"text": f"a fish {number}", "label": "fish"} for number in range(9)]
    done = iter(range(99))

    def folder() -> Path:
        found = tmp_path / str(next(done))
        found.mkdir()
        return found

    with pytest.raises(DataError, match=r"evaluation rows of .* 9 of 26 rows teach nothing.*its label 'fish'"):
        refused(folder(), {"eval": [*labelled_rows(17, 1), *fish]})
    with pytest.raises(DataError, match=r"9 of 20 rows teach nothing.*it has no label"):
        refused(folder(), {"train": [*labelled_rows(11, 0), *({"text": item["text"]} for item in fish)]})
    with pytest.raises(DataError, match="all of its rows have the label 'fish'"):
        refused(folder(), {"train": fish})
    short = folder()
    base = classifier_base(short / "base", "distilbert")
    found = AutoTokenizer.from_pretrained(base)
    found.model_max_length = 32
    found.save_pretrained(base)
    with pytest.raises(RecipeError, match="is longer than the 32 tokens that the base model's tokenizer is made for"):
        refused(short, base={"model": base, "scratch": None})

    # A head of other labels, a head where text is asked for, an encoder that lacks a layer.
    headed = folder() / "headed"
    loss, tokenizer = classifier(bases["llama"])
    loss.model.save_pretrained(headed)
    tokenizer.save_pretrained(headed)
    assert head_labels(headed) == LABELS
    with pytest.raises(RecipeError, match=r"knows the labels 'animal', 'colour', 'place', and 1 label\(s\).*'fish'"):
        refused(folder(), {"train": [*labelled_rows(30, 0), *fish]}, base={"model": str(headed), "scratch": None})
    with pytest.raises(RecipeError, match="is a classifier, whose head gives labels and no text"):
        load_model(headed)
    with pytest.raises(RecipeError, match=r"lacks 1 of its weights.*Name a model with a head"):
        load_classifier(bases["llama"])
    weights = load_file(headed / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, headed / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match=r"lacks 1 of its weights, as model.layers.1.mlp.up_proj.weight"):
        load_classifier(headed, labels=LABELS, pad=0)


def test_the_trainer_checks_the_task_of_run_json_again() -> None:
    values = recipe(task="classification")
    based = {"base": {**values["base"], "model": "/base", "scratch": None}}
    asked = {"rows": 3, "max_new_tokens": 8, "metrics": ["rouge-l"], "batch": 2, "every": 1}
    assert read_settings(values).task == "classification"
    for change, match in (
        ({"task": "seq2seq"}, "`task`"),
        ({"train": {**values["train"], "loss_on": "all"}}, "none of its tokens"),
        (
            {"evaluate": {**values["evaluate"], "generation": asked}},
            r"`evaluate.generation`: a classifier gives labels",
        ),
        ({"promote": {**values["promote"], "metric": "gen/rouge-l"}}, r"`promote.metric`: .* a classifier writes none"),
        ({**based, "train": {**values["train"], "method": "prefix"}}, r"`train.method`: a classifier's head is new"),
    ):
        with pytest.raises(RecipeError, match=match):
            read_settings({**values, **change})
    with pytest.raises(RecipeError, match="`task`: it is missing"):
        read_settings({key: value for key, value in values.items() if key != "task"})
    encoder = recipe(task="classification", base={"scratch": {"architecture": "distilbert"}})
    with pytest.raises(RecipeError, match="it needs `task: classification`"):
        read_settings({**encoder, "task": "causal-lm"})


FAST: dict[str, Any] = {"max_steps": 40, "checkpoint_every": 40, "tokens_per_step": None, "rows_per_step": 24,
                        "learning_rate": 3e-3, "micro_batch": 12}  # fmt: skip


@pytest.mark.parametrize("method", ["full", "lora", "dora"])
def test_a_classifier_learns_and_transformers_alone_uses_it(bases: dict[str, str], tmp_path: Path, method: str) -> None:
    """From rows to the exported model: its labels, its logits, its adapter with the head, its card."""
    toy = labelled_toy(str(tmp_path / "bucket"), train=150)
    kind = "distilbert" if method == "lora" else "llama"
    rate = {} if method == "full" else {"learning_rate": 1e-2, "lora": {"r": 8, "alpha": 32}}
    stage = make_stage(toy, "run", tmp_path / "scratch", task="classification",
                       base={"model": bases[kind], "scratch": None},
                       train={**FAST, **rate, "method": method})  # fmt: skip
    train_whole(Gang(), stage)
    files = toy.files()
    report = json.loads(files.get("report.json"))
    before, after = report["eval"]["before"], report["eval"]["after"]
    assert after["eval/loss"] < (0.8 if method == "full" else 0.98) * before["eval/loss"]
    assert after["eval/accuracy"] > before["eval/accuracy"]
    assert "eval/perplexity" not in after
    model = Path(toy.root) / "runs/run/model"
    loaded, info = AutoModelForSequenceClassification.from_pretrained(model, output_loading_info=True)
    assert not info["missing_keys"]
    assert loaded.config.id2label == dict(enumerate(LABELS))
    ask = pipeline("text-classification", model=str(model), top_k=None)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [item for item in rows_of(17, 1) if item.text is not None]
    right = nats = 0.0
    for item, scores in zip(rows, ask([item.text for item in rows], batch_size=5), strict=True):
        assert {score["label"] for score in scores} == set(LABELS)
        right += scores[0]["label"] == item.label
        nats -= np.log(next(score["score"] for score in scores if score["label"] == item.label))
    with torch.no_grad():
        alone = [loaded(**tokenizer(item.text, return_tensors="pt")).logits[0].log_softmax(-1) for item in rows]
    truth = [LABELS.index(str(item.label)) for item in rows]
    assert nats == pytest.approx(-sum(float(each[label]) for each, label in zip(alone, truth, strict=True)), rel=1e-3)
    if method != "full":
        adapter = load_file(model / "adapter/adapter_model.safetensors")
        head = {"classifier", "pre_classifier"} if method == "lora" else {"score"}
        found = {name.rsplit(".", 1)[0] for name in adapter if "lora" not in name}
        assert found == {f"base_model.model.{name}" for name in head}
        assert len([name for name in adapter if "lora_B" in name]) == (18 if method == "lora" else 21)
    card = (model / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "Macro F1" in card
    assert "| Label animal, training and evaluation rows |" in card
    assert "token" not in card.split("## Evaluation")[1].split("## Checks")[0]

    # Candidate and champion on the same rows: itself, and one that lacks a label.
    less = tmp_path / "less"
    other = load_classifier(bases[kind], labels=LABELS[:2], pad=0)
    other.save_pretrained(less)
    tokenizer.save_pretrained(less)
    for name, champion in (("same", str(model)), ("less", str(less)), ("text", bases["llama"])):
        order = {"run": f"{toy.root}/runs/run/run.json", "candidate": str(model),
                 "champion": {"version": "1", "model": champion}}  # fmt: skip
        files.put("evaluate.json", json.dumps(order).encode())
        result = evaluate(f"{toy.root}/runs/run/evaluate.json", StopSignal(), Console(quiet=True))
        assert result["candidate"]["eval/loss"] == pytest.approx(after["eval/loss"], rel=1e-6)
        assert result["candidate"]["eval/macro_f1"] == pytest.approx(after["eval/macro_f1"], rel=1e-9)
        assert result["rows"] == 17
        promote = {"metric": "eval/accuracy", "min_improvement": 0.0, "better_than_base": False}
        policy = policy_of(promote, same_tokenizer=True, task="classification")
        verdict = decide(result["candidate"], result["champion"], None, policy, shared=result["shared"])
        if name == "same":
            assert result["champion"]["eval/loss"] == result["candidate"]["eval/loss"]
            assert result["shared"] is None
        elif name == "less":  # both on the twelve rows whose labels both know
            assert result["shared"]["eval/loss"] != result["candidate"]["eval/loss"]
            assert verdict.checks[-1].candidate == result["shared"]["eval/accuracy"]
            assert verdict.checks[-1].reference == result["champion"]["eval/accuracy"]
        else:
            assert "no classifier" in result["champion"]["problem"]
            assert not verdict.promote


def test_a_rehearsal_has_a_label_at_the_end_of_each_row(bases: dict[str, str]) -> None:
    loss, tokenizer = classifier(bases["llama"])
    batch = rehearsal(data_of(tokenizer, 5), 16, 1.0, False, 3)
    assert batch.ids.shape == batch.positions.shape == (3, 16)
    assert (batch.places.tolist(), batch.tokens, batch.labelled) == ([15, 31, 47], 48, True)
    assert torch.isfinite(loss(batch.ids, batch.positions, batch.places, batch.targets))


@pytest.mark.parametrize("kind", ["distilbert", "llama"])
def test_micro_batches_wait_for_no_device(
    bases: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    stage = make_stage(labelled_toy(str(tmp_path / "bucket")), "run", tmp_path / "scratch", task="classification",
                       base={"model": bases[kind], "scratch": None},
                       train={"rows_per_step": 8, "tokens_per_step": None})  # fmt: skip
    found = reads_of_steps(stage, False, monkeypatch)
    assert found[8] == found[2]
    assert sum(found[2][0].values()) <= 3  # the loss, and the norm of the gradient
