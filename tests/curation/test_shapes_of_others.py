"""Files as other programs write them: read as they were meant, or refused with what is wrong and where."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from curation.canonical import canonical
from curation.gate import checks
from curation.notes import NoUsableRowError
from curation.reasons import RejectError
from dropforge.dataset import Manifest
from dropforge.errors import DataError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

Make = Callable[..., Manifest]
Rows = Callable[..., list[dict[str, Any]]]
ASKED = [f"What is {n} and {n}?" for n in range(30)]
ANSWERS = [f"It is {2 * n}, which is even." for n in range(30)]
BOTH = list(zip(ASKED, ANSWERS, strict=True))
CHATS = [[{"role": "user", "content": asked}, {"role": "assistant", "content": answer}] for asked, answer in BOTH]


def parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def sheet(*rows: str, end: str = "\n") -> bytes:
    return end.join(rows).encode()


def table(*rows: tuple[str, ...]) -> bytes:
    sink = io.StringIO()
    csv.writer(sink).writerows(rows)
    return sink.getvalue().encode()


def json_column(values: list[Any]) -> pa.Array:
    """A column of type JSON, as DuckDB and `datasets` of Hugging Face write fields with values of several types."""
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(list(map(json.dumps, values)), pa.string()))


def lists(values: pa.Array, length: int = 2) -> pa.Array:
    return pa.ListArray.from_arrays(list(range(0, len(values) + 1, length)), values)


def arrow(**columns: Any) -> bytes:
    sink = io.BytesIO()
    table = pa.table(columns)
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


#: The messages' roles, and their contents, of which half are in parts.
ROLES = ["user", "assistant"] * len(BOTH)
CONTENTS = [part for a, b in BOTH for part in ([{"type": "text", "text": a}], b)]
TYPED = lists(pa.StructArray.from_arrays(
    [pa.array(ROLES), json_column(CONTENTS), pa.array([1.0, 1.0] * len(BOTH), pa.float32())],
    ["role", "content", "weight"]))  # fmt: skip
PAIRS = [f"{asked};{answer}" for asked, answer in BOTH]
COMMAS = [f'"{asked}","{answer}"' for asked, answer in BOTH]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", b"\xef\xbb\xbf" + sheet("question,answer,,", *(f"{pair},," for pair in COMMAS), end="\r\n")),
        ("a.csv", sheet("question,answer,,", *COMMAS)),  # programs leave empty cells at the end away
        ("a.csv", sheet("question,answer", *(f"{pair}," for pair in COMMAS))),
        ("a.csv", sheet("sep=;", "question;answer", *PAIRS)),
        ("a.csv", b"\xef\xbb\xbf" + sheet('"sep=;"', "question;answer", *PAIRS, end="\r\n")),
        ("a.csv", sheet('question,"a;b;c",answer', *(f'"{a}",,"{b}"' for a, b in BOTH))),
        ("a.parquet", parquet(prompt=[a.encode() for a in ASKED], completion=[b.encode() for b in ANSWERS])),
        ("a.parquet", parquet(
            messages=[{"role": ["user", "assistant"], "content": [a, b]} for a, b in BOTH])),
        ("a.parquet", parquet(
            conversations=[{"from": ["human", "gpt"], "value": [a, b]} for a, b in BOTH])),
        ("a.parquet", parquet(
            prompt=[{"role": ["user"], "content": [a]} for a in ASKED],
            completion=[{"role": ["assistant"], "content": [b]} for b in ANSWERS])),
        ("a.parquet", parquet(prompt=ASKED, completion=pa.nulls(30, pa.string()), response=ANSWERS)),
        ("a.parquet", parquet(messages=pa.array(
            [[list(message.items()) for message in chat] for chat in CHATS],
            pa.list_(pa.map_(pa.string(), pa.string()))))),
        ("a.csv", table(("prompt", "completion"), *((json.dumps(c[:1]), json.dumps(c[1:])) for c in CHATS))),
        ("a.jsonl", sheet(*(json.dumps({"question": json.dumps([{"from": "human", "value": a}]), "response": b})
                            for a, b in BOTH))),
        ("a.parquet", parquet(messages=pa.array(
            [[{"role": b"user", "content": a.encode()}, {"role": b"assistant", "content": b.encode()}]
             for a, b in BOTH],
            pa.large_list(pa.struct([("role", pa.binary()), ("content", pa.large_binary())]))))),
        ("a.parquet", parquet(
            prompt=pa.array(ASKED).dictionary_encode(), completion=pa.array(ANSWERS, pa.large_string()))),
        ("a.jsonl", sheet(*(
            json.dumps({"instruction": "", "input": a, "output": b}) for a, b in BOTH))),
        ("a.parquet", parquet(messages=TYPED)),
        ("data-00000-of-00001.arrow", arrow(messages=TYPED)),
        ("a.parquet", parquet(messages=lists(json_column([m for chat in CHATS for m in chat])))),
        ("a.parquet", parquet(messages=json_column(CHATS))),
        ("a.parquet", parquet(prompt=json_column(ASKED), completion=json_column(ANSWERS))),
        ("a.parquet", parquet(messages=[list(map(json.dumps, chat)) for chat in CHATS])),
        ("a.parquet", parquet(messages=[
            [{"role": m["role"], "content": {"type": ["text"], "text": [m["content"]]}} for m in chat]
            for chat in CHATS])),
    ],
)  # fmt: skip
def test_the_same_rows_whatever_wrote_them(make: Make, name: str, data: bytes) -> None:
    plain = sheet(*(json.dumps({"messages": chat}) for chat in CHATS))
    assert make({name: data}, "theirs").digest == make({"a.jsonl": plain}, "plain").digest


def test_a_text_that_is_no_json_ends_its_row_where_the_column_s_type_says_json(make: Make, rows: Rows) -> None:
    """A label, a group and a kept column are what they hold, as a file of JSON has them."""
    holds = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"b":null,"a":[1]}', "no", '{"a":1,"a":2}', None]))
    columns = {"text": ASKED[:4], "label": json_column(["no", "yes", 1, "a"]), "raw": holds}
    made = make({"a.parquet": parquet(**columns)}, data={"keep_columns": ["raw"]})
    assert (made.counts["bad_json"], made.counts["duplicate_field"]) == (1, 1)
    assert made.measured["causes"] == [
        "bad_json: column 'raw' is of type JSON and holds none (Expecting value: line 1 column 1 (char 0)): write it as"
        " text (1 row, the first at a.parquet @ 1)",
        "duplicate_field: column 'raw': field 'a' appears twice (1 row, the first at a.parquet @ 2)",
    ]
    found = {(row["label"], row["extras"]) for row in rows(made)}
    assert found == {("no", '{"raw":{"a":[1],"b":null}}'), ("a", None)}


def test_bytes_of_names_and_templates_are_text_too_and_kept_columns_stay_as_they_are(
    make: Make, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    columns = {"raw": [b"\x00\xff", b"abc"] * 15, "label": [b"yes", b"no"] * 15, "who": [a.encode() for a in ASKED]}
    asked = {"prompt_template": "{who}!", "keep_columns": ["raw"]}
    found = rows(make({"a.parquet": parquet(**columns)}, data=asked))
    assert {row["text"] for row in found} == {f"{asked}!" for asked in ASKED}
    assert {(row["label"], row["extras"]) for row in found} == {("yes", '{"raw":"AP8="}'), ("no", '{"raw":"YWJj"}')}


def test_columns_without_a_name_are_told_and_a_value_in_one_is_not_dropped(make: Make, store: FolderStore) -> None:
    rows = [f"{pair},," for pair in COMMAS]
    rows[3] += "x"
    made = make({"a.csv": sheet("question,answer,,", *rows)})
    assert (made.counts["ragged"], made.counts["train"] + made.counts["eval"]) == (1, 29)
    card = json.loads(store.get(made.files["card_json"]))
    assert any("2 columns have no name" in line for line in card["warnings"])
    assert not any("filled up with spaces" in line for line in card["warnings"])
    assert "a value in a column without a name" in store.get(made.files["quarantine"]).decode()


@pytest.mark.parametrize(
    ("head", "row", "padded"),
    [
        ("| prompt     | completion |\n|:-----------|:-----------|", "| {:<60} | {:<60} |", True),
        ("prompt,completion", '"{:<60}","{:<60}"', True),
        ("prompt ; completion", "{} ; {:<80}", True),
        ("prompt,completion", '"{}"," {}"', False),  # as OpenAI had completions once
    ],
)
def test_cells_that_are_filled_up_are_told(make: Make, store: FolderStore, head: str, row: str, padded: bool) -> None:
    pairs = list(zip(ASKED, ANSWERS, strict=True))
    made = make({"a.csv": "\n".join([head, *(row.format(*pair) for pair in pairs), ""]).encode()})
    told = any("filled up with spaces" in line for line in json.loads(store.get(made.files["card_json"]))["warnings"])
    assert (made.counts["train"] + made.counts["eval"], told) == (30, padded)


COLUMNS = {"prompt": dict(enumerate(ASKED)), "completion": dict(enumerate(ANSWERS))}


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("a.json", json.dumps({"version": "1.0", "data": [{"text": "a"}, {"text": "b"}]}).encode(),
         "2 objects are under the key `data`: if these are the rows, write each as a line of its own"),
        ("a.json", b'{"version": 1,\n"data": [\n{"text": "a"},\n{"text": "b"}\n]}', "2 objects are under the key"),
        ("a.json", b'{"data": [\n{"text": "a"},\n{"text": "b"}\n]}', "2 objects are under the key `data`"),
        ("a.json", json.dumps({"columns": ["text"], "index": [0], "data": [["a"]]}).encode(), "orient='split'"),
        ("a.json", json.dumps({n: {"text": a} for n, a in enumerate(ASKED)}).encode(), "30 objects are under their"),
        ("a.json", json.dumps({"messages": dict(enumerate(CHATS))}).encode(), "`messages` holds 30 values of a column"),
        ("a.jsonl", json.dumps({"prompt": CHATS[0][:1], "chosen": [], "rejected": []}).encode(), "it is a preference"),
        ("a.jsonl", json.dumps({"preferred_output": [], "non_preferred_output": 1}).encode(), "preference"),
        ("a.jsonl", json.dumps({"custom_id": "1", "body": {"messages": 1}}).encode(), "a request of OpenAI's batches"),
        ("a.jsonl", json.dumps({"custom_id": "1", "params": {"messages": []}}).encode(), "a request of Anthropic's"),
        ("a.jsonl", json.dumps({"custom_id": "1", "result": {"type": "x"}}).encode(), "an answer of Anthropic's"),
        ("a.jsonl", json.dumps({"fields": {"chat": CHATS[0]}, "responses": {}}).encode(), "a record of Argilla"),
        ("a.jsonl", json.dumps({"attributes.llm.input_messages": [{"message.role": "user"}]}).encode(), "of Phoenix"),
        ("a.jsonl", json.dumps({"contents": [{"role": "user", "parts": [{"text": "a"}]}]}).encode(),
         "as Gemini takes it: write `contents` as `messages`"),
        ("a.jsonl", json.dumps({"request": 1, "contents": [{"parts": [], "role": "model"}]}).encode(), "as Gemini"),
        ("a.jsonl", json.dumps({"data": {"text": "a"}, "annotations": [{"result": []}]}).encode(), "Label Studio"),
        ("a.jsonl", json.dumps({"data": {"text": "a"}, "completions": [{"result": []}]}).encode(), "Label Studio"),
        ("a.jsonl", json.dumps({"question": "a", "answer": {"text": ["b"], "answer_start": [1]}}).encode(),
         "`answer` holds answers as SQuAD has them: write one of its texts"),
        ("a.jsonl", json.dumps({"question": "a", "answers": {"text": ["b"], "answer_start": [1]}}).encode(),
         "`answers` holds answers as SQuAD"),
        ("a.jsonl", json.dumps({"messages": [*CHATS[0][:1], {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "custom", "custom": {"name": "run", "input": "print(1)"}}]}]}).encode(),
         "a tool call is of type 'custom', and only those of functions are read"),
        ("a.jsonl", sheet(*(json.dumps(chat) for chat in CHATS)), "a list of messages: write it as the `messages`"),
        ("a.jsonl", sheet(*(json.dumps(turn) for chat in CHATS for turn in chat)), "it is one message"),
        ("a.jsonl", json.dumps({"dialogue": "Ann: Hi.", "summary": "b"}).encode(),
         "`dialogue` is text, but not a JSON list of messages: .* name it in `data.columns` as `prompt`, `completion`"),
        ("a.jsonl", json.dumps({"conversations": ["Is it on?", "Yes."]}).encode(),
         "`conversations` holds texts, not objects: write each as an object with `role`, which says who speaks"),
        ("a.jsonl", json.dumps({"turns": [{"speaker": "a", "text": "b"}]}).encode(),
         "a message has no role, but `speaker`, `text`: write each as an object with `role`"),
        ("a.jsonl", json.dumps({"messages": [{"role": 0, "content": "b"}]}).encode(),
         "the role of a message is a number, not text"),
        ("a.jsonl", json.dumps({"messages": [{"role": "user", "parts": [{"type": "text", "text": "a"}]}]}).encode(),
         "a message of user has no `content`, but `parts`"),
        ("a.tsv", b"id\t" + table(("messages",), *((json.dumps(chat),) for chat in CHATS)).replace(b"\n", b"\n1\t"),
         "`messages` is JSON in the quotes of a cell.*`data.quotes: always`"),
        ("a.csv", b"text,label,text\na,b,c", "column 'text' appears twice"),
        ("a.json", json.dumps(CHATS).encode(), "the row is a list of messages: write it as the `messages`"),
        ("a.jsonl", b'[{"text": "a"}, {"text": "b"}]\n[{"text": "c"}]\n', "a list of 2 objects: if these are the rows"),
        ("a.jsonl", b"[]\n[]\n", "the row is a list"),
        ("a.csv", b"prompt,completion\nIs it\ron?,Yes.\n", "a carriage return is in a cell without quotes"),
        ("a.csv", b'text,label\n"a \\"b\\" c",d', "Spark: option escape"),
        ("a.json", json.dumps(COLUMNS).encode(), "`prompt` holds 30 values of a column.*orient='records', lines=True"),
        ("a.json", json.dumps({"prompt": ASKED, "completion": ANSWERS}).encode(), "`prompt` is a list of 30 texts"),
        ("a.json", json.dumps({"text": COLUMNS["prompt"]}).encode(), "`text` holds 30 values of a column"),
        ("a.csv", sheet("messages", *(f'"{chat}"' for chat in CHATS)), "as Python shows a list.*json.dumps"),
        ("a.csv", table(("prompt", "completion"), *((str(c[:1]), str(c[1:])) for c in CHATS)),
         "`prompt` is text as Python shows a list.*json.dumps"),
        ("a.parquet", parquet(text=pa.array([1, 2], pa.decimal128(5, 1))), "`text` is a decimal number"),
        ("a.parquet", parquet(text=pa.array([1, 2], pa.timestamp("s", "UTC"))), "`text` is a time"),
        ("a.parquet.gz", gzip.compress(parquet(text=ASKED)), "it is Parquet within gzip: unpack it"),
        ("a.jsonl", sheet(*(json.dumps({"text": a}) for a in ASKED), end="\r"), "carriage return alone"),
        ("a.tar", b"a.jsonl".ljust(257, b"\0") + b"ustar".ljust(255, b"\0"), "it is a tar archive"),
        ("a.parquet", parquet(text=[b"\xff\xfe\xfd"] * 3), "`text` is bytes that are not UTF-8"),
    ],
)  # fmt: skip
def test_a_drop_of_which_no_row_can_be_used_says_why_and_where(
    make: Make, store: FolderStore, name: str, data: bytes, told: str
) -> None:
    with pytest.raises(
        NoUsableRowError, match=f"none of [0-9]+ rows can be used.*{told}.*the first at {name}(:[0-9]+, byte | @ )[0-9]"
    ) as no:
        make({name: data})
    made = no.value.manifest
    assert made is not None
    assert made.files["card_html"] in no.value.cause
    assert store.get(made.files["quarantine"])
    assert made.counts["train"] + made.counts["eval"] == 0


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"input": [{"role": "user", "content": "a"}], "ideal": "b"}, "OpenAI's evals: name `input` in `data.columns`"),
        ({"id": "1", "object": "chat.completion", "choices": [{"index": 0}]}, "a response of OpenAI's API"),
        ({"request": {"messages": []}, "response": {"choices": []}}, "a request of a log"),
        ({"inputs": {"q": "a"}, "outputs": {"a": "b"}}, "as of LangSmith"),
        ({"schema": {"type": "struct"}, "payload": {"prompt": "a", "completion": "b"}}, "schemas.enable=false"),
        ({"schema": None, "payload": {"prompt": "a", "completion": "b"}}, "schemas.enable=false"),
        ({"sessionId": "s", "type": "user", "message": {"role": "user", "content": "a"}}, "line of a session's log"),
        ({"type": "response_item", "payload": {"type": "message", "role": "user"}}, "line of a session's log"),
        ({"_airbyte_ab_id": "1", "_airbyte_data": {"prompt": "a", "completion": "b"}}, "record of Airbyte"),
        ({"_index": "a", "_id": "1", "_source": {"prompt": "a", "completion": "b"}}, "document of Elasticsearch"),
        ({"request_body": {"messages": []}, "response_body": {}}, "request of a log"),
        ({"name": "prompt", "type": "STRING", "mode": "NULLABLE"}, "BigQuery writes it: leave this file out"),
        ({"entries": [{"url": "s3://b/a.jsonl", "mandatory": True}]}, "Redshift writes it: leave this file out"),
        ({"query": "a", "answers": '[{"name": "f"}]', "tools": "[]"}, "calls of tools, as xLAM has them"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "refusal": "No."}]},
            "a message of assistant has no `content`, but `refusal`",
        ),
        ({"translation": {"en": "a", "de": "b"}}, "write its two texts as `prompt` and `completion`"),
        ({"segments": [{"label": False, "text": "a"}, {"label": True, "text": "b"}]}, "as Axolotl has them"),
        ({"messages": [], "prompt": "a", "completion": ""}, "`messages` is an empty list"),
    ],
)
def test_what_is_no_row_is_called_what_it_is(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(RejectError) as no:
        canonical(fields)
    assert told in no.value.detail


def test_a_line_before_the_names_of_columns_is_told(make: Make) -> None:
    with pytest.raises(NoUsableRowError, match=r"2 cells under 1 column \('# made by x'\): the first line is to name"):
        make({"a.csv": sheet("# made by x", "prompt,completion", *(f"Is {n}?,It is." for n in range(30)))})


def test_a_file_without_a_row_that_can_be_used_stops_the_gate_however_small_it_is(
    make: Make, recipe: Callable[..., Recipe]
) -> None:
    rows = sheet(*(json.dumps({"text": f"row number {n}"}) for n in range(600)))
    made = make({"a.json": json.dumps({"data": [{"text": "lost"}] * 9}).encode(), "zz.jsonl": rows})
    (broken,) = [check for check in checks(made, recipe()) if not check.ok]
    assert broken.name == "every file gives rows"
    assert "no row of 1 of 2 files can be used: a.json (1 of no_content)" in broken.found
    assert "9 objects are under the key `data`" in broken.found


def test_where_a_file_is_a_row_a_bad_file_is_a_bad_row(make: Make, recipe: Callable[..., Recipe]) -> None:
    files = {f"{n}.json": json.dumps({"text": f"row number {n}"}).encode() for n in range(40)}
    made = make(files | {"bad.json": b'{"other": 1}'})
    assert made.counts["no_content"] == 1
    assert all(check.ok for check in checks(made, recipe()))


@pytest.mark.parametrize(
    ("log", "named"),
    [
        ("_delta_log/00000000000000000000.json", "Delta.*deltalake"),
        ("table/_delta_log/00000000000000000001.checkpoint.parquet", "Delta"),
        ("metadata/v3.metadata.json", "Iceberg.*iceberg"),
        ("metadata/00002-1b.metadata.json.gz", "Iceberg"),
        ("data/00000-1-0b7a9c1e-35a4-4a0c-9d0e-7f1c2a3b4c5d-00002-deletes.puffin", "Iceberg"),
        ("data/00000-1-0b7a9c1e-35a4-4a0c-9d0e-7f1c2a3b4c5d-00002-deletes.parquet", "Iceberg"),
        ("main/t/ducklake-0b7a9c1e-35a4-4a0c-9d0e-7f1c2a3b4c5d-delete.parquet", "DuckLake.*COPY"),
        (".hoodie/hoodie.properties", "Hudi.*hudi"),
        ("day=1/0b7a9c1e-35a4-4a0c-9d0e-7f1c2a3b4c5d-0_0-22-29_20260101120000000.parquet", "Hudi.*hudi"),
        ("t/snapshot/snapshot-12", "Paimon.*paimon"),
        ("t/_spark_metadata/0", "Spark's streaming.*FORMAT"),
        ("t/delta_0000002_0000002_0000/bucket_00000", "Hive with transactions.*spark.table"),
        ("t/deletion_vector_0b7a9c1e-35a4-4a0c-9d0e-7f1c2a3b4c5d.bin", "Delta"),
        ("rows.lance/_versions/3.manifest", "Lance.*lance"),
    ],
)
def test_a_table_with_a_log_is_refused_with_what_exports_it(make: Make, log: str, named: str) -> None:
    with pytest.raises(DataError, match=f"it is a table of {named}"):
        make({"data/part-0.parquet": parquet(text=ASKED), log: b"{}"})
