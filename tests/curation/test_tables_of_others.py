"""Tables and folders as other programs write them: no row is joined with its neighbours, and no document is a row."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from curation.csv_rows import csv_rows
from curation.dialect import Quotes
from curation.documents import documents
from curation.folders import said
from curation.formats import decide
from curation.gate import checks
from curation.notes import NoUsableRowError
from curation.records import Fault, Line
from curation.told import card_lines
from dropforge.dataset import Manifest
from dropforge.errors import DataError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

Make = Callable[..., Manifest]
Rows = Callable[..., list[dict[str, Any]]]
BOTH = [(f"What is {n} and {n}?", f"It is {2 * n}, which is even.") for n in range(30)]


def table(*rows: tuple[str, ...], mark: str = "\t", header: tuple[str, ...] = ("prompt", "completion")) -> bytes:
    return "".join(f"{mark.join(cells)}\n" for cells in (header, *rows)).encode()


def chats(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row["messages"][0]["content"]: row["messages"][1]["content"] for row in rows}


def card_of(store: FolderStore, made: Manifest) -> dict[str, Any]:
    card: dict[str, Any] = json.loads(store.get(made.files["card_json"]))
    return card


OPEN = [
    (BOTH[0][0], '"Now wait'),
    *BOTH[1:4],
    (BOTH[4][0], 'until it is ready"'),
    ('"Reset', "x"),
    *BOTH[5:],
    ("y", 'd"'),
]


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.tsv.gz"])
def test_a_quote_in_tsv_is_a_character(make: Make, rows: Rows, name: str) -> None:
    data = table(*OPEN)
    made = make({name: gzip.compress(data) if name.endswith(".gz") else data})
    assert chats(rows(made)) == dict(OPEN)
    assert made.counts["input"] == len(OPEN)


@pytest.mark.parametrize(
    ("cells", "read"),
    [
        (('"a" is a letter', 'so is "b"'), ('"a" is a letter', 'so is "b"')),
        (('"', '""'), ('"', '""')),
        (('5" pipe', '6"'), ('5" pipe', '6"')),
        (("say \\t and \\n", "it's"), ("say \\t and \\n", "it's")),
    ],
)
def test_marks_of_tsv_stay_as_they_are(make: Make, rows: Rows, cells: tuple[str, str], read: tuple[str, str]) -> None:
    assert chats(rows(make({"a.tsv": table(*BOTH, cells)})))[read[0]] == read[1]


def test_cells_that_stand_in_quotes_are_told_with_the_key_that_takes_them_off(
    make: Make, rows: Rows, store: FolderStore
) -> None:
    data = table(*BOTH, ('"say ""now"""', "now"), ('"a ""b"" c"', '"d, e"'))
    made = make({"a.tsv": data}, "d1")
    assert chats(rows(made))['"say ""now"""'] == "now"
    told = "a.tsv: 2 rows have cells in quotes, which were read as characters; `data.quotes: always` takes them off"
    assert told in card_of(store, made)["warnings"]
    assert told in card_lines(card_of(store, made))
    taken = make({"a.tsv": data}, "d2", data={"quotes": "always"})
    assert chats(rows(taken))['say "now"'] == "now"
    assert chats(rows(taken))['a "b" c'] == "d, e"
    assert taken.rules["quotes"] == "always"
    assert "quotes" not in made.rules
    assert not any("in quotes" in line for line in card_of(store, taken)["warnings"])


def test_names_of_columns_in_quotes_say_that_the_program_quotes(make: Make, rows: Rows, store: FolderStore) -> None:
    quoted = [tuple(f'"{cell}"' for cell in pair) for pair in [*BOTH, ("two\nlines\tand a tab", 'a ""word""')]]
    made = make({"a.tsv": table(*quoted, header=('"prompt"', '"completion"'))})
    assert chats(rows(made)) == {**dict(BOTH), "two\nlines\tand a tab": 'a "word"'}
    (line,) = [line for line in card_of(store, made)["warnings"] if "several lines" in line]
    assert line.startswith("a.tsv: 1 records run over several lines, within quotes; `data.quotes: never` reads each")


@pytest.mark.parametrize("quotes", ["auto", "always"])
def test_csv_has_quotes_and_records_over_lines_are_counted(
    make: Make, rows: Rows, store: FolderStore, quotes: str
) -> None:
    data = table(*BOTH, ('"two\nlines"', '"a, b"'), ('"and\n\nthree"', "c"), mark="|")
    made = make({"a.csv": data}, data={"quotes": quotes})
    assert chats(rows(made))["two\nlines"] == "a, b"
    assert any("a.csv: 2 records run over several lines" in line for line in card_of(store, made)["warnings"])


def test_csv_without_quotes_reads_each_line_as_a_row(make: Make, rows: Rows) -> None:
    made = make({"a.csv": table(*OPEN, mark=";")}, data={"quotes": "never"})
    assert chats(rows(made)) == dict(OPEN)


def test_a_tsv_whose_records_run_over_lines_loses_no_row_in_silence(make: Make, rows: Rows) -> None:
    pairs = [(f'"question\nof {n}"', f'"answer, {n}"') for n in range(20)]
    with pytest.raises(NoUsableRowError, match=r"a cell opens a quote.*`data.quotes: always` reads it \(40 rows"):
        make({"a.tsv": table(*pairs)}, "d1")
    assert len(rows(make({"a.tsv": table(*pairs)}, "d2", data={"quotes": "always"}))) == 20


