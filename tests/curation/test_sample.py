"""A look at some rows: which ones, what is said of them, that nothing is published, and the command around it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from curation.kernel import ROWS, run
from curation.local import check_out
from curation.notes import NoUsableRowError
from curation.pace import Lines
from curation.plan import make_rules, tasks
from curation.reasons import REST, Reason
from curation.records import Fault, Found
from curation.sample import SEEN, Sample, Told, choose_sample, chosen, guess_rows, whole_seconds
from dropforge import layout
from dropforge.cli.app import app
from dropforge.drop import Drop
from dropforge.errors import DataError, DropforgeError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

HALF = Sample(1 << 63)


def lines(count: int) -> bytes:
    return b"\n".join(
        json.dumps({"text": f"row {n} of the sample's test, with mail to person{n}@example.com"}).encode()
        for n in range(count)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(600) + b"\nbroken\n" * 60)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(400).replace(b"row", b"line")))
    (folder / "recipe.yaml").write_text("curation: {pii: {}, dedup: {}}\n")
    return folder


def test_the_same_rows_are_chosen_however_a_file_is_cut(
    upload: Callable[..., Drop], store: FolderStore, recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    drop = upload({"a.jsonl": lines(500)})
    path, found = store.root / "drops/fam/d1/a.jsonl", []
    for split_bytes in (1 << 20, 3000):
        work = tasks(
            drop, list(drop.files), [path], make_rules(recipe()), tmp_path / str(split_bytes), split_bytes, sample=HALF
        )
        done = [(task, run(task)) for task in work]
        assert sum(report.counts[SEEN] for _, report in done) == 500
        rows = pa.concat_tables([pq.read_table(task.rows, schema=ROWS) for task, _ in done])
        found.append(sorted(rows.column("position").to_pylist()))
    assert found[0] == found[1]
    assert 200 < len(found[0]) < 300


@pytest.mark.parametrize("reason", sorted(REST))
def test_what_stands_for_a_whole_file_is_always_told(reason: Reason) -> None:
    records = iter([Found(0, {}, b""), Fault(9, reason, "", b""), Fault(19, Reason.BAD_JSON, "", b"")])
    counts: dict[str, int] = {}
    assert [record.position for record in chosen(records, "a", Sample(0), counts)] == [9]
    assert counts[SEEN] == 3


def test_rows_are_guessed_by_the_head_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(lines(7))
    (tmp_path / "large").write_bytes(lines(40_000))
    (tmp_path / "packed").write_bytes(gzip.compress(lines(7)))
    pq.write_table(pa.table({"text": ["a"] * 9}), tmp_path / "parquet")
    guess = {path.name: guess_rows(path, "a.jsonl", 1 << 20) for path in tmp_path.iterdir()}
    assert (guess["small"], guess["packed"], guess["parquet"]) == (7, 7, 9)
    assert 36_000 < guess["large"] < 44_000
    assert choose_sample(100, [("a.jsonl", tmp_path / "small")], 1 << 20).takes("any", 1)


def test_the_time_of_the_whole_grows_with_what_was_left_out() -> None:
    stages = {"fetch": 1.0, "read": 10.0, "deduplicate": 2.0, "write": 3.0}
    # A tenth of the rows; of the ten seconds four went into reading all of them.
    least, most = whole_seconds(Told(taken=100, seen=1000, reading=8, working=20), stages)
    assert least == pytest.approx(1 + 10 + 5 + 6 * 9)
    assert most == pytest.approx(least + 5 * 9)


def test_lines_say_when_a_stage_ends_and_now_and_then_before() -> None:
    now, said = [0.0], list[str]()
    told = Lines(said.append, every=5, clock=lambda: now[0])
    for second, done in enumerate((0, 10, 20, 30, 40, 50, 60, 100)):
        now[0] = float(second)
        told("read", done * 1000, 100_000)
    assert [line.split(",")[0] for line in said] == [
        "read: 50.0 of 100.0 kB",
        "read: 100.0 of 100.0 kB",
    ]


# --- the command ---


def test_a_sample_is_told_and_nothing_is_published(folder: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    card = tmp_path / "card.html"
    done = CliRunner().invoke(app, ["curate", str(folder), "--sample", "400", "--card", str(card)])
    assert done.exit_code == 0, (done.output, done.exception)
    said = done.stdout
    for text in ("A sample of ", " of 1,060 rows", "nothing of it is published", "bad_json", "json.dumps", "e-mail"):
        assert text in said
    for text in ("Near duplicates found, by similarity: 0.6", "few rows quarantined", "All rows would take about"):
        assert text in said
    assert "enough rows" not in said
    assert "A sample of" in card.read_text()
    assert sorted(path for path in tmp_path.rglob("*") if path != card) == before
    # Not a terminal: whole lines, no bars.
    assert "\nread: " in done.stderr
    assert "\x1b" not in done.output


@pytest.mark.parametrize(
    ("rows", "scope", "min_rows", "found"),
    [
        (5, "drop", 20, "BROKEN  enough rows: 5 rows after curation; wanted at least 20"),
        (200, "drop", 300, "BROKEN  enough rows: "),  # of a part, fewer than the minimum were read in all
        (200, "drop", 20, None),
        (60, "drop", 20, "ok      enough rows: 60 rows"),
        (5, "family", 20, None),  # the drops before it may have enough
    ],
)
def test_a_sample_has_enough_rows_if_all_of_them_are_known(
    tmp_path: Path, rows: int, scope: str, min_rows: int, found: str | None
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_bytes(lines(rows))
    (tmp_path / "data/recipe.yaml").write_text(f"curation: {{scope: {scope}, min_rows: {min_rows}}}\n")
    done = CliRunner().invoke(app, ["curate", str(tmp_path / "data"), "--sample", "100"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert ("enough rows" in done.stdout) == (found is not None)
    assert (found or "") in done.stdout
    assert ("Of copies a sample shows only" in done.stdout) == (rows > 100)


def test_a_folder_becomes_a_version_in_a_folder(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["curate", str(folder), "--out", str(tmp_path / "out"), "--family", "fam"])
    assert done.exit_code == 0, (done.output, done.exception)
    (manifest,) = (tmp_path / "out/datasets/fam").glob("*/manifest.json")
    assert f"fam/{manifest.parent.name}" in done.stdout
    assert json.loads(manifest.read_bytes())["counts"]["input"] == 1060


@pytest.mark.parametrize(("out", "refused"), [("out", True), ("", True), (".out", False), ("../out", False)])
def test_a_version_is_not_put_among_the_data_where_it_would_be_read(folder: Path, out: str, refused: bool) -> None:
    """Rows that were taken out since would return with it."""
    with pytest.raises(DataError, match="whose files are read") if refused else nullcontext():
        check_out(folder, folder / out)
    check_out(folder / "a.jsonl", folder)  # of one file nothing beside it is read
    done = CliRunner().invoke(app, ["curate", str(folder), "--out", str(folder / "out")])
    assert "whose files are read" in str(done.exception)


def test_one_file_is_looked_at_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    for name in ("a.jsonl", "b.jsonl", "recipe.yaml"):  # neither another file nor a recipe beside it is meant
        (tmp_path / "one" / name).write_bytes(lines(200) if name == "a.jsonl" else b"not: [a recipe")
    done = CliRunner().invoke(app, ["curate", str(tmp_path / "one/a.jsonl"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, (done.output, done.exception)
    (manifest,) = (tmp_path / "out/datasets/local").glob("*/manifest.json")
    assert json.loads(manifest.read_bytes())["counts"]["input"] == 200


def test_a_ledger_among_the_data_decides_nothing(folder: Path, tmp_path: Path) -> None:
    recipe = {"code": {"wheel": str(folder / "evil.whl"), "sha256": "0" * 64}, "curation": {"kernels": ["evil"]}}
    kept = {"recipe": recipe, "preset": "sample", "origin": "person", "by": "whoever", "at": "2026-01-01T00:00:00"}
    ledger = folder / layout.family_recipe_key("local")
    ledger.parent.mkdir(parents=True)
    ledger.write_text(json.dumps(kept))
    head = folder / layout.head_key("local")
    head.parent.mkdir(parents=True)
    head.write_text("{}")
    for words in ([str(folder)], [str(folder / "a.jsonl")]):
        done = CliRunner().invoke(app, ["curate", *words, "--sample", "100"])
        assert done.exit_code == 0, done.output


def test_a_drop_of_the_bucket_is_looked_at_with_its_own_recipe(
    folder: Path, upload: Callable[..., Drop], store: FolderStore
) -> None:
    upload({path.name: path.read_bytes() for path in folder.iterdir()})
    done = CliRunner().invoke(app, ["curate", "fam/d1", "--sample", "200", "--store", str(store.root)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "Personal data and secrets: " in done.stdout
    assert not list(store.list("datasets/"))


def test_a_sample_of_which_no_row_can_be_used_shows_why_and_keeps_the_card_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    card = tmp_path / "card.html"
    done = CliRunner().invoke(app, ["curate", str(tmp_path / "data"), "--sample", "100", "--card", str(card)])
    assert isinstance(done.exception, NoUsableRowError)
    assert "no_content: fields: a (1 row" in done.output
    assert b"no_content" in card.read_bytes()
    assert "none of 2 rows can be used" in str(done.exception)
    assert "The card is" not in str(done.exception)


def test_names_of_files_cannot_steer_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(200))
    (tmp_path / "b\x1b[31m.jsonl").write_bytes(b"")
    done = CliRunner().invoke(app, ["curate", str(tmp_path), "--sample", "100"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "b\\u001b[31m.jsonl: the file is empty" in done.stdout
    assert "\x1b" not in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["DATA"], "nothing says where"),
        (["nowhere", "--sample", "100"], "no such file or folder"),
        (["a/b/c", "--sample", "100"], "not FAMILY/DROP"),
        (["DATA", "--sample", "100", "--card", "nowhere/at/all.html"], "--card"),
    ],
)
def test_what_cannot_work_is_told(folder: Path, store: FolderStore, words: list[str], said: str) -> None:
    where = ["--store", str(store.root)]
    done = CliRunner().invoke(app, ["curate", *[str(folder) if word == "DATA" else word for word in words], *where])
    assert isinstance(done.exception, DropforgeError)
    assert said in str(done.exception)
