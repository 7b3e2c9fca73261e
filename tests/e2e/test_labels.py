"""A drop of rows with labels goes the whole way: to a registered classifier that transformers alone uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from dropforge import tracking
from dropforge.client.drops import wait_for_run
from tests.e2e.harness import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

FAMILY: Final = "labels"
WORDS: Final = {
    "animal": ("cat", "dog", "bird", "horse"),
    "colour": ("red", "green", "blue", "white"),
    "place": ("house", "river", "garden", "bridge"),
}
RECIPE: Final = """\
task: classification
extends: tiny
base: {scratch: {architecture: distilbert}}
train:
  {sequence_length: 32, rows_per_step: 16, micro_batch: 16, max_steps: 100, learning_rate: 0.001, checkpoint_every: 50}
evaluate: {max_rows: 40}
promote: {metric: eval/macro_f1}
"""


def text(number: int, word: str) -> str:
    """A line of which one word tells the label."""
    return f"{word} {word} {word} number {number}"


def rows(folder: Path) -> dict[str, Path]:
    """300 rows, a hundred of each label."""
    words = [(label, word) for label, found in WORDS.items() for word in found]
    lines = [{"text": text(n, words[n % 12][1]), "label": words[n % 12][0]} for n in range(300)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {path.name: path}


def test_a_drop_of_labels_becomes_a_registered_classifier(stack: Stack, tmp_path: Path) -> None:
    drop = stack.drop(FAMILY, "one", rows(tmp_path), RECIPE)
    run = wait_for_run(stack.connection, drop)
    assert stack.end(run) == "success", {name: task["state"] for name, task in stack.tasks(run).items()}
    (tracked,) = stack.tracked(run)
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["task"] == "classification"
    assert tracked.data.tags[tracking.TAG_VERDICT].startswith("promote")
    for name, better in (("eval/loss", -1), ("eval/macro_f1", 1)):
        course = sorted(stack.mlflow.get_metric_history(tracked.info.run_id, name), key=lambda point: point.step)
        assert better * (course[-1].value - course[0].value) > 0

    version = stack.mlflow.get_model_version(FAMILY, tracked.data.tags[tracking.TAG_VERSION])
    assert version.run_id == tracked.info.run_id
    assert stack.champion(FAMILY) == version.version
    prefix = version.source.removeprefix(f"{stack.connection.settings.root}/").rstrip("/") + "/"
    model = tmp_path / "model"
    for info in stack.connection.store.list(prefix):
        stack.connection.store.download(info.key, model / info.key.removeprefix(prefix))
    transformers = pytest.importorskip("transformers")
    use = transformers.pipeline("text-classification", model=str(model), device="cpu")
    assert use.model.config.id2label == dict(enumerate(WORDS))
    asked = [(label, text(1000 + n, word)) for label, found in WORDS.items() for n, word in enumerate(found)]
    given = [answer["label"] for answer in use([line for _, line in asked])]
    assert sum(label == own for (own, _), label in zip(asked, given, strict=True)) > len(asked) / 2
