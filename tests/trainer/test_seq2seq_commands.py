"""`python -m trainer plan|inspect|evaluate|export` on an encoder-decoder that was really trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from dropforge.layout import dataset_prefix
from trainer.rank import run as train
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .pairs import T5, pair_toy
from .test_commands import address, ask, refused
from .toy import Toy


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A bucket with the finished run `run` of a small T5 from a config."""
    toy = pair_toy(str(tmp_path_factory.mktemp("pairs") / "bucket"), train=40, held=11)
    uri = toy.run(
        "run",
        task="sequence-to-sequence",
        base={"scratch": {"config": {"model_type": "t5", "vocab_size": 320, **T5, "num_decoder_layers": 2}}},
        train={"max_steps": 4, "tokens_per_step": None, "rows_per_step": 8, "micro_batch": 8},
    )
    train(uri, StopSignal(), Console(quiet=True))
    return toy


def test_plan_tells_why_nothing_is_packed_and_counts_the_weights(
    trained: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask(capsys, "plan", address(trained))
    report = json.loads(trained.files().get("report.json"))
    assert found["refused"] == []
    assert found["task"] == "sequence-to-sequence"
    assert found["packing"]["reason"] == "an encoder-decoder reads one source and writes one target a row"
    assert found["steps"] == report["steps"]
    assert found["train"]["tokens"] == found["train"]["source_tokens"] + found["train"]["targets"]
    model = AutoModelForSeq2SeqLM.from_pretrained(Path(trained.root) / "runs/run/model")
    assert found["model"]["trained"] == found["model"]["parameters"] == sum(w.numel() for w in model.parameters())


def test_inspect_shows_the_prompt_as_context_and_the_answer_as_target(
    trained: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ask(capsys, "inspect", address(trained), "--rows", "40")["samples"]
    assert len(rows) == 40
    for sample in rows:
        source, target, end = sample["segments"]
        assert [source["kind"], target["kind"], end["kind"]] == ["context", "target", "end"]
        words = source["text"].removesuffix("<|eos|>").split()
        assert target["text"].split() == words[::-1]
    step = ask(capsys, "inspect", address(trained), "--step", "1", "--rows", "8")["packed"]
    assert [len(row["documents"]) for row in step] == [1] * 8
    code, text = refused(capsys, "inspect", address(trained), "--packed")
    assert (code, "one target a row" in text) == (10, True)


def test_evaluate_and_export_give_the_run_s_own_model(
    trained: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = json.loads(trained.files().get("report.json"))["eval"]["after"]
    folder = str(tmp_path / "exported")
    ask(capsys, "export", address(trained), "--to", folder)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert len(model.generate(**tokenizer("the red cat", return_tensors="pt"), max_new_tokens=4)[0]) <= 5
    own, exported = ask(capsys, "evaluate", address(trained), folder, "--run", address(trained))
    # Without a run the model tells the task.
    data = f"{trained.root}/{dataset_prefix('toy', trained.digest)}"
    (alone,) = ask(capsys, "evaluate", folder, "--dataset", data, "--answers", "3", "--max-new-tokens", "5")
    for found in (own, exported, alone):
        assert (found["rows"], found["target_tokens"]) == (11, after["target_tokens"])
        for key in ("eval/loss", "eval/accuracy", "eval/bits_per_byte"):
            assert found[key] == pytest.approx(after[key], rel=1e-6)
    assert len(alone["answers"]) == 3