PART = "a.tsv: {} lines are parts of cells that open a quote and run over lines: no rows; `data.quotes: always` reads"


@pytest.mark.parametrize(
    ("spread", "lines"),
    [
        (('What is "it"?', '"One.\n\nTwo, ""so"" to say.\nThree."'), 3),
        (('"What\nis it?"', "This."), 2),
        (('"What\nis\nit?"', '"This\nand that."'), 4),
        (("What?", '"One.\n""Two"""'), 2),
    ],
)
def test_lines_of_a_cell_whose_quotes_are_not_read_are_no_rows(
    make: Make, rows: Rows, store: FolderStore, spread: tuple[str, str], lines: int
) -> None:
    data = table(*BOTH[:10], spread, *BOTH[10:20], ("an inch", '"5'), *BOTH[20:], ("x", '"'))
    made = make({"a.tsv": data}, "d1")
    assert chats(rows(made)) == {**dict(BOTH), "an inch": '"5', "x": '"'}
    assert made.counts["ragged"] == lines
    assert any(line.startswith(PART.format(lines)) for line in card_lines(card_of(store, made)))


CODE = ("Write it.", '"def one(x):\n\treturn x + 1"')


@pytest.mark.parametrize(
    ("spread", "lines"),
    [
        ([CODE], 2),
        ([("What is (it)?", '"Step\tWhat to do\n1\tOpen it\n2\tWait"')], 3),
        ([('"Item\tPrice\nlamp\t3\nWhat is it?"', "spam"), ('"Item\tPrice\npump\t4\nAnd it?"', "ham")], 6),
        ([("What is (it)?", '"One.\nHe said ""no"".\tTwo."')], 2),
        ([("Write it.", '"func one(x int) int {\n\treturn x + 1\n}"')], 3),
        ([('"Step\tTwo"', "This.")], 1),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_of_a_cell_with_tabs_are_no_rows_though_they_have_as_many_cells_as_one(
    make: Make, rows: Rows, spread: list[tuple[str, str]], lines: int, end: str
) -> None:
    data = b"".join(line + end.encode() for line in table(*BOTH[:10], *spread, *BOTH[10:]).splitlines())
    made = make({"a.tsv": data}, "d1")
    assert chats(rows(made)) == dict(BOTH)
    assert made.counts["ragged"] == lines
    assert len(rows(make({"a.tsv": data}, "d2", data={"quotes": "always"}))) == 30 + len(spread)


def test_lines_that_may_be_parts_of_cells_are_rows_where_the_recipe_says_so(make: Make, rows: Rows) -> None:
    pairs = [*BOTH, *((f"{n}", cell) for n, cell in enumerate(['"Now', 'wait"', '"until', 'ready"']))]
    assert make({"a.tsv": table(*pairs)}, "d1").counts["ragged"] == 4
    assert chats(rows(make({"a.tsv": table(*pairs)}, "d2", data={"quotes": "never"}))) == dict(pairs)


@pytest.mark.parametrize(
    ("others", "told"), [([], True), ([('It is 5" wide', "yes")], False), ([('"No", he said', "yes")], False)]
)
def test_a_quote_that_a_later_row_closes_is_a_character_and_told_unless_a_row_says_that_quotes_are(
    make: Make, rows: Rows, store: FolderStore, others: list[tuple[str, str]], told: bool
) -> None:
    pairs = [*BOTH[:10], ("one", '"Now wait'), *BOTH[10:20], ("two", 'until it is ready"'), *BOTH[20:], *others]
    made = make({"a.tsv": table(*pairs)})
    assert chats(rows(made)) == dict(pairs)
    line = "a.tsv: 1 rows open a quote that a later line closes, both read as characters; if a cell runs over lines"
    assert any(one.startswith(line) for one in card_of(store, made)["warnings"]) == told


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("again", "mark"),
    [
        ("prompt,completion", ","),
        ("Prompt,Completion", ","),
        ('"prompt","completion"', ","),
        ("\ufeffprompt,completion", ","),
        ('\ufeff"prompt","completion"', ","),
        ("prompt\tcompletion", "\t"),
        ("prompt,completion\n---------,-----------", ","),
    ],
)
def test_names_of_columns_that_come_again_are_no_row(
    make: Make, rows: Rows, store: FolderStore, again: str, mark: str, end: str
) -> None:
    pairs = [(f'"{asked}"', f'"{answer}"') if mark == "," else (asked, answer) for asked, answer in BOTH]
    data = table(*pairs[:20], mark=mark) + f"{again}\n".encode() + table(*pairs[20:], mark=mark).split(b"\n", 1)[1]
    made = make({"a.csv": data.replace(b"\n", end.encode())})
    assert chats(rows(made)) == dict(BOTH)
    assert made.counts["input"] == 30
    told = f"a.csv: {1 + again.count('---,')} lines repeat the names of columns, or are the rule below them, and"
    assert any(line.startswith(told) for line in card_lines(card_of(store, made)))


QUOTED = table(*((f'"{asked}"', f'"{answer}"') for asked, answer in BOTH), mark=",")


@pytest.mark.parametrize(
    ("more", "mark", "lines"),
    [
        (
            'What is asked?,What is answered?\n"{""ImportId"":""QID1_TEXT""}","{""ImportId"":""QID2"",""x"":1}"\n',
            ",",
            2,
        ),
        ('"What, in\ntwo lines?",What?\n"{""ImportId"":""QID1""}","{""ImportId"":""QID2""}"\n', ",", 2),
        (",Open-Ended Response\n", ",", 1),
        ("string\tstring\nmeta\tmeta\n", "\t", 2),
        ("string\tYes No\nmeta\tclass\n", "\t", 2),
        ("string\tstring\n\t\n", "\t", 1),
        ("String\tNullable(String)\n", "\t", 1),
    ],
    ids=["qualtrics", "qualtrics-lines", "surveymonkey", "orange", "orange-values", "orange-blank", "clickhouse"],
)
def test_further_lines_of_names_are_no_rows(
    make: Make, rows: Rows, store: FolderStore, more: str, mark: str, lines: int
) -> None:
    head, rest = (table(*BOTH) if mark == "\t" else QUOTED).split(b"\n", 1)
    made = make({"a.csv" if mark == "," else "a.tsv": head + b"\n" + more.encode() + rest})
    assert chats(rows(made)) == dict(BOTH)
    told = f"a.{'csv' if mark == ',' else 'tsv'}: {lines} lines below the names of columns say more of these"
    assert any(line.startswith(told) for line in card_lines(card_of(store, made)))


@pytest.mark.parametrize("row", ["string,Of a type", "Response,Open-Ended Response", "meta,class", "first,second"])
def test_rows_that_look_like_further_names_alone_are_rows(make: Make, rows: Rows, row: str) -> None:
    head, rest = QUOTED.split(b"\n", 1)
    made = make({"a.csv": head + f"\n{row}\n".encode() + rest})
    assert chats(rows(made)) == dict(BOTH) | dict([tuple(row.split(","))])


def test_a_first_row_of_one_text_alone_is_told(make: Make, rows: Rows, store: FolderStore) -> None:
    """Pandas writes a second line of names where columns have two levels."""
    head, rest = QUOTED.split(b"\n", 1)
    made = make({"a.csv": head + b"\nfirst,first\n" + rest})
    assert chats(rows(made))["first"] == "first"
    assert any("has the same text in each cell" in line for line in card_lines(card_of(store, made)))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt"])
def test_the_mark_of_a_file_that_was_joined_to_another_is_none_of_its_first_row(
    make: Make, rows: Rows, name: str
) -> None:
    texts = [f"It is {n}, and so on." for n in range(40)]
    lines = [
        {"a.csv": f'"{text}"', "a.jsonl": json.dumps({"text": text}), "a.txt": f"{text}\n"}[name] for text in texts
    ]
    mark = "\ufeff"
    parts = [lines[:20], [mark + lines[20], *lines[21:39]], [mark + lines[39]]]
    head = f"{mark}text\n" if name == "a.csv" else mark
    made = make({name: (head + "".join(f"{line}\n" for part in parts for line in part)).encode()})
    assert sorted(row["text"] for row in rows(made)) == sorted(texts)


def test_the_rule_of_a_markdown_table_is_no_row_and_one_below_other_rows_is(make: Make, rows: Rows) -> None:
    body = "".join(f"| {asked} | {answer} |\n" for asked, answer in [*BOTH, ("---", "---")])
    made = make({"a.md": f"| prompt | completion |\n|:---|---:|\n{body}".encode()})
    assert made.counts["input"] == 31


def test_names_of_columns_in_another_order_end_the_file(make: Make, recipe: Callable[..., Recipe]) -> None:
    swapped = table(*((answer, asked) for asked, answer in BOTH[20:]), header=("completion", "prompt"))
    made = make({"a.tsv": table(*BOTH[:25]) + swapped})
    assert made.counts["bad_header"] == 1
    assert made.counts["input"] == 26
    assert any(not check.ok and "bad_header" in check.found for check in checks(made, recipe()))


@pytest.mark.parametrize(
    ("header", "read"),
    [
        ("prompt, completion", True),
        ('"prompt", "completion"', True),
        ("prompt,completion", False),
    ],
)
def test_a_space_before_quotes_is_none_of_a_cell_where_the_names_have_one_and_told_elsewhere(
    make: Make, rows: Rows, store: FolderStore, header: str, read: bool
) -> None:
    body = "".join(f'"{asked}", "{answer.replace(",", ", " if read else "")}"\n' for asked, answer in BOTH)
    made = make({"a.csv": f'{header}\n{body}"He said, ""yes"", twice","a, ""b"""\n'.encode()})
    found = chats(rows(made))
    assert found.pop('He said, "yes", twice') == 'a, "b"'
    assert all(answer.startswith(' "') != read for answer in found.values())
    told = "a.csv: 30 rows have cells with a space before their quotes, which were read as characters"
    assert any(line.startswith(told) for line in card_lines(card_of(store, made))) != read


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        *(("a.tsv", "one\\ntwo"), ("a.tsv", "C:\\\\dir"), ("a.tsv", "a\\tb"), ("a.csv", '"one\\\ntwo"')),
        *(("a.csv", '"C:\\\\dir"'), ("a.csv", "one\\ntwo"), ("a.csv", '"one\ntwo\\tthree"')),
        *(("a.csv", 'say \\"on\\" twice'), ("a.tsv", 'say \\"on\\" twice')),
    ],
)
def test_escapes_that_are_read_as_letters_are_told(
    make: Make, rows: Rows, store: FolderStore, name: str, cell: str
) -> None:
    mark = "\t" if name == "a.tsv" else "|"
    made = make({name: table(*BOTH, ("what", cell), ("an s", "a\\s"), mark=mark)})
    assert chats(rows(made))["what"] == cell.strip('"')
    assert any(line.startswith(f"{name}: 1 rows have `\\n`") for line in card_lines(card_of(store, made)))


