"""A doctor's test object goes the way of a drop, to the real trigger, and leaves nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import boto3
import pytest
from dropforge_airflow.triggers.drops import DropTrigger

from dropforge import layout, settings
from dropforge.cli.probe import follow
from dropforge.client.airflow import Airflow
from dropforge.client.connection import Connection
from dropforge.stack.doctor import Finding, Level
from tests.dropforge.cli.conftest import FakeAirflow
from tests.dropforge_airflow.conftest import Yard
from tests.dropforge_airflow.test_trigger import do, inbox, running, until


@pytest.fixture
def airflow() -> Iterator[FakeAirflow]:
    server = FakeAirflow()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(yard: Yard, airflow: FakeAirflow, patience: float) -> Finding:
    connection = Connection(settings.from_env(), yard.store, Airflow(airflow.url, "", ""))
    (finding,) = follow(connection, patience)
    return finding


def left(yard: Yard) -> list[str]:
    return [info.key for prefix in (layout.DROPS, layout.PROBES) for info in yard.store.list(prefix)]


def test_the_watcher_answers_and_nothing_is_left(yard: Yard, airflow: FakeAirflow) -> None:
    async def test() -> None:
        async with running(DropTrigger()) as runner:
            finding = await asyncio.to_thread(ask, yard, airflow, 60.0)
            await until(lambda: yard.left() == 0)
        assert finding.level is Level.OK, finding
        assert yard.queue_url in finding.found
        assert runner.events == []  # it is no drop

    do(test)
    assert left(yard) == []
    assert inbox(yard) == []
    assert yard.dead() == []


def test_a_watcher_that_polls_answers_once(yard: Yard, airflow: FakeAirflow) -> None:
    async def test() -> None:
        async with running(DropTrigger(queue_url="", bucket=yard.bucket, poll_every=0.1)) as runner:
            finding = await asyncio.to_thread(ask, yard, airflow, 60.0)
        assert finding.level is Level.OK, finding
        assert "polling" in finding.found
        assert runner.events == []

    do(test)
    assert left(yard) == []


def test_messages_that_nobody_takes(yard: Yard, airflow: FakeAirflow) -> None:
    finding = ask(yard, airflow, 0.5)
    assert finding.level is Level.FAIL
    assert "messages wait, and nothing takes them" in finding.found
    assert "triggerer" in finding.mend
    assert left(yard) == []


def test_a_paused_intake(yard: Yard, airflow: FakeAirflow) -> None:
    airflow.paused = True
    assert ask(yard, airflow, 0.5).mend == "Unpause dropforge_intake"


def test_a_bucket_that_tells_nobody(yard: Yard, airflow: FakeAirflow) -> None:
    boto3.client("s3").put_bucket_notification_configuration(Bucket=yard.bucket, NotificationConfiguration={})
    finding = ask(yard, airflow, 0.5)
    assert "notifies none of the queues" in finding.found
    assert f"--bucket {yard.bucket}" in finding.mend


def test_a_bucket_that_may_not_be_written(yard: Yard, airflow: FakeAirflow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPFORGE_DROP_BUCKETS", "nowhere")
    connection = Connection(settings.from_env(), yard.store, Airflow(airflow.url, "", ""))
    *_, finding = follow(connection, 0.1)
    assert finding.check == "watcher, nowhere"
    assert "nothing can be written" in finding.found


@pytest.mark.parametrize("key", ["drops/.probe/x/_SUCCESS", "drops/.probe/" + "0" * 32 + "/other", "drops/probe/x"])
def test_what_is_no_probe_is_not_answered(yard: Yard, key: str) -> None:
    async def test() -> None:
        yard.store.put(key, b"")
        async with running(DropTrigger()):
            await until(lambda: yard.left() == 0)

    do(test)
    assert [info.key for info in yard.store.list(layout.PROBES)] == []
