"""What a file's name says: names of unfinished files are no data, and names that lie are told."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import curation
from curation.formats import decide
from curation.reasons import Reason
from curation.told import card_lines
from dropforge.dataset import Manifest
from dropforge.errors import DataError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

Make = Callable[..., Manifest]


def stream() -> bytes:
    sink = io.BytesIO()
    table = pa.table({"text": ["a row of Arrow"]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl.tmp", "deep/a.jsonl.TMP", "a.jsonl.gz.part", "a.jsonl.partial", "a.parquet.crdownload", "a.jsonl~",
        "a.jsonl._COPYING_", "a.csv.filepart", "a.tmp.gz", "a.arrow.incomplete", ".a/../b.tmp",
    ],
)  # fmt: skip
@pytest.mark.parametrize("whole", [True, False])
def test_unfinished_files_are_no_data(
    make: Make,
    texts: Callable[..., list[bytes]],
    quarantine: Any,
    recipe: Callable[..., Recipe],
    name: str,
    whole: bool,
) -> None:
    name = name.removeprefix(".a/../")
    more = b"\n".join(texts(9, 500)) if whole else b""
    manifest = make({"a.jsonl": b"\n".join(texts(60)), name: gzip.compress(more) if ".gz" in name and whole else more})
    assert manifest.counts["train"] + manifest.counts["eval"] == 60
    (fault,) = quarantine(manifest)
    assert (fault["file"], fault["position"], fault["reason"]) == (name, 0, "partial_file")
    assert "its name ends with" in fault["detail"]
    # Nobody knows what the file was to hold.
    with pytest.raises(DataError, match=r"partial_file.*under its final name"):
        curation.check(manifest, recipe())


def test_names_that_only_look_so_are_data(make: Make, texts: Callable[..., list[bytes]]) -> None:
    names = ("part-0.jsonl", "template.jsonl", "a.tmp/b.jsonl", "counterpart", "temp")
    manifest = make({name: b"\n".join(texts(10, 10 * at)) for at, name in enumerate(names)})
    assert manifest.counts["train"] + manifest.counts["eval"] == manifest.counts["input"] == 50


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", gzip.compress(b'{"text": "x"}', mtime=0), "the name says not compressed, the bytes are gzip"),
        ("a.jsonl.gz", b'{"text": "x"}', "the name says gzip, the bytes are not compressed"),
        ("a.parquet", b'{"text": "x"}', "the name says Parquet, the bytes are JSON"),
        ("a.parquet", b"<!DOCTYPE html><p>404", "the name says Parquet, the bytes are a web page or XML"),
        ("a.csv", b"%PDF-1.7 and so on", "the name says CSV, the bytes are PDF"),
        ("a.jsonl", stream(), "the name says JSON, the bytes are Arrow"),
        ("a.txt", b'{"text": "x"}', "the name says text, the bytes are JSON"),
        ("a.arrow", b"text\nx\n", "the name says Arrow, the bytes are text"),
        ("a.json", b'{"text": "x"}\n{"text": "y"}', None),
        ("rows", b'{"text": "x"}', None),
        ("a.arrow", stream(), None),
    ],
)
def test_a_name_that_lies_is_told_on_the_card(
    make: Make, texts: Callable[..., list[bytes]], store: FolderStore, name: str, data: bytes, said: str | None
) -> None:
    manifest = make({"good.jsonl": b"\n".join(texts(60)), name: data}, max_quarantined=1)
    card = json.loads(store.get(manifest.files["card_json"]))
    assert card["warnings"] == ([] if said is None else [f"{name}: {said}"])
    if said is not None:
        assert said in store.get(manifest.files["card_html"]).decode()


ROWS = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(4)]
PROSE = "It was on.\n\nIt was off.\n"


@pytest.mark.parametrize(
    ("name", "text", "like"),
    [
        ("a.txt", json.dumps(ROWS, indent=1), "looks like JSON"),
        ("a.txt", "[\n" + ",\n\n".join(map(json.dumps, ROWS)) + "\n]", "looks like JSON"),
        ("a.txt", "\n\n".join(map(str, ROWS)), "looks like rows as Python shows them"),
        (
            "a.md",
            "```json\n" + "\n```\n\n```json\n".join(map(json.dumps, ROWS)),
            "looks like rows in blocks of Markdown",
        ),
        ("part-00000", "".join(f"What is {n}?\tIt is {n}.\n" for n in range(4)), "looks like a table"),
        ("a.txt", "Is it?\tIt is.\tlamp\n" + "Is it?\tIt is.\t\n\tIt is.\t\n" * 3, "looks like a table"),
        ("a.txt", "#separator:tab\n#html:true\n#tags column:3\nIs it?\tIt is.\tlamp\n", "looks like Anki's notes"),
        ("a.txt", "#columns of a temple:\nIt is long.\n", None),
        ("000000_0", "".join(f"What is {n}?\1It is {n}.\n" for n in range(4)), "looks like a table"),
        ("out/part-00000-5f.txt", "".join(f"It is {n}.\n" for n in range(4)), "is named as a part"),
        ("a.txt", "__label__pos It is on.\n", "looks like fastText's rows"),
        ("a.yaml", "- prompt: Is it?\n  completion: It is.\n", "looks like YAML"),
        ("a0", "<row><prompt>Is it?</prompt></row>", "looks like XML or HTML"),
        ("wiki_00", '<doc id="0">\nIt is on.\n</doc>\n', "looks like XML or HTML"),
        ("a.eml", "From: a@b.c\nTo: d@e.f\nSubject: x\n\nhello", "looks like an e-mail with its header"),
        ("a.mbox", "From 17@xxx Wed Mar 06 04:33:59 +0000 2024\r\nX-GM-THRID: 17\r\n\r\nhello", "looks like an e-mail"),
        ("a.mbox", "From - Mon Jan  1 00:00:00 2024\nX-Mozilla-Status: 0001\n\nhello", "looks like an e-mail"),
        ("a.txt", "From London on Monday the 1st of May 2024\nNote: it is on.\n", None),
        ("a.warc.wet", "WARC/1.0\r\nWARC-Type: conversion\r\n\r\nIt is on.\r\n", "looks like a web archive"),
        ("nlu.yml", 'version: "3.1"\n\nnlu:\n- intent: ask\n  examples: |\n    - Is it?\n', "looks like YAML"),
        ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\nHi\n", "looks like subtitles"),
        ("a.txt", "review,sentiment\n" + '"It is on, and off.",pos\n' * 4, "looks like a CSV table"),
        ("a.txt", "It is on.\nIs it off?\n" * 3, "has lines that each end like a sentence"),
        ("a.md", "---\ntitle: A lamp\ntags:\n  - lamp\n---\n\nIt is on.\n", "looks like Markdown with front matter"),
        (
            "a.txt",
            " prompt | completion\n--------+------------\n Is it? | Yes.\n(1 row)\n",
            "looks like a table as SQL's",
        ),
        ("a.md", "| Lamp | State |\n|:---|---:|\n| one | on |\n", None),
        ("a.md", "| Lamp | State |\n|:---|---:|\n" + "| one | on |\n" * 5, None),
        *(
            ("a.txt", f"Is it on{mark}It is\n" * 6, "looks like a table whose first line names no columns")
            for mark in (";", "|", '";"')
        ),
        ("a.txt", "Is it on,It is\n" * 3 + '"Is it off, now",It is\n' * 3, "looks like a CSV table"),
        ("a.txt", "Is it on, it is\n" * 6, None),
        ("a.txt", "Is it on,it is.\n" * 6, "has lines that each end like a sentence"),
        ("a.txt", "It is on; it hums.\n" * 6, "has lines that each end like a sentence"),
        ("a.po", '# Ann\nmsgid "on"\nmsgstr "an"\n', "looks like messages of gettext"),
        ("a.ini", "; a lamp\n[lamp]\nstate = on\n", "looks like settings"),
        ("a.bib", "@article{ann2026,\n  title = {On}\n}\n", "looks like BibTeX"),
        ("a.ics", "BEGIN:VCALENDAR\r\nVERSION:2.0\r\n", "looks like cards, dates"),
        ("a.ldif", "version: 1\ndn: cn=ann,dc=x\ncn: ann\n", "looks like cards, dates"),
        ("a.txt", "[Scene 1]\nAnn: it is = on\n", None),
        ("a.txt", "+-----+---+\n| p   | c |\n+-----+---+\n| Is? | Y |\n", "looks like a table as SQL's"),
        ("a.txt", f"{'*' * 27} 1. row {'*' * 27}\nprompt: Is it?\n", "looks like a table as SQL's"),
        ("a.txt", "-[ RECORD 1 ]----\nprompt | Is it?\n", "looks like a table as"),
        ("a.sql", "INSERT INTO `t` (prompt) VALUES ('Is it?');\n" * 3, "looks like a dump of SQL"),
        ("a.sql", "--\n-- PostgreSQL database dump\n--\n\nSET x = 0;\n", "looks like a dump of SQL"),
        ("a.log", "".join(f"2026-01-01 INFO {json.dumps(row)}\n" for row in ROWS * 3), "has JSON in each line"),
        ("a.txt", "".join(f"data: {json.dumps(row)}\n\n" for row in ROWS * 3), "has JSON in each line"),
        ("a.conll", "The O\nlamp B-LAMP\nis O\n\nIt O\nis O\n", "looks like words with their tags"),
        ("a.txt", "-DOCSTART- -X- -X- O\n\nThe DT B-NP O\n", "looks like words with their tags"),
        ("a.conllu", "# sent_id = 1\n# text = It is.\n1\tIt\tit\n", "looks like words with their tags"),
        ("a.txt", f"{PROSE * 9}\n<|endoftext|>\n{PROSE}\n", "has `<|endoftext|>` between its documents"),
        ("a.txt", "<s>[INST] Is it on? [/INST] It is. </s>\n" * 3, "looks like conversations in a model's template"),
        ("a.txt", "### Human: Is it on?\n\n### Assistant: It is\n\n" * 3, "looks like questions and answers"),
        ("a.txt", "Human: Is it on?\n\nAssistant: It is\n\n" * 3, "looks like questions and answers"),
        ("a.txt", "Q: Is it on?\nA: It is\n" * 3, "looks like questions and answers"),
        ("a.txt", "Question: is it on? Nobody knows\nhow it was.\n\nIt may be off\n", None),
        ("a.txt", "01/02/2024, 10:05 - Ann: is it on\n" * 3, "looks like a chat"),
        ("a.txt", "[01.02.24, 10:05:00] Ann: is it on\n" * 3, "looks like a chat"),
        ("a.txt", "2024-01-02 10:05 It was on\nand then\nit was off\n", None),
        ("a.txt", f"// lamps\n/* all */\n{json.dumps(ROWS, indent=1)}", "looks like JSON with comments"),
        ("a.txt", "/**/" * 900 + " and no JSON", None),
        ("nlu.md", "## intent:ask\n- is it on\n- is it off\n", "looks like Rasa's examples"),
        ("a.ris", "TY  - JOUR\nTI  - A lamp\nER  - \n", "looks like references"),
        ("a.txt", "1 1:0.5 7:1\n-1 2:0.25 9:3\n", "looks like libsvm's rows"),
        ("a.txt", "It is on\nnow.\n</s>\nIt is off\nnow.\n</s>\n", "has `</s>` between its documents"),
        ("a.md", "On | and off\n------------\n\nIt is on.\n", None),
        ("a.txt", "INSERT INTO the slot what has its values\nand wait.\n", None),
        ("a.txt", "It is O\nor A\nor so.\n", None),
        ("a.txt", 'So {"it": "is"} on\nand\noff.\n', None),
        ("a.txt", "review,sentiment\nIt is on, and off.\nIt is, after all.\nSo, yes.\n", None),
        ("a.txt", "It is on, she\nsaid. It was off\nbefore. And so\non it went.\n" * 3, None),
        ("a.txt", "It is on.\nIt is off.\n\n" * 4, None),
        ("a.md", "---\n\nIt is on.\n\n---\n", None),
        ("a.txt", PROSE, None),
        ("a.txt", "\tIt was on.\n\tIt was off.\n\tAnd so on.\n\tEnd.\n", None),
        ("a.txt", "It was\ton.\nIt was off.\nAnd so on.\nEnd.\n", None),
        ("a.txt", '["It is on," she said: "no."]\n', None),
        ("a.txt", "From: here to there: a way.\nIt is long.\n", None),
        ("a.txt", "<s>[INST] Is it? [/INST] It is. </s>", "looks like conversations in a model's template"),
        ("a.txt", "- It is on.\n- It is off: now.\n", None),
        ("part-00000", PROSE * 4, None),
        ("a.txt", "It is on.\nIt is off.\nIt is on.\nIt is off.\n", None),
    ],
)
def test_what_a_text_looks_like_is_told(name: str, text: str, like: str | None) -> None:
    found = decide(text.encode(), name)
    assert (found.kind, found.fault) == ("text", None)
    assert (found.looks or "").startswith(
        "" if like is None else f"learned as text, a paragraph a row, though it {like}"
    )
    assert (found.looks is None) == (like is None)


def test_files_that_look_alike_are_told_in_one_line(make: Make, store: FolderStore) -> None:
    told = make({f"{n:02}.txt": json.dumps(ROWS[:2], indent=n).encode() for n in range(1, 30)})
    how = "if that is not meant, call it `.json`, or `.jsonl` if each line is a row"
    alike = [line for line in json.loads(store.get(told.files["card_json"]))["warnings"] if "copies" not in line]
    assert alike == [
        "01.txt, 02.txt, 03.txt, and 26 more files: learned as text, a paragraph a row, though it looks like JSON; "
        + how
    ]


def test_what_is_told_of_many_files_is_one_line_and_hides_no_keys(make: Make, store: FolderStore) -> None:
    part = "prompt,completion,note\n" + "".join(f'{{0}} and {n}?,"It is {n}.\nSo.",x\n' for n in range(2))
    told = make({f"{n:02}.csv": part.replace("{0}", f"What is {n}").encode() for n in range(25)} | {"e.csv": b""})
    lines = card_lines(json.loads(store.get(told.files["card_json"])))
    assert lines[0] == "Keys that mean nothing here and are not learned: `note` (50 rows)"
    assert lines[1].startswith("00.csv, 01.csv, 02.csv, and 22 more files: 50 records run over several lines, within")
    assert lines[2:4] == ["e.csv: the file is empty", "Rows"]
    rows = ({"text": f"row {n}", "group": f"{'uU'[n % 2]}{n // 2}", "note": "x"} for n in range(60))
    told = make({"a.jsonl": "\n".join(map(json.dumps, rows)).encode()}, "d2")
    lines = card_lines(json.loads(store.get(told.files["card_json"])))
    assert lines[0] == "Keys that mean nothing here and are not learned: `note` (60 rows)"
    assert lines[1].startswith("groups: one value, or several?")


@pytest.mark.parametrize(
    ("head", "what"),
    [
        ("{\\rtf1\\ansi x}", "RTF"),
        ("%!PS-Adobe-3.0\n", "PostScript"),
        ("outs:\n- md5: a304\n  path: a\n", "a pointer of DVC, not the file: fetch it with `dvc pull`"),
        ("/annex/objects/SHA256E-s1--0.txt\n", "a pointer of git-annex, not the file: fetch it with `git annex get`"),
        ("[InternetShortcut]\nURL=https://x.org\n", "a shortcut to another place, not what is there"),
        ('<svg xmlns="x"><path/></svg>', "a web page or XML"),
    ],
)
def test_what_is_certainly_no_text_is_refused(head: str, what: str) -> None:
    assert decide(head.encode(), "a").fault == (Reason.BAD_FORMAT, f"it is {what}")
