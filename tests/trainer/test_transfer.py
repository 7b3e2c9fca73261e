"""Fine-tuning works: after a minute of pretraining on real text, few examples teach more than random weights learn.

The text is Python's documentation, as `help()` has it; no hub is asked. Seeds, rows and steps are the same for both.
"""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from dropforge.store import open_store
from trainer.rank import run
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .toy import Toy, write_dataset

pytestmark = pytest.mark.exact

LENGTH: Final = 128  # tokens of a row
VOCABULARY: Final = 1024
UNSEEN: Final = ("specialnames", "string-methods", "debugger", "compound")  # what is learned from few examples
STEPS: Final = 200  # of pretraining


def paragraphs(topic: str) -> list[str]:
    found = (" ".join(paragraph.split()) for paragraph in topics[topic].split("\n\n"))
    return [paragraph for paragraph in found if paragraph]


def passages(found: list[str]) -> list[str]:
    """Pieces of about 400 characters, each of whole paragraphs."""
    pieces = [""]
    for paragraph in found:
        if len(pieces[-1]) > 400:
            pieces.append("")
        pieces[-1] += paragraph + "\n"
    return [text for text in pieces if len(text) > 200]


UNREAD: Final = {paragraph for topic in UNSEEN for paragraph in paragraphs(topic)}  # other topics quote some of them
SEEN: Final = passages(
    list(dict.fromkeys(text for topic in sorted(topics) for text in paragraphs(topic) if text not in UNREAD))
)


def trained(toy: Toy, name: str, **overrides: Any) -> dict[str, Any]:
    """The report of a run that has been done."""
    run(toy.run(name, **overrides), StopSignal(), Console(quiet=True))
    report: dict[str, Any] = json.loads(toy.files(name).get("report.json"))
    return report


def test_a_decoder_that_has_read_learns_more_from_few_passages(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    reading = Toy(str(tmp_path), write_dataset(store, {"train": texts(SEEN[:-20]), "eval": texts(SEEN[-20:])}))
    sizes = {"hidden_size": 96, "layers": 3, "heads": 4, "vocab_size": VOCABULARY, "context": LENGTH}
    course = {"sequence_length": LENGTH, "tokens_per_step": 16 * LENGTH, "micro_batch": 16, "checkpoint_every": 1000}
    trained(reading, "reading", base={"scratch": sizes}, train={**course, "max_steps": STEPS, "learning_rate": 3e-3})
    read = Path(reading.files("reading").uri) / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(read)).save_pretrained(tmp_path / "random")
    AutoTokenizer.from_pretrained(read).save_pretrained(tmp_path / "random")

    few = passages(paragraphs("specialnames"))
    toy = Toy(str(tmp_path), write_dataset(store, {"train": texts(few[:24]), "eval": texts(few[24:54])}))
    reports = {
        name: trained(toy, name, base={"model": str(base), "scratch": None},
                      train={**course, "max_steps": 12, "learning_rate": 1e-3})
        for name, base in {"read": read, "random": tmp_path / "random"}.items()
    }  # fmt: skip
    losses = {name: [report["eval"][when]["eval/loss"] for when in ("before", "after")]
              for name, report in reports.items()}  # fmt: skip
    assert all(after < before for before, after in losses.values())
    assert losses["read"][1] < losses["random"][1] - 0.5, losses


def test_an_encoder_that_has_read_learns_more_from_few_labels(tmp_path: Path) -> None:
    """What it has read is which of the other topics a passage belongs to."""
    store = open_store(str(tmp_path))
    read_rows: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    for topic in sorted(set(topics) - set(UNSEEN)):
        found = [{"text": text, "label": topic} for text in passages(unquoted(topic))]
        read_rows["train"] += found[:1] + found[2:]
        read_rows["eval"] += found[1:2]
    reading = Toy(str(tmp_path), write_dataset(store, read_rows))
    course = {"sequence_length": LENGTH, "tokens_per_step": None, "rows_per_step": 16, "micro_batch": 16,
              "learning_rate": 1e-3, "checkpoint_every": 1000}  # fmt: skip
    sizes = {"architecture": "distilbert", "hidden_size": 96, "layers": 3, "heads": 4, "vocab_size": VOCABULARY,
             "context": LENGTH}  # fmt: skip
    trained(reading, "reading", task="classification", base={"scratch": sizes}, train={**course, "max_steps": STEPS})
    folder = Path(reading.files("reading").uri) / "model"
    torch.manual_seed(0)
    bases = {
        "read": AutoModel.from_pretrained(folder),
        "random": AutoModel.from_config(AutoConfig.from_pretrained(folder)),
    }
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    for topic in UNSEEN:
        found = [{"text": text, "label": topic} for text in passages(paragraphs(topic))]
        rows["train"] += found[::2][:8]
        rows["eval"] += found[1::2][:20]
    toy = Toy(str(tmp_path), write_dataset(store, rows))
    after = {}
    for name, base in bases.items():
        base.config.id2label = base.config.label2id = None  # labels are for the rows to tell
        base.save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / name)
        report = trained(toy, name, task="classification", base={"model": str(tmp_path / name), "scratch": None},
                         train={**course, "max_steps": 12}, evaluate={"max_rows": 100})  # fmt: skip
        after[name] = report["eval"]["after"]
    assert after["read"]["eval/accuracy"] > after["random"]["eval/accuracy"] + 0.1, after
    assert after["read"]["eval/loss"] < after["random"]["eval/loss"], after


def unquoted(topic: str) -> list[str]:
    return [text for text in paragraphs(topic) if text not in UNREAD]


def texts(found: list[str]) -> list[dict[str, Any]]:
    return [{"text": text} for text in found]
