"""The sample: real text, the same for the same Python, two parts with nothing in common."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dropforge.errors import DataError
from dropforge.samples import write_sample


def rows(folder: Path, part: int) -> list[dict[str, Any]]:
    questions, reference, signatures = write_sample(folder, part=part)
    found = [json.loads(line) for line in questions.read_bytes().splitlines()]
    found += [json.loads(line) for line in gzip.decompress(reference.read_bytes()).splitlines()]
    with signatures.open(newline="") as table:
        return found + list(csv.DictReader(table))


def text(row: dict[str, Any]) -> tuple[str, str]:
    if "messages" in row:
        return row["messages"][0]["content"], row["messages"][1]["content"]
    return row.get("prompt") or row["question"], row.get("completion") or row["answer"]


def test_parts_are_large_disjoint_and_small_on_disk(tmp_path: Path) -> None:
    first, second = rows(tmp_path / "1", 1), rows(tmp_path / "2", 2)
    for part in (first, second):
        assert 2_000 < len(part) < 20_000
        assert len({row["group"] for row in part}) > 500
        assert all(question.strip() and answer.strip() for question, answer in map(text, part))
    assert not {row["group"] for row in first} & {row["group"] for row in second}
    assert not set(map(text, first)) & set(map(text, second))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.*")) < 8_000_000


def test_same_python_same_bytes(tmp_path: Path) -> None:
    left, right = write_sample(tmp_path / "a"), write_sample(tmp_path / "b")
    assert [path.name for path in left] == ["questions.jsonl", "reference.jsonl.gz", "signatures.csv"]
    assert [path.read_bytes() for path in left] == [path.read_bytes() for path in right]


def test_questions_are_varied_and_about_real_things(tmp_path: Path) -> None:
    asked = {text(row)[0] for part in (1, 2) for row in rows(tmp_path, part)}
    assert any("`itertools.chain`" in question for question in asked)
    assert any("`json.dumps`" in question for question in asked)
    assert len({question.split("`")[0] for question in asked}) > 15


def test_unknown_part(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="part 3"):
        write_sample(tmp_path, part=3)
