"""What uploaders may make many of: columns, files with odd names, copies, labels; what is told of them is bounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from curation import check, drift
from curation.engines.duck import DuckTables
from curation.kernel import canonical_rows
from curation.notes import not_as_meant, unknown_keys, warnings
from curation.page import first_of
from curation.phrases import numbers, repeated
from curation.plan import cut, make_rules
from curation.reasons import Reason
from curation.records import Fault
from curation.schema import changes
from curation.streams import Limits
from curation.task import Report, Task
from curation.told import card_lines
from dropforge.dataset import Manifest
from dropforge.errors import DataError
from dropforge.recipes import load_recipe


def test_the_first_lines_are_told_and_how_many_there_are_beyond_them() -> None:
    assert first_of(["a", "b"], 2, "lines") == ["a", "b"]
    assert first_of(["a", "b", "c"], 2, "lines") == ["a", "b", "and 1 more lines"]


def columns(files: int, each: int) -> list[tuple[str, str, dict[str, dict[str, int]]]]:
    """Files of which none has a column in common with another."""
    return [(f"{n}.jsonl", "jsonl", {f"c{n}_{m}": {"string": 1} for m in range(each)}) for n in range(files)]


def test_only_the_most_frequent_columns_are_compared_and_the_first_lines_kept() -> None:
    kept = {"kept": {"string": 5}, "odd": {"number": 3, "string": 2}}
    files = [(name, kind, {**kept, **found}) for name, kind, found in columns(20, 60)]
    lines = changes(files, {"JSON": {f"gone {n}": {"string": 1} for n in range(300)}})
    assert len(lines) == 402
    assert lines[200] == "and 299 more changes of columns"
    assert lines[-1] == "and 600 more changes of columns"
    assert lines[0] == "JSON column `c0_0` is only in 0.jsonl"


def test_keys_that_say_something_are_told_before_columns_and_those_beyond_the_card_are_counted_together() -> None:
    rules: Any = SimpleNamespace(
        encoding="utf-8",
        columns=SimpleNamespace(names=(), wanted=lambda _: frozenset()),
        text_column="text",
        keep_columns=None,
    )
    task: Any = SimpleNamespace(name="a.jsonl")
    report = Report(0, unknown={"messages.mask": 2}, columns={f"m{n:03}": {"number": 600 - n} for n in range(510)})
    reports: list[tuple[Task, Report]] = [(task, report)]
    found = unknown_keys(reports, rules)
    assert list(found.items())[:2] == [("messages.mask", 2), ("m000", 600)]
    assert list(found.items())[499:] == [("m498", 102), ("and 11 more keys", sum(range(91, 102)))]
    (told,) = not_as_meant(reports, rules, found)
    assert told.startswith(
        "Keys that mean nothing here and are not learned: `messages.mask` (2 rows), `m000` (600 rows)"
    )
    assert told.endswith("`m098` (502 rows), and 401 more keys (card.json has them)")


def test_where_a_column_is_not_names_two_files_and_counts_the_others() -> None:
    files = [(f"{n}.jsonl", "jsonl", {"a": {"string": 1}, **({"b": {"string": 1}} if n > 3 else {})}) for n in range(9)]
    assert changes(files) == ["JSON column `b` is not in 0.jsonl, 1.jsonl and 2 more files"]
    assert changes(files[:6]) == ["JSON column `b` is only in 4.jsonl, 5.jsonl"]


def test_warnings_about_files_are_bounded_on_the_card_and_in_the_terminal() -> None:
    work: list[Any] = [
        SimpleNamespace(
            name=f"{n:04}.csv",
            split=SimpleNamespace(
                format=SimpleNamespace(kind="csv", warnings=(f"{n + 2} columns have no name",), looks=None)
            ),
        )
        for n in range(1_500)
    ]
    reports: list[tuple[Task, Report]] = [(task, Report(0)) for task in work]
    rules: Any = SimpleNamespace(
        encoding="utf-8",
        columns=SimpleNamespace(names=(), wanted=lambda _: frozenset()),
        text_column="text",
        keep_columns=None,
        scope="drop",
    )
    told = warnings(work, reports, rules, [], {}, [])
    assert len(told) == 1_001
    assert told[0] == "0000.csv: 2 columns have no name"
    assert told[1_000] == "and 500 more warnings about files"
    card = {
        "warnings": told,
        "columns": {"changed": [f"change {n}" for n in range(30)]},
        "counts": {"input": 1, "train": 1, "eval": 0},
        "inputs": [],
        "statistics": {"by_file": []},
        "rules": {},
    }
    lines = card_lines(card)
    assert lines[19:21] == [told[19], "and 981 more warnings (the card has them)"]
    assert lines[40:42] == ["change 19", "and 10 more changes of columns (the card has them)"]
    assert lines[42] == "Rows"


class Heard(DuckTables):
    """Tables that keep what was fetched."""

    fetched = 0

    def all(self, statement: str) -> list[tuple[Any, ...]]:
        found = super().all(statement)
        self.fetched += sum(len(str(value)) for row in found for value in row)
        return found


def test_of_a_phrase_one_row_is_fetched_however_many_copies_it_has(tmp_path: Path) -> None:
    text = "By order of Zanzibar " + "x" * 10_000
    opening, closing = numbers(text)
    with Heard(tmp_path) as tables:
        tables.do(
            "create table rows as select cast('k' || (n % 20) as blob) as key, cast('r' || n as blob) as rank,"
            f" 'web' as source, {opening} as opening, {closing} as closing, '{text}' as text,"
            " null::struct(role varchar, content varchar)[] as messages from range(400) t(n)"
        )
        tables.do("create table sides as select key, min(rank) as rank from rows group by key")
        found = repeated(tables, "rows r join sides s on r.key = s.key and r.rank = s.rank", 12)
        assert found == [("web", "begin", "by order of zanzibar", 20, 20)]
        assert tables.fetched < 500  # characters


def test_a_template_that_makes_too_much_of_a_file_ends_it_as_a_bomb(tmp_path: Path) -> None:
    data = {"prompt_template": "word " * 1_000 + "{a}"}
    rules = make_rules(load_recipe("tiny", {"data": data}))
    (tmp_path / "a.jsonl").write_bytes(b'{"a":1}\n' * 100)
    (split,) = cut(tmp_path / "a.jsonl", "a.jsonl")
    task = Task("t", split, 0, "a.jsonl", rules, tmp_path, Limits(ratio=100, free=200_000))
    report = Report(0)
    *rows, fault = canonical_rows(task, report)
    assert len(rows) == 39
    assert isinstance(fault, Fault)
    assert (fault.position, fault.reason) == (39 * 8, Reason.BOMB)
    assert fault.detail == "filling the template: 800 bytes expand to more than 200040"
    assert report.records == 40
    assert len(list(canonical_rows(replace(task, limits=Limits(ratio=1_000, free=200_000)), Report(0)))) == 100
    # What is cut is as large as its part.
    half = split._replace(start=0, end=400)
    assert len(list(canonical_rows(replace(task, split=half, limits=Limits(ratio=500, free=200_000)), Report(0)))) == 40


@pytest.mark.parametrize(("bound", "most"), [("MOST_LABELS", 5), ("MOST_LABEL_CHARS", 41)])
def test_the_gate_refuses_more_labels_than_a_classifier_holds(
    make: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    rows = [json.dumps({"text": f"a text of number {n}", "label": f"label {n % 6}"}) for n in range(60)]
    monkeypatch.setattr(drift, bound, most)
    made = make({"a.jsonl": "\n".join(rows).encode()}, task="classification")
    assert made.measured["labels"] == [6, 42]
    overruled: dict[str, Any] = {"curation": {"gate": {"override": "a first look"}}}
    with pytest.raises(DataError, match=r"labels that a classifier can hold.*6 labels of 42 characters.*Give rows"):
        check(made, load_recipe("tiny", {**overruled, "task": "classification"}))
    assert check(made, load_recipe("tiny", overruled))  # no classifier
    monkeypatch.setattr(drift, bound, most + 1)
    few = [row for row in rows if "label 5" not in row]
    made = make({"a.jsonl": "\n".join(few).encode()}, "d2", task="classification")
    assert "labels" not in made.measured
    assert check(made, load_recipe("tiny", {**overruled, "task": "classification"}))
