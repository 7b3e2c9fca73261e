"""Waking for what is asked for in MLflow: at once, not all the time, and again if nothing came of it."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any, cast

import pytest
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.execution_time.context import set_current_context
from dropforge_airflow.tasks import asked
from dropforge_airflow.triggers import asks
from dropforge_airflow.triggers.asks import AskTrigger, Reminder

from dropforge import checkpoints, layout, tracking
from dropforge.checkpoints import Ask, Checkpoint
from dropforge.recipes import load_recipe
from dropforge.rest import DeniedError, MissingError, Rest
from dropforge.run import RunSpec, Tracking
from tests.dropforge_airflow.conftest import Yard

ONE, TWO = ("run", "", "step-1 export"), ("run", "m-2", "export")


def test_it_wakes_for_what_is_new_and_again_for_what_stays() -> None:
    reminder = Reminder(again=100)
    assert not reminder.due([], 0)
    assert reminder.due([ONE], 1)
    assert not reminder.due([ONE], 50)
    assert reminder.due([ONE, TWO], 51)
    assert not reminder.due([ONE, TWO], 100)
    assert reminder.due([ONE, TWO], 101)
    assert not reminder.due([TWO], 102)
    assert reminder.due([ONE, TWO], 103)  # answered, and asked for again


def test_a_server_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    looks: list[Any] = [OSError("refused"), OSError("refused"), [ONE], [ONE], [ONE, TWO]]

    def look(uri: str) -> list[tuple[str, ...]]:
        found = looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return list(found)

    async def at_once(seconds: float) -> None:
        return

    async def two_events() -> list[Any]:
        found: list[Any] = []
        async for event in AskTrigger(tracking_uri="http://x").run():
            found.append(event.payload)
            if len(found) == 2:
                break
        return found

    monkeypatch.setattr(asks, "_look", look)
    monkeypatch.setattr(asks.asyncio, "sleep", at_once)
    with caplog.at_level(logging.INFO):
        assert asyncio.run(two_events()) == [{"asks": 1}, {"asks": 2}]
    assert len([record for record in caplog.records if "waits: refused" in record.message]) == 1


def test_an_mlflow_that_has_no_rest_interface_is_not_asked() -> None:
    assert asks._look("sqlite:///x.db") == []
    assert asks._look("") == []


class Server:
    """What MLflow has, for the tasks; answers are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, yard: Yard) -> None:
        self.asks: list[Ask] = []
        self.answers: dict[str, str] = {}
        self.started: dict[str, str] = {}
        self.metrics: list[dict[str, Any]] = []
        self.gone: set[str] = set()
        self.locked: set[str] = set()
        self.tags = {"dropforge.run": "fam-1", "dropforge.family": "fam"}
        self.params: dict[str, str] = {}
        self.names: dict[str, str] = {}
        where = f"s3://{yard.bucket}/runs/fam-1/checkpoints/step-10"
        self.item = Checkpoint("m-1", "run-id", "fam-1", 10, 1, 1, "abc", where, True, True, "", 3.0, "", "")
        self.spec = RunSpec(
            run="fam-1",
            family="fam",
            counter=1,
            root=f"s3://{yard.bucket}/runs/fam-1",
            data_root=f"s3://{yard.bucket}",
            dataset="m",
            dataset_digest="d" * 64,
            recipe=load_recipe("tiny").plain(),
            code="c",
            tracking=Tracking("http://mlflow", "run-id", "0"),
        )
        yard.store.put(layout.run_key("fam-1"), self.spec.to_json())
        yard.store.put("runs/fam-1/checkpoints/step-10/manifest.json", b'{"digest": "abc"}')
        monkeypatch.setattr(checkpoints, "asks", lambda rest: list(self.asks))
        monkeypatch.setattr(checkpoints, "checkpoints", lambda rest, experiment, mlflow_run: [self.kept(mlflow_run)])
        monkeypatch.setattr(checkpoints, "answer", self.answer)
        monkeypatch.setattr(checkpoints, "start", self.start)
        monkeypatch.setattr(Rest, "call", lambda rest, *words: self.call(*words))

    def kept(self, mlflow_run: str) -> Checkpoint:
        name = self.names.get(mlflow_run, "fam-1")
        return replace(self.item, mlflow_run=mlflow_run, run=name, uri=self.item.uri.replace("fam-1", name))

    def answer(self, rest: Rest, ask: Ask, text: str, checkpoint: Checkpoint | None = None) -> None:
        if ask.mlflow_run in self.gone:
            raise MissingError("no such run")
        self.edit(ask)
        self.answers[ask.text] = text

    def start(self, rest: Rest, ask: Ask, by: str) -> None:
        self.edit(ask)
        self.started[ask.text] = by

    def edit(self, ask: Ask) -> None:
        if ask.text in self.locked:
            raise DeniedError("HTTP 403: Permission denied")

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        if path.startswith("runs/get?run_id=") and path.partition("=")[2] in self.gone:
            raise MissingError("no such run")
        if path == "runs/log-batch":
            self.metrics += body["metrics"]
        tags = [{"key": key, "value": value} for key, value in self.tags.items()]
        info = {"experiment_id": "0", "run_id": path.partition("run_id=")[2]}
        if info["run_id"] in self.names:
            tags = [{"key": "dropforge.run", "value": self.names[info["run_id"]]}, tags[1]]
        params = [{"key": key, "value": value} for key, value in self.params.items()]
        return {"run": {"info": info, "data": {"tags": tags, "params": params}}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, yard: Yard) -> Server:
    return Server(monkeypatch, yard)


