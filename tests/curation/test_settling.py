"""Settling tells which statement of how many runs, and what took long, with its rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import curation
from curation import settling
from curation.pace import Lines
from curation.plan import make_rules
from curation.settling import planned
from dropforge.drop import Drop
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

Uploaded = Callable[..., Drop]
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "near": {"dedup": {"threshold": 0.7}, "scope": "family"},
    "keep": {"exact_duplicates": "keep"},
}


def chains() -> bytes:
    """Groups that share a text with the next one, so that ties are followed for more than a round."""
    rows = [{"text": f"text number {n + m} that two groups share", "group": f"g{n}"} for n in range(40) for m in (0, 1)]
    return b"\n".join(json.dumps(row).encode() for row in rows)


@pytest.mark.parametrize("way", ASKED)
def test_each_statement_is_counted_up_to_all(
    store: FolderStore, upload: Uploaded, recipe: Callable[..., Recipe], tmp_path: Path, way: str
) -> None:
    told, asked = list[tuple[int, int]](), recipe(**ASKED[way])

    def progress(stage: str, done: int, total: int, _rows: int) -> None:
        if stage == "deduplicate":
            told.append((done, total))

    said = list[str]()
    curation.curate(
        store, upload({"a.jsonl": chains()}), asked, workdir=tmp_path / "w", progress=progress, say=said.append
    )
    dones, totals = [done for done, _ in told], [total for _, total in told]
    assert dones == [0, *range(dones[-1] + 1)]
    assert totals == sorted(totals)
    assert totals[0] == planned(make_rules(asked)).total() > 10
    assert totals[-1] == dones[-1] >= totals[0]
    assert not any(line.startswith("deduplicate") for line in said), "fast ones have no line"


def test_a_slow_statement_has_a_line_with_its_rows_and_time(
    store: FolderStore,
    upload: Uploaded,
    recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settling.Watched.__init__, "__defaults__", (map(float, count(0, 65)).__next__,))
    said = list[str]()
    clock: Iterator[float] = map(float, count())
    curation.curate(
        store,
        upload({"a.jsonl": chains()}),
        recipe(exact_duplicates="keep"),
        workdir=tmp_path / "w",
        progress=Lines(said.append, clock=clock.__next__),
        say=said.append,
    )
    slow = [line for line in said if " rows in " in line and line.startswith("deduplicate")]
    assert slow[2].startswith("deduplicate: 3 of ")
    assert slow[2].endswith(", winners: 41 rows in 1 min 5 s")
    assert len(slow) == len({line.partition(",")[0] for line in slow})
