"""When a try says that Airflow ended the one before, and when triggers may speak."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowSkipException,
    AirflowTaskTimeout,
    DagRunTriggerException,
    TaskDeferralError,
)
from kubeflow_training.exceptions import JobFailed, TaskStopped
from kubeflow_training.state_mismatch import ResumableTask, first_event_at, reach
from kubeflow_training.triggers import PyTorchJobTrigger

from tests.kubeflow_training.test_retries import Store


class Resumed:
    """What Airflow does with a task that it resumes."""

    def resume_execution(self, next_method, next_kwargs, context):
        raise next_kwargs["error"]


class Task(ResumableTask, Resumed):
    def __init__(self):
        self.lines = []
        self.log = SimpleNamespace(warning=lambda text, *values: self.lines.append(text % values))


def context(store, attempt, clears=0):
    ti = SimpleNamespace(try_number=attempt, max_tries=4 + clears)
    return {"ti": ti, "task_state_store": store, "dag_run": SimpleNamespace(clear_number=clears)}


def told(error, *, clears=0):
    """What try 2 says after try 1 has waited, and was resumed with this end."""
    store, task = Store(), Task()
    task.note_wait(context(store, 1))
    if error is not None:
        with pytest.raises(type(error)):
            task.resume_execution("resume", {"error": error}, context(store, 1))
    task.explain_retry(context(store, 2, clears))
    return task.lines


TRIGGERED = DagRunTriggerException(
    trigger_dag_id="dag",
    dag_run_id="run",
    conf={},
    logical_date=None,
    reset_dag_run=False,
    skip_when_already_exists=False,
    wait_for_completion=True,
    allowed_states=[],
    failed_states=[],
    poke_interval=1,
    deferrable=True,
)


@pytest.mark.parametrize(
    "error",
    [None, TaskStopped("a signal"), AirflowFailException("for good"), AirflowSkipException("skipped"), TRIGGERED],
    ids=lambda error: type(error).__name__,
)
def test_a_try_that_airflow_ended_is_told_of_by_the_next(error):
    (line,) = told(error)
    assert line.startswith("Try 1 waited, and Airflow ended it as it was resumed")


@pytest.mark.parametrize(
    "error",
    [JobFailed("it broke"), OSError("away"), AirflowTaskTimeout("too long"), TaskDeferralError("the trigger broke")],
    ids=lambda error: type(error).__name__,
)
def test_a_try_that_failed_by_itself_is_not(error):
    assert told(error) == []


def test_a_clear_and_a_first_try_have_nothing_to_tell():
    assert told(None, clears=1) == []
    task = Task()
    task.explain_retry(context(Store(), 1))
    assert task.lines == []


def test_a_store_that_is_away_hides_no_failure():
    store, task = Store(), Task()

    def away(*_, **__):
        raise OSError("the store is away")

    store.set = away
    with pytest.raises(JobFailed, match="it broke"):
        task.resume_execution("resume", {"error": JobFailed("it broke")}, context(store, 1))
    assert task.lines == ["that this try failed by itself could not be kept: OSError('the store is away')"]


def test_triggers_are_silent_until_a_worker_has_noticed_its_end(monkeypatch):
    monkeypatch.setenv("AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL", "20")
    before, moment, after = time.time(), first_event_at(), time.time()
    assert before + 25 <= moment <= after + 25
    moment = time.time() + 0.2
    asyncio.run(reach(moment))
    assert time.time() >= moment
    asyncio.run(asyncio.wait_for(reach(None), 1))
    asyncio.run(asyncio.wait_for(reach(moment - 1000), 1))


def test_the_triggers_event_does_not_come_earlier(monkeypatch):
    async def ended(self):
        return self._event("ended", None, "it has ended already")

    monkeypatch.setattr(PyTorchJobTrigger, "_wait", ended)
    moment = time.time() + 0.3
    trigger = PyTorchJobTrigger(name="job", namespace="default", not_before=moment)

    async def first():
        return await anext(trigger.run())

    event = asyncio.run(first())
    assert event.payload["kind"] == "ended"
    assert time.time() >= moment
