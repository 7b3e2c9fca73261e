"""`python -m trainer plan|inspect|evaluate|export` on a classifier that was really trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from dropforge.layout import dataset_prefix
from dropforge.store import open_store
from trainer.rank import run as train
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .classes import LABELS, labelled_rows
from .test_commands import address, ask, refused
from .toy import Toy, write_dataset


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A bucket with the finished run `run` of a small encoder, whose data has a label that no training row has."""
    root = str(tmp_path_factory.mktemp("classes") / "bucket")
    rows = {"train": labelled_rows(40, 0), "eval": [*labelled_rows(11, 1), {"text": "a fish", "label": "fish"}]}
    toy = Toy(root, write_dataset(open_store(root), rows))
    uri = toy.run(
        "run",
        task="classification",
        base={"scratch": {"architecture": "distilbert"}},
        train={"max_steps": 4, "tokens_per_step": None, "rows_per_step": 8, "micro_batch": 8},
        promote={"metric": "eval/accuracy"},
    )
    train(uri, StopSignal(), Console(quiet=True))
    return toy


def test_plan_tells_labels_and_why_nothing_is_packed(trained: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, "plan", address(trained))
    report = json.loads(trained.files().get("report.json"))
    assert found["refused"] == []
    assert list(found["labels"]) == list(LABELS)
    assert sum(found["labels"].values()) == found["train"]["targets"] == 40
    assert found["eval"]["unseen_labels"] == 1
    assert found["packing"]["reason"] == "a classifier reads one document a row"
    assert found["steps"] == report["steps"]
    assert found["model"]["trained"] == found["model"]["parameters"]


def test_inspect_shows_the_label_of_a_row(trained: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = ask(capsys, "inspect", address(trained), "--rows", "40")["samples"]
    assert {sample["label"] for sample in rows} == set(LABELS)
    assert {part["kind"] for sample in rows for part in sample["segments"]} == {"context"}
    told = {json.dumps(row.get("text")): row["label"] for row in labelled_rows(40, 0)}
    for sample in rows:
        text = "".join(part["text"] for part in sample["segments"])
        if "im_start" not in text:
            assert sample["label"] == told[json.dumps(text.removeprefix("<|bos|>").removesuffix("<|eos|>"))]
    step = ask(capsys, "inspect", address(trained), "--step", "1", "--rows", "8")["packed"]
    assert len(step) == 8
    key = {"".join(part["text"] for part in sample["segments"]): sample["label"] for sample in rows}
    for (sample,) in (row["documents"] for row in step):
        assert sample["label"] == key["".join(part["text"] for part in sample["segments"])]
    code, text = refused(capsys, "inspect", address(trained), "--packed")
    assert (code, "one document a row" in text) == (10, True)


def test_evaluate_and_export_give_the_run_s_own_model(
    trained: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = json.loads(trained.files().get("report.json"))["eval"]["after"]
    folder = str(tmp_path / "exported")
    ask(capsys, "export", address(trained), "--to", folder)
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.id2label == dict(enumerate(LABELS))
    own, exported = ask(capsys, "evaluate", address(trained), folder, "--run", address(trained))
    # Without a run the model tells the task.
    (alone,) = ask(capsys, "evaluate", folder, "--dataset", f"{trained.root}/{dataset_prefix('toy', trained.digest)}")
    for found in (own, exported, alone):
        assert (found["rows"], found["target_tokens"], found["unseen_labels"]) == (11, 11, 1)
        for key in ("eval/loss", "eval/accuracy", "eval/macro_f1"):
            assert found[key] == pytest.approx(after[key], rel=1e-6)
