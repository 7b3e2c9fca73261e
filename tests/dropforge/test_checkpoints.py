"""Asking for something to be done with a checkpoint: what is understood, what is refused, and the answer in MLflow."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, replace
from typing import Any

import pytest

from dropforge import checkpoints, layout, tracking
from dropforge.checkpoints import ANSWER, ASK, NOTE, Ask, BadAskError, Checkpoint, Order
from dropforge.json_objects import UnreadableError
from dropforge.rest import Rest
from dropforge.run import RunSpec, Tracking
from dropforge.store import S3Store
from tests.dropforge.cli.conftest import Terminal, airflow, terminal

__all__ = ["airflow", "terminal"]

KEPT = Checkpoint("m-1", "r", "fam-1", 10, 100, 5, "d", "s3://b", False, False, "", 3.0, "", "")
KNOWN = [
    replace(KEPT, model="m-0", step=5, deleted="2026-11-22T00:00:00Z"),
    replace(KEPT, best=True),
    replace(KEPT, model="m-2", step=20, last=True),
    replace(KEPT, model="m-3", step=30, deleted="2026-11-22T00:00:00Z"),  # written again by another attempt
    replace(KEPT, model="m-4", step=30),
]


@pytest.mark.parametrize(
    ("text", "model", "verb", "chosen"),
    [
        ("step-10 evaluate", "", "evaluate", "m-1"),
        (" Export:  20 ", "", "export", "m-2"),
        ("best register", "", "register", "m-1"),
        ("evaluate last", "", "evaluate", "m-2"),
        ("30 evaluate", "", "evaluate", "m-4"),
        ("register", "m-2", "register", "m-2"),
    ],
)
def test_what_an_ask_means(text: str, model: str, verb: str, chosen: str) -> None:
    order = checkpoints.read(Ask("r", text, "", model), KNOWN)
    assert (order.verb, order.checkpoint.model) == (verb, chosen)


@pytest.mark.parametrize(
    ("text", "model", "why"),
    [
        ("step-10 evalute", "", "Did you mean evaluate?"),
        ("", "", "names none of evaluate, export, register"),
        ("export register 10", "", "more than one"),
        ("step-11 export", "", "Kept are: step-10, step-20, step-30"),
        ("export", "", "Kept are"),
        ("export 10 20", "", "Kept are"),
        ("step-5 export", "", r"step-5 was deleted by the run's retention \(2026"),
        ("export", "m-0", "step-5 was deleted"),
        ("export", "m-9", "Kept are"),
        ("../../x export", "", "Kept are"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(text: str, model: str, why: str) -> None:
    with pytest.raises(BadAskError, match=why):
        checkpoints.read(Ask("r", text, "", model), KNOWN)


class Yard:
    """A run in a real bucket, its MLflow run, and a checkpoint of it as the trainer shows it."""

    def __init__(self, uri: str, store: S3Store) -> None:
        self.store, self.rest, self.mlflow = store, Rest(uri), tracking.client(uri)
        self.root = f"s3://{store.bucket}"
        self.family = f"fam-{uuid.uuid4().hex[:8]}"
        self.run = f"{self.family}-1"
        self.experiment = self.mlflow.create_experiment(self.family)
        tags = {"dropforge.run": self.run, "dropforge.family": self.family}
        self.mlflow_run = self.mlflow.create_run(self.experiment, tags=tags).info.run_id
        self.spec = RunSpec(
            run=self.run,
            family=self.family,
            counter=1,
            root=f"{self.root}/runs/{self.run}",
            data_root=self.root,
            dataset="m",
            dataset_digest="d" * 64,
            recipe={"train": {"method": "full"}},
            code="c",
            tracking=Tracking(uri, self.mlflow_run, self.experiment),
        )
        store.put(layout.run_key(self.run), self.spec.to_json())

    def add(self, step: int, digest: str = "abc", **tags: str) -> str:
        """A checkpoint, in S3 and in MLflow; the id of its logged model."""
        where = f"runs/{self.run}/checkpoints/step-{step}"
        self.store.put(f"{where}/manifest.json", json.dumps({"digest": digest}).encode())
        facts = {"run": self.run, "step": str(step), "tokens": "7000", "bytes": "1500000", "digest": digest}
        facts |= {"uri": f"{self.root}/{where}"}
        named = {f"dropforge.{key}": value for key, value in (facts | tags).items()}
        made = self.mlflow.create_logged_model(
            self.experiment, f"step-{step}", self.mlflow_run, {**named, NOTE: "Kept."}, model_type="checkpoint"
        )
        return str(made.model_id)

    @property
    def row(self) -> Any:
        """Its MLflow run, as MLflow gives it."""
        return self.rest.call("GET", f"runs/get?run_id={self.mlflow_run}")["run"]

    def known(self) -> list[Checkpoint]:
        return checkpoints.checkpoints(self.rest, self.experiment, self.mlflow_run)

    def asks(self) -> list[Ask]:
        """Those of this run: the server is shared."""
        return [ask for ask in checkpoints.asks(self.rest) if ask.mlflow_run == self.mlflow_run]

    def tags(self, model: str) -> dict[str, str]:
        return dict(self.mlflow.get_logged_model(model).tags)


@pytest.fixture
def yard(mlflow_server: str, s3_store: S3Store) -> Yard:
    return Yard(mlflow_server, s3_store)


def test_an_ask_on_a_model_or_on_its_run_is_found_and_answered_once(yard: Yard) -> None:
    model = yard.add(10, best="true", last="true")
    (item,) = yard.known()
    assert (item.step, item.tokens, item.bytes, item.best, item.last) == (10, 7000, 1_500_000, True, True)
    assert yard.asks() == []
    checkpoints.ask_for(yard.rest, item, "export")
    yard.mlflow.set_tag(yard.mlflow_run, ASK, "step-10 evaluate")
    found = {ask.text: ask for ask in yard.asks()}
    assert {text: ask.model for text, ask in found.items()} == {"export": model, "step-10 evaluate": ""}
    for text in ("export", "step-10 evaluate"):
        checkpoints.start(yard.rest, found[text], "dag run-1")
    assert {checkpoints.started_by(ask) for ask in yard.asks()} == {"dag run-1"}
    for _ in range(2):  # a task that is tried again answers again
        checkpoints.answer(yard.rest, found["export"], "s3://there", item)
        checkpoints.answer(yard.rest, found["step-10 evaluate"], "loss 3", item)
    assert yard.asks() == []
    told = yard.tags(model)
    assert "dropforge.ask" not in told
    assert [line[19:] for line in told[NOTE].partition(checkpoints.NOTE_LINE)[2].splitlines()][:2] == [
        "export: s3://there",
        "step-10 evaluate: loss 3",
    ]
    assert yard.mlflow.get_run(yard.mlflow_run).data.tags[ANSWER] == "step-10 evaluate: loss 3"
    # The same again is a new ask, which nobody has begun.
    yard.mlflow.set_tag(yard.mlflow_run, ASK, "step-10 evaluate")
    assert [checkpoints.started_by(ask) for ask in yard.asks()] == [""]


def test_an_ask_that_was_changed_while_its_job_ran_stays(yard: Yard) -> None:
    model = yard.add(10)
    (item,) = yard.known()
    checkpoints.ask_for(yard.rest, item, "export")
    yard.mlflow.set_tag(yard.mlflow_run, ASK, "step-10 evaluate")
    taken = {ask.text: ask for ask in yard.asks()}
    checkpoints.ask_for(yard.rest, item, "register")
    yard.mlflow.set_tag(yard.mlflow_run, ASK, "step-10 register")
    checkpoints.answer(yard.rest, taken["export"], "s3://there", item)
    checkpoints.answer(yard.rest, taken["step-10 evaluate"], "loss 3", item)
    assert {(ask.text, ask.model) for ask in yard.asks()} == {("register", model), ("step-10 register", "")}
    assert "export: s3://there" in yard.tags(model)[NOTE]
    assert [checkpoints.started_by(ask) for ask in yard.asks()] == ["", ""]


def test_a_look_for_asks_asks_once_for_the_experiments(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []
    real = Rest.call
    monkeypatch.setattr(Rest, "call", lambda rest, way, path, *body: paths.append(path) or real(rest, way, path, *body))
    yard.asks()
    assert paths.count("experiments/search") == 1


def test_a_run_is_ours_if_its_folder_in_our_bucket_says_so(yard: Yard) -> None:
    def row(mlflow_run: str) -> Any:
        return yard.rest.call("GET", f"runs/get?run_id={mlflow_run}")["run"]

    assert checkpoints.is_ours(row(yard.mlflow_run), yard.store)
    named_alike = yard.mlflow.create_run(yard.experiment, tags={"dropforge.run": yard.run}).info.run_id
    assert not checkpoints.is_ours(row(named_alike), yard.store)
    yard.store.put(layout.run_key(yard.run), b"{broken")
    with pytest.raises(UnreadableError, match=rf"runs/{yard.run}/run\.json: it cannot be read"):  # for its ask's answer
        checkpoints.is_ours(row(yard.mlflow_run), yard.store)
    yard.store.delete(layout.run_key(yard.run))
    assert not checkpoints.is_ours(row(yard.mlflow_run), yard.store)


def test_a_checkpoint_is_what_its_tags_say_or_nothing_is_done(yard: Yard) -> None:
    yard.add(10)
    (item,) = yard.known()
    good = Order("export", item)
    assert checkpoints.check(good, yard.row, yard.store, yard.root) == yard.spec
    elsewhere = replace(item, uri="s3://other/runs/x/checkpoints/step-10")
    forged = {
        "its MLflow run is that of": [replace(item, run="../ledger"), moved(item, yard, run="nobody-1")],
        "is not one of run": [elsewhere, item_up(item)],
        "any more": [moved(item, yard, step=11)],
        "has another MLflow run": [replace(item, mlflow_run="f" * 32)],
        "holds other bytes": [replace(item, digest="other")],
    }
    for why, items in forged.items():
        for bad in items:
            with pytest.raises(BadAskError, match=why):
                checkpoints.check(Order("export", bad), yard.row, yard.store, yard.root)
    yard.store.put(f"runs/{yard.run}/checkpoints/step-10/manifest.json", b"{broken")
    with pytest.raises(BadAskError, match="cannot be read"):
        checkpoints.check(good, yard.row, yard.store, yard.root)


def test_a_place_of_its_own_is_the_runs_and_no_other(yard: Yard) -> None:
    """The job looks at what is there: a folder of the cluster is nothing that Airflow sees."""
    spec = replace(yard.spec, recipe={"train": {"method": "full", "checkpoints": "/mnt/checkpoints"}})
    yard.store.put(layout.run_key(yard.run), spec.to_json())
    yard.add(10)
    (item,) = yard.known()
    with pytest.raises(BadAskError, match="is not one of run"):
        checkpoints.check(Order("export", item), yard.row, yard.store, yard.root)
    there = replace(item, uri=f"{spec.checkpoints_root}/checkpoints/step-10")
    assert checkpoints.check(Order("export", there), yard.row, yard.store, yard.root) == spec


def item_up(item: Checkpoint) -> Checkpoint:
    return replace(item, uri=item.uri.replace("/runs/", "/runs/../runs/"))


def moved(item: Checkpoint, yard: Yard, **fields: Any) -> Checkpoint:
    """A checkpoint whose tags fit one another, but not what lies in the bucket."""
    made = replace(item, **fields)
    return replace(made, uri=f"{yard.root}/runs/{made.run}/checkpoints/step-{made.step}")


def test_other_logged_models_are_no_checkpoints(yard: Yard) -> None:
    yard.mlflow.create_logged_model(yard.experiment, "mine", yard.mlflow_run)
    yard.mlflow.create_logged_model(yard.experiment, "odd", yard.mlflow_run, {"dropforge.step": "x"})
    assert yard.known() == []


@pytest.mark.parametrize("key", ["tokens", "bytes"])
def test_a_tag_that_is_no_amount_takes_its_row_alone_away(yard: Yard, terminal: Terminal, key: str) -> None:
    for step, amount in enumerate(["9" * 400, "-1", "\uff11", str(1 << 63)]):
        yard.add(step, **{key: amount})
    yard.add(10, **{key: str((1 << 63) - 1)})
    done = terminal("checkpoints", yard.run)
    assert done.exit_code == 0, done.exception
    assert [item.uri for item in yard.known()] == [f"{yard.root}/runs/{yard.run}/checkpoints/step-10"]


def test_a_checkpoint_that_is_registered_is_a_version_beside_the_runs_own(yard: Yard) -> None:
    model = yard.add(10)
    uri, exported = yard.rest._base.partition("/api")[0], {"uri": f"{yard.spec.root}/exports/a", "digest": "m"}
    first = tracking.register_checkpoint(uri, yard.spec, exported, 10, "abc", model)
    assert tracking.register_checkpoint(uri, yard.spec, exported, 10, "abc", model) == first
    version = yard.mlflow.get_model_version(yard.family, first)
    assert version.source == exported["uri"]
    assert version.run_id == yard.mlflow_run
    assert version.tags["dropforge.run"] == yard.run
    assert version.tags["dropforge.step"] == "10"
    assert not version.aliases
    # The run's model is not taken for registered because a checkpoint of it is.
    report = {"model": {"uri": f"{yard.spec.root}/model", "digest": "final"}}
    own = tracking._version(yard.mlflow, yard.spec, report)
    assert own.version != version.version
    assert tracking._version(yard.mlflow, yard.spec, report).version == own.version


def test_the_command_lists_checkpoints_and_asks(
    yard: Yard, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.add(5, deleted="2026-11-22T00:00:00Z")
    model = yard.add(10, best="true", last="true")
    done = terminal("checkpoints", yard.run)
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines() if "checkpoints/step-" in line]
    assert [row[0] for row in rows] == ["5", "10"]
    assert "deleted" in rows[0]
    assert rows[1][1:3] == ["7,000", "-"]
    assert "best," in rows[1]
    assert terminal("checkpoints", yard.run, "best", "export").exit_code == 0
    assert yard.tags(model)[ASK] == "export"
    assert "export …" in terminal("checkpoints", yard.run).output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("5", "export"), "was deleted"),
        (("11", "export"), "Kept are: step-10"),
        (("10", "bake"), "choose one of evaluate, export, register"),
        (("10",), "choose one of"),
    ],
)
def test_the_command_refuses_what_the_dag_would(
    yard: Yard, terminal: Terminal, words: tuple[str, ...], why: str
) -> None:
    yard.add(5, deleted="2026-11-22T00:00:00Z")
    yard.add(10)
    done = terminal("checkpoints", yard.run, *words)
    assert done.exit_code != 0
    assert why in f"{done.output} {done.exception}"
    assert yard.asks() == []


def test_a_run_that_mlflow_does_not_know_is_said(terminal: Terminal, yard: Yard) -> None:
    done = terminal("checkpoints", "nobody-1")
    assert "MLflow knows no such run" in str(done.exception)


def test_values_travel_through_airflow_as_plain_ones() -> None:
    assert Checkpoint(**json.loads(json.dumps(asdict(KEPT)))) == KEPT