def test_a_backslash_before_quotes_that_csv_or_json_doubles_is_no_escape(make: Make, store: FolderStore) -> None:
    cells = [("a path", '"C:\\dir\\"'), ("a name", '"Schr\\""odinger"')]
    made = make({"a.csv": table(*BOTH, *cells, mark="|"), "b.tsv": table(*BOTH, ("json", '{"say": "\\"on\\""}'))})
    assert not any("`\\n`" in line for line in card_lines(card_of(store, made)))


def test_an_escaped_separator_is_named_where_cells_are_too_many() -> None:
    found = [Line(0, b"prompt,completion"), Line(18, b"Is it on\\, now?,Yes.")]
    [row] = csv_rows(iter(found), 1000, Quotes())
    assert isinstance(row, Fault)
    assert row.detail.startswith("3 cells under 2 columns; one ends with a backslash")


@pytest.mark.parametrize(("name", "mark"), [("a.tsv", "\t"), ("a.csv", "|"), ("000000", "\t")])
@pytest.mark.parametrize(
    "cells",
    [
        ("How is it reset?", "Turn it\\\noff."),
        ("How is it reset,\\\nsay?", "Turn it off."),
        ("How?\\\nSay it.\\\nNow.", "Turn\\\n\\\noff."),
        ("How?", "Turn it\\\\\\\noff."),
    ],
)
def test_a_record_whose_breaks_are_escaped_without_quotes_is_no_row_and_its_parts_are_none(
    make: Make, rows: Rows, name: str, mark: str, cells: tuple[str, str]
) -> None:
    """As MySQL's OUTFILE, Redshift's ESCAPE and Snowflake write a break. Neighbours are rows."""
    made = make({name: table(*BOTH[:9], cells, BOTH[9], cells, *BOTH[10:], mark=mark)})
    assert chats(rows(made)) == dict(BOTH)
    assert made.counts["input"] == len(BOTH) + 2 * len(mark.join(cells).splitlines())