def test_what_can_be_done_becomes_a_job_and_the_rest_is_answered(server: Server, yard: Yard) -> None:
    server.gone = {"deleted"}
    server.asks = [
        Ask("deleted", "step-10 export", ""),
        Ask("run-id", "step-11 export", ""),
        Ask("", "evaluate", "", "m-7"),
        Ask("run-id", "last evaluate", ""),
        Ask("run-id", "register", "", "m-1"),
    ]
    taken = asked.take("dag-run-1")
    assert [item["verb"] for item in taken] == ["evaluate", "register"]
    assert set(server.started) == {"last evaluate", "register"}
    assert set(server.answers) == {"step-11 export", "evaluate"}
    names = [asked.job_of(item)["manifest"]["metadata"]["name"] for item in taken]
    assert len(set(names)) == 2
    evaluate, register = (json.loads(yard.store.get(f"{item['folder']}order.json")) for item in taken)
    assert (evaluate["verb"], evaluate["step"], evaluate["digest"]) == ("evaluate", 10, "abc")
    assert register["verb"] == "export"
    assert register["to"] == f"s3://{yard.bucket}/runs/fam-1/exports/step-10-abc"
    command = json.dumps(taken[0]["job"]["manifest"])
    assert f"s3://{yard.bucket}/{taken[0]['folder']}order.json" in command
    assert json.loads(json.dumps(taken)) == taken  # travels through Airflow
    # The task tried again makes the same orders.
    server.asks = [replace(ask, answer=f"{ask.text}: started by {server.started[ask.text]}") for ask in server.asks[3:]]
    assert [item["folder"] for item in asked.take("dag-run-1")] == [item["folder"] for item in taken]


def test_what_another_dag_run_began_and_left_is_not_begun_for_ever(server: Server) -> None:
    server.asks = [Ask("run-id", "last export", "last export: started by dropforge_checkpoints dag-run-0")]
    assert asked.take("dag-run-1") == []
    assert "dag-run-0 began it and ended without an answer" in server.answers["last export"]


def test_many_asks_wait_for_their_turn(server: Server) -> None:
    server.asks = [Ask("run-id", "export", "", "m-1") for _ in range(9)]
    assert len(asked.take("dag-run-1")) == 4


def test_a_checkpoint_that_is_gone_is_no_job(server: Server, yard: Yard) -> None:
    yard.store.delete("runs/fam-1/checkpoints/step-10/manifest.json")
    server.asks = [Ask("run-id", "last export", "")]
    assert asked.take("dag-run-1") == []
    assert "there is no s3://" in server.answers["last export"]


@pytest.mark.parametrize(
    ("spec", "manifest"),
    [
        ({}, b"[]"),
        ({}, b"[" * 100_000),
        ({}, b'{"digest": ' + b"9" * 400 + b"}"),
        ({"recipe": [1]}, b"{}"),
        ({"recipe": {"train": "x"}}, b"{}"),
        ({"recipe": {"train": {"checkpoints": 7}}}, b"{}"),
        ({"tracking": {"uri": [], "run_id": "odd", "experiment_id": "0"}}, b"{}"),
        (None, b"{}"),
    ],
    ids=["list", "nested", "number", "recipe", "section", "place", "tracking", "nested run"],
)
def test_what_pods_wrote_in_another_shape_holds_up_no_other_ask(
    server: Server, yard: Yard, spec: dict[str, Any] | None, manifest: bytes
) -> None:
    whole = json.loads(server.spec.to_json()) | {
        "run": "fam-2",
        "root": server.spec.root.replace("fam-1", "fam-2"),
        "tracking": {"uri": "u", "run_id": "odd", "experiment_id": "0"},
    }
    yard.store.put(layout.run_key("fam-2"), b"[" * 100_000 if spec is None else json.dumps(whole | spec).encode())
    yard.store.put("runs/fam-2/checkpoints/step-10/manifest.json", manifest)
    server.names = {"odd": "fam-2"}
    server.asks = [Ask("odd", "last evaluate", ""), Ask("run-id", "last export", "")]
    taken = asked.take("dag-run-1")
    assert [item["ask"]["mlflow_run"] for item in taken] == ["run-id"]
    assert server.answers["last evaluate"].startswith("not done: ")
    assert "cannot be read" in server.answers["last evaluate"]


