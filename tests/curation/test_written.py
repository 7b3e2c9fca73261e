"""The ledger is held to what the readers counted, file by file and place by place, before anything is uploaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from curation import written
from curation.engines import duck
from dropforge.dataset import Manifest
from dropforge.errors import DropforgeError
from dropforge.store import FolderStore

Texts = Callable[..., list[bytes]]
Make = Callable[..., Manifest]
Patch = pytest.MonkeyPatch


@pytest.fixture
def files(texts: Texts) -> dict[str, bytes]:
    """Two files of 50 rows."""
    return {"a.jsonl": b"\n".join(texts(50)) + b"\n", "b.jsonl": b"\n".join(texts(50, 50)) + b"\n"}


def test_ledger_that_does_not_add_up_stops_the_run(
    make: Make, files: dict[str, bytes], monkeypatch: Patch, store: FolderStore
) -> None:
    run = duck.run_all

    def shifting(tasks: Any, workers: int) -> Any:
        for task, report in run(tasks, workers):
            report.records += 1 if task.name == "a.jsonl" else -1  # the sum stays
            yield task, report

    monkeypatch.setattr(duck, "run_all", shifting)
    with pytest.raises(DropforgeError, match="does not add up") as caught:
        make(files)
    assert "'a.jsonl' has 51 rows, the ledger 50; 'b.jsonl' has 49 rows, the ledger 50" in str(caught.value)
    assert not list(store.list("datasets/"))


def test_a_place_with_two_ends_stops_the_run(
    make: Make, files: dict[str, bytes], monkeypatch: Patch, store: FolderStore
) -> None:
    second = files["a.jsonl"].index(b"\n") + 1
    doubled = written.LEDGER.replace("position,", f"greatest(position, {second}) as position,", 1)
    # As many rows in each file, of which the first two of a.jsonl have one place.
    monkeypatch.setattr(written, "LEDGER", doubled)
    with pytest.raises(DropforgeError, match="does not add up: 1 rows have two ends"):
        make(files)
    assert not list(store.list("datasets/"))