@pytest.mark.parametrize("name", ["000000_0", "a.tsv", "a.csv"])
def test_hive_s_mark_separates_cells(make: Make, rows: Rows, name: str) -> None:
    quotes = [('What is "on"?', '"On" is on, and; so | on')]
    assert chats(rows(make({name: table(*BOTH, *quotes, mark="\x01")}))) == dict([*BOTH, *quotes])


def test_a_backslash_at_the_end_of_a_row_is_one_of_it_and_told(make: Make, rows: Rows, store: FolderStore) -> None:
    """As of a folder. Where a whole row follows, it is no escape."""
    folders = [(f"Where is {n}?", f"C:\\data\\{n}\\") for n in range(3)]
    made = make({"a.tsv": table(*BOTH, *folders, *BOTH[:1])})
    assert chats(rows(made)) == dict([*BOTH, *folders])
    assert "were read as letters" in json.dumps(card_of(store, made))


def test_breaks_that_a_table_of_one_column_escapes_are_told(make: Make, store: FolderStore) -> None:
    """Each of its lines may be a row."""
    made = make({"a.tsv": b"text\n" + b"".join(b"Turn lamp %d\\\noff, then on.\n" % n for n in range(30))})
    assert any(line.startswith("a.tsv: 30 rows have `\\n`") for line in card_lines(card_of(store, made)))


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.tsv", "\t")])
def test_single_quotes_that_are_read_as_characters_are_told(
    make: Make, rows: Rows, store: FolderStore, name: str, mark: str
) -> None:
    odd = [("'What?'", "x"), ("what", "'It''s on.'"), ("say", "'Yes' or 'No'"), ("and", "the '90s'"), ("or", "'")]
    made = make({name: table(*(pair for pair in BOTH if mark not in pair[1]), *odd, mark=mark)})
    assert dict(odd).items() <= chats(rows(made)).items()
    told = f"{name}: 2 rows have cells in single quotes, which were read as characters"
    assert any(line.startswith(told) for line in card_lines(card_of(store, made)))


def test_rows_of_a_hostile_tsv_stay_rows(make: Make, rows: Rows) -> None:
    made = make({"a.tsv": table(*BOTH, *((f'"{n}', f'{n}"' * 3) for n in range(5000)))})
    assert made.counts["input"] == len(rows(made)) == 5030


def test_an_evaluation_set_is_read_as_its_recipe_says(make: Make, store: FolderStore) -> None:
    item = "a question of many words that is asked in the set"
    store.put("eval-sets/one.tsv", table((item, '"x'), ("y", 'z"')))
    asked = {"decontaminate": {"sets": {"one": "eval-sets/one.tsv"}}}
    files = {"a.tsv": table(*BOTH, (f"{item}?", "no"))}
    assert card_of(store, make(files, "d1", **asked))["evaluation_sets"]["sets"]["one"]["items"] == 2
    made = make(files, "d2", data={"quotes": "always"}, **asked)
    assert card_of(store, made)["evaluation_sets"]["sets"]["one"]["items"] == 1


LINES = "".join(f"{json.dumps({'prompt': asked, 'completion': answer})}\n" for asked, answer in BOTH).encode()
PROSE = b"A paragraph of a page.\n\nAnother paragraph of it.\n"


