"""`dropforge runs` lists every run once, also those that failed before MLflow heard of them."""

from __future__ import annotations

import csv
import io
import json
import uuid

import pytest

from dropforge import ledger, sweep_tracking, sweeps, tracking
from dropforge.cli import runs
from dropforge.client import history
from dropforge.client.history import Course, read_points
from dropforge.drop import Drop
from dropforge.store import S3Store
from dropforge.sweeps import Outcome
from dropforge.terminal import Console
from tests.dropforge.cli.conftest import DagRun, FakeAirflow, Terminal

LOSS = "eval/loss"
KEY = "bucket/{family}/{drop}/" + "0" * 32


@pytest.fixture
def family() -> str:
    return f"fam-{uuid.uuid4().hex[:8]}"


def track(uri: str, family: str, run: str, dag_run: str) -> str:
    """A run that MLflow knows; its id."""
    mlflow = tracking.client(uri)
    known = mlflow.get_experiment_by_name(family)
    experiment = known.experiment_id if known else mlflow.create_experiment(family)
    tags = {tracking.TAG_RUN: run, tracking.TAG_DAG_RUN: dag_run, tracking.TAG_VERDICT: "keep champion: [/red] worse"}
    made = mlflow.create_run(experiment, tags=tags)
    for step, value in ((0, 8.0), (10, 5.0), (20, 2.5)):
        mlflow.log_metric(made.info.run_id, "eval/loss", value, step=step)
    mlflow.set_terminated(made.info.run_id, "FAILED")
    return str(made.info.run_id)


def sweep(uri: str, family: str, trials: int) -> str:
    """A sweep whose last trial became a candidate, and whose others failed; its name."""
    mlflow, name = tracking.client(uri), f"sweep__{family}__1"
    parent, experiment = sweep_tracking.open_parent(uri, family, name, {"trials": str(trials)}, {})
    for trial in range(trials):
        best = trial == trials - 1
        by = sweeps.Member(by=name, parent=parent, trial=trial, candidate=best)
        dag_run = sweeps.candidate_run(name) if best else sweeps.trial_run(name, trial)
        tags = {tracking.TAG_RUN: f"{family}-t{trial}", tracking.TAG_DAG_RUN: dag_run, **sweep_tracking.trial_tags(by)}
        mlflow.create_run(experiment, tags=tags)
    sweep_tracking.tell_best(uri, parent, Outcome(trials - 1, "done", f"{family}-t{trials - 1}", 2.5, 10), LOSS, "")
    return name


def lines(text: str, family: str) -> list[str]:
    return [line for line in text.splitlines() if family in line]


def test_a_run_that_failed_before_training_is_listed_with_its_reason(
    terminal: Terminal, airflow: FakeAirflow, mlflow_server: str, family: str
) -> None:
    track(mlflow_server, family, f"{family}-1-abc", "tracked")
    opened = ("success",) * 3
    key = KEY.format(family=family, drop="good")
    airflow.add(DagRun("tracked", "failed", (*opened, "failed"), "after MLflow had the run", key))
    airflow.add(DagRun("deleted-in-mlflow", "failed", (*opened, "success", "failed"), "x", key))
    error = "recipe key `train.learning_rat`: it is\nunknown. Did you mean [b]`train.learning_rate`?"
    airflow.add(DagRun("early", "failed", ("failed",), error, KEY.format(family=family, drop="bad")))
    airflow.add(DagRun("fine", "success", ("success",), "", KEY.format(family=family, drop="fine")))
    airflow.add(DagRun("other", "failed", ("failed",), "x", KEY.format(family="other-family", drop="d")))
    done = terminal("runs", "--family", family)
    assert done.exit_code == 0, done.output
    early, tracked = lines(done.output, family)
    assert early.split()[:2] == [f"{family}/bad", "FAILED"]
    assert "plan failed: recipe key `train.learning_rat`: it is unknown. Did you mean [b]`train.le" in early
    assert tracked.split()[:2] == [f"{family}-1-abc", "FAILED"]
    assert "8.000 → 2.500" in tracked
    assert "keep champion: [/red] worse" in tracked
    assert "other-family" not in done.output


