"""Rows of prompts and answers become a registered encoder-decoder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dropforge import tracking
from dropforge.cli.drops import wait_for_run
from tests.e2e.harness import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

FAMILY = "backwards"
RECIPE = """\
extends: tiny
task: sequence-to-sequence
base:
  scratch:
    config: {model_type: t5, vocab_size: 400, d_model: 48, d_kv: 12, d_ff: 96, num_layers: 2, num_heads: 4,
             dropout_rate: 0.0}
train: {sequence_length: 64, tokens_per_step: null, rows_per_step: 32, micro_batch: 16, max_steps: 12,
        learning_rate: 0.01, checkpoint_every: 6}
evaluate: {max_rows: 40, generation: {rows: 4, max_new_tokens: 12}}
promote: {metric: eval/loss}
"""
WORDS = ("red", "green", "blue", "cat", "dog", "bird", "sees", "likes", "small", "big")


@pytest.fixture(scope="module")
def run(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The run of 300 rows, each of which asks for its words backwards, and of one text without an answer."""
    path = tmp_path_factory.mktemp("pairs") / "rows.jsonl"
    rows = []
    for number in range(300):
        words = [WORDS[number // 10**place % 10] for place in range(3)] + [WORDS[number * 7 % 10]]
        rows.append({"prompt": " ".join(words), "completion": " ".join(reversed(words))})
    path.write_text("\n".join(map(json.dumps, [*rows, {"text": "nobody asked"}])))
    return wait_for_run(stack.connection, stack.drop(FAMILY, "one", {path.name: path}, RECIPE))


def test_a_drop_of_prompts_becomes_a_registered_encoder_decoder(stack: Stack, run: str, tmp_path: Path) -> None:
    assert stack.end(run) == "success", stack.log(run, "train")
    (tracked,) = stack.tracked(run)
    losses = sorted(stack.mlflow.get_metric_history(tracked.info.run_id, "eval/loss"), key=lambda point: point.step)
    assert losses[-1].value < losses[0].value
    assert tracked.data.metrics["gen/rouge-l"] >= 0
    version = stack.mlflow.get_model_version(FAMILY, tracked.data.tags[tracking.TAG_VERSION])
    assert stack.champion(FAMILY) == version.version
    prefix = version.source.removeprefix(f"{stack.connection.settings.root}/").rstrip("/") + "/"
    for info in stack.connection.store.list(prefix):
        stack.connection.store.download(info.key, tmp_path / info.key.removeprefix(prefix))
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    written = model.generate(**tokenizer("red green blue cat", return_tensors="pt"), max_new_tokens=8)
    assert tokenizer.decode(written[0], skip_special_tokens=True)
    card = (tmp_path / "README.md").read_text()
    assert "pipeline_tag: text2text-generation" in card
