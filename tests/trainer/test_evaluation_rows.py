"""The rows that models are measured on, and what is told of a model that has no figures."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dropforge.errors import DataError
from dropforge.run import RunSpec
from trainer import evaluate
from trainer.config import read_settings
from trainer.data.rows import Row, read_rows

from .toy import Toy

_MOST = 5


def test_of_a_large_dataset_only_the_rows_that_are_measured_are_held(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RunSpec.from_json(Path(toy.run("many", evaluate={"max_rows": _MOST})).read_bytes())
    alive: weakref.WeakSet[Row] = weakref.WeakSet()
    most = 0

    def counted(*arguments: Any) -> Iterator[Row]:
        nonlocal most
        for row in read_rows(*arguments):
            alive.add(row)
            most = max(most, len(alive))
            yield row

    monkeypatch.setattr(evaluate, "read_rows", counted)
    found = evaluate.evaluation_rows(spec, read_settings(spec.recipe))
    store, manifest = toy.store, evaluate.load_manifest(spec)
    assert [row.key for row in found] == sorted(row.key for row in read_rows(store, manifest, "eval"))[:_MOST]
    assert manifest.counts["train"] > 2 * _MOST < manifest.counts["eval"]
    assert most <= _MOST + 3  # besides them the one at hand, and the one before it


def test_rows_that_are_not_the_datasets_are_refused(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec.from_json(Path(toy.run("fewer")).read_bytes())
    monkeypatch.setattr(
        evaluate, "read_rows", lambda *arguments: (row for at, row in enumerate(read_rows(*arguments)) if at != 1)
    )
    with pytest.raises(DataError, match="rows are missing"):
        evaluate.evaluation_rows(spec, read_settings(spec.recipe))