def test_without_an_error_in_the_log_the_page_is_named(terminal: Terminal, airflow: FakeAirflow, family: str) -> None:
    airflow.add(DagRun("manual__1", "failed", ("success", "failed"), conf={"family": family, "drop": "d"}))
    airflow.add(DagRun("manual__2", "failed", ("skipped",), conf={"family": family}, began="2099-01-01T00:00:00Z"))
    done = terminal("runs", "--family", family)
    first, second = (line for line in done.output.splitlines() if "FAILED" in line)
    assert first.split()[0] == f"{family}/d"
    assert "/dags/dropforge_finetune/runs/manual__1" in first
    assert second.split()[0] == "manual__2"
    assert "/dags/dropforge_finetune/runs/manual__2" in second


def test_a_forced_run_is_listed_by_the_name_of_its_drop(
    terminal: Terminal, airflow: FakeAirflow, s3_store: S3Store, family: str
) -> None:
    drop = Drop(family=family, drop="named", id="a" * 32, bucket="b", files=())
    ledger.record(s3_store, drop)
    airflow.add(DagRun("manual__1", "failed", ("failed",), "no", conf={"family": family, "drop": drop.id}))
    assert f"{family}/named" in terminal("runs").output


def test_the_newest_are_listed_up_to_the_limit(
    terminal: Terminal, airflow: FakeAirflow, mlflow_server: str, family: str
) -> None:
    for number in range(3):
        track(mlflow_server, family, f"{family}-{number}-abc", f"dag-{number}")
        key, began = KEY.format(family=family, drop=f"bad-{number}"), f"{2000 + 50 * number}-01-01T00:00:00Z"
        airflow.add(DagRun(f"early-{number}", "failed", ("failed",), "no", key, began=began))
    found = [line.split()[0] for line in lines(terminal("runs", "--family", family, "--limit", "3").output, family)]
    assert found == [f"{family}/bad-2", f"{family}/bad-1", f"{family}-2-abc"]


def test_a_sweep_is_one_line_and_its_best_trial_another(
    terminal: Terminal, airflow: FakeAirflow, mlflow_server: str, family: str
) -> None:
    track(mlflow_server, family, f"{family}-own", "own")
    name = sweep(mlflow_server, family, 6)
    conf = {"family": family, "sweep": {"by": name, "parent": "p", "trial": 7, "candidate": False}}
    airflow.add(DagRun("trial__7__x", "failed", ("failed",), "no room", conf=conf))
    found = {
        line.split()[0]: line for line in lines(terminal("runs", "--family", family, "--limit", "5").output, family)
    }
    assert list(found) == [f"{family}-t5", name, f"{family}-own"]
    assert f"6 trials  the best is {family}-t5" in found[name]
    assert "2.500" in found[name]
    every = terminal("runs", "--family", family, "--trials").output
    assert [line.split()[0] for line in lines(every, family)][-8:] == [
        *(f"{family}-t{trial}" for trial in range(5, -1, -1)),
        name,
        f"{family}-own",
    ]
    assert "no room" in every


