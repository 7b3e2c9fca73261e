"""The four occasions on the real stack, as a queue receives them through Airflow's own SQS notifier."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import boto3
import psutil
import pytest

from dropforge.client.airflow import FINETUNE, ROLLBACK
from dropforge.client.drops import wait_for_run
from dropforge.errors import DropforgeError
from dropforge.source_root import source_root
from dropforge.stack.state import read_state
from tests.e2e.harness import EVALUATE, Stack, wait
from tests.moto_server import moto_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

FAMILY = "alerted"
RECIPE = f"""\
extends: tiny
{EVALUATE}
train: {{max_steps: 3}}
promote: {{better_than_base: false, min_improvement: -0.9, approval: {{deadline_hours: 1}}}}
"""


class Told:
    """The queue, read as a person's mail is: what came stays."""

    def __init__(self, stack: Stack, url: str) -> None:
        login = {"aws_access_key_id": "alerts", "aws_secret_access_key": "alerts-secret", "region_name": "us-east-1"}
        self._sqs = boto3.session.Session().client("sqs", endpoint_url=url, **login)
        self._url = self._sqs.create_queue(QueueName="alerts")["QueueUrl"]
        self._came: dict[str, str] = {}
        arguments = {
            "aws_conn_id": "alerts",
            "queue_url": self._url,
            "message_body": "{occasion}: {subject}\n{body}",
        }
        one = {"notifier": "airflow.providers.amazon.aws.notifications.sqs.SqsNotifier", "arguments": arguments}
        connection = {"connection_id": "alerts", "conn_type": "aws", "login": "alerts", "password": "alerts-secret"}
        extra = json.dumps({"endpoint_url": url, "region_name": "us-east-1"})
        call = stack.connection.airflow._call
        call("POST", "/api/v2/connections", json=connection | {"extra": extra})
        call("POST", "/api/v2/variables", json={"key": "dropforge_notify", "value": json.dumps([one])})

    def about(self, word: str) -> list[str]:
        while found := self._sqs.receive_message(QueueUrl=self._url, MaxNumberOfMessages=10).get("Messages"):
            for message in found:
                self._came[message["MessageId"]] = message["Body"]
                self._sqs.delete_message(QueueUrl=self._url, ReceiptHandle=message["ReceiptHandle"])
        return [body for body in self._came.values() if word in body]


@contextmanager
def paused(stack: Stack, name: str) -> Iterator[None]:
    """With a service that is there and does not answer, and no supervisor who kills it for that after half a minute."""
    state = read_state(stack.folder)
    assert state is not None
    held = [*psutil.Process(state.supervisor[0]).children(), psutil.Process(state.services[name].pid)]
    for process in held:
        process.suspend()
    try:
        yield
    finally:
        for process in reversed(held):
            process.resume()


@pytest.fixture(scope="module")
def told(stack: Stack) -> Iterator[Told]:
    with moto_server() as url:
        yield Told(stack, url)
        with suppress(DropforgeError):  # the stack ends with its last test
            stack.connection.airflow._call("DELETE", "/api/v2/variables/dropforge_notify")


def test_a_question_and_a_promotion_are_told_once(
    stack: Stack, told: Told, samples: dict[int, dict[str, Path]]
) -> None:
    run = wait_for_run(stack.connection, stack.drop(FAMILY, "one", samples[2], RECIPE))
    wait("the question", lambda: stack.tasks(run).get("approve", {}).get("state") == "awaiting_input", 600)
    (question,) = wait("its alert", lambda: told.about("approval: "))
    assert f"approval: Dropforge: {FAMILY}: your approval is needed" in question
    assert "Until: " in question
    assert f"Answer: {stack.connection.airflow.url}/" in question
    assert "/required_actions" in question
    stack.connection.airflow.answer(FINETUNE, run, "approve", "Keep the champion")
    assert stack.end(run) == "success"
    assert not told.about("promoted: ")
    # What is asked anew is told anew, and what moves nothing is not.
    stack.clear(run, "approve")
    stack.see(run, "approve", "awaiting_input")
    stack.connection.airflow.answer(FINETUNE, run, "approve", "Promote")
    assert stack.end(run) == "success"
    (promoted,) = told.about("promoted: ")
    assert "Version 1 is champion now, as the family's first." in promoted
    assert " said yes at " in promoted
    assert f"Run: {stack.connection.airflow.page(FINETUNE, run)}" in promoted
    (tracked,) = stack.tracked(run)
    assert tracked.info.run_id in promoted
    stack.clear(run, "approve")
    assert stack.end(run) == "success"
    assert [len(told.about(what)) for what in ("approval: ", "promoted: ", FAMILY)] == [2, 1, 3]


def test_refused_data_are_told_as_a_rejected_drop(stack: Stack, told: Told, tmp_path: Path) -> None:
    """By a gate, which ends a run; and by intake, so that none begins."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(4)))
    gate = "curation: {min_rows: 1000}\n"
    run = wait_for_run(stack.connection, stack.drop(FAMILY, "few", {"rows.jsonl": rows}, RECIPE + gate))
    assert stack.end(run) == "failed"
    (refused,) = wait("the gate's alert", lambda: told.about("drop few is rejected"))
    assert refused.startswith(f"rejected: Dropforge: {FAMILY}: drop few is rejected at c")
    assert "Fix: " in refused
    stack.connection.store.put(f"drops/{FAMILY}/torn/_SUCCESS", b"{")
    (torn,) = wait("intake's alert", lambda: told.about("drop torn is rejected"))
    assert "no run begins" in torn
    # Neither the teardown nor the DAG says it again.
    assert len(told.about(stack.connection.airflow.page(FINETUNE, run))) == 1


def test_a_run_whose_worker_is_killed_each_time_is_told_by_airflow_itself(stack: Stack, told: Told) -> None:
    """Nothing of the task's own can tell it: the DAG processor does, after the last try."""
    airflow = stack.connection.airflow
    conf = {"family": FAMILY, "version": "1", "reason": "a trial", "alias": "champion"}
    with paused(stack, "mlflow"):  # the task waits for it, and can be caught
        run = airflow.trigger(ROLLBACK, conf)
        for attempt in (1, 2, 3):

            def working(attempt: int = attempt) -> int | None:
                task = {task["task_id"]: task for task in airflow.task_states(ROLLBACK, run)}["choose"]
                here = task["state"] == "running" and task["try_number"] == attempt
                return int(task["pid"]) if here and task["pid"] else None

            os.kill(wait(f"try {attempt}", working), signal.SIGKILL)
            assert told.about("run failed") == []
        wait("the end", lambda: airflow.dag_run(ROLLBACK, run)["state"] == "failed")
    # If the DAG processor is just reading the file, the callback waits until it reads it again: every ten minutes, or
    # when the file is newer.
    touched = 0.0

    def alert() -> list[str]:
        nonlocal touched
        if time.monotonic() - touched > 40:
            os.utime(source_root() / "dags" / "rollback.py")
            touched = time.monotonic()
        return told.about("run failed")

    (failed,) = wait("the alert", alert, 700)
    assert failed.startswith(f"failed: Dropforge: {FAMILY}: run failed at choose")
    assert f"Run: {airflow.page(ROLLBACK, run)}" in failed
