"""What the guard before MLflow lets trainings write, by pure functions; `test_mlflow_accounts` asks the server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dropforge import tracking
from dropforge.checkpoints import ANSWER, ASK
from dropforge.stack.mlflow_guard import may_tag, may_upload
from dropforge.training_tags import may_set
from trainer.report.models import BEST, DELETED, LAST, shown
from trainer.state.checkpoint import Seal

SEAL = Seal("fam-1", 1, 1, "p", {}, {}, "digest", 1.0)


@pytest.mark.parametrize(
    "body",
    [
        b'{"key": "dropforge.ask"}',
        b'{"key": "dropforge.ask", "key": "mine"}',
        rb'{"k\u0065y": "dropforge\u002eask"}',
        b'{"key": " Dropforge.Ask"}',
        b'{"a": [{"tags": [{"key": "dropforge.version"}]}]}',
        b'["key"]',
        b'"{}"',
        b"\xff\xfe{\0}\0",
        b"[" * 100_000,
        b"key=dropforge.ask",
    ],
)
def test_a_tag_is_found_however_it_is_written(body: bytes) -> None:
    assert not may_tag("/api/2.0/mlflow/runs/log-batch", body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"path": "f", "num_parts": 1000000000}',
        b'{"path": "f", "num_parts": 1, "numParts": 1000000000}',
        b'{"path": "f", "num_parts": 1000000000, "num_parts": 1}',
        b'{"num_parts": "1000000000"}',
        b'{"num_parts": 1e9}',
        b'{"num_parts": 0}',
        b'"{}"',
        b"[" * 100_000,
        b"",
    ],
)
def test_an_upload_of_too_many_parts_is_found_however_it_is_written(body: bytes) -> None:
    assert not may_upload(body)
    assert may_upload(b'{"path": "f", "num_parts": 10000}')


def test_tags_that_the_trainer_sets_are_those_that_trainings_may_set() -> None:
    sources = [path.read_text() for path in (Path(__file__).parents[2] / "trainer").rglob("*.py")]
    names = {name for text in sources for name in re.findall(r"\"(dropforge\.[a-z_]+)\"", text)}
    assert {"dropforge.attempt", "dropforge.idle"} <= names
    assert [name for name in sorted({*names, f"{BEST}_checkpoint", f"{LAST}_checkpoint"}) if not may_set(name)] == []
    assert all(may_set(tag, checkpoint=True) for tag in (*shown("s3://b", [SEAL], [])[0].tags, DELETED))
    assert not any(may_set(tag, checkpoint=kind) for tag in (ASK, ANSWER) for kind in (True, False))
    assert not may_set(tracking.TAG_RUN)