POD = {"image": "evil.example/x", "namespace": "airflow", "service_account": "airflow-worker", "run_as": None}


@pytest.mark.parametrize("kept", ["digest", "parameters"])
def test_what_a_pod_wrote_into_its_run_makes_no_job_and_no_version(server: Server, yard: Yard, kept: str) -> None:
    """Of a run that an earlier version opened, its parameters in MLflow say what it asked of the cluster."""
    recipe = load_recipe("tiny", {"compute": {"backend": "kubernetes", "image": "trainer"}})
    spec = replace(server.spec, recipe=recipe.plain())
    yard.store.put(layout.run_key("fam-1"), spec.to_json())
    if kept == "digest":
        server.tags["dropforge.run_digest"] = spec.digest
    else:
        server.params = recipe.flat()
    server.asks = [Ask("run-id", "register", "", "m-1")]
    (taken,) = asked.take("dag-run-1")
    yard.store.put(f"{taken['folder']}result.json", b'{"model": {"uri": "u", "bytes": 1, "digest": "d"}}')
    for name, value in POD.items():
        changed = recipe.plain() | {"compute": recipe.plain()["compute"] | {name: value}}
        yard.store.put(layout.run_key("fam-1"), replace(spec, recipe=changed).to_json())
        assert asked.take("dag-run-1") == []
        assert "it was changed: " in server.answers.pop("register")
    asked.answer([taken], "dag-run-1")
    assert "it was changed: " in server.answers["register"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"run": "fam-2"}, "`run` is 'fam-2'"),
        ({"family": "payments"}, "the run was opened with 'fam'"),
        ({"root": "s3://attacker/runs/fam-1"}, "`root` is "),
        ({"recipe": load_recipe("tiny", {"compute": {"deadline_minutes": 800}}).plain()}, "DROPFORGE_LIMITS: minutes"),
        ({"recipe": load_recipe("tiny", {"base": {"model": "s3://b2/m", "scratch": None}}).plain()}, "`base.model`"),
    ],
    ids=["run", "family", "root", "limits", "reads"],
)
def test_a_run_without_a_digest_is_held_to_what_else_is_known(
    server: Server, yard: Yard, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], why: str
) -> None:
    monkeypatch.setenv("DROPFORGE_LIMITS", "minutes=720")
    server.asks = [Ask("run-id", "last export", "")]
    yard.store.put(layout.run_key("fam-1"), replace(server.spec, **changed).to_json())
    assert asked.take("dag-run-1") == []
    assert why in server.answers["last export"]


