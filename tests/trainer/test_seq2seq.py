"""Encoder-decoders: rows become a source and a target, and losses, figures and answers are what transformers has."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from dropforge.errors import DataError, RecipeError
from dropforge.run import RunSpec
from dropforge.store import open_store
from trainer.assembly import build, examine, pad_id
from trainer.config import Freeze, Generation, Lora, Scratch, read_settings
from trainer.data.batch import make_batch
from trainer.data.rows import Row
from trainer.data.seq2seq import Sources, for_seq2seq, pairs
from trainer.data.tokenizer import SPECIAL
from trainer.data.tokens import Tokens, collect
from trainer.evaluate import evaluate
from trainer.gang import Gang
from trainer.generate import generate
from trainer.measure import measure
from trainer.model.adapters import add_adapters
from trainer.model.build import load_classifier, load_model, task_of
from trainer.model.fit import rehearsal
from trainer.model.freeze import freeze_part
from trainer.model.loss import choose_way, loss_model, shortened
from trainer.model.recompute import recompute
from trainer.model.scratch import check_scratch, make_scratch
from trainer.model.seq2seq import Seq2SeqLoss, load_seq2seq
from trainer.model.shard import blocks_to_recompute
from trainer.prepare import await_prepared, prepare
from trainer.report.console import Console
from trainer.report.flops import model_flops
from trainer.state.stop import StopSignal
from trainer.tokenise import prompts_of

from .pairs import BART, KINDS, T5, make_pairs, pair_base, pair_tokenizer, pair_toy
from .ranks_loop import make_stage, train_whole
from .toy import Toy, chat, recipe, sample_rows, write_dataset
from .waits import reads_of_steps

SPECIALS = {token: index for index, token in enumerate(SPECIAL)}


def talk(*turns: tuple[str, str], key: int = 0) -> Row:
    return Row(key.to_bytes(16, "big"), turns, None, "s")


def rows_of(count: int, seed: int = 3) -> list[Row]:
    found = []
    for number, values in enumerate(sample_rows(count, seed)):
        found.append(talk(*((one["role"], one["content"]) for one in values["messages"]), key=number))
    return found


def read(rows: list[Row], length: int = 64, tokenizer: Any = None) -> Tokens:
    facts: dict[str, Any] = {}
    return collect(pairs(tokenizer or for_seq2seq(pair_tokenizer()), rows, length, facts), facts)


def parts(data: Tokens, index: int) -> tuple[list[int], list[int]]:
    ids, trained = data.document(index)
    return ids[~trained].tolist(), ids[trained].tolist()


def loss_of(kind: str, **more: Any) -> Seq2SeqLoss:
    loss = loss_model(make_pairs(kind, **more), True, False)
    assert isinstance(loss, Seq2SeqLoss)
    assert not loss.packed
    return loss.eval()


def batch_of(data: Tokens, rows: list[int]) -> Any:
    return make_batch(data, [np.array([index]) for index in rows], 0)


def inputs(batch: Any) -> tuple[Any, ...]:
    return batch.ids, batch.positions, batch.places, batch.targets


def test_a_prompt_and_its_answer_are_tokenised_as_transformers_does_it() -> None:
    tokenizer = for_seq2seq(pair_tokenizer())
    rows = [
        talk(("user", "the red cat"), ("assistant", "a bird")),
        talk(("system", "be old"), ("user", "the cat"), ("assistant", "a"), ("user", "and"), ("assistant", "big tree"),
             ("user", "under")),
        Row(bytes(16), None, "the cat sees", "s"),
        talk(("user", "the cat")),
    ]  # fmt: skip
    data = read(rows, tokenizer=tokenizer)
    assert parts(data, 0) == (tokenizer("the red cat")["input_ids"], tokenizer("a bird")["input_ids"])
    source, target = parts(data, 1)
    assert tokenizer.decode(source) == "System:\nbe old\nUser:\nthe cat\nAssistant:\na\nUser:\nand\n<|eos|>"
    assert tokenizer.decode(target) == "big tree<|eos|>"
    assert all(part[-1] == tokenizer.eos_token_id for index in (0, 1) for part in parts(data, index))
    assert [item["reason"] for item in data.facts["left_out"]] == [
        "it is a text without an answer, which would be the target",
        "it is a conversation without an answer, which would be the target",
    ]
    counted = {key: data.facts[key] for key in ("rows", "documents", "without_targets", "cut_conversations")}
    assert counted == {"rows": 4, "documents": 2, "without_targets": 2, "cut_conversations": 0}
    assert data.facts["target_bytes"] == len("a bird") + len("big tree")
    assert data.facts["tokens"] == data.facts["source_tokens"] + data.facts["targets"] == len(data.ids)
    assert data.paired


def test_a_template_of_the_model_s_own_writes_its_special_tokens_itself() -> None:
    tokenizer = pair_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ bos_token + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ eos_token }}{% endif %}"
        "{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}"
    )
    own = tokenizer.chat_template
    tokenizer = for_seq2seq(tokenizer)
    assert tokenizer.chat_template == own
    bad = talk(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    data = read([talk(("user", "the cat"), ("assistant", "a")), bad], tokenizer=tokenizer)
    assert tokenizer.decode(parts(data, 0)[0]) == "<|bos|>the cat<|eos|>"
    assert data.facts["refused_by_template"] == 1
    assert data.facts["left_out"][0]["reason"].startswith("the chat template refuses it")


def test_what_is_left_out_of_a_pair_is_told_and_an_answer_that_calls_is_refused() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    pair = talk(("user", "the cat"), ("assistant", "a bird"))
    data = read(
        [
            replace(pair, beside=({"name": "Bob"}, {"reasoning_content": "the tree"})),
            replace(pair, beside=({}, {"tool_calls": [call]})),
            replace(
                talk(("user", "the cat"), ("assistant", "a bird"), ("user", "so?"), ("assistant", "")),
                beside=({}, {}, {}, {"tool_calls": [call]}),
            ),
            replace(  # a call that is not to be learned is none that is lost
                talk(("user", "the cat"), ("assistant", "a bird"), ("user", "so?"), ("assistant", "")),
                beside=({}, {}, {}, {"tool_calls": [call], "train": False}),
            ),
        ]
    )
    assert (data.facts["unwritten_names"], data.facts["unwritten_thoughts"], data.facts["documents"]) == (1, 1, 2)
    assert [item["reason"] for item in data.facts["left_out"]] == [
        "its answer calls tools, and the target of an encoder-decoder is text alone"
    ] * 2


@pytest.mark.parametrize(("asked", "said"), [(40, 2), (2, 40), (40, 40), (9, 9)])
def test_what_is_too_long_keeps_a_source_and_a_target(asked: int, said: int) -> None:
    tokenizer = for_seq2seq(pair_tokenizer())
    question, answer = " ".join(["cat"] * asked), " ".join(["bird"] * said)
    (source, target), whole = (
        parts(read([talk(("user", question), ("assistant", answer))], 20, tokenizer), 0),
        (tokenizer(question)["input_ids"], tokenizer(answer)["input_ids"]),
    )
    data = read([talk(("user", question), ("assistant", answer))], 20, tokenizer)
    assert len(source) + len(target) == min(20, len(whole[0]) + len(whole[1]))
    assert target == whole[1][: max(10, 20 - len(whole[0]))]
    assert source == tokenizer(question, truncation=True, max_length=20 - len(target))["input_ids"]
    assert source[-1] == tokenizer.eos_token_id  # a cut source ends as the tokenizer ends one
    cut = len(whole[1]) - len(target)
    assert (data.facts["cut_targets"], data.facts["cut_conversations"]) == (cut, int(len(source + target) == 20))
    assert data.facts["target_bytes"] == len(answer) * len(target) // len(whole[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_model_s_own_however_its_head_is_scaled(kind: str) -> None:
    loss, data = loss_of(kind), read(rows_of(9))
    batch = batch_of(data, list(range(9)))
    assert choose_way(loss, batch) in ("fused", "places")
    assert loss.scale == (32**-0.5 if kind == "t5" else 1.0)
    logits = loss.logits(*inputs(batch)[:3])
    nats = 0.0
    for index in range(9):
        source, target = parts(data, index)
        with torch.no_grad():  # by transformers alone, without padding
            found = loss.model(input_ids=torch.tensor([source]), labels=torch.tensor([target]))
        mine = logits[batch.documents == index]
        torch.testing.assert_close(mine, found.logits[0], rtol=0, atol=2e-5)
        nats += float(found.loss) * len(target)
    assert float(loss(*inputs(batch))) == pytest.approx(nats, rel=1e-5)
    for way in ("own", "places"):
        loss.way = way  # type: ignore[assignment]
        assert float(loss(*inputs(batch))) == pytest.approx(nats, rel=1e-5)


def test_a_model_that_learns_another_loss_or_begins_otherwise_is_refused() -> None:
    batch = batch_of(read(rows_of(4)), [0, 1, 2, 3])
    loss = loss_of("bart")
    loss.start = 5
    with pytest.raises(RecipeError, match=r"not the cross entropy of its targets behind token 5"):
        choose_way(loss, batch)
    silent = make_pairs("t5")
    silent.config.decoder_start_token_id = None
    with pytest.raises(RecipeError, match=r"names no `decoder_start_token_id`.*Set `decoder_start_token_id`"):
        loss_model(silent, False, False)


def gradients(loss: Seq2SeqLoss, data: Tokens, cut: list[list[int]]) -> dict[str, torch.Tensor]:
    loss.model.zero_grad()
    for rows in cut:
        loss(*inputs(batch_of(data, rows))).backward()
    return {name: weight.grad.clone() for name, weight in loss.model.named_parameters()}


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_eleven_rows_are_one_gradient_however_they_are_cut(kind: str) -> None:
    loss, data = loss_of(kind), read(rows_of(11))
    choose_way(loss, batch_of(data, [0, 1]))
    whole = gradients(loss, data, [list(range(11))])
    assert all(gradient.any() for name, gradient in whole.items() if "k_proj.bias" not in name)
    for cut in ([6, 5], [4, 4, 3]):
        ends = np.cumsum([0, *cut]).tolist()
        # And a rank without a row touches every weight and changes none.
        found = gradients(loss, data, [*(list(range(low, high)) for low, high in pairwise(ends)), []])
        assert found.keys() == whole.keys()
        assert all(torch.allclose(found[name], whole[name], rtol=1e-4, atol=1e-5) for name in whole)
    none = gradients(loss, data, [[]])
    assert not any(gradient.any() for gradient in none.values())


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_blocks_that_compute_again_give_the_same_gradients_to_the_bit(kind: str) -> None:
    data = read(rows_of(5))
    kept = gradients(loss_of(kind), data, [list(range(5))])
    for mode in ("selective", "full"):
        again = loss_of(kind)
        blocks = blocks_to_recompute(again.model)
        assert len(blocks) == 5
        recompute(blocks, mode)
        found = gradients(again, data, [list(range(5))])
        assert all(torch.equal(found[name], kept[name]) for name in kept)


def test_a_short_probe_and_a_rehearsal_are_pairs_too() -> None:
    long = talk(("user", " ".join(["cat"] * 300)), ("assistant", " ".join(["bird"] * 200)))
    data = read([long, *rows_of(3)], 600)
    part = shortened(batch_of(data, [0, 1, 2]))
    assert part.paired
    assert (part.ids.shape, part.positions.shape) == ((2, 256), (2, 128))
    assert torch.equal(part.ids.view(-1)[part.places + 1], part.targets)
    assert len(part.targets) == 128 + len(parts(data, 1)[1])
    loss = loss_of("t5")
    row = rehearsal(data, 40, 10 / 39, False, 3)
    assert (row.ids.shape, row.positions.shape, row.tokens) == ((3, 40), (3, 30), 120)
    assert torch.equal(row.ids.view(-1)[row.places + 1], row.targets)
    assert torch.isfinite(loss(*inputs(row)))


def test_attention_is_compared_and_nothing_packs(tmp_path: Path) -> None:
    toy = pair_toy(str(tmp_path / "bucket"))
    base = {"model": pair_base(tmp_path / "base", "bart"), "scratch": None}
    stage = make_stage(toy, "run", tmp_path / "scratch", task="sequence-to-sequence", base=base)
    prepared = await_prepared(stage.settings, stage.spec, stage.scratch, lambda: None)
    found = examine(build(stage.settings, prepared, Gang()), stage.settings)
    assert (found.packs, found.isolation.reason) == (
        False, "an encoder-decoder reads one source and writes one target a row",
    )  # fmt: skip
    assert found.deviation is not None
    assert found.deviation < 1e-4
    assert prepared.packs is None


def test_an_evaluation_is_exact_for_every_batch_size() -> None:
    loss, data = loss_of("t5"), read(rows_of(23))
    choose_way(loss, batch_of(data, [0, 1]))
    nats = right = 0.0
    for index in range(23):
        source, target = parts(data, index)
        with torch.no_grad():
            found = loss.model(input_ids=torch.tensor([source]), labels=torch.tensor([target]))
        nats += float(found.loss) * len(target)
        right += int((found.logits[0].argmax(-1) == torch.tensor(target)).sum())
    for micro in (1, 4, 16):
        measured = measure(loss, data, Gang(), size=64, micro=micro, pad=0)
        assert measured is not None
        assert (measured.rows, measured.targets) == (23, data.facts["targets"])
        assert measured.loss == pytest.approx(nats / measured.targets, rel=1e-6)
        assert measured.accuracy == right / measured.targets
        assert measured.bits_per_byte == pytest.approx(nats / np.log(2) / data.facts["target_bytes"], rel=1e-6)


def asking(**values: Any) -> Generation:
    return Generation(**{"rows": 9, "max_new_tokens": 12, "metrics": ("rouge-l",), "batch": 4, "every": 1, **values})


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_generate_whatever_stands_beside_them(
    kind: str, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Weights by which answers differ; and `generate` gives a T5 as many caches as its encoder has layers.
    more = {"init_std": 0.5} if kind == "bart" else {"num_decoder_layers": 2, "initializer_factor": 3.0}
    loss = loss_of(kind, **more)
    tokenizer = for_seq2seq(pair_tokenizer())
    choose_way(loss, batch_of(read(rows_of(4)), [0, 1]))
    settings = read_settings(recipe(task="sequence-to-sequence", base={"model": "x", "scratch": None}))
    prompts = prompts_of(settings, tokenizer, rows_of(9), 9)
    assert prompts[0].ids == tuple(tokenizer(prompts[0].text)["input_ids"])
    if not cached:  # a cache that is of no use
        own = Seq2SeqLoss.next_logits
        monkeypatch.setattr(Seq2SeqLoss, "next_logits", lambda *values: (-own(*values)[0], own(*values)[1]))
    said: list[str] = []
    found = generate(loss, prompts, Gang(), tokenizer, asking(), pad=pad_id(tokenizer), say=said.append)
    assert found is not None
    assert bool(said) is not cached
    loss.model.generation_config.forced_eos_token_id = None  # which is about the longest answer alone
    for prompt, answer in zip(prompts, found.answers, strict=True):
        ids = torch.tensor([prompt.ids])
        [written] = loss.model.generate(ids, max_new_tokens=12, do_sample=False, num_beams=1).tolist()
        assert answer is not None
        assert answer.text == tokenizer.decode(written, skip_special_tokens=True)
    assert len({answer.text for answer in found.answers if answer is not None}) > 3


def test_a_prompt_that_is_longer_than_the_context_is_not_answered_and_an_answer_ends_with_it() -> None:
    tokenizer = for_seq2seq(pair_tokenizer())
    settings = read_settings(recipe(task="sequence-to-sequence", base={"model": "x", "scratch": None}))
    rows = [talk(("user", " ".join(["cat"] * count)), ("assistant", "a")) for count in (63, 64)]
    prompts = prompts_of(settings, tokenizer, rows, 2)
    assert [len(prompt.ids) for prompt in prompts] == [64, 65]
    loss = loss_of("bart")
    loss.model.generation_config.eos_token_id = None
    found = generate(loss, prompts, Gang(), tokenizer, asking(max_new_tokens=70, batch=1), pad=0)
    assert found is not None
    assert found.answers[1] is None
    assert found.answers[0] is not None
    assert found.answers[0].tokens == 64 or found.answers[0].ended


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_frozen_blocks_are_the_encoder_s_and_then_the_decoder_s(kind: str) -> None:
    model = make_pairs(kind)
    freeze_part(model, Freeze(blocks=3, embeddings=True))
    still = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    stack = "block" if kind == "t5" else "layers"
    for place in range(2):
        assert any(f"encoder.{stack}.{place}." in name for name in still)
    assert any(f"decoder.{stack}.0." in name for name in still)
    assert not any(f"decoder.{stack}.1." in name for name in still)
    assert not model.get_input_embeddings().weight.requires_grad
    assert all(not weight.requires_grad for name, weight in model.named_parameters() if "embed_positions" in name)
    with pytest.raises(RecipeError, match=r"6 are to be frozen, and the model has 5"):
        freeze_part(make_pairs(kind), Freeze(blocks=6, embeddings=False))


def test_a_new_model_may_be_of_any_config_of_an_encoder_decoder() -> None:
    for asked in ({"model_type": "t5", "vocab_size": 400, **T5}, {"model_type": "bart", "vocab_size": 400, **BART}):
        scratch = Scratch(None, None, None, None, None, None, asked)
        check_scratch(scratch, "sequence-to-sequence")
        model = make_scratch(scratch, SPECIALS, 1, task="sequence-to-sequence").model
        assert model.config.decoder_start_token_id == SPECIALS["<|bos|>"]
        assert model.generation_config.eos_token_id == SPECIALS["<|eos|>"]
        assert isinstance(loss_model(model, True, False), Seq2SeqLoss)
        with pytest.raises(RecipeError, match=r"is an encoder-decoder, .*Set `task: sequence-to-sequence`"):
            check_scratch(scratch, "causal-lm")
        with pytest.raises(RecipeError, match=r"model_type`: .* learns no labels here"):
            check_scratch(scratch, "classification")
    for kind, match in (("llama", "llama is no encoder-decoder of texts"), ("vit", "vit is no encoder-decoder")):
        with pytest.raises(RecipeError, match=match):
            check_scratch(Scratch(None, None, None, None, None, None, {"model_type": kind}), "sequence-to-sequence")
    mine = {"model_type": "t5", "vocab_size": 400, "decoder_start_token_id": 3}
    with pytest.raises(RecipeError, match=r"decoder_start_token_id`: the tokenizer is trained on the drop"):
        check_scratch(Scratch(None, None, None, None, None, None, mine), "sequence-to-sequence")


def test_a_model_of_another_kind_is_refused_with_the_task_that_it_is_for(tmp_path: Path) -> None:
    for kind in ("t5", "bart"):
        base = pair_base(tmp_path / kind, kind)
        assert task_of(base) == "sequence-to-sequence"
        with pytest.raises(RecipeError, match=r"is an encoder-decoder, .*Set `task: sequence-to-sequence`"):
            load_model(base)  # of a BART the library would load the decoder alone
        with pytest.raises(RecipeError, match=r"learns answers here and no labels\. .*`task: sequence-to-sequence`"):
            load_classifier(base, labels=("a", "b"), pad=0)
    from transformers import AutoModelForCausalLM

    llama = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=320, **llama)).save_pretrained(
        tmp_path / "llama"
    )
    with pytest.raises(RecipeError, match=r"cannot be loaded as an encoder-decoder.*Name one, such as a T5"):
        load_seq2seq(tmp_path / "llama")


def test_the_trainer_checks_what_an_encoder_decoder_has_no_use_for() -> None:
    values = recipe(task="sequence-to-sequence", base={"model": "/base", "scratch": None})
    assert read_settings(values).task == "sequence-to-sequence"
    sizes = recipe()["base"]
    for change, match in (
        ({"train": {**values["train"], "loss_on": "all"}}, r"`train.loss_on`: the prompt is what the encoder reads"),
        ({"train": {**values["train"], "method": "prefix"}}, r"`train.method`: a prefix is trained for language"),
        ({"train": {**values["train"], "compile": True}}, r"`train.compile`: .* not tried compiled"),
        ({"train": {**values["train"], "precision": "fp16"}}, r"`train.precision`: .* leave the range of fp16"),
        ({"base": sizes}, r"`base.scratch`: its sizes are none of an encoder-decoder"),
        (
            {
                "base": {**values["base"], "new_tokens": ["<call>"]},
                "train": {**values["train"], "method": "lora"},
            },
            r"`base.new_tokens`: with `lora`",
        ),
    ):
        with pytest.raises(RecipeError, match=match):
            read_settings({**values, **change})


def test_rows_without_an_answer_end_a_run_by_name(tmp_path: Path) -> None:
    root = str(tmp_path / "bucket")
    texts = [{"text": f"the cat {number}"} for number in range(20)]
    toy = Toy(root, write_dataset(open_store(root), {"train": [*texts, *sample_rows(20)], "eval": sample_rows(5)}))
    base = {"model": pair_base(tmp_path / "base", "t5"), "scratch": None}
    spec = RunSpec.from_json(Path(toy.run("run", task="sequence-to-sequence", base=base)).read_bytes())
    (tmp_path / "scratch").mkdir()
    with pytest.raises(DataError, match=r"20 of 40 rows teach nothing.*it is a text without an answer"):
        prepare(spec, read_settings(spec.recipe), tmp_path / "scratch", lambda: None, lambda _: None)


def test_micro_batches_wait_for_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = pair_toy(str(tmp_path / "bucket"))
    base = {"model": pair_base(tmp_path / "base", "t5"), "scratch": None}
    stage = make_stage(toy, "run", tmp_path / "scratch", task="sequence-to-sequence", base=base,
                       train={"rows_per_step": 8, "tokens_per_step": None})  # fmt: skip
    found = reads_of_steps(stage, False, monkeypatch)
    assert found[8] == found[2]
    assert sum(found[2][0].values()) <= 3  # the loss, and the norm of the gradient


FAST: dict[str, Any] = {"max_steps": 30, "checkpoint_every": 30, "tokens_per_step": None, "rows_per_step": 24,
                        "learning_rate": 1e-2, "micro_batch": 12}  # fmt: skip


@pytest.mark.parametrize(("kind", "method"), [("t5", "full"), ("bart", "lora"), ("t5-gated", "dora")])
def test_a_run_ends_in_a_model_that_transformers_alone_uses(tmp_path: Path, kind: str, method: str) -> None:
    toy = pair_toy(str(tmp_path / "bucket"), train=120)
    base = pair_base(tmp_path / "base", kind, **({} if kind == "bart" else {"num_decoder_layers": 2}))
    lora = {} if method == "full" else {"lora": {"r": 8, "alpha": 32}}
    stage = make_stage(toy, "run", tmp_path / "scratch", task="sequence-to-sequence",
                       base={"model": base, "scratch": None}, train={**FAST, **lora, "method": method},
                       evaluate={"generation": {"rows": 5, "max_new_tokens": 16}})  # fmt: skip
    train_whole(Gang(), stage)
    files = toy.files()
    report = json.loads(files.get("report.json"))
    before, after = report["eval"]["before"], report["eval"]["after"]
    assert after["eval/loss"] < (0.9 if method == "full" else 0.995) * before["eval/loss"]
    assert {"eval/perplexity", "eval/bits_per_byte", "gen/rouge-l"} <= after.keys()
    assert report["model"]["max_logit_difference"] < 1e-3
    model = Path(toy.root) / "runs/run/model"
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(model, output_loading_info=True)
    assert not info["missing_keys"]
    assert getattr(loaded.config, "scale_decoder_outputs", None) is getattr(
        AutoConfig.from_pretrained(base), "scale_decoder_outputs", None
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [talk(*((one["role"], one["content"]) for one in values["messages"])) for values in sample_rows(17, seed=1)]
    nats = count = 0.0
    for row in rows:
        (_, question), (_, answer) = row.messages or ()
        labels = tokenizer(text_target=answer, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            found = loaded(**tokenizer(question, return_tensors="pt"), labels=labels)
        nats, count = nats + float(found.loss) * labels.shape[1], count + labels.shape[1]
    assert nats / count == pytest.approx(after["eval/loss"], rel=1e-5)
    answers = json.loads(files.get(f"answers/step-{report['steps']}.json"))
    columns = answers["columns"]
    for line in answers["data"]:
        told = dict(zip(columns, line, strict=True))
        ids = tokenizer(told["prompt"], return_tensors="pt")
        [written] = loaded.generate(**ids, max_new_tokens=16, do_sample=False, num_beams=1)
        text = tokenizer.decode(written, skip_special_tokens=True)
        assert told["answer"] == text or len(written) > 16  # BART forces an end at the longest answer
    if method != "full":
        assert json.loads((model / "adapter/adapter_config.json").read_text())["task_type"] == "SEQ_2_SEQ_LM"
    card = (model / "README.md").read_text()
    assert "pipeline_tag: text2text-generation" in card
    assert "An encoder-decoder" in card
    assert "an encoder-decoder reads one source" in card

    # Candidate and champion on the same rows: itself, and a model of another task.
    from .ranks_loop import make_base

    for name, champion in (("same", str(model)), ("other", make_base(tmp_path / "llama"))):
        order = {"run": f"{toy.root}/runs/run/run.json", "candidate": str(model),
                 "champion": {"version": "1", "model": champion}}  # fmt: skip
        files.put("evaluate.json", json.dumps(order).encode())
        result = evaluate(f"{toy.root}/runs/run/evaluate.json", StopSignal(), Console(quiet=True))
        assert result["candidate"]["eval/loss"] == pytest.approx(after["eval/loss"], rel=1e-6)
        assert result["candidate"]["gen/rouge-l"] == after["gen/rouge-l"]
        if name == "same":
            assert result["champion"]["eval/loss"] == result["candidate"]["eval/loss"]
        else:
            assert "a causal language model, and no encoder-decoder" in result["champion"]["problem"]


def test_pairs_that_fill_the_context_together_are_exported(tmp_path: Path) -> None:
    """The model that is read back is asked for both, each of which fits."""
    rows = [chat(f"{'red green blue ' * 35}cat {at}", f"dog {at}") for at in range(40)]
    root = str(tmp_path / "bucket")
    toy = Toy(root, write_dataset(open_store(root), {"train": rows[:30], "eval": rows[30:]}))
    steps = {"max_steps": 1, "sequence_length": 64, "tokens_per_step": None, "rows_per_step": 8, "micro_batch": 8}
    base = {"scratch": None, "model": pair_base(tmp_path / "bart", "bart")}
    stage = make_stage(toy, "run", tmp_path / "scratch", task="sequence-to-sequence", base=base, train=steps)
    train_whole(Gang(), stage)
    assert "model/model.safetensors" in toy.files().sizes()


def test_adapters_reach_the_encoder_the_decoder_and_what_joins_them() -> None:
    built = add_adapters(make_pairs("t5"), Lora(2, 4, 0.0, "all-linear"), 1)
    names = {name.split(".lora_")[0] for name, _ in built.trainable()}
    assert {"encoder.block.0.layer.0.SelfAttention.q", "decoder.block.2.layer.1.EncDecAttention.v"} <= names
    assert not any("lm_head" in name or "shared" in name for name in names)
    sources = Sources(for_seq2seq(pair_tokenizer()))
    before = Row(b"", (("user", "the cat"),), None)
    assert sources.ask(before) == ("the cat", tuple(sources.tokenizer("the cat")["input_ids"]))


def test_the_encoder_s_flops_are_those_of_sources_and_the_decoder_s_those_of_targets() -> None:
    model, lengths, targets = make_pairs("t5"), np.array([10, 30]), np.array([4, 6])
    found = model_flops(model, lengths, targets)
    inner, width, feed, words = 4 * 8, 32, 48, 320
    attention, mlp = 4 * width * inner, 2 * width * feed
    encoder = 2 * (attention + mlp) + 3 * 2 * width * inner  # and keys and values of what the decoder looks at
    decoder = 3 * (attention + attention // 2 + mlp)
    sources = (lengths - targets).sum()
    seen = 2 * ((lengths - targets) ** 2).sum() + 3 * (targets * lengths).sum()
    whole = 6 * (encoder * sources + (decoder + words * width) * targets.sum()) + 12 * inner * seen
    assert found.of(float(lengths.sum()), float(targets.sum())) == pytest.approx(float(whole), rel=1e-9)


def test_a_tokenizer_that_marks_languages_has_to_be_told_which(tmp_path: Path) -> None:
    from transformers import NllbTokenizer

    words = ("<s>", "<pad>", "</s>", "<unk>", "a", "eng_Latn", "deu_Latn")
    made: Any = NllbTokenizer(vocab={word: at for at, word in enumerate(words)}, merges=[])
    with pytest.raises(DataError, match=r"names no src_lang and no tgt_lang\. Name both there"):
        for_seq2seq(made)
    made.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for_seq2seq(AutoTokenizer.from_pretrained(tmp_path)).save_pretrained(tmp_path / "again")  # as an export does
    again = for_seq2seq(AutoTokenizer.from_pretrained(tmp_path / "again"))
    assert (again.src_lang, again.tgt_lang) == ("eng_Latn", "deu_Latn")