@pytest.mark.parametrize(
    "name",
    ["README.md", "readme", "Readme.rst", "README_zh-CN.md", "README.md.gz", "docs/README.txt", "LICENSE",
     "LIESMICH.txt", "LICENCE.txt",
     "LICENSE-MIT", "NOTICE", "CHANGELOG.md", "CITATION.cff", "citation.bib", "AUTHORS", "CONTRIBUTING.md",
     "CODE_OF_CONDUCT.md", "SHA256SUMS", "md5sums.txt", "train.jsonl.sha256", "COPYRIGHT", "TERMS_OF_USE.txt",
     "HISTORY.md", "dataset_card.md", "DATASHEET.pdf", "data/train/dataset_info.json", "dataset_infos.json",
     "croissant.json", "datapackage.json", "dataset_dict.json"],
)  # fmt: skip
def test_documentation_and_metadata_are_no_rows_and_are_told(
    make: Make, store: FolderStore, rows: Rows, name: str
) -> None:
    data = gzip.compress(PROSE) if name.endswith(".gz") else b'{"features": {}}' if name.endswith(".json") else PROSE
    made = make({"data/train.jsonl": LINES, name: data})
    assert chats(rows(made)) == dict(BOTH)
    told = f"{name}: skipped, because its name is that of a data set's documentation, metadata or cache"
    assert told in card_lines(card_of(store, made))


@pytest.mark.parametrize(
    "name",
    ["readme.jsonl", "README_questions.csv", "license.parquet", "licenses.txt", "notices.txt", "state.json",
     "a/info.json", "authority.txt", "unreadme.md", "changelogs.ndjson.gz",
     "history.txt", "security.md", "news.txt", "copyrights.txt", "HISTORY.jsonl", "HISTORY_of_Rome.txt"],
)  # fmt: skip
def test_names_that_only_look_like_documentation_hold_rows(name: str) -> None:
    assert documents([name]) == []


def test_caches_beside_a_saved_data_set_are_none_of_its_rows() -> None:
    names = ["a/state.json", "a/data-00000-of-00001.arrow", "a/cache-1f3e.arrow", "a/tmpx1.arrow", "b/cache-1f3e.arrow"]
    assert documents(names) == ["a/state.json", "a/cache-1f3e.arrow", "a/tmpx1.arrow"]


def test_a_pointer_of_dvc_is_no_row_beside_what_it_points_to_alone() -> None:
    names = ["a.jsonl", "a.jsonl.dvc", "b/c/1.txt", "b/c.dvc", "d.txt.dvc"]
    assert documents(names) == ["a.jsonl.dvc", "b/c.dvc"]


def test_the_state_of_a_saved_data_set_is_none_beside_its_files_alone() -> None:
    names = ["a/state.json", "a/data-00000-of-00001.arrow", "b/state.json", "b/texas.jsonl", "state.json"]
    assert documents(names) == ["a/state.json"]


def test_a_template_of_jumpstart_is_no_row_beside_json_lines_alone(make: Make, store: FolderStore, rows: Rows) -> None:
    assert documents(["a/template.json", "a/train.jsonl", "b/template.json", "b/x.csv", "template.json"]) == [
        "a/template.json"
    ]
    template = {"prompt": "Below is an instruction.\n\n{instruction}\n\n{context}", "completion": " {response}"}
    made = make({"train.jsonl": LINES, "template.json": json.dumps(template).encode()})
    assert chats(rows(made)) == dict(BOTH)
    assert any(line.startswith("template.json: skipped") for line in card_lines(card_of(store, made)))


SETTINGS = b"[.ShellClassInfo]\r\nIconResource=C:\\x.dll,4\r\n"


@pytest.mark.parametrize("name", ["desktop.ini", "a/Desktop.ini", "Thumbs.db", "~$train.xlsx"])
def test_what_a_desktop_keeps_in_a_folder_is_no_row_and_is_told(make: Make, store: FolderStore, name: str) -> None:
    data = b"\xd0\xcf\x11\xe0" + bytes(400) if name == "Thumbs.db" else SETTINGS
    made = make({f"{n}.txt": f"page {n} of many".encode() for n in range(20)} | {name: data})
    assert made.counts["input"] == made.counts["train"] + made.counts["eval"] == 20
    told = f"{name}: skipped, because Windows or Office keeps it beside other files"
    assert told in card_lines(card_of(store, made))


@pytest.mark.parametrize(
    ("head", "kind"),
    [("[.Section]\na=b\n", "text"), ("[tool]\n", "text"), ("[00:01] It was on.\n", "text"), ("[1] A. Smith\n", "text"),
     ('[{"text": "x"},\n', "array"), ("[\n", "array"), ("[ [1],", "array"), ("[]", "array"),
     ("[1, 2]\n[3, 4]\n", "jsonl")],
)  # fmt: skip
def test_a_bracket_makes_no_array_of_a_file_that_is_called_nothing(head: str, kind: str) -> None:
    assert decide(head.encode(), "a.ini").kind == kind
    assert decide(head.encode(), "a.json").kind in {"array", kind}


def test_files_that_are_no_texts_are_not_told_as_some(make: Make, store: FolderStore) -> None:
    made = make({"a.txt": b"A page.", "b.lock": b"", "rows.lock": LINES}, data={"text_files": "read"})
    assert not any("learned as texts" in line for line in card_of(store, made)["warnings"])


def lines(first: int, last: int) -> bytes:
    return b"".join(LINES.splitlines(keepends=True)[first:last])


def arrow(first: int, last: int) -> bytes:
    sink = io.BytesIO()
    found = pa.table({"prompt": [a for a, _ in BOTH[first:last]], "completion": [b for _, b in BOTH[first:last]]})
    with pa.ipc.new_stream(sink, found.schema) as writer:
        writer.write_table(found)
    return sink.getvalue()