def test_without_airflow_the_list_is_shown_with_a_note(
    terminal: Terminal, mlflow_server: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    track(mlflow_server, family, f"{family}-1-abc", "tracked")
    monkeypatch.setenv("DROPFORGE_AIRFLOW_URL", "http://127.0.0.1:1")
    done = terminal("runs", "--family", family)
    assert done.exit_code == 0, done.output
    assert f"{family}-1-abc" in done.output
    assert "Runs that failed before training are not listed: Airflow at http://127.0.0.1:1" in done.output


def test_programs_get_whole_values(terminal: Terminal, airflow: FakeAirflow, mlflow_server: str, family: str) -> None:
    run = track(mlflow_server, family, f"{family}-1-abc", "tracked")
    mlflow = tracking.client(mlflow_server)
    for tag, value in (
        (tracking.TAG_SOURCE, f"s3://bucket/drops/{family}/good/"),
        (tracking.TAG_VERDICT, "promote:\tit is [best]"),
    ):
        mlflow.set_tag(run, tag, value)
    mlflow.log_param(run, "base.model", "org/base")
    airflow.add(DagRun("early", "failed", ("failed",), "no room", KEY.format(family=family, drop="bad")))
    early, tracked = json.loads(terminal("runs", "--family", family, "-o", "json").stdout)
    known = mlflow.get_run(run).info
    assert (early["run"], early["drop"], early["seconds"], early["started"]) == (
        *2 * (f"{family}/bad",),
        None,
        "2100-01-01T00:00:00Z",
    )
    assert {name: tracked[name] for name in ("run", "status", "drop", "base", "version", "verdict")} == {
        "run": f"{family}-1-abc",
        "status": "FAILED",
        "drop": f"{family}/good",
        "base": "org/base",
        "version": None,
        "verdict": "promote:\tit is [best]",
    }
    assert (tracked["loss_before"], tracked["loss_after"]) == (8.0, 2.5)
    assert tracked["seconds"] == round((known.end_time - known.start_time) / 1000)
    rows = list(csv.DictReader(io.StringIO(terminal("runs", "--family", family, "-o", "tsv").stdout), delimiter="\t"))
    assert [(row["run"], row["verdict"], row["version"]) for row in rows] == [
        (f"{family}/bad", "plan failed: no room", ""),
        (f"{family}-1-abc", "promote: it is [best]", ""),
    ]
    assert json.loads(terminal("runs", "--family", "nobody", "-o", "json").stdout) == []
    assert terminal("runs", "--family", "nobody", "-o", "tsv").stdout.split("\t")[0] == "run"


def test_nothing_is_cut_in_a_pipe(
    terminal: Terminal, airflow: FakeAirflow, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "console", Console(width=80))
    name, error = f"manual__{'x' * 150}", f"a long story {'y' * 200} without an end"
    airflow.add(DagRun(name, "failed", ("failed",), error, conf={"family": family}))
    (line,) = (one for one in terminal("runs", "--family", family).output.splitlines() if name in one)
    assert line.endswith(error)
    assert all(line == line.rstrip() for line in terminal("runs").output.splitlines())


@pytest.mark.parametrize("columns", [80, 100])
def test_a_terminal_shows_a_run_and_its_drop_whole(
    terminal: Terminal, airflow: FakeAirflow, family: str, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(runs, "console", Console(file=out, width=columns, force_terminal=True, color_system=None))
    error = "recipe key `compute`: 1 gpu is too few, for " + "ever and " * 25 + "ever."
    for drop in ("2026-11-29T07-55-12-000000Z", "2026-11-29T07-59-01-000000Z"):
        airflow.add(DagRun(f"manual__{drop}", "failed", ("failed",), error, KEY.format(family=family, drop=drop)))
    assert terminal("runs", "--family", family).exit_code == 0
    names, *shown = out.getvalue().splitlines()
    assert names.split()[:2] == ["run", "status"]
    assert max(map(len, shown)) <= columns
    assert len(shown) <= 12
    for drop in ("2026-11-29T07-55-12-000000Z", "2026-11-29T07-59-01-000000Z"):
        (at,) = (number for number, line in enumerate(shown) if line.startswith(f"{family}/{drop}  FAILED"))
        assert "plan failed: recipe key `compute`" in " ".join(line.strip() for line in shown[at + 1 : at + 3])


def test_a_family_without_runs_is_named(terminal: Terminal) -> None:
    assert "There are no runs of family nobody yet" in terminal("runs", "--family", "nobody").output


def test_a_long_history_is_read_once(mlflow_server: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.entities import Metric

    run = track(mlflow_server, family, "r", "d")
    mlflow = tracking.client(mlflow_server)

    def log(steps: range) -> None:
        for start in range(steps.start, steps.stop, 1000):
            part = range(start, min(start + 1000, steps.stop))
            mlflow.log_batch(run, [Metric("train/loss", 1.0 / step, step, step) for step in part])

    fetched: list[int] = []

    def count(*words: object, **options: object) -> dict[int, float]:
        found = read_points(*words, **options)  # type: ignore[arg-type]
        fetched.append(len(found))
        return found

    monkeypatch.setattr(history, "read_points", count)
    course = Course(mlflow_server, run, "train/loss")
    assert course.read_on() == ()
    log(range(1, 2001))
    assert course.read_on() == tuple(1.0 / step for step in range(1, 2001))
    log(range(2001, 2004))
    assert course.read_on()[-4:] == (1 / 2000, 1 / 2001, 1 / 2002, 1 / 2003)
    assert course.read_on()[-1] == 1 / 2003
    assert fetched == [0, 2000, 4, 1]
    mlflow.log_metric(run, "train/loss", float("nan"), step=2004)
    assert course.read_on()[-1] != course.read_on()[-1]
    ends = read_points(mlflow_server, run, "eval/loss", most=2)
    assert ends == {0: 8.0, 20: 2.5}
