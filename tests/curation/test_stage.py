"""Stages change texts or end rows, and nothing else; how rows are cut into batches changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from curation import kernel
from curation.canonical import Row, canonical
from curation.columns import strings
from curation.formats import sniff
from curation.reasons import Reason
from curation.records import Split
from curation.stage import REFUSED, Refusal, Staged, put_through, refusals
from curation.task import Rules, Task
from dropforge.errors import DropforgeError

NONE = refusals([], [], [])


def replaced(old: str, new: str):
    def stage(passages: pa.RecordBatch) -> Staged:
        found = passages.column("content")
        contents = pc.replace_substring(found, old, new)
        hits = pc.sum(pc.match_substring(found, old)).as_py() or 0
        return Staged(passages.set_column(2, "content", contents), NONE, {f"had_{old}": hits})

    return stage


def without(word: str):
    """Ends rows that say this word anywhere, and hides it."""

    def stage(passages: pa.RecordBatch) -> Staged:
        texts, rows = passages.column("content").to_pylist(), passages.column("row").to_pylist()
        ended = sorted({row for row, text in zip(rows, texts, strict=True) if word in text})
        hidden = strings([text.replace(word, "...") for text in texts])
        refused = refusals(ended, ["said_it"] * len(ended), ["a word"] * len(ended))
        return Staged(passages.set_column(2, "content", hidden), refused, {"said": len(ended)})

    return stage


def chat(*contents: str) -> Row:
    roles = ("user", "assistant") * len(contents)
    return canonical({"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]})


def text(content: str) -> Row:
    return canonical({"text": content})


def test_stages_see_what_the_ones_before_them_left():
    rows = [text("a cat"), chat("a dog?", "a cat!"), text("nothing")]
    done, counts = put_through(rows, [replaced("cat", "dog"), replaced("dog", "cow")])
    assert [row.text or row.contents for row in done] == ["a cow", ("a cow?", "a cow!"), "nothing"]
    assert counts == {"had_cat": 2, "had_dog": 3}
    assert done[2] is rows[2]


def test_a_refused_row_ends_and_later_stages_do_not_see_it():
    rows = [text("secret cat"), text("a cat"), chat("x", "a secret cat"), chat("a cat", "x")]
    done, counts = put_through(rows, [without("secret"), replaced("cat", "dog")])
    assert done[0] == Refusal("said_it", "a word", "... cat")
    assert done[2] == Refusal("said_it", "a word", "x")
    assert done[1].text == "a dog"
    assert done[3].contents == ("a dog", "x")
    assert counts == {"said": 2, "had_cat": 2}


def test_a_row_of_which_nothing_is_left_ends():
    rows = [text("cat"), chat("cat", "x"), chat("x", "cat"), text("cats")]
    done, _ = put_through(rows, [replaced("cat", " ")])
    assert [getattr(row, "reason", None) for row in done] == [Reason.EMPTY, Reason.EMPTY, Reason.NO_ANSWER, None]


def test_a_system_message_of_which_nothing_is_left_goes_alone():
    row = canonical(
        {
            "messages": [
                {"role": "system", "content": "cat"},
                *({"role": r, "content": "x"} for r in ("user", "assistant")),
            ]
        }
    )
    (done,), _ = put_through([row], [replaced("cat", " ")])
    assert (done.roles, done.contents) == (("user", "assistant"), ("x", "x"))


def test_what_becomes_a_control_token_is_made_harmless():
    (done,), _ = put_through([text("<|im_-end|>")], [replaced("-", "")])
    assert done.text == "< |im_end|>"
    assert done.neutralised == 1


@pytest.mark.parametrize("wrong", [lambda p: p.slice(1), lambda p: p.select(["row", "role"]), lambda p: p.take([1, 0])])
def test_a_stage_that_loses_passages_is_an_error(wrong):
    def stage(passages: pa.RecordBatch) -> Staged:
        return Staged(wrong(passages), NONE, {})

    with pytest.raises(DropforgeError, match=r"stage.*other passages"):
        put_through([text("a"), text("b")], [stage])


def made(folder: Path, rules: Rules) -> tuple[list, list, kernel.Report]:
    path = folder / "rows.jsonl"
    lines = [json.dumps({"text": f"row {n} {'secret' if n % 3 == 0 else 'cat'}"}) for n in range(20)]
    path.write_text("\n".join([*lines, "no row"]))
    task = Task("one", Split(path, sniff(path, "rows.jsonl")), 0, "rows.jsonl", rules, folder)
    report = kernel.run(task)
    return pq.read_table(task.rows).to_pylist(), pq.read_table(task.faults).to_pylist(), report


@pytest.mark.parametrize("at_once", [1, 7, 4096])
def test_the_kernel_names_rows_after_the_stages(tmp_path, monkeypatch, at_once):
    rules = Rules(50_000, "salt", "text", 1_000_000, "drop")
    monkeypatch.setattr(kernel, "_STAGE_ROWS", at_once)
    (tmp_path / "plain").mkdir()
    plain, _, _ = made(tmp_path / "plain", rules)
    monkeypatch.setattr(kernel, "make_stages", lambda *_: (without("secret"), replaced("cat", "dog")))
    rows, faults, report = made(tmp_path, rules)
    assert [row["text"] for row in rows] == [f"row {n} dog" for n in range(20) if n % 3]
    assert {row["key"] for row in rows}.isdisjoint({row["key"] for row in plain})
    ended = sorted((fault["position"], fault["reason"], fault["head"]) for fault in faults)
    assert [reason for _, reason, _ in ended] == ["said_it"] * 7 + ["bad_json"]
    assert ended[0][2] == b"row 0 ..."
    assert (report.records, report.rows, report.faults) == (21, 13, 8)
    assert report.counts == {"said": 7, "had_cat": 13}


def test_the_schema_of_refusals_is_what_stages_must_give():
    assert refusals([3], ["why"], ["what"]).schema == REFUSED
