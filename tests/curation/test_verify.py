"""`curation: none`: clean rows are taken as they are, and a row that cannot be used ends the run with its place."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import curation
from dropforge.dataset import Manifest
from dropforge.drop import Drop
from dropforge.errors import DataError, RecipeError
from dropforge.recipes import load_recipe
from dropforge.recipes.load import build_recipe, merge
from dropforge.store import FolderStore

Take = Callable[[Drop], Manifest]


@pytest.fixture
def take(store: FolderStore, tmp_path: Path) -> Take:
    recipe = load_recipe("tiny", {"curation": "none"})
    return lambda drop: curation.curate(store, drop, recipe, workdir=tmp_path / f"w-{drop.drop}")


def test_clean_rows_are_taken_as_they_are(
    upload: Callable[..., Drop], take: Take, make: Callable[..., Manifest], texts: Callable[..., list[bytes]]
) -> None:
    lines = b"\n".join([*texts(40), *texts(3)])
    made = take(upload({"a.jsonl": lines}))
    assert (made.counts["input"], made.counts["train"] + made.counts["eval"]) == (43, 43)
    assert make({"a.jsonl": lines}, "d2", exact_duplicates="keep").digest == made.digest


def test_a_bad_row_is_an_error_that_names_its_place(
    upload: Callable[..., Drop], take: Take, texts: Callable[..., list[bytes]]
) -> None:
    good = b"\n".join(texts(40)) + b"\n"
    files = {"a.jsonl": good, "b.jsonl": good + b"{bad\n" + b"[1]\n", "c.jsonl": b"{bad"}
    with pytest.raises(DataError, match=rf"'b\.jsonl', byte {len(good)}: bad_json.*and 2 more rows.*`curation: none`"):
        take(upload(files))
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": ["one", "two", "  "]}), sink)
    with pytest.raises(DataError, match=r"'a\.parquet', row 2: empty: `text` is empty"):
        take(upload({"a.parquet": sink.getvalue()}, "d2"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("exact_duplicates", "drop"),
        ("dedup", {}),
        ("pii", {}),
        ("prefer", ["a"]),
        ("quality", {"c4": {}}),
        ("max_quarantined", 0.5),
    ],
)
def test_steps_beside_none_are_refused(key: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=rf"`curation\.{key}`.*takes all rows as they are.*leave `none` out"):
        load_recipe("tiny", {"curation": {"steps": "none", key: value}})


def test_none_stays_under_other_keys() -> None:
    values = merge({"base": {"model": "a/b"}, "curation": "none"}, {"curation": {"workers": 2}})
    recipe = build_recipe(values)
    assert (recipe.curation.steps, recipe.curation.workers) == ("none", 2)
    assert build_recipe(recipe.plain()) == recipe
    assert merge({"curation": {"dedup": {}}}, {"curation": "none"}) == {"curation": "none"}