def test_a_lower_limit_of_a_gang_keeps_nobody_from_a_job_of_one_pod(
    server: Server, yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROPFORGE_LIMITS", "nodes=1 retries=0")
    recipe = load_recipe("tiny", {"compute": {"nodes": 4, "retries": 3}})
    yard.store.put(layout.run_key("fam-1"), replace(server.spec, recipe=recipe.plain()).to_json())
    server.asks = [Ask("run-id", "last export", "")]
    assert len(asked.take("dag-run-1")) == 1


def test_a_result_of_another_shape_holds_up_no_other_answer(server: Server, yard: Yard) -> None:
    results = {
        "evaluate": b"[]",
        "last evaluate": b'{"figures": [1]}',
        "export": b'{"model": {"uri": "u", "bytes": "x"}}',
        "last export": b'{"model": {"uri": "u", "bytes": 1000000}}',
    }
    server.asks = [Ask("run-id", text, "", "" if " " in text else "m-1") for text in results]
    for item, result in zip(taken := asked.take("dag-run-1"), results.values(), strict=True):
        yard.store.put(f"{item['folder']}result.json", result)
    asked.answer(taken, "dag-run-1")
    assert ["cannot be read" in server.answers[text] for text in results] == [True, True, True, False]
    assert server.answers["last export"] == f"s3://{yard.bucket}/runs/fam-1/exports/step-10-abc, 1.0 MB"


def test_each_result_has_its_answer(server: Server, yard: Yard) -> None:
    texts = ("evaluate", "export", "last evaluate", "last export")
    server.asks = [Ask("run-id", text, "", "" if " " in text else "m-1") for text in texts]
    taken = asked.take("dag-run-1")
    results = [
        {"figures": {"eval/loss": 2.5, "eval/accuracy": 0.5, "rows": 40, "precision": "fp32"}},
        {"model": {"uri": "s3://attacker/x", "bytes": 2_000_000, "digest": "d"}},
        {"error": "step-10\n\n# is\x1b[2J broken\ud800" + " " * 100_000},
    ]
    for item, result in zip(taken, results, strict=False):
        yard.store.put(f"{item['folder']}result.json", json.dumps(result).encode())
    asked.answer(taken, "dag-run-1")
    assert [server.answers[text] for text in texts] == [
        "loss 2.5000, accuracy 0.5000 on 40 rows",
        f"s3://{yard.bucket}/runs/fam-1/exports/step-10-abc, 2.0 MB",
        r"not done: step-10 # is\x1b[2J broken\ud800 [... 96,075 characters ...]",  # a job's word, as it goes into XCom
        "not done: its job ended without a word; see DAG run dag-run-1 in Airflow",
    ]
    assert {(row["key"], row["value"], row["step"], row["model_id"]) for row in server.metrics} == {
        ("checkpoint_eval/loss", 2.5, 10, "m-1"),
        ("checkpoint_eval/accuracy", 0.5, 10, "m-1"),
    }
    assert asked.answer([], "dag-run-2") == []  # nothing was asked for


def test_a_checkpoint_that_was_registered_is_named_to_openlineage(
    server: Server, yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[Any] = []
    monkeypatch.setattr(tracking, "register_checkpoint", lambda *given: models.append(given[2]) or "7")
    server.asks = [Ask("run-id", "register", "", "m-1")]
    taken = asked.take("dag-run-1")
    result = {"model": {"uri": "s3://attacker/x", "bytes": 1, "digest": "d"}}  # where it lies is not for pods to say
    yard.store.put(f"{taken[0]['folder']}result.json", json.dumps(result).encode())
    task: Any = BaseOperator(task_id="answer")
    with set_current_context(cast(Any, {"task": task})):
        asked.answer(taken, "dag-run-1")
    named = task.get_openlineage_facets_on_complete(None)
    folder = "runs/fam-1/exports/step-10-abc"
    assert [(one.namespace, one.name) for one in named.inputs] == [(f"s3://{yard.bucket}", folder)]
    assert [model["uri"] for model in models] == [f"s3://{yard.bucket}/{folder}"]
    assert [one.name for one in named.outputs] == ["models:/fam/7"]


def test_a_run_that_may_be_read_and_not_edited_holds_up_nobody(server: Server, yard: Yard) -> None:
    server.asks = [
        Ask("run-id", "best export", ""),
        Ask("run-id", "step-11 export", ""),
        Ask("run-id", "last export", ""),
        Ask("run-id", "10 export", ""),
    ]
    server.locked = {"best export", "step-11 export"}
    taken = asked.take("dag-run-1")
    assert [item["ask"]["text"] for item in taken] == ["last export", "10 export"]
    for item in taken:
        result = {"model": {"uri": "s3://b/x", "bytes": 1, "digest": "d"}}
        yard.store.put(f"{item['folder']}result.json", json.dumps(result).encode())
    server.locked = {"last export"}  # the right was taken away while the job ran
    told = asked.answer(taken, "dag-run-1")
    assert told[0].startswith("not answered: HTTP 403")
    assert server.answers["10 export"] == told[1] == f"s3://{yard.bucket}/runs/fam-1/exports/step-10-abc, 0.0 MB"


@pytest.mark.parametrize("tags", [{}, {"dropforge.run": "theirs-1"}, {"dropforge.run": "../ledger"}])
def test_asks_of_another_installation_are_left_to_it(server: Server, tags: dict[str, str]) -> None:
    server.tags = tags
    server.asks = [Ask("run-id", "last export", ""), Ask("run-id", "x", "x: started by dropforge_checkpoints theirs")]
    assert asked.take("dag-run-1") == []
    assert (server.answers, server.started) == ({}, {})


def test_the_same_run_name_of_another_installation_is_not_ours(server: Server) -> None:
    server.asks = [Ask("their-run-id", "last export", "")]
    assert asked.take("dag-run-1") == []
    assert (server.answers, server.started) == ({}, {})


def test_asks_that_could_not_be_taken_fail_the_dag(server: Server) -> None:
    """The task that answers runs after a failed one too, and Airflow looks at the last task only."""
    with pytest.raises(AirflowFailException, match="could not be taken"):
        asked.answer(None, "dag-run-1")
