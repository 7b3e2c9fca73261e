"""Commands whose Airflow, MLflow or both answer like something else: each ends soon, with an error for a person."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dropforge import layout
from dropforge.cli.app import app
from dropforge.errors import DropforgeError
from dropforge.settings import Settings
from dropforge.store import S3Store
from tests.dropforge.cli.conftest import DagRun, FakeAirflow
from tests.strange_server import Server, told

RUN = "fam-1"
COMMANDS = [
    ["queue"],
    ["compare", RUN, "fam@champion"],
    ["checkpoints", RUN],
    ["stop", RUN, "--yes"],
    ["resume", RUN],
    ["follow", RUN],
    ["top", RUN, "--once"],
    ["approve", RUN, "--yes"],
]
ROWS = [{"info": {}, "data": None}]
FAMILY = {"experiment_id": "1", "name": "f"}
ANSWERS: dict[str, bytes] = {
    "html": b"<html>login</html>",
    "list": b"[]",
    "null": b"null",
    "deep": b'{"a":' + b"[" * 100_000,
    "types": json.dumps(
        {"dag_runs": 7, "experiments": [FAMILY], "runs": ROWS, "task_instances": "x", "state": {}}
    ).encode(),
    "tags": json.dumps({"experiments": [FAMILY], "runs": [{"info": {"run_id": "1"}, "data": {"tags": [7]}}]}).encode(),
    "token": json.dumps(
        {
            "experiments": [FAMILY],
            "runs": [],
            "next_page_token": "again",
            "dag_runs": [],
            "state": "running",
            "task_instances": [{"task_id": "a", "state": "running"}] * 50,
        }
    ).encode(),
}


@pytest.fixture(params=ANSWERS)
def strange(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(told(ANSWERS[request.param]))
    yield server
    server.stop()


@pytest.mark.parametrize("airflow_is", ["strange", "well"])
def test_a_command_ends_with_an_error_for_a_person(
    strange: Server, airflow: FakeAirflow, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch, airflow_is: str
) -> None:
    s3_store.put(layout.run_key(RUN), b"{}")
    airflow.add(DagRun("dataset_triggered__1", "running", ("success", "running")))
    airflow.add(DagRun("dataset_triggered__2", "queued"))
    url = strange.url if airflow_is == "strange" else airflow.url
    nowhere = Path("/nonexistent")
    for key, value in Settings(s3_store.bucket, s3_store.bucket, "", strange.url, url, nowhere).to_env().items():
        monkeypatch.setenv(key, value)
    for words in COMMANDS:
        strange.seen.clear()
        done = CliRunner().invoke(app, [*words, "--state", str(nowhere)])
        assert isinstance(done.exception, DropforgeError), (words, done.exception, done.output)
        assert len(strange.seen) < 50


ITEM = "<Contents><Key>ledger/refused/a/b.json</Key><Size>{}</Size><LastModified>{}</LastModified></Contents>"


@pytest.mark.parametrize(
    "item",
    [
        "<Contents><Size>5</Size></Contents>",
        "<Contents><Key>ledger/refused/a/b.json</Key><Size>5</Size><ETag>x</ETag></Contents>",
        ITEM.format("x", "2026-01-01T00:00:00.000Z"),
        ITEM.format(5, "never"),
    ],
    ids=["no-key", "no-time", "odd-size", "odd-time"],
)
def test_a_listing_that_is_none_of_s3_s_is_an_error_for_a_person(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    xmlns = "http://s3.amazonaws.com/doc/2006-03-01/"
    server = Server(told(f'<ListBucketResult xmlns="{xmlns}">{item}</ListBucketResult>'.encode()))
    nowhere = Path("/nonexistent")
    settings = Settings("bucket", "bucket", "", server.url, server.url, nowhere)
    try:
        for key, value in {**settings.to_env(), "AWS_ENDPOINT_URL": server.url}.items():
            monkeypatch.setenv(key, value)
        done = CliRunner().invoke(app, ["letters", "--state", str(nowhere)])
    finally:
        server.stop()
    assert isinstance(done.exception, DropforgeError), (done.exception, done.output)
    assert "S3 answers no listing" in str(done.exception)
