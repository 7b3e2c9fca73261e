"""What `follow` and its kin print at the end of a run, and their exit codes."""

from __future__ import annotations

import uuid
from dataclasses import asdict
from pathlib import Path

import pytest

from dropforge import Client, tracking
from dropforge.cli import drops
from dropforge.stages import NOTHING_NEW, STAGES
from dropforge.terminal import Console
from tests.dropforge.cli.conftest import DagRun, FakeAirflow, Terminal

DONE = ("success",) * len(STAGES)


class Registry:
    """A family in MLflow, and the runs in Airflow that trained its versions."""

    def __init__(self, server: str, airflow: FakeAirflow) -> None:
        self.family = f"fam-{uuid.uuid4().hex[:8]}"
        self.mlflow, self.airflow = tracking.client(server), airflow
        self.experiment = self.mlflow.create_experiment(self.family)
        self.mlflow.create_registered_model(self.family, tags={tracking.TAG_FAMILY: self.family})

    def add_run(self, verdict: str, promote: bool, state: str = "success") -> str:
        """Add an ended run with a version; return its id in Airflow."""
        dag_run = f"manual__{uuid.uuid4().hex[:8]}"
        tags = {tracking.TAG_RUN: dag_run, tracking.TAG_DAG_RUN: dag_run, tracking.TAG_FAMILY: self.family}
        run = self.mlflow.create_run(self.experiment, tags=tags).info.run_id
        version = self.mlflow.create_model_version(self.family, "s3://b/model", run).version
        for tag, value in ((tracking.TAG_VERDICT, verdict), (tracking.TAG_VERSION, str(version))):
            self.mlflow.set_tag(run, tag, value)
        if promote:
            self.mlflow.set_model_version_tag(self.family, version, tracking.TAG_PREVIOUS, "none")
            self.mlflow.set_registered_model_alias(self.family, "champion", version)
        self.airflow.add(DagRun(dag_run, state, DONE if state == "success" else (*DONE[:-3], "failed"), "no rights"))
        return dag_run


@pytest.fixture
def registry(mlflow_server: str, airflow: FakeAirflow) -> Registry:
    return Registry(mlflow_server, airflow)


def test_a_promoted_model_is_shown_with_how_to_use_it(
    terminal: Terminal, registry: Registry, mlflow_server: str
) -> None:
    dag_run = registry.add_run("promote: better than the [base]", promote=True)
    done = terminal("follow", dag_run)
    assert done.exit_code == 0, done.output
    for said in (
        f"{registry.family} version 1",
        "promote: better than the [base]",
        f'mlflow.pyfunc.load_model("models:/{registry.family}@champion")',
        f"{registry.airflow.url}/dags/dropforge_finetune/runs/{dag_run}",
        f"{mlflow_server}/#/models/{registry.family}/versions/1",
    ):
        assert said in done.output


def test_a_model_that_was_not_promoted_ends_with_3_and_says_why(terminal: Terminal, registry: Registry) -> None:
    first = registry.add_run("promote: it is the first", promote=True)
    done = terminal("follow", registry.add_run("keep champion: worse by 54 %", promote=False))
    assert done.exit_code == 3, done.output
    for said in ("champion is version 1", "keep champion: worse by 54 %", f'"models:/{registry.family}/2"'):
        assert said in done.output
    # The first one was promoted at its end, whoever holds the alias by now.
    registry.mlflow.set_registered_model_alias(registry.family, "champion", "2")
    assert terminal("follow", first).exit_code == 0


def test_a_failure_behind_the_registration_is_one(terminal: Terminal, registry: Registry) -> None:
    done = terminal("follow", registry.add_run("promote: better", promote=True, state="failed"))
    assert done.exit_code == 1
    assert "register failed: no rights" in done.output
    assert (" failed ─" in done.output, " registered ─" in done.output) == (True, False)


def test_a_run_that_registered_nothing_itself_is_not_headed_so(terminal: Terminal, registry: Registry) -> None:
    dag_run = registry.add_run("promote: better", promote=True)
    assert " registered ─" in terminal("follow", dag_run).output
    registry.airflow.dag_runs[dag_run].states = tuple("skipped" if name == "register" else "success" for name in STAGES)
    assert " success ─" in terminal("follow", dag_run).output


def test_a_run_that_found_nothing_new_names_the_one_before_it(
    terminal: Terminal, registry: Registry, mlflow_server: str
) -> None:
    first = registry.add_run("keep champion: worse by 54 %", promote=False)
    (run,) = registry.mlflow.search_runs([registry.experiment])
    found = tracking.Finished(first, "1", run.info.run_id, registry.experiment)
    second = f"manual__{uuid.uuid4().hex[:8]}"
    states = ("success",) * 3 + ("skipped",) * (len(STAGES) - 3)
    registry.airflow.add(DagRun(second, "success", states, xcoms={NOTHING_NEW: {**asdict(found), "told": ""}}))
    done = terminal("follow", second)
    assert done.exit_code == 0, done.output
    assert f"Nothing new: the same rows and recipe as run {first}, version 1, which stays as it is." in done.output
    assert f"{mlflow_server}/#/models/{registry.family}/versions/1" in done.output
    assert " registered " not in done.output
    assert Client().run(second).model.version == 1
    assert f"Name that run: {first}" in str(terminal("checkpoints", second).exception)
    assert "so it did nothing" in str(terminal("resume", second).exception)


@pytest.mark.parametrize("number", ["7", "../../x", "9" * 400])
def test_a_version_that_is_gone_or_none_ends_nothing(terminal: Terminal, registry: Registry, number: str) -> None:
    dag_run = registry.add_run("promote: better", promote=False)
    (run,) = registry.mlflow.search_runs([registry.experiment])
    registry.mlflow.set_tag(run.info.run_id, tracking.TAG_VERSION, number)
    done = terminal("follow", dag_run)
    assert (done.exit_code, "none was registered" in done.output) == (0, True), done.output


def test_an_address_stays_on_its_line(
    terminal: Terminal, registry: Registry, mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drops, "console", Console(width=40))
    done = terminal("follow", registry.add_run("promote: better", promote=True))
    assert any(
        line.endswith(f"{mlflow_server}/#/models/{registry.family}/versions/1") for line in done.output.split("\n")
    )


def test_an_upload_says_how_its_run_is_followed(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one two three"}\n')
    done = terminal("drop", str(tmp_path / "rows.jsonl"), "--family", "fam", "--name", "one")
    assert (done.exit_code, "dropforge follow fam/one" in done.output) == (0, True), done.output
