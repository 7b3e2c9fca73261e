"""What is killed, stopped or misused in the middle of training, and what becomes of the run."""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import httpx
import psutil
import pytest
from cryptography.fernet import Fernet

from dropforge import ledger, tracking
from dropforge.client.airflow import FINETUNE
from dropforge.client.drops import wait_for_run
from dropforge.stack.state import read_state
from tests.e2e.harness import RECIPE, Stack, kill, typed, wait
from tests.stack.databases import Postgres

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

FAMILY = "kills"
SALT = "{{ 7 * 7 }} {{ conn.dropforge_s3.password }}"  # a text for Airflow's templates
BRACES = f"data: {{split_salt: '{SALT}'}}\n"


def rows(folder: Path) -> dict[str, Path]:
    """A file of a few rows that no other test has."""
    lines = [
        {"text": f"In case {n} of the kills, {n} plus {n} is {2 * n}, and {n} times three is {3 * n}."}
        for n in range(60)
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {path.name: path}


@contextmanager
def paused(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def test_services_and_tasks_are_killed_and_the_run_ends_well(stack: Stack, tmp_path: Path) -> None:
    """One run for all of it, because its start and its end take most of the time."""
    recipe = f"{RECIPE}{BRACES}train: {{max_steps: 400, checkpoint_every: 20}}\n"
    drop = stack.drop(FAMILY, "one", rows(tmp_path), recipe)
    run = wait_for_run(stack.connection, drop)
    wait("training", lambda: stack.checkpoints(run) and stack.tasks(run)["train"]["state"] == "deferred")
    (gang,) = stack.ranks()
    # A fast machine would be done with its steps before a triggerer is back.
    with paused(gang):
        kill(stack, "airflow-triggerer")
        kill(stack, "cluster")
        kill(stack, "database")
    kill(stack, "objects")
    with paused(gang):
        # Nothing that was killed is what trains: the same gang goes on.
        assert [process.pid for process in stack.ranks()] == [gang.pid]
        assert stack.tracked(run)[0].data.tags[tracking.TAG_ATTEMPT] == "1"

        airflow, dag = stack.connection.airflow, f"/api/v2/dags/{FINETUNE}"
        airflow._call("PATCH", f"{dag}/dagRuns/{run}/taskInstances/train", json={"new_state": "failed"})
    wait("the end of its processes", lambda: not stack.ranks())
    assert stack.end(run) == "failed"
    ended = stack.tracked(run)[0]
    assert ended.info.status == "FAILED"
    assert (used := ended.data.metrics["cost/core_hours"]) > 0  # nobody but the trigger saw that gang start

    clear = {"dag_run_id": run, "task_ids": ["train"], "include_downstream": True, "only_failed": False}
    airflow._call("POST", f"{dag}/clearTaskInstances", json={**clear, "reset_dag_runs": True, "dry_run": False})
    wait("the second gang", stack.ranks)
    kill(stack, "airflow-scheduler")
    kill(stack, "database")
    assert stack.end(run) == "success", stack.log(run, "train")
    (tracked,) = stack.tracked(run)
    assert tracked.info.status == "FINISHED"
    assert tracked.data.tags[tracking.TAG_ATTEMPT] == "2"
    assert int(tracked.data.tags[tracking.TAG_RESUMED]) >= 20
    assert tracked.data.metrics["cost/core_hours"] > used
    assert tracked.data.tags[tracking.TAG_VERSION] == "1"
    assert tracked.data.params["data.split_salt"] == SALT  # what a recipe says is filled in by nobody
    assert ledger.owner_of(stack.connection.store, FAMILY, drop.id, 2) is None
    others = [item["state"] for item in stack.dag_runs(drop) if item["dag_run_id"] != run]
    assert "running" not in others
    assert "failed" not in others


def test_messages_that_are_no_events_are_put_aside_with_their_reason(stack: Stack) -> None:
    sqs: Any = boto3.session.Session().client("sqs")
    queue = stack.connection.settings.queue_url
    dead = sqs.get_queue_url(QueueName="dropforge-drops-dead")["QueueUrl"]
    sent = {"hello kills": "not JSON", '{"kills": 1}': "no Records", '{"Records": [{"eventSource": "aws:ec2"}]}': "S3"}
    for body in sent:
        sqs.send_message(QueueUrl=queue, MessageBody=body)

    def listed() -> list[str]:
        lines = typed(stack, "letters").stdout.splitlines()
        return [
            line.split()[0] for line in lines if any(reason in line for reason in ("not JSON", "no Records", "ec2"))
        ]

    wait("the list of them", lambda: len(listed()) == 3, 60)
    assert typed(stack, "letters", *listed(), "--replay").returncode == 0  # they are no better now, and come back
    found: dict[str, str] = {}

    def all_there() -> bool:
        answer = sqs.receive_message(QueueUrl=dead, MaxNumberOfMessages=10, MessageAttributeNames=["All"])
        for message in answer.get("Messages", []):
            found[message["Body"]] = message["MessageAttributes"]["dropforge.reason"]["StringValue"]
        return sent.keys() <= found.keys()

    wait("the dead letters", all_there, 60)
    for body, reason in sent.items():
        assert reason in found[body]


def test_nothing_holds_a_secret_but_the_files_that_must(stack: Stack) -> None:
    """Logs, job folders, Airflow's and MLflow's databases, the bucket: after everything that has happened so far."""
    secrets = {
        name: value.encode()
        for name, value in json.loads((stack.folder / "secrets.json").read_text()).items()
        if isinstance(value, str) and len(value) >= 12
    }
    assert len(secrets) >= 5
    allowed = {stack.folder / "secrets.json", stack.folder / "airflow" / "passwords.json"}
    told = []
    for path in stack.folder.rglob("*"):
        if path.is_file() and path not in allowed:
            data = path.read_bytes()
            told += [f"{name} in {path.relative_to(stack.folder)}" for name, value in secrets.items() if value in data]
    assert told == []


def test_no_row_of_a_trigger_holds_a_secret(stack: Stack) -> None:
    """Airflow encrypts them, so they are looked at as the triggerer does."""
    secrets = json.loads((stack.folder / "secrets.json").read_text())
    fernet = Fernet(secrets["fernet_key"])
    rows = [
        (str(path), str(text)) for path, text in Postgres(stack.folder).ask("SELECT classpath, kwargs FROM trigger")
    ]
    assert any("drops" in path for path, _ in rows), "the watcher's is always there"
    planted = (
        "planted",
        fernet.encrypt(json.dumps({"url": f"http://x:{secrets['secret_key']}@y"}).encode()).decode(),
    )
    told = []
    for path, text in [*rows, planted]:
        plain = text if text.startswith("{") else fernet.decrypt(text.encode()).decode()
        told += [
            f"{name} in {path}" for name, value in secrets.items() if len(str(value)) >= 12 and str(value) in plain
        ]
    assert told == ["secret_key in planted"]


def test_nothing_listens_beyond_this_machine(stack: Stack) -> None:
    state = read_state(stack.folder)
    assert state is not None
    supervisor = psutil.Process(state.supervisor[0])
    addresses = set()
    for process in supervisor.children(recursive=True):
        try:
            listening = [item for item in process.net_connections("inet") if item.status == psutil.CONN_LISTEN]
        except psutil.Error:
            continue
        addresses |= {item.laddr.ip for item in listening}
    assert addresses == {"127.0.0.1"}


def test_files_are_their_owners_alone(stack: Stack) -> None:
    """Those that lie where nobody else can come count too: a copy of them lies elsewhere."""
    assert stat.S_IMODE(stack.folder.stat().st_mode) == 0o700
    seen = {}
    for path in stack.folder.rglob("*"):
        name = path.relative_to(stack.folder)
        if name.parts[0] in {"families", "lineage", "recipes"} or path.is_symlink():  # made by tests
            continue
        with contextlib.suppress(FileNotFoundError):  # it lasted a moment
            seen[str(name)] = stat.S_IMODE(path.stat().st_mode)
    assert {"secrets.json", "stack.json", "airflow", "cluster", "logs"} <= seen.keys()
    assert {name: oct(mode) for name, mode in seen.items() if mode & 0o077} == {}


def test_another_name_of_this_machine_and_a_page_of_others_are_refused(stack: Stack) -> None:
    """By the first a page reaches a server that listens on 127.0.0.1 alone; the second is what sends it."""
    mlflow, airflow = stack.connection.settings.tracking_uri, stack.connection.settings.airflow_url
    login = (stack.env["MLFLOW_TRACKING_USERNAME"], stack.env["MLFLOW_TRACKING_PASSWORD"])
    search = f"{mlflow}/api/2.0/mlflow/experiments/search"
    asked = {"max_results": 1}
    assert httpx.post(search, json=asked, auth=login).status_code == 200
    assert httpx.post(search, json=asked, auth=login, headers={"Host": "evil.example"}).status_code == 403
    assert httpx.post(search, json=asked, auth=login, headers={"Origin": "http://evil.example"}).status_code == 403
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{airflow}/api/v2/dags/{FINETUNE}/dagRuns", headers=preflight)
    assert "access-control-allow-origin" not in answer.headers