def state(*names: str, **more: Any) -> bytes:
    return json.dumps({"_data_files": [{"filename": name} for name in names], **more}).encode()


def commit(added: list[str], removed: list[str]) -> bytes:
    return json.dumps({"added": added, "removed": removed}).encode()


OLD, NEW, OPEN_WRITE = "part-00000-tid-1-a-1-c000.json", "part-00000-tid-2-b-1-c000.json", "part-0-tid-3-c-1-c000.json"


@pytest.mark.parametrize(
    ("files", "out"),
    [
        (
            {"t/_started_1": b"", "t/_committed_1": commit([OLD], []), f"t/{OLD}": lines(20, 30),
             "t/_started_2": b"", "t/_committed_2": commit([NEW], [OLD]), f"t/{NEW}": lines(0, 20),
             "t/_started_3": b"", f"t/{OPEN_WRITE}": lines(25, 30)},
            {f"t/{OLD}": "`_committed_2` names it as removed",
             f"t/{OPEN_WRITE}": "`_started_3` has no `_committed_3`: its write has not ended"},
        ),
        (
            {"state.json": state("data-00000-of-00001.arrow"), "data-00000-of-00001.arrow": arrow(0, 20),
             "data-00001-of-00002.arrow": arrow(20, 30)},
            {"data-00001-of-00002.arrow": "`state.json` does not name it: another data set was saved there before"},
        ),
        (
            {"s/dataset_dict.json": b'{"splits": ["train"]}',
             "s/train/state.json": state("a.arrow"), "s/train/a.arrow": arrow(0, 20),
             "s/test/state.json": state("a.arrow"), "s/test/a.arrow": arrow(20, 30)},
            {"s/test/a.arrow":
             "`dataset_dict.json` does not name its folder: another data set was saved there before"},
        ),
    ],
)  # fmt: skip
def test_rows_that_a_list_of_files_does_not_count_stay_out_and_are_told(
    make: Make, store: FolderStore, rows: Rows, files: dict[str, bytes], out: dict[str, str]
) -> None:
    made = make(files)
    assert chats(rows(made)) == dict(BOTH[:20])
    told = card_lines(card_of(store, made))
    assert {f"{name}: skipped, because {why}" for name, why in out.items()} <= set(told)


@pytest.mark.parametrize(
    ("name", "data", "cause"),
    [
        ("state.json", state("a.arrow", "b.arrow"), "it lists 'b.arrow', which is not there"),
        ("state.json", state("a.arrow", _indices_data_files=[{"filename": "i.arrow"}]), "chosen from its files by"),
        ("state.json", b"[", "it is no JSON object"),
        ("_committed_1", b"", "it is no JSON object"),
        ("_committed_1", b"x" * ((16 << 20) + 1), "it lists files in 16,777,217 bytes"),
    ],
)
def test_a_list_of_files_that_cannot_be_followed_is_refused(make: Make, name: str, data: bytes, cause: str) -> None:
    with pytest.raises(DataError, match=f"file '{name}'.*{cause}"):
        make({"a.arrow": arrow(0, 30), name: data})


@pytest.mark.parametrize("text_files", ["auto", "read"])
def test_a_drop_of_nothing_but_documentation_says_so(make: Make, text_files: str) -> None:
    files = {"README.md": PROSE, "LICENSE": PROSE, "dataset_infos.json": b"{}", "docs/README.md": PROSE}
    with pytest.raises(
        DataError, match=r"nothing but documentation.*LICENSE, README.md, .* and 1 more.*Upload its rows"
    ):
        make(files, data={"text_files": text_files})


@pytest.mark.parametrize("name", ["notes.txt", "pages/a.md", "notes", "script.py", "notes.txt.gz", "a.log"])
@pytest.mark.parametrize("limit", [{}, {"limit_rows": 1000}])
def test_plain_text_beside_tables_takes_the_recipe_s_word(
    make: Make, store: FolderStore, rows: Rows, name: str, limit: dict[str, int]
) -> None:
    files = {"train.jsonl": LINES, name: gzip.compress(PROSE) if name.endswith(".gz") else PROSE}
    made = make(files, "d1", data=limit)
    assert chats(rows(made)) == dict(BOTH)
    told = f"{name}: skipped, because it is plain text beside tables; `data.text_files: read` reads it"
    assert told in card_lines(card_of(store, made))
    assert "text_files" not in made.rules
    read = make(files, "d2", data={"text_files": "read", **limit})
    assert sum(row["text"] is not None for row in rows(read)) == 2
    assert not any("skipped, because" in line for line in card_of(store, read)["warnings"])


@pytest.mark.parametrize("limit", [{}, {"limit_rows": 1000}])
def test_where_there_is_nothing_but_text_it_is_read_and_bytes_decide_what_it_is(
    make: Make, rows: Rows, limit: dict[str, int]
) -> None:
    texts = {f"{n}.txt": f"page {n}\n\nand more of it, {n}".encode() for n in range(20)}
    assert len(rows(make({**texts, "README.md": PROSE, "empty.jsonl": b""}, "d1", data=limit))) == 40
    # Rows under the name of a text are rows, as everywhere.
    assert chats(rows(make({"a.jsonl": LINES, "b.txt": LINES, "notes.md": PROSE}, "d2", data=limit))) == dict(BOTH)


