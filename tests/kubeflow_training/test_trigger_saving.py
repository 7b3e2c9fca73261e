"""Where the log was left is saved for another triggerer, also after Airflow could not take it for a while."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from kubeflow_training import triggers
from kubeflow_training.jobs.waiting.joblog import JobLog
from kubeflow_training.triggers import PyTorchJobTrigger


def new_trigger() -> PyTorchJobTrigger:
    trigger = PyTorchJobTrigger(name="job", namespace="default", uid="u")
    trigger.task_instance = SimpleNamespace(dag_id="d", task_id="t", run_id="r", map_index=-1)
    return trigger


def test_a_save_under_way_when_the_triggerer_stops_is_not_the_last_one(monkeypatch):
    """Its older position, written after the last, would have the next triggerer repeat the log."""
    from airflow.sdk.execution_time.xcom import XCom

    saved, begun, go = [], threading.Event(), threading.Event()

    def keep(key, value, **_):
        if not begun.is_set():
            begun.set()
            go.wait()
        saved.append(value["lines"])

    async def stop_while_saving() -> None:
        trigger, log, waiting = new_trigger(), JobLog(lambda _: None), SimpleNamespace(version=1, observation=None)
        keeper = asyncio.create_task(trigger._keep(log, waiting))
        await asyncio.to_thread(begun.wait)
        await log.add("pod", "master-0", ["a line"], lambda n: {"line": n})
        keeper.cancel()
        asyncio.get_running_loop().call_later(0.2, go.set)
        await asyncio.gather(keeper, return_exceptions=True)
        await trigger._save(log, waiting)

    monkeypatch.setattr(XCom, "set", keep)
    asyncio.run(stop_while_saving())
    assert saved == [0, 1]


def test_a_position_that_could_not_be_saved_is_saved_later(monkeypatch):
    from airflow.sdk.execution_time.xcom import XCom

    tried, warned, pauses = [], [], []

    def keep(key, value, **_):
        tried.append(value)
        if len(tried) < 4:
            raise ConnectionError("Airflow is away")

    async def pause(seconds):
        pauses.append(seconds)
        if len(tried) == 4:
            raise asyncio.CancelledError

    trigger = new_trigger()
    monkeypatch.setattr(trigger.log, "warning", lambda *words: warned.append(words))
    monkeypatch.setattr(XCom, "set", keep)

    monkeypatch.setattr(triggers.asyncio, "sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(trigger._keep(JobLog(lambda _: None), SimpleNamespace(version=1, observation=None)))
    assert tried[-1]["uid"] == "u"
    assert len(warned) == 1
    assert pauses == [2, 4, 8, 1]
