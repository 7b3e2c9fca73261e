"""A run has several names, and every command takes each of them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dropforge import layout, ledger, tracking
from dropforge.cli.named import complete_run
from dropforge.client.connection import connect
from dropforge.client.named import find, find_dag_run, find_name, name_for_mlflow
from dropforge.drop import read_drop
from dropforge.run import RunSpec
from dropforge.store import S3Store
from tests.dropforge.cli.conftest import DagRun, FakeAirflow, Terminal


@dataclass
class Family:
    """A family whose drop `first` two runs have taken, the second of which made version 1, the champion."""

    name: str
    first: str
    second: str

    def __post_init__(self) -> None:
        self.drop = f"{self.name}/first"


@pytest.fixture
def family(terminal: Terminal, mlflow_server: str, s3_store: S3Store, airflow: FakeAirflow) -> Family:
    name = f"fam-{uuid.uuid4().hex[:8]}"
    prefix = layout.drop_prefix(name, "first")
    s3_store.put(f"{prefix}a.jsonl", b'{"text": "a"}\n')
    s3_store.put(prefix + layout.SUCCESS, b"")
    drop = ledger.record(s3_store, read_drop(s3_store, name, "first", s3_store.bucket))
    assert drop is not None
    runs = []
    for number in (1, 2):
        run, dag_run = f"{name}-{number}abc", f"manual__{name}-{number}"
        ledger.claim(s3_store, name, drop.id, dag_run, again=True)
        airflow.add(DagRun(dag_run, "success"))
        root = f"{s3_store.uri}/{layout.run_prefix(run)}".rstrip("/")
        spec = RunSpec(run, name, number, root, s3_store.uri, "", "0" * 64, {"train": {}}, "code", tracking=None)
        opened = tracking.open_run(mlflow_server, spec, {}, {tracking.TAG_DAG_RUN: dag_run})
        s3_store.put(layout.run_key(run), spec.to_json())
        runs.append(run)
    mlflow = tracking.client(mlflow_server)
    mlflow.create_registered_model(name)
    mlflow.create_model_version(name, source=f"{root}/model", run_id=opened.run_id)
    mlflow.set_registered_model_alias(name, "champion", "1")
    return Family(name, *runs)


def words(family: Family) -> dict[str, str]:
    """Each way to name a run, and the run."""
    return {
        family.first: family.first,
        f"{family.name}-1a": family.first,
        f"{family.drop}#1": family.first,
        f"manual__{family.name}-1": family.first,
        family.drop: family.second,
        f"{family.drop}#2": family.second,
        f"{family.name}/1": family.second,
        f"{family.name}@champion": family.second,
    }


def test_each_name_leads_to_its_run(terminal: Terminal, family: Family) -> None:
    connection = connect(terminal.state)
    for word, run in words(family).items():
        assert find(connection, word).run == run, word
        assert find_name(connection, word) == run, word
        assert find_dag_run(connection, word)[0] == f"manual__{run.removesuffix('abc')}", word
        assert name_for_mlflow(connection, word) in (run, word), word


def test_commands_take_them_all(terminal: Terminal, family: Family) -> None:
    for command in (["logs"], ["checkpoints"], ["top", "--once"]):
        for word, run in words(family).items():
            done = terminal(*command, word)
            text = done.output + str(done.exception or "")
            assert run in text or word in text
            assert "no such run" not in text


def test_two_runs_are_compared_by_any_of_their_names(terminal: Terminal, family: Family) -> None:
    for first, second in ((f"{family.drop}#1", f"{family.name}@champion"), (f"{family.name}-1", family.drop)):
        done = terminal("compare", first, second)
        assert done.exit_code == 0, done.exception
        assert family.first in done.output


NONE = {
    "{name}-": "2 runs begin so: ",
    "{name}/first#3": "2 runs have taken this drop. There is `{name}/first#1` to `{name}/first#2`",
    "{name}/first#x": "2 runs have taken this drop",
    "{name}/first#0000010000": "2 runs have taken this drop",
    "{name}/nope": "drop {name}/nope: there is no _SUCCESS yet",
    "{name}/7": "the registered model '{name}' has none of this name",
    "{name}@nope": "has none of this name",
    "nobody-1": "MLflow knows no such run",
    "manual__nobody": "manual__nobody",
    "a/b/c": "a/b/c",
    "../x": "'x' is not the number of a version",
}


def test_what_names_no_run_or_several_is_said(terminal: Terminal, family: Family) -> None:
    for word, told in NONE.items():
        done = terminal("follow", word.format(name=family.name))
        assert done.exit_code != 0
        assert told.format(name=family.name) in str(done.exception), word


def test_a_run_whose_drop_is_not_there_is_found_by_what_it_was_asked_for(
    terminal: Terminal, family: Family, airflow: FakeAirflow
) -> None:
    airflow.add(DagRun("manual__lost", "failed", ("failed",), conf={"data": f"{family.name}/nope"}))
    assert find_dag_run(connect(terminal.state), f"{family.name}/nope") == ("manual__lost", f"{family.name}/nope")


@pytest.mark.parametrize("command", [["follow"], ["logs"], ["top", "--once"], ["checkpoints"]], ids=lambda one: one[0])
def test_a_family_s_name_stands_for_its_newest_run(
    terminal: Terminal, family: Family, airflow: FakeAirflow, caplog: pytest.LogCaptureFixture, command: list[str]
) -> None:
    done = terminal(*command, family.name)
    assert f"{family.name} is a family: its newest run is {family.second}" in caplog.text
    assert "no run" not in str(done.exception)
    # One that failed before MLflow heard of it is newer, and a sweep's trial is none.
    late = {"family": family.name, "data": f"{family.name}/late"}
    airflow.add(DagRun("early", "failed", ("failed",), "1 gpu too few", conf=late))
    trial = {"family": family.name, "sweep": {"by": "s", "parent": "p", "trial": 1, "candidate": False}}
    airflow.add(DagRun("trial", "failed", ("failed",), "x", conf=trial, began="2101-01-01T00:00:00Z"))
    done = terminal(*command, family.name)
    assert f"its newest run is {family.name}/late" in caplog.text
    assert "plan failed: 1 gpu too few" in done.output + str(done.exception) or command[0] == "top"


def test_a_drop_that_is_called_like_a_number_comes_before_the_version(
    terminal: Terminal, family: Family, s3_store: S3Store
) -> None:
    s3_store.put(layout.drop_prefix(family.name, "1") + "b.jsonl", b'{"text": "b"}\n')
    s3_store.put(layout.drop_prefix(family.name, "1") + layout.SUCCESS, b"")
    drop = ledger.record(s3_store, read_drop(s3_store, family.name, "1", s3_store.bucket))
    assert drop is not None
    ledger.claim(s3_store, family.name, drop.id, f"manual__{family.name}-1")
    connection = connect(terminal.state)
    assert find_name(connection, f"{family.name}/1") == family.first
    assert name_for_mlflow(connection, f"{family.name}/1") == family.first


def test_the_shell_completes_names_and_drops(terminal: Terminal, family: Family) -> None:
    class Context:
        params: dict[str, Any] = {"state": Path(terminal.state)}  # noqa: RUF012

    assert sorted(complete_run(Context, f"{family.name}-")) == [family.first, family.second]  # type: ignore[arg-type]
    assert complete_run(Context, f"{family.name}/f") == [family.drop]  # type: ignore[arg-type]
    assert complete_run(Context, "../x") == []  # type: ignore[arg-type]