def test_a_table_without_an_ending_is_one_by_its_bytes(make: Make, rows: Rows) -> None:
    assert chats(rows(make({"part-00000": LINES, "notes.md": PROSE}))) == dict(BOTH)


@pytest.mark.parametrize(
    ("name", "mark"), [("a.txt", "\t"), ("part-00000", ","), ("train.dat", ";"), ("a.tab", "\t"), ("notes.md", "|")]
)
def test_a_table_that_is_called_a_text_is_one_by_the_names_of_its_columns(
    make: Make, rows: Rows, store: FolderStore, name: str, mark: str
) -> None:
    pairs = [(asked, answer.replace(",", "")) for asked, answer in BOTH]
    made = make({name: table(*pairs, mark=mark), "b.jsonl": LINES.replace(b"What", b"How")})
    assert len(rows(made)) == 60
    assert dict(pairs).items() <= chats(rows(made)).items()
    said = name.endswith(("txt", "md"))
    assert any("the name says text, the bytes are CSV" in line for line in card_of(store, made)["warnings"]) == said


@pytest.mark.parametrize(
    "text",
    ["Prompt, completion\nand what they are", "A question, an answer\nand, so on", "text\na, b", "a, b\nc, d",
     "input;output", '"prompt, completion"\na, b'],
)  # fmt: skip
def test_a_text_that_begins_like_a_table_is_none(make: Make, rows: Rows, text: str) -> None:
    made = make({f"{n}.txt": f"{text}\n{n}".encode() for n in range(20)})
    assert len(rows(made)) == 20


def test_a_carriage_return_among_the_names_of_columns_harms_no_other_file(make: Make, rows: Rows) -> None:
    bad = {"b.csv": b"prom\rpt,completion\n1,2\n3,4\n", "c.txt": b"prom\rpt,completion\n1,2\n3,4\n"}
    made = make({"a.jsonl": LINES, **bad})
    assert set(chats(rows(make({"a.jsonl": LINES}, "d2")))) <= set(chats(rows(made)))
    assert made.counts["bad_quotes"] >= 1


def test_columns_that_are_folders_are_told_where_no_row_has_them(make: Make, store: FolderStore) -> None:
    files = {f"label={label}/year=2026/part-{label}.jsonl": LINES.replace(b"What", label.encode()) for label in "abcd"}
    told = "folders hold the values of a column `label` (a, b, c and 1 more) that no row has: write it there"
    warnings = card_of(store, made := make(files, "d1"))["warnings"]
    assert told in warnings
    assert told in card_lines(card_of(store, made))
    assert any("`year` (2026)" in line for line in warnings)
    within = {name: data.replace(b"{", b'{"label": "x", "year": 1, ') for name, data in files.items()}
    assert not any("folders hold" in line for line in card_of(store, make(within, "d2"))["warnings"])


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            ("train.jsonl", "test.jsonl"),
            "test.jsonl: named as rows that are kept for tests, and learned as all others are",
        ),
        (("data/train-0.jsonl", "data/validation-0.jsonl"), "data/validation-0.jsonl: named"),
        (("my_train/a.jsonl", "my_dev/a.jsonl"), "my_dev/a.jsonl: named"),
        (("data.jsonl", "test.jsonl"), "test.jsonl: named"),
        (("training.jsonl", "testing.jsonl"), "testing.jsonl: named"),
        (("train.jsonl", "evaluation.jsonl"), "evaluation.jsonl: named"),
        (("train.csv", "held-out/a.csv", "tests/b.csv"), "held-out/a.csv, tests/b.csv: named"),
        (("test.jsonl",), ""),
        (("test-1.jsonl", "test-2.jsonl"), ""),
        (("train.jsonl", "latest.jsonl"), ""),
        (("train_test.jsonl", "train.jsonl"), ""),
    ],
)
def test_rows_that_are_called_as_those_of_a_test_are_told(names: tuple[str, ...], told: str) -> None:
    assert "".join(said(names, ()))[: len(told) or None] == told


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("train.jsonl", "train.jsonl.bak", "train.jsonl.orig", "train (1).jsonl"),
         "train.jsonl.bak, train.jsonl.orig, train (1).jsonl: named as copies"),
        (("a/b.csv", "a/b_copy.csv", "a/b - Copy.csv", "a/Copy of b.csv", "a/b.old.csv"),
         "a/b_copy.csv, a/b - Copy.csv, a/Copy of b.csv and 1 more: named as copies"),
        (("d/train-00000-of-00003.parquet", "d/train-00002-of-00003.parquet", "d/b-00000-of-00001.parquet"),
         "d/train-00001-of-00003.parquet: missing, 1 of 3 parts in total"),
        (("a-00002-of-00004", "a-00004-of-00004"), "a-00001-of-00004: missing, 2 of 4 parts in total"),
        (("a-00001-of-00002", "a-00002-of-00002", "b.0-of-2.csv", "c-00000-of-00001.csv"), ""),
        (("a.csv.bak", "a (1).csv", "b.csv", "hardcopy.csv"), ""),
        (("train.en", "train.de"), "train.en, train.de: named as sides"),
        (("a.pt-BR.txt.gz", "a.zh_Hans.txt.gz"), "a.pt-BR.txt.gz, a.zh_Hans.txt.gz: named as sides"),
        (("source.txt", "target.txt", "c.txt"), "source.txt, target.txt: named as sides"),
        (("input.txt", "output.txt", "questions.txt", "part-00.txt"),
         "input.txt, output.txt, questions.txt: named as sides"),
        (("a/seq.in", "a/seq.out", "b/seq.in"), "a/seq.in, a/seq.out: named as sides"),
        (("my_prompts.txt", "my_answers.txt.gz"), "my_prompts.txt, my_answers.txt.gz: named as sides"),
        (("w.deu_Latn", "w.eng_Latn"), "w.deu_Latn, w.eng_Latn: named as sides"),
        (("notes.txt", "context.txt", "a.log", "a.tex", "texts.txt", "input-1.txt", "input-2.txt",
          "sign-in.txt", "sign-out.txt"), ""),
        (("a.src", "b.tgt", "train.en", "en.jsonl", "de.jsonl"), ""),
        (("neg/1.txt", "neg/2.txt", "train/pos/1.txt", "pos/1.txt", "pos/2.txt"), "neg, pos: folders of texts"),
        (("train/neg/1.txt", "train/neg/2.txt", "train/pos/1.md", "train/pos/2.txt"), "neg, pos: folders"),
        (("2026/1.txt", "2026/2.txt", "part-1/1.txt", "part-1/2.txt", "x/1.txt", "x/2.txt"), ""),
        (("pos/1.txt", "neg/1.txt"), ""),
        (("pos/1.jsonl", "pos/2.jsonl", "neg/1.jsonl", "neg/2.jsonl"), ""),
        (("corpus.txt", "load.py", "dataset.yaml", "Makefile", "requirements.txt"),
         "load.py, dataset.yaml, Makefile and 1 more: named as programs or settings"),
        (("a.py", "lib/b.py", "Makefile"), ""),
    ],
)  # fmt: skip
def test_what_names_say_and_no_row_does_is_told(names: tuple[str, ...], found: str) -> None:
    (*others, told) = ["", *said(names, {"text"})]
    assert not any(others)
    assert told[: len(found) or None] == found


