"""A sweep in the terminal: on services that do not answer, and before its best trial is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dropforge import ledger, sweeps
from dropforge.cli.sweep import View, look, run_id
from dropforge.client.airflow import SWEEP, Airflow
from dropforge.client.connection import Connection
from dropforge.drop import read_drop
from dropforge.settings import from_env
from dropforge.store import S3Store
from dropforge.sweep import read_sweep
from tests.dropforge.cli.conftest import DagRun, FakeAirflow, Terminal

RUN = "sweep__fam__1"


def test_what_does_not_answer_is_shown_as_it_was(terminal: Terminal, airflow: FakeAirflow, s3_store: S3Store) -> None:
    airflow.add(DagRun(RUN, "running", ("success", "deferred"), dag=SWEEP))
    by = sweeps.Member(by=RUN, parent="p", trial=0, candidate=False)
    sweeps.note(s3_store, "fam", by, "fam-0", "0" * 32)
    settings = replace(from_env(), tracking_uri="http://127.0.0.1:1")
    seen = look(Connection(settings, s3_store, Airflow(airflow.url, "", "")), "fam", RUN, View("eval/loss"))
    assert [seen.word(number)[0] for number in range(3)] == ["done", "waits", "waits"]
    assert seen.opened == {0: sweeps.Noted("fam-0", "0" * 32)}

    gone = S3Store(f"{s3_store.bucket}-gone", client=s3_store.client)
    before = replace(seen, curves={0: {10: 2.5}})
    again = look(Connection(settings, gone, Airflow(airflow.url, "", "")), "fam", RUN, before)
    assert (again.opened, again.curves) == (seen.opened, {0: {10: 2.5}})


def test_the_data_of_a_sweep_have_no_run_before_its_best_trial_is_known(
    terminal: Terminal, airflow: FakeAirflow, s3_store: S3Store
) -> None:
    for name in ("a.jsonl", "_SUCCESS"):
        s3_store.put(f"drops/fam/swept/{name}", b"")
    drop = read_drop(s3_store, "fam", "swept")
    ledger.record(s3_store, drop)
    ledger.claim(s3_store, "fam", drop.id, sweeps.candidate_run(RUN))
    told = str(terminal("follow", "fam/swept").exception)
    assert f"drop fam/swept: {RUN} trains on it, and which of its trials is the best is not known yet" in told
    airflow.add(DagRun(sweeps.candidate_run(RUN), "success", ("success",)))
    assert terminal("follow", "fam/swept").exit_code == 0


def test_a_sweep_that_another_terminal_starts_at_this_moment_was_started_before(
    terminal: Terminal, airflow: FakeAirflow, tmp_path: Path
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("recipe: {extends: tiny}\nspace: {train.learning_rate: [1.0e-3, 1.0e-2]}\n")
    name = run_id({"sweep": read_sweep(file).plain(), "family": "fam", "drop": "one"})
    airflow.unseen[name] = DagRun(name, "running", ("running",), dag=SWEEP)
    done = terminal("sweep", str(file), "--family", "fam", "--drop", "one")
    assert (done.exit_code, f"Sweep {name} was started before: running" in done.output) == (0, True), done.exception
