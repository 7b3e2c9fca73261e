"""`dropforge submit`, `stop` and `resume`: what they ask of Airflow, and what they refuse before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dropforge import aside, layout, sweeps, tracking
from dropforge.cli.resume import first_unfinished
from dropforge.cli.submit import asked, parse_change
from dropforge.client.airflow import SWEEP
from dropforge.client.progress import Stage
from dropforge.errors import DropforgeError
from dropforge.run import RunSpec
from dropforge.stages import STAGES
from dropforge.store import S3Store, open_store
from dropforge.sweeps import candidate_run
from tests.dropforge.cli.conftest import DagRun, FakeAirflow, Terminal

DONE = ("success",) * STAGES.index("train")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: tiny\ntrain: {max_steps: 5}\n")
    return path


def opened(mlflow_server: str, store: S3Store, name: str, dag_run: str, **tags: str) -> None:
    """A run as `open_run` leaves it."""
    root = f"{store.uri}/{layout.run_prefix(name)}".rstrip("/")
    recipe: dict[str, Any] = {"train": {"method": "full"}}
    spec = RunSpec(name, "steer", 1, root, store.uri, "", "0" * 64, recipe, "code", tracking=None)
    params = {"compute.backend": "kubernetes"}
    tracking.open_run(mlflow_server, spec, params, {tracking.TAG_DAG_RUN: dag_run, **tags})
    store.put(layout.run_key(name), spec.to_json())


def test_a_submitted_run_has_the_conf_of_the_form(terminal: Terminal, airflow: FakeAirflow, recipe: Path) -> None:
    airflow.submitted.states = ("success",)
    words = ["--drop", "one", "--set", "train.seed=3", "--set", "train.learning_rate=1e-3", "--again", "--json"]
    done = terminal("submit", str(recipe), "-f", "steer", *words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "dag_run": "manual__1",
        "page": f"{airflow.url}/dags/dropforge_finetune/runs/manual__1",
        "run": None,
        "mlflow": None,
    }
    over = {"train": {"max_steps": 5, "seed": 3, "learning_rate": 0.001}}
    conf = {"preset": "tiny", "family": "steer", "again": True, "drop": "steer/one", "overrides": over}
    assert airflow.orders == [("dagRuns", {"logical_date": None, "conf": conf})]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["tiny"], "none are named.*--drop FAMILY/DROP"),
        (["tiny", "--drop", "one", "--set", "train.max_step=3"], r"Did you mean `train\.max_steps`"),
        (["tiny", "--drop", "one", "--set", "train.max_steps"], "it is not KEY=VALUE"),
        (["tiny", "--drop", "one", "--set", "train.max_steps=[1"], "its value is no YAML"),
        (["tiny", "--drop", "one", "--set", "train..max_steps=1"], "it is not KEY=VALUE"),
        (["tiny", "--data", "tests"], "have to be uploaded first"),
        (["tiny", "--data", "wiki"], "it names no source"),
        (["tiny", "--data", "hub:"], "option --data 'hub:'.*nothing follows"),
        (["tiny", "--data", "hub:a/b?split=x&split=y"], "`split` is given twice"),
        (["tiny", "--data", "s3://elsewhere/lake/"], "Write `prefix:KEY/PREFIX/`"),
        (["tiny", "--data", "hub:a/b", "--drop", "one"], "Leave one of them out"),
        (["tiny", "--data", "dataset:fam/none"], r"recipe key `data\.source\.dataset`"),
        (["none-such", "--drop", "one"], "neither a file nor a preset"),
        (["lora", "--drop", "one"], "this preset trains a model of your own"),
    ],
)
def test_what_cannot_work_starts_nothing(
    terminal: Terminal, airflow: FakeAirflow, words: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    done = terminal("submit", *words, "--family", "steer")
    with pytest.raises(DropforgeError, match=told):
        raise done.exception or AssertionError(done.output)
    assert airflow.orders == []


def test_a_recipe_file_is_sent_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("extends: tiny\ndata: {source: {prefix: lake/a/}}\nevaluate: {max_rows: 7}\n")
    values = {"data": {"source": {"prefix": "lake/a/"}}, "evaluate": {"max_rows": 7}}
    assert asked(str(path), [], None) == ("tiny", values)
    assert asked(str(path), ["evaluate.max_rows=9"], "hub:o/n")[1]["evaluate"] == {"max_rows": 9}
    path.write_text("train: {max_steps: 3}\n")
    with pytest.raises(DropforgeError, match="Begin it with `extends: NAME`"):
        asked(str(path), [], None)
    hub = asked("tiny", [], "hub:o/n?config=en&revision=v1")[1]["data"]["source"]
    assert hub == {"hub": "o/n", "config": "en", "revision": "v1"}
    assert parse_change("a.b=null") == {"a": {"b": None}}
    assert parse_change('a="x: y"') == {"a": "x: y"}
    assert parse_change("a=") == {"a": None}
    with pytest.raises(DropforgeError, match=r"option --set 'a.b=0xf.*: it is a number of about 4817 digits"):
        parse_change("a.b=0x" + "f" * 4000)


def test_the_end_of_its_plan_is_told(terminal: Terminal, airflow: FakeAirflow) -> None:
    words = ["submit", "tiny", "-f", "steer", "--drop", "one"]
    airflow.submitted = DagRun("manual__2", "failed", ("failed",), error="drop steer/one: [/red] it is not there")
    assert "plan failed: drop steer/one: [/red] it is not there" in str(terminal(*words).exception)
    airflow.submitted = DagRun("manual__3", "success", ("skipped",))
    assert "another run has these data" in str(terminal(*words).exception)
    airflow.paused, airflow.submitted = True, DagRun("manual__4", "queued")
    done = terminal(*words)
    assert (done.exit_code, "is paused: the run begins once" in done.output) == (0, True)
    airflow.denied = True
    refused = str(terminal(*words).exception)
    assert "an anonymous user (AIRFLOW_USERNAME is not set) may not do this" in refused


def test_only_what_goes_on_is_stopped(
    terminal: Terminal, airflow: FakeAirflow, mlflow_server: str, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = airflow.add(DagRun("manual__5", "running", ("success", "running")))
    assert terminal("stop", "manual__5").exit_code == 1  # there is nobody who says yes
    assert airflow.orders == []
    run.states = ("success", "failed")
    done = terminal("stop", "manual__5", "--yes")
    assert done.exit_code == 0, done.exception
    assert airflow.orders == [("dagRuns/manual__5", {"state": "failed"})]
    done = terminal("stop", "manual__5", "--yes")
    assert (done.exit_code, "is over: failed" in done.output, len(airflow.orders)) == (0, True, 1)
    # Its pods may still be there, where nobody can look.
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    opened(mlflow_server, s3_store, "steer-6", "manual__6")
    airflow.add(DagRun("manual__6", "running", (*DONE, "failed")))
    done = terminal("stop", "steer-6", "-y")
    assert (done.exit_code, "cannot be seen from here" in done.output) == (1, True)
    done = terminal("stop", "steer-x6", "-y")
    assert "Did you mean steer-6?" in str(done.exception)


def test_a_sweep_is_stopped_by_its_id(terminal: Terminal, airflow: FakeAirflow) -> None:
    one = airflow.add(DagRun("sweep__fam__0123", "running", ("running", "", "success"), dag=SWEEP))
    done = terminal("stop", one.name)
    assert (done.exit_code, "with 2 of 3 trials that run or wait" in done.output) == (1, True)
    assert airflow.orders == []
    one.states = ("success", "failed")
    candidate = airflow.add(DagRun(candidate_run(one.name), "running", ("running",)))
    done = terminal("stop", one.name, "--yes")
    assert done.exit_code == 0, done.exception
    assert [order["state"] for path, order in airflow.orders if path.endswith(f"{SWEEP}/dagRuns/{one.name}")] == [
        "failed"
    ]
    assert "Clear `trial` at" in done.output
    assert f"`dropforge stop {candidate.name}`" in done.output, "it is a run of its own"
    assert "Airflow knows no such run" in str(terminal("stop", "sweep__fam__none", "-y").exception)


def test_the_first_stage_that_did_not_succeed_runs_again() -> None:
    def stages(*states: str) -> list[Stage]:
        return [Stage(name, state) for name, state in zip(STAGES, (*states, *("",) * 20), strict=False)]

    assert first_unfinished("r", "failed", stages("failed")) == "plan"
    assert first_unfinished("r", "failed", stages("success", "success", "upstream_failed")) == "check_data"
    assert first_unfinished("r", "failed", stages(*DONE, "skipped", "skipped")) == "train"
    assert first_unfinished("r", "failed", stages(*("success",) * (len(STAGES) - 1), "failed")) == "close_run"
    for states, told in ((("skipped",), "another run has its data"), (("success",) * len(STAGES), "it has succeeded")):
        with pytest.raises(DropforgeError, match=told):
            first_unfinished("r", "success", stages(*states))


def test_a_run_is_taken_back_to_an_older_checkpoint(
    terminal: Terminal, airflow: FakeAirflow, mlflow_server: str, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    opened(mlflow_server, s3_store, "steer-7", "manual__7")
    airflow.add(DagRun("manual__7", "failed", (*DONE, "failed")))
    store = open_store(f"{s3_store.uri}/runs/steer-7")
    for step in (20, 40):
        store.put(f"checkpoints/step-{step}/manifest.json", json.dumps({"check": f"c{step}"}).encode())
    assert "no complete checkpoint of it. There is: step-20, step-40" in str(
        terminal("resume", "steer-7", "--from", "step-30").exception
    )
    assert terminal("resume", "steer-7", "--from", "best").exit_code == 2
    assert airflow.orders == []

    done = terminal("resume", "steer-7", "--from", "step-20")
    assert done.exit_code == 0, done.exception
    assert "resumes from checkpoint step-20; step-40 is set aside" in done.output
    assert aside.known(store) == {"c40"}
    order, body = airflow.orders[0]
    assert (order, body["task_ids"], body["include_downstream"]) == ("clearTaskInstances", ["train"], True)
    # Whoever was cut off before the clear finds what was settled.
    assert "from checkpoint step-20; step-40 is set aside" in terminal("resume", "steer-7").output
    assert "resumes from checkpoint step-40\n" in terminal("resume", "steer-7", "--from", "40").output

    store.put("report.json", b"{}")
    assert "its training is done" in str(terminal("resume", "steer-7", "--from", "20").exception)
    assert aside.known(store) == frozenset()
    opened(mlflow_server, s3_store, "steer-8", "manual__8", **{tracking.TAG_VERSION: "3"})
    airflow.add(DagRun("manual__8", "failed", (*("success",) * STAGES.index("report"), "failed")))
    assert "registered as version 3" in str(terminal("resume", "steer-8", "--from", "20").exception)
    assert "resumes at report" in terminal("resume", "steer-8").output

    # Where its checkpoints lie is not for its pods to say.
    orders = len(airflow.orders)
    opened(mlflow_server, s3_store, "steer-9", "manual__9", **{tracking.TAG_RUN_DIGEST: "0" * 64})
    airflow.add(DagRun("manual__9", "failed", (*DONE, "failed")))
    assert "run.json: it was changed" in str(terminal("resume", "steer-9").exception)
    assert len(airflow.orders) == orders


@pytest.mark.parametrize(
    ("early", "mend"), [(True, "Submit its recipe as a run of its own"), (False, "Clear the trial in the sweep")]
)
def test_a_trial_that_its_sweep_ended_is_not_resumed(
    terminal: Terminal, airflow: FakeAirflow, s3_store: S3Store, early: bool, mend: str
) -> None:
    family, sweep = f"steer-{early}".lower(), "sweep__steer__1"
    by = sweeps.Member(by=sweep, parent="p", trial=2, candidate=False)
    run = f"trial__2__{sweep}__{early}"
    airflow.add(DagRun(run, "failed", ("success", "failed"), conf={"family": family, "sweep": dict(by)}))
    sweeps.stop(s3_store, family, sweep, 2, sweeps.Stop(early, "it is worse"))
    told = str(terminal("resume", run).exception)
    assert f"trial 2 of sweep {sweep}: it was ended: it is worse. {mend}" in told
    assert airflow.orders == []
    sweeps.let_go_on(s3_store, family, sweep, 2)
    assert "resumes at curate" in terminal("resume", run).output