def test_folders_are_no_labels_where_rows_have_some() -> None:
    assert said([f"{name}/{n}.txt" for name in ("neg", "pos") for n in range(3)], {"text", "label"}) == []


def test_labels_that_stand_in_names_of_folders_alone_are_told_with_the_refusal(make: Make) -> None:
    rows = {name: b"".join(b'{"text": "%s %d"}\n' % (name.encode(), n) for n in range(20)) for name in ("neg", "pos")}
    with pytest.raises(NoUsableRowError, match=r"Are the names of the folders the labels \(neg, pos\)\?"):
        make({f"{name}/a.jsonl": data for name, data in rows.items()}, task="classification")
    parts = {f"part-{at}/a.jsonl": data for at, data in enumerate(rows.values())}
    with pytest.raises(NoUsableRowError) as caught:
        make(parts, name="d2", task="classification")
    assert "folders" not in str(caught.value)


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("Total,40", True),
        ('Gesamtergebnis,"€ 1.234,50"', True),
        ("Grand Total:,100%", True),
        ("Total,I cannot say", False),
        ("What is the total?,40", False),
    ],
)
def test_a_total_below_a_table_is_told(make: Make, store: FolderStore, last: str, told: bool) -> None:
    rows = "".join(f"What is {n}?,{n} it is\n" for n in range(40))
    made = make({"a.csv": f"prompt,completion\n{rows}{last}\n".encode()})
    warned = json.loads(store.get(made.files["card_json"]))["warnings"]
    assert any(line.startswith("a.csv: the last row is a total") for line in warned) == told


def test_a_pointer_of_git_lfs_is_no_text(make: Make, recipe: Callable[..., Recipe]) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    made = make({"a.jsonl": LINES, "b.parquet": pointer})
    broken = {check.name: check.found for check in checks(made, recipe()) if not check.ok}
    assert "every file gives rows" in broken
    assert "`git lfs pull`" in broken["every file gives rows"]


def spark_csv(*rows: tuple[str, str]) -> bytes:
    """What `df.write.csv(header=True)` of Spark writes in its defaults: quotes within a cell are escaped."""

    def cell(text: str) -> str:
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"' if any(mark in text for mark in ',"\n') else text

    return "".join(f"{cell(one)},{cell(other)}\n" for one, other in [("prompt", "completion"), *rows]).encode()


@pytest.mark.parametrize(
    ("asked", "answered", "parts"),
    [
        ('Fix it:\nprint("hello")\nWhy does it fail?', "Because.", 2),
        ("Write a poem.", 'He said "yes" to me,\nthen "no", and left,\n\nand so, it ended.', 2),
        ('One\n"two", three\nfour', 'Five\n"six", seven,\neight', 4),
    ],
)
def test_parts_of_a_record_whose_quotes_are_escaped_are_no_rows(
    make: Make, rows: Rows, store: FolderStore, asked: str, answered: str, parts: int
) -> None:
    plain = [(f"plain question {n}", f"plain, answer {n}" if n % 3 else f"plain answer {n}") for n in range(60)]
    broken = [(f"{asked} {n}", f"{answered} {n}") for n in range(4)]
    table = [row for n in range(4) for row in (*plain[15 * n : 15 * n + 15], broken[n])]
    manifest = make({"part-00000.csv": spark_csv(*table)})
    found = [[turn["content"] for turn in row["messages"]] for row in rows(manifest)]
    assert sorted(map(tuple, found)) == sorted(plain)
    assert (manifest.counts["bad_quotes"], manifest.counts["ragged"]) == (4, 4 * parts)
    told = json.dumps(json.loads(store.get(manifest.files["card_json"])))
    assert "(Spark: option escape" in told
