"""`dropforge drop` of bytes that are known: nothing is trained twice, and `--follow` follows the run that there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dropforge import ledger
from dropforge.client.connection import connect
from dropforge.client.drops import foresee
from dropforge.client.upload import upload
from dropforge.drop import Drop, read_drop
from dropforge.errors import RecipeError
from dropforge.stages import STAGES
from dropforge.store import S3Store
from tests.dropforge.cli.conftest import DagRun, FakeAirflow, Terminal


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one two three"}\n')
    return path


@pytest.fixture
def known(s3_store: S3Store, rows: Path) -> Drop:
    """A drop that `first` has taken."""
    upload(s3_store, "fam", "before", {rows.name: rows})
    drop = read_drop(s3_store, "fam", "before", s3_store.bucket)
    ledger.record(s3_store, drop)
    ledger.claim(s3_store, "fam", drop.id, "first")
    return drop


def test_a_run_that_has_ended_is_told_with_its_exit_code(
    terminal: Terminal, airflow: FakeAirflow, known: Drop, rows: Path
) -> None:
    run = airflow.add(DagRun("first", "failed", ("success", "failed"), "no row can be read"))
    done = terminal("drop", str(rows), "--family", "fam", "--name", "again", "--follow")
    assert done.exit_code == 1, done.output
    assert "dropped before; as fam/before, taken by first" in done.output
    assert "That run failed before anything was trained, in curate: no row can be read." in done.output
    assert "`dropforge resume fam/before`, or use --again" in " ".join(done.output.split())
    assert "curate failed: no row can be read" in done.output
    run.state, run.states = "success", ("success",) * len(STAGES)
    done = terminal("drop", str(rows), "--family", "fam", "--name", "once-more", "--follow")
    assert done.exit_code == 0, done.output
    assert "close_run: success" in done.output


def test_a_run_that_goes_on_is_followed_to_its_end(
    terminal: Terminal, airflow: FakeAirflow, known: Drop, rows: Path
) -> None:
    run = airflow.add(DagRun("first", "running", ("success", "running"), ends_at_look=3))
    done = terminal("drop", str(rows), "--family", "fam", "--name", "again", "--follow")
    assert done.exit_code == 0, done.output
    assert run.looks == 3
    assert "curate: running" in done.output


def test_of_several_runs_the_last_is_followed(
    terminal: Terminal, airflow: FakeAirflow, s3_store: S3Store, known: Drop, rows: Path
) -> None:
    ledger.claim(s3_store, "fam", known.id, "second", again=True)
    airflow.add(DagRun("first", "success"))
    airflow.add(DagRun("second", "failed", ("failed",), "no"))
    done = terminal("drop", str(rows), "--family", "fam", "--name", "again", "--follow")
    assert done.exit_code == 1
    assert "Nothing is trained twice" in done.output  # the first one trained
    assert terminal("follow", "fam/before").exit_code == 1


def test_without_follow_it_is_only_said(terminal: Terminal, known: Drop, rows: Path) -> None:
    done = terminal("drop", str(rows), "--family", "fam", "--name", "again")
    assert done.exit_code == 0
    assert "Nothing is trained twice" in done.output


def test_a_family_that_nobody_knows_may_be_another_one(terminal: Terminal, known: Drop, rows: Path) -> None:
    told = str(terminal("follow", "famm/before").exception)
    assert "Did you mean fam/before?" in told
    hint = "Family famm is new. Did you mean fam?"
    assert hint in terminal("drop", str(rows), "--family", "famm", "--name", "d").stderr
    assert hint not in terminal("drop", str(rows), "--family", "famm", "--name", "e").stderr


def test_a_mistyped_family_without_a_recipe_is_asked_about_first(terminal: Terminal, known: Drop) -> None:
    embedded = connect(terminal.state)._replace(stack=terminal.state)
    with pytest.raises(RecipeError, match=r"^family famm: it is new, and no recipe came .* Did you mean fam\?"):
        foresee(embedded, "famm", {})
    with pytest.raises(RecipeError, match=r"^recipe key `base`"):  # the family is there, or is not like any
        foresee(embedded, "fam", {})
