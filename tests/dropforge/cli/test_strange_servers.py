"""Commands whose Airflow, MLflow or both answer like something else: each ends soon, with an error for a person."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dropforge import layout
from dropforge.cli.app import app
from dropforge.client.s3 import asking_s3
from dropforge.errors import DropforgeError
from dropforge.settings import Settings
from dropforge.store import S3Store
from tests.dropforge.cli.conftest import DagRun, FakeAirflow
from tests.strange_server import Answer, Server, told

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
    page = f'<ListBucketResult xmlns="{xmlns}">{item}</ListBucketResult>'.encode()
    assert "S3 answers no listing" in refused(["letters"], told(page), monkeypatch)


@pytest.mark.parametrize("words", [["letters"], ["family", "show", "fam"]])
def test_what_sends_each_request_elsewhere_is_no_s3(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = told(b"", status=307, Location="http://127.0.0.1:9/")
    assert "it sends each request elsewhere" in refused(words, elsewhere, monkeypatch)


@pytest.mark.parametrize("head", [{"Last-Modified": "yesterday"}, {"x-amz-delete-marker": "?", "Expires": "\xff"}])
def test_a_header_that_is_none_of_s3_s_is_an_error_for_a_person(
    head: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "S3 answers no object" in refused(["family", "show", "fam"], told(b"{}", **head), monkeypatch)


def test_a_page_is_no_object(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "S3 answers no object" in refused(["family", "show", "fam"], told(b"<html>login</html>"), monkeypatch)


def refused(words: list[str], answer: Answer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The error of a command where a server that answers so is called S3."""
    server, nowhere = Server(answer), Path("/nonexistent")
    settings = Settings("bucket", "bucket", "", server.url, server.url, nowhere)
    try:
        for key, value in {**settings.to_env(), "AWS_ENDPOINT_URL": server.url}.items():
            monkeypatch.setenv(key, value)
        with pytest.raises(DropforgeError) as caught, asking_s3():
            CliRunner().invoke(app, [*words, "--state", str(nowhere)], catch_exceptions=False)
    finally:
        server.stop()
    return str(caught.value)
