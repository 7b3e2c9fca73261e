"""Where the log was left is saved for another triggerer, also after Airflow could not take it for a while."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from kubeflow_training import triggers
from kubeflow_training.jobs.waiting.joblog import JobLog
from kubeflow_training.triggers import PyTorchJobTrigger


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

    trigger = PyTorchJobTrigger(name="job", namespace="default", uid="u")
    trigger.task_instance = SimpleNamespace(dag_id="d", task_id="t", run_id="r", map_index=-1)
    monkeypatch.setattr(trigger.log, "warning", lambda *words: warned.append(words))
    monkeypatch.setattr(XCom, "set", keep)

    monkeypatch.setattr(triggers.asyncio, "sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(trigger._keep(JobLog(lambda _: None), SimpleNamespace(version=1, observation=None)))
    assert tried[-1]["uid"] == "u"
    assert len(warned) == 1
    assert pauses == [2, 4, 8, 1]
