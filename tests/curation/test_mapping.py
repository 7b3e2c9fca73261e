"""A recipe's own names of columns, and its template for prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from curation.mapping import Columns
from curation.notes import NoUsableRowError
from curation.reasons import Reason, RejectError
from dropforge.dataset import Manifest
from dropforge.recipe_data import Data
from dropforge.store import FolderStore


def columns(template: str | None = None, **names: str) -> Columns:
    return Columns(tuple(sorted(names.items())), template)


@pytest.mark.parametrize(
    ("how", "fields", "known"),
    [
        (columns(text="body"), {"body": "x", "text": "no"}, {"text": "x"}),
        (columns(text="body"), {" Body ": "x"}, {"text": "x"}),
        (columns(prompt="q", completion="a"), {"q": "x", "a": "y", "b": "z"}, {"prompt": "x", "completion": "y"}),
        (columns(label="stars"), {"text": "x", "stars": 3}, {"text": "x", "label": 3}),
        (columns(label="answer"), {"text": "x", "query": "q", "answer": 3}, {"text": "x", "query": "q", "label": 3}),
        (columns(label="Group"), {"text": "x", "group": "g"}, {"text": "x", "label": "g"}),
        (columns(group="conversation"), {"text": "x", "conversation": 7}, {"text": "x", "group": 7}),
        (columns(system="context"), {"prompt": "x", "completion": "y", "context": "z", "system": "no"},
         {"prompt": "x", "completion": "y", "system": "z"}),
        (columns(label="stars"), {"text": "x", "label": "old"}, {"text": "x"}),
        (columns(label="stars"), {"text": "x", "Label": "old"}, {"text": "x"}),
        (columns(prompt="q", completion="a", system="s"), {"q": "x", "a": "y"}, {"prompt": "x", "completion": "y"}),
        (columns(text="body"), {"body": "x", "Label": 1, "group_id": "g"}, {"text": "x", "label": 1, "group_id": "g"}),
        (columns(text="body", group="user"), {"body": "x", "group_id": "g"}, {"text": "x"}),
        (columns(prompt="q", completion="label"), {"q": "x", "label": "y"}, {"prompt": "x", "completion": "y"}),
        (columns("{a} {{and}} {b}", completion="c"), {"a": 1, "b": True, "c": "y"},
         {"prompt": "1 {and} true", "completion": "y"}),
        (columns("# {title}\n{body text}"), {"Title": "x", "body text": "y"}, {"text": "# x\ny"}),
    ],
)  # fmt: skip
def test_fields_get_their_known_names(how: Columns, fields: dict[str, Any], known: dict[str, Any]) -> None:
    assert how.apply(fields, 1000) == known


def test_decimals_times_and_ids_of_columns_are_written_as_a_file_of_text_has_them() -> None:
    fields = {
        "price": Decimal("1.50"), "day": date(2026, 1, 2), "at": datetime(2026, 1, 2, 3, 4, 5),
        "id": UUID(int=7), "left": Decimal("1E+2"),
    }  # fmt: skip
    made = columns("{price} {day} {at} {id} {left}").apply(fields, 1000)
    assert made == {"text": f"1.50 2026-01-02 2026-01-02T03:04:05 {UUID(int=7)} 100"}


def test_a_picture_is_refused_beside_content_that_the_recipe_names(make: Callable[..., Manifest]) -> None:
    """Whether the column is kept or not."""
    lines = [{"q": f"<image> {n}?", "best": f"It is {n}.", "image": f"{n}.png"} for n in range(30)]
    files = {"a.jsonl": "\n".join(map(json.dumps, lines)).encode()}
    data = {"columns": {"prompt": "q", "completion": "best"}}
    for name, more in {"d1": {}, "d2": {"keep_columns": ["image"]}}.items():
        with pytest.raises(NoUsableRowError, match=r"a message has `<image>`.* beside a column of them"):
            make(files, name, data={**data, **more})
    assert make({"a.jsonl": files["a.jsonl"].replace(b"<image> ", b"")}, "d3", data=data).counts["input"] == 30


def test_a_usual_name_that_another_column_replaces_is_no_column_that_is_read() -> None:
    assert "label" not in columns(label="stars").wanted("text")
    assert "label" in columns(label="Label").wanted("text")
    assert not {"group", "group_id", "conversation_id"} & columns(text="body", group="user").wanted("text")
    assert "prompt" in columns(system="context").wanted("text")


@pytest.mark.parametrize(
    ("how", "fields", "reason", "said"),
    [
        (columns(text="body"), {"text": "x"}, Reason.NO_CONTENT, "no `body`; fields: text"),
        (columns(prompt="q", completion="a"), {"q": "x", "answer": "y"}, Reason.NO_ANSWER, "no `a`; fields: q, answer"),
        (columns("{a}"), {"b": "x"}, Reason.NO_CONTENT, "the template's `a` has no value"),
        (columns("{a}"), {"a": ["x"]}, Reason.BAD_FIELD, "the template's `a` is no text, number or time"),
        (columns("{a}"), {"a": math.nan}, Reason.NO_CONTENT, "the template's `a` has no value"),
    ],
)
def test_rows_without_a_named_column_end_with_its_name(
    how: Columns, fields: dict[str, Any], reason: Reason, said: str
) -> None:
    with pytest.raises(RejectError) as caught:
        how.apply(fields, 1000)
    assert (caught.value.reason, caught.value.detail) == (reason, said)


def test_a_template_that_names_a_long_field_many_times_is_refused_before_it_is_filled() -> None:
    """All at once it would be a gigabyte."""
    how = columns("{a}" * 10_000)
    assert how.apply({"a": "x" * 100}, 1_000_000) == {"text": "x" * 1_000_000}
    with pytest.raises(RejectError) as caught:
        how.apply({"a": "x" * 100_000}, 1_000_000)
    assert caught.value.reason == Reason.TOO_LARGE
    assert caught.value.detail == "the filled template has more than 1000000 characters"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"columns": {"prompt": "q"}}, "name both"),
        ({"columns": {"text": "q", "messages": "m"}}, "two of"),
        ({"columns": {"text": "q", "completion": "m"}}, "two of"),
        ({"columns": {"text": "q", "label": " Q"}}, "names a column twice"),
        ({"columns": {"text": "q"}, "text_column": "body"}, "not both"),
        ({"columns": {}}, "at least 1"),
        ({"columns": {"answer": "q"}}, "columns.answer"),
        ({"prompt_template": "no column"}, "names no column"),
        ({"prompt_template": "{q}", "columns": {"prompt": "q", "completion": "a"}}, "makes the prompt"),
        ({"prompt_template": "{q}", "text_column": "a"}, "makes the prompt"),
        ({"prompt_template": "{q"}, "expected '}'"),
        *(
            ({"prompt_template": f"{{{field}}}"}, "nothing else")
            for field in ("q.x", "q[0]", "q!r", "q:>9", "", " ", "q:{w}")
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Data.model_validate(section)


def test_a_drop_with_names_of_its_own_becomes_a_dataset(make, rows) -> None:
    table = pa.table({"Passage": ["p0", "p1"], "q": ["w0", "w1"], "best": ["a0", "a1"], "prompt": ["no", "no"]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    files = {
        "a.jsonl": b'{"passage": "p2", "q": "w2", "best": "a2", "messages": []}\n{"q": "w", "best": "a"}\n',
        "b.csv": b"passage,q,best\np3,w3,a3\np4,w4,\n",
        "c.parquet": sink.getvalue().to_pybytes(),
    }
    data = {"prompt_template": "{passage}: {q}?", "columns": {"completion": "best"}}
    manifest = make(files, data=data)
    contents = {tuple(turn["content"] for turn in row["messages"]) for row in rows(manifest)}
    assert contents == {(f"p{n}: w{n}?", f"a{n}") for n in range(4)}
    assert {name: manifest.counts[name] for name in ("no_content", "no_answer")} == {"no_content": 1, "no_answer": 1}
    assert manifest.rules["prompt_template"] == "{passage}: {q}?"
    assert manifest.rules["columns"] == {"completion": "best"}


def test_labels_sources_and_groups_keep_their_usual_names_where_content_is_named(make, rows) -> None:
    table = pa.table(
        {"q": ["w0", "w1"], "best": ["a0", "a1"], "label": ["l", "l"], "Source": ["s", "s"], "group": ["g", "g"]}
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    files = {
        "a.parquet": sink.getvalue().to_pybytes(),
        "b.csv": b"q,best,label,source,group\nw2,a2,l,s,g\nw3,a3,l,s,h\n",
    }
    manifest = make(files, data={"columns": {"prompt": "q", "completion": "best"}})
    kept = rows(manifest)
    assert {(row["label"], row["source"]) for row in kept} == {("l", "s")}
    assert len({row["split"] for row in kept if row["group"] == "g"}) == 1
    assert sum(row["group"] == "g" for row in kept) == 3


def test_a_recipe_without_names_of_its_own_keeps_its_digest(make) -> None:
    manifest = make({"a.jsonl": b'{"text": "x y"}\n{"text": "z"}\n'})
    assert not {"columns", "prompt_template"} & manifest.rules.keys()


def test_columns_that_the_recipe_names_and_no_row_has_are_told(
    make: Callable[..., Manifest], store: FolderStore
) -> None:
    lines = [{"q": f"Is {n} on?", "best": f"{n} is.", "user": f"u{n}", "sys": None, "url": "x"} for n in range(30)]
    files = {"a.jsonl": "\n".join(map(json.dumps, lines)).encode()}
    columns = {"prompt": "q", "completion": "best", "group": "usr", "system": "Sys", "source": "URL "}
    made = make(files, data={"columns": columns, "keep_columns": ["url", "id"]})
    told = "Columns that the recipe names and no row has: `usr` (`data.columns.group`), `Sys` (`data.columns.system`), "
    assert told + "`id` (`data.keep_columns`)" in json.loads(store.get(made.files["card_json"]))["warnings"]
    columns |= {"group": "user"}
    del columns["system"]
    warnings = json.loads(store.get(make(files, "d2", data={"columns": columns}).files["card_json"]))["warnings"]
    assert not any(line.startswith("Columns that") for line in warnings)


def test_sources_that_the_recipe_names_otherwise_than_rows_do_are_told(
    make: Callable[..., Manifest], store: FolderStore
) -> None:
    rows = "".join(
        json.dumps({"text": f"row number {n}", "source": "News" if n % 2 else None}) + "\n" for n in range(30)
    )
    mine = {
        "max_rows_per_source": {"news": 5},
        "prefer": ["wiki", "other"],
        "data": {"mix": {"News": 2, "wiki.jsonl": 1}},
    }
    made = make({"in/wiki.jsonl": rows.encode()}, **mine)
    assert [line for line in json.loads(store.get(made.files["card_json"]))["warnings"] if "recipe names" in line] == [
        "sources: the recipe names `news`, which no row has; is `News` meant?",
        "sources: the recipe names `wiki`, which no row has; is `in/wiki.jsonl` meant?",
        "sources: the recipe names `wiki.jsonl`, which no row has; is `in/wiki.jsonl` meant?",
        "sources: the recipe names `other`, which no row has",
    ]
