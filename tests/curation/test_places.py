"""Rows are named by the line on which they begin, with the byte beside it, and are found by either."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from curation.explain import explain
from dropforge import layout
from dropforge.cli.app import app
from dropforge.dataset import Manifest
from dropforge.errors import DataError
from dropforge.store import FolderStore

Make = Callable[..., Manifest]
PREFIX = "drops/fam/d1/"
GOOD = [json.dumps({"text": f"a lamp stands beside door number {n} and it is {n * 7} years old"}) for n in range(30)]
LINES = [*GOOD[:3], "", "broken", *GOOD[3:]]
CSV = (
    "text,note\n"
    + "".join(f'"a door\n\nof {n} metres beside the {n * 3} lamps",{n}\n' for n in range(30))
    + "a,b,c,d\n"
)


def table() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": [f"the pump of house {n} stops after {n * 3} minutes" for n in range(30)]}), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "broken", "position"),
    [
        ("a.jsonl", "\n".join(LINES).encode(), 5, len("\n".join(LINES[:4])) + 1),
        ("bom.jsonl", ("\ufeff" + "\n".join(LINES)).encode(), 5, len("\n".join(LINES[:4])) + 4),
        ("a.jsonl.gz", gzip.compress("\n".join(LINES).encode()), 5, len("\n".join(LINES[:4])) + 1),
        ("wide.jsonl", "\n".join(LINES).encode("utf-16"), 5, None),
        ("a.csv", CSV.encode(), 92, CSV.index("a,b,c,d")),
    ],
    ids=["jsonl", "mark", "gzip", "utf-16", "csv"],
)
def test_a_row_is_told_by_its_line_and_found_by_it(
    make: Make, store: FolderStore, name: str, data: bytes, broken: int, position: int | None
) -> None:
    made = make({name: data}, data={"encoding": "auto"})
    (cause,) = made.measured["causes"]
    assert f"the first at {name}:{broken}, byte " in cause
    card = json.loads(store.get(made.files["card_json"]))
    (ended,) = card["statistics"]["quarantine"]
    assert ended["line"] == broken
    assert position in {None, ended["position"]}
    assert f"<code>{name}:{broken}</code>, byte {ended['position']:,}" in store.get(made.files["card_html"]).decode()
    (fate,) = explain(store, made, f"{name}:{broken}", PREFIX)
    assert (fate.position, fate.line, fate.head) == (ended["position"], broken, ended["head"])
    assert explain(store, made, f"{name}@{fate.position}")[0].end == fate.end


def test_a_line_within_a_row_names_that_row_and_one_without_a_row_none(make: Make, store: FolderStore) -> None:
    made = make({"a.csv": CSV.encode(), "b.jsonl": "\n".join(LINES).encode(), "c.parquet": table()})
    ends = [explain(store, made, f"a.csv:{line}", PREFIX)[0] for line in (2, 3, 4, 5)]
    assert [end.position for end in ends] == [CSV.index('"'), *[CSV.index('"')] * 2, CSV.index('"a door\n\nof 1')]
    for row, said in {
        "a.csv:1": "there is no row",
        "b.jsonl:4": "there is no row",
        "b.jsonl:99": "the file has fewer lines",
        "b.jsonl:0": "counted from 1",
        "c.parquet:3": "the file has no lines. Name the row by its number",
        "d.jsonl:3": "no file 'd.jsonl'",
        "b.jsonl:x": "names no row",
        ":3": "names no row",
    }.items():
        with pytest.raises(DataError, match=said):
            explain(store, made, row, PREFIX)


def test_a_run_knows_where_its_lines_lie_and_a_digest_does_not(make: Make, store: FolderStore) -> None:
    made = make({"a.jsonl": "\n".join(LINES).encode()})
    values = {"run": "fam-1", "family": "fam", "counter": 1, "root": "", "data_root": "", "dataset": ""}
    spec = {**values, "dataset_digest": made.digest, "recipe": {}, "code": "", "drop": {"prefix": PREFIX}}
    store.put(layout.run_key("fam-1"), json.dumps(spec).encode())
    told = CliRunner().invoke(app, ["explain", "fam-1", "a.jsonl:5", "--store", str(store.root)])
    assert told.exit_code == 0, told.output
    assert "(line 5)  bad_json" in told.output
    with pytest.raises(DataError, match="Name it by its run instead"):
        explain(store, made, "a.jsonl:5")
    store.put(f"{PREFIX}a.jsonl", b"other bytes\n" * 9)
    with pytest.raises(DataError, match=r"a\.jsonl"):
        explain(store, made, "a.jsonl:5", PREFIX)


def test_lines_are_counted_in_each_drop_of_a_family(make: Make, store: FolderStore) -> None:
    family = {"scope": "family"}
    make({"a.jsonl": "\n".join(GOOD).encode()}, "d1", **family)
    two = make({"a.jsonl": "\n".join(["", "", "bad"]).encode()}, "d2", **family)
    [bad] = explain(store, two, "drops/fam/d2/a.jsonl:3")
    assert (bad.end, bad.line) == ("bad_json", 3)
    assert [fate.end for fate in explain(store, two, "a.jsonl:3")] in ([side, "bad_json"] for side in ("train", "eval"))
