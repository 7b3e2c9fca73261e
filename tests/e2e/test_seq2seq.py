"""Rows of prompts and answers become a registered encoder-decoder, and other runs go on from its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dropforge import tracking
from dropforge.client.airflow import FINETUNE
from dropforge.client.drops import wait_for_run
from tests.e2e.harness import Stack

if TYPE_CHECKING:
    from mlflow.entities import Run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

FAMILY = "backwards"
RECIPE = """\
extends: tiny
task: sequence-to-sequence
base:
  scratch:
    config: {model_type: t5, vocab_size: 400, d_model: 48, d_kv: 12, d_ff: 96, num_layers: 2, num_heads: 4,
             dropout_rate: 0.0}
train: {sequence_length: 64, tokens_per_step: null, rows_per_step: 32, micro_batch: 16, max_steps: 12,
        learning_rate: 0.01, checkpoint_every: 6, eval_every: 6}
evaluate: {max_rows: 40, generation: {rows: 4, max_new_tokens: 12}}
promote: {metric: eval/loss}
"""
WORDS = ("red", "green", "blue", "cat", "dog", "bird", "sees", "likes", "small", "big")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """300 rows, each of which asks for its words backwards, and one text without an answer."""
    path = tmp_path_factory.mktemp("pairs") / "rows.jsonl"
    rows = []
    for number in range(300):
        words = [WORDS[number // 10**place % 10] for place in range(3)] + [WORDS[number * 7 % 10]]
        rows.append({"prompt": " ".join(words), "completion": " ".join(reversed(words))})
    path.write_text("\n".join(map(json.dumps, [*rows, {"text": "nobody asked"}])))
    return {path.name: path}


@pytest.fixture(scope="module")
def run(stack: Stack, rows: dict[str, Path]) -> str:
    return wait_for_run(stack.connection, stack.drop(FAMILY, "one", rows, RECIPE))


def losses(stack: Stack, tracked: Run) -> dict[int, float]:
    """Evaluation loss by step."""
    return {point.step: point.value for point in stack.mlflow.get_metric_history(tracked.info.run_id, "eval/loss")}


def test_a_drop_of_prompts_becomes_a_registered_encoder_decoder(stack: Stack, run: str, tmp_path: Path) -> None:
    assert stack.end(run) == "success", stack.log(run, "train")
    (tracked,) = stack.tracked(run)
    course = losses(stack, tracked)
    assert course[12] < course[0]
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


@pytest.fixture(scope="module")
def from_champion(stack: Stack, run: str) -> str:
    """A short run on the same rows from the champion, asked for in the form."""
    assert stack.end(run) == "success", stack.log(run, "train")
    # It cannot win by 99 %: the first model stays champion.
    asked = {"base_start": "champion", "train_max_steps": 2, "promote_min_improvement": 0.99}
    conf = {"drop": f"{FAMILY}/one", "again": True}
    return stack.connection.airflow.trigger(FINETUNE, {**conf, **asked})


@pytest.fixture(scope="module")
def from_checkpoint(stack: Stack, run: str, rows: dict[str, Path]) -> str:
    """Another one from the first run's checkpoint at step 6, asked for by a drop of another family."""
    assert stack.end(run) == "success", stack.log(run, "train")
    name = stack.tracked(run)[0].data.tags[tracking.TAG_RUN]
    recipe = RECIPE.replace("base:", f"base:\n  start: runs/{name}/step-6").replace("max_steps: 12", "max_steps: 2")
    return wait_for_run(stack.connection, stack.drop(f"{FAMILY}-halfway", "one", rows, recipe))


def test_a_run_goes_on_from_the_registered_champion(stack: Stack, run: str, from_champion: str) -> None:
    assert stack.end(from_champion) == "success", {
        name: task["state"] for name, task in stack.tasks(from_champion).items()
    }
    (first,), (second,) = stack.tracked(run), stack.tracked(from_champion)
    assert losses(stack, second)[0] == pytest.approx(losses(stack, first)[12], rel=1e-5)
    champion = stack.mlflow.get_model_version_by_alias(FAMILY, "champion")
    digest = champion.tags[tracking.TAG_MODEL]
    began = f"version {champion.version}, run {first.data.tags[tracking.TAG_RUN]}, digest {digest[:12]}"
    made = stack.mlflow.get_model_version(FAMILY, second.data.tags[tracking.TAG_VERSION])
    assert made.version != champion.version
    assert second.data.tags[tracking.TAG_START] == made.tags[tracking.TAG_START] == began
    assert second.data.params["base.model"] == champion.source


def test_a_run_goes_on_from_a_checkpoint_of_another_family(stack: Stack, run: str, from_checkpoint: str) -> None:
    assert stack.end(from_checkpoint) == "success", {
        name: task["state"] for name, task in stack.tasks(from_checkpoint).items()
    }
    (first,), (second,) = stack.tracked(run), stack.tracked(from_checkpoint)
    assert losses(stack, second)[0] == pytest.approx(losses(stack, first)[6], rel=1e-5)
    source = first.data.tags[tracking.TAG_RUN]
    seal = json.loads(stack.connection.store.get(f"runs/{source}/checkpoints/step-6/manifest.json"))
    began = f"checkpoint step-6 of run {source}, digest {seal['digest'][:12]}"
    made = stack.mlflow.get_model_version(f"{FAMILY}-halfway", second.data.tags[tracking.TAG_VERSION])
    assert second.data.tags[tracking.TAG_START] == made.tags[tracking.TAG_START] == began
