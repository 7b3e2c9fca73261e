"""What became of a row: each kind of end in words, by place and by content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from curation.explain import explain
from curation.forget import key_of
from dropforge import layout
from dropforge.cli.app import app
from dropforge.dataset import Manifest
from dropforge.errors import DataError
from dropforge.store import FolderStore

TEXT = "a text of more than a few words, so that it has runs of words to be compared by at all, number"


@pytest.fixture
def manifest(make: Callable[..., Manifest]) -> Manifest:
    rows = [{"text": f"{TEXT} {n} {n * 7} {n * 13} and the end of number {n}"} for n in range(40)]
    copies = [rows[3], rows[3], {"text": rows[5]["text"] + " almost"}]
    lines = [json.dumps(row) for row in [*rows, *copies]]
    lines += ["broken", json.dumps({"text": "{ }"})]
    files = {"a.jsonl": "\n".join(lines).encode()}
    return make(files, dedup={"threshold": 0.7}, quality={"c4": {"min_sentences": None, "terminal_punctuation": False}})


def place(manifest: Manifest, store: FolderStore, row: int) -> str:
    lines = store.get("drops/fam/d1/a.jsonl").split(b"\n")
    return f"a.jsonl@{sum(len(line) + 1 for line in lines[:row])}"


def test_a_row_that_stayed_tells_who_went_for_it(manifest: Manifest, store: FolderStore) -> None:
    rows = [explain(store, manifest, place(manifest, store, row))[0] for row in (3, 40, 41)]
    (kept,) = [fate for fate in rows if fate.end in {"train", "eval"}]
    assert kept.copies == 2
    assert "Removed as copies of it: 2 rows" in kept.why
    for fate in rows:
        if fate is not kept:
            assert fate.end == "duplicate"
            assert fate.kept == (kept.file, kept.position)
            assert f"the same as a.jsonl@{kept.position}" in fate.why


def test_all_rows_of_one_content_are_found_by_its_key(manifest: Manifest, store: FolderStore) -> None:
    (one,) = explain(store, manifest, place(manifest, store, 3))
    fates = explain(store, manifest, one.key)
    assert sorted(fate.end for fate in fates)[:2] == ["duplicate", "duplicate"]
    assert len(fates) == 3


def test_a_near_duplicate_tells_how_near(manifest: Manifest, store: FolderStore) -> None:
    both = [explain(store, manifest, place(manifest, store, row))[0] for row in (5, 42)]
    (gone,) = [fate for fate in both if fate.end == "near_duplicate"]
    assert gone.shared
    assert gone.either
    assert f"{gone.shared} of {gone.either} shingles" in gone.why


def test_a_row_that_ended_tells_the_reason_and_the_mend(manifest: Manifest, store: FolderStore) -> None:
    (broken,) = explain(store, manifest, place(manifest, store, 43))
    assert broken.end == "bad_json"
    assert broken.head == "broken"
    assert broken.why.startswith("It cannot be used: Expecting value")
    assert "json.dumps" in broken.why
    (filtered,) = explain(store, manifest, place(manifest, store, 44))
    assert filtered.end.startswith("c4_")
    assert filtered.why.startswith("A rule of the recipe took it out")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("a.jsonl@1", "has no such row"),
        ("b.jsonl@0", "no file 'b.jsonl': it was made of a.jsonl"),
        ("a.jsonl", "names no row"),
        ("0" * 32, "has no such row"),
        ("@3", "names no row"),
        ("a.jsonl@\u00b2", "names no row"),
        ("a.jsonl@\u0663", "names no row"),
        ("a.jsonl@99999999999999999999", "names no row"),
        ("a.jsonl@" + "9" * 5_000, "names no row"),
        ("\udcff@3", "names no row"),
        ("a.jsonl@" + "9" * 18, "has no such row"),
    ],
)
def test_a_row_that_is_not_there_is_an_error(manifest: Manifest, store: FolderStore, row: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        explain(store, manifest, row)


@pytest.mark.parametrize(
    ("file", "body"),
    [
        *(("quarantine", body) for body in (b"\n", b"[1]\n", b"[" * 100_000, b"{}\n", b"\xff\n")),
        *(("ledger", body) for body in (b"", b"PAR1 and no more", b"[1]")),
    ],
    ids=["empty line", "list", "nested", "other", "no text", "empty", "torn", "no table"],
)
def test_a_ledger_or_quarantine_that_is_torn_is_told(
    manifest: Manifest, store: FolderStore, file: str, body: bytes
) -> None:
    row = place(manifest, store, 43)
    store.put(manifest.files[file], body)
    with pytest.raises(DataError, match=rf"{file} .*: it cannot be read .*Curate the drop again"):
        explain(store, manifest, row)


@pytest.mark.parametrize("place", ["\u00b2", "9" * 20, "9" * 5_000])
def test_a_place_that_is_none_is_no_row_to_forget_either(store: FolderStore, place: str) -> None:
    with pytest.raises(DataError, match="names no row"):
        key_of(store, "fam", f"a.jsonl@{place}")


def test_the_command_finds_the_version_by_its_first_digits(manifest: Manifest, store: FolderStore) -> None:
    where = ["--store", str(store.root)]
    told = CliRunner().invoke(app, ["explain", f"fam/{manifest.digest[:8]}", place(manifest, store, 43), *where])
    assert told.exit_code == 0, told.output
    assert "bad_json" in told.output
    assert "broken" in told.output
    for dataset in ("fam/00zz", "no-run"):
        refused = CliRunner().invoke(app, ["explain", dataset, "a.jsonl@0", *where])
        assert isinstance(refused.exception, DataError)


def test_the_command_finds_the_version_of_a_run(manifest: Manifest, store: FolderStore, tmp_path: Path) -> None:
    values = {"run": "fam-1", "family": "fam", "counter": 1, "root": "", "data_root": "", "dataset": ""}
    spec = {**values, "dataset_digest": manifest.digest, "recipe": {}, "code": ""}
    store.put(layout.run_key("fam-1"), json.dumps(spec).encode())
    told = CliRunner().invoke(app, ["explain", "fam-1", place(manifest, store, 43), "--store", str(store.root)])
    assert told.exit_code == 0, told.output
    assert "bad_json" in told.output


def test_a_row_whose_neighbour_went_itself_says_what_became_of_that_one(
    make: Callable[..., Manifest], store: FolderStore
) -> None:
    texts = [f"{TEXT} {n} {n * 7} {n * 13} and the end of number {n}" for n in range(12)]
    rows = [{"text": text, "source": "wiki"} for text in texts]
    rows += [{"text": f"{text} almost", "source": "web"} for text in texts] + rows[:12]
    asked = {"dedup": {"threshold": 0.7}, "prefer": ["wiki"], "max_rows_per_source": {"wiki": 1}}
    made = make({"a.jsonl": "\n".join(map(json.dumps, rows)).encode()}, **asked)
    assert made.counts["over_cap"] == 11
    fates = [explain(store, made, place(made, store, row))[0] for row in range(36)]
    for one, other, copy in zip(fates[:12], fates[12:24], fates[24:], strict=True):
        gone, first = (copy, one) if copy.end == "duplicate" else (one, copy)
        assert gone.kept == other.kept == (first.file, first.position)
        assert (other.end, other.kept_end, gone.kept_end) == ("near_duplicate", first.end, first.end)
        for fate in (other, gone):
            stayed = first.end in {"train", "eval"}
            assert ("which went itself: over_cap. Raise the source's number" in fate.why) is not stayed
            assert ("stayed" in fate.why) is stayed
