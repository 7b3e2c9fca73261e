"""The clock is set while jobs run and are waited for: what a job may take is as long as ever."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from kubeflow_training import state_mismatch
from kubeflow_training.gangs import memory
from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.local import gang, pod
from kubeflow_training.jobs.local.gang import Gang
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.reaping.orphans import Fate, Owned, Task, sort
from kubeflow_training.jobs.waiting import job as waiting_job
from kubeflow_training.jobs.waiting import moments
from kubeflow_training.jobs.waiting.job import Waiting
from kubeflow_training.jobs.waiting.joblog import JobLog
from kubeflow_training.jobs.waiting.limits import Limits, exceeded
from kubeflow_training.jobs.waiting.moments import Moments

from tests.kubeflow_training.test_last_look import News, Silent
from tests.kubeflow_training.test_limits import Phase, at

DAY = 86400.0


class Clock:
    """Stands in for the module `time`, and goes on by itself."""

    def __init__(self):
        self.moved = 0.0

    def __getattr__(self, name):
        return getattr(time, name)

    def time(self):
        return time.time() + self.moved


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    for module in (gang, pod, memory, waiting_job, moments, state_mismatch):
        monkeypatch.setattr(module, "time", found)
    return found


@pytest.mark.parametrize("step", [-DAY, DAY])
def test_a_wait_keeps_its_limits(clock, step):
    now = clock.time()
    found = Moments(Limits(until=now + 100, run_seconds=60))

    def passed(seen, later=0.0):
        limits, seen = found.by_now(seen)
        return exceeded(limits, seen, clock.time() + later)

    early = at(Phase.RUNNING, datetime.fromtimestamp(now, UTC))
    assert passed(early) is None
    clock.moved += step
    # The start as it was told before, though another moment of the job is told by the new clock.
    for seen in (early, replace(early, unplaced_since=datetime.fromtimestamp(now + step, UTC))):
        assert passed(seen) is None
        assert "it runs for 6" in passed(seen, 65)
        assert "its time is over" in passed(seen, 105)
    # One that starts after the step tells its start by the new clock; the time of the try is as long as it was.
    late = at(Phase.RUNNING, datetime.fromtimestamp(now + step + 50, UTC))
    assert passed(late, 65) is None
    assert "its time is over" in passed(late, 105)


def test_the_time_of_a_try_is_never_longer_than_it_is(clock):
    kept = {}
    store = SimpleNamespace(get=kept.get, set=lambda key, value, retention: kept.update({key: value}))
    found = memory.Memory({"task_state_store": store, "ti": SimpleNamespace(try_number=1)})
    until = found.until(timedelta(minutes=1))
    assert until == pytest.approx(clock.time() + 60, abs=5)
    clock.moved = -DAY
    assert found.until(timedelta(minutes=1)) == pytest.approx(clock.time() + 60, abs=5)


def test_an_event_is_kept_back_no_longer_than_it_was_to_be(clock, monkeypatch):
    monkeypatch.setattr(state_mismatch, "report_seconds", lambda: 0.1)
    moment = state_mismatch.first_event_at()
    clock.moved = -DAY
    asyncio.run(asyncio.wait_for(state_mismatch.reach(moment), 5))


def test_an_orphan_whose_task_ended_in_the_future_goes_after_the_grace():
    job = Snapshot({"metadata": {"name": "job", "namespace": "n", "uid": "u"}})
    live, tasks, now = Owned([(job, "me")]), {"me": Task("failed", ended=1000 + DAY)}, 1000.0
    first = sort(live, tasks, now, 300, {})
    assert [one.fate for one in first.orphans] == [Fate.WAIT]
    assert [one.fate for one in sort(live, tasks, now + 300, 300, first.seen).orphans] == [Fate.DELETE]


@pytest.mark.parametrize("step", [-DAY, DAY])
def test_a_pod_ran_as_long_as_it_did(clock, step, tmp_path):
    spec = {"argv": [sys.executable, "-c", "print(1)"], "env": {}, "cwd": str(tmp_path)}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    keeper = pod.Keeper(tmp_path)
    began = pod.timestamp()
    keeper.began = clock.monotonic() - 7
    clock.moved = step
    keeper._finish(began, 0, "Completed", "")
    ended = json.loads((tmp_path / "status.json").read_text())["state"]["terminated"]
    seconds = datetime.fromisoformat(ended["finishedAt"]) - datetime.fromisoformat(ended["startedAt"])
    assert seconds.total_seconds() == pytest.approx(7, abs=2)


@pytest.mark.parametrize("step", [-DAY, DAY])
def test_a_deadline_counts_what_the_job_ran(clock, step, tmp_path):
    job = {
        "uid": "u",
        "order": 1,
        "created": "2026-11-28T00:00:00Z",
        "manifest": pytorch_job(name="job", namespace="n", image="-", command=["true"]),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    found, started = Gang(tmp_path), clock.time() - 50
    assert found.age(started) == pytest.approx(50, abs=5)  # of an earlier supervisor
    clock.moved = step
    assert found.age(started) == pytest.approx(50, abs=5)
    assert found.seconds_since(started) == pytest.approx(0, abs=5)


def test_a_deadline_is_not_passed_because_the_clock_was_set(clock, monkeypatch):
    began = datetime.fromtimestamp(clock.time() - 50, UTC)
    manifest = pytorch_job(name="job", namespace="n", image="-", command=["true"])
    manifest["spec"].setdefault("runPolicy", {})["activeDeadlineSeconds"] = 3600
    manifest["status"] = {"startTime": began.isoformat(), "conditions": [{"type": "Running", "status": "True"}]}
    waiting = Waiting("job", "u", News(None), JobLog(lambda _: None, None), Silent())
    real = waiting_job.observe

    def later(*arguments, now=None, **named):
        return real(*arguments, now=now or datetime.now(UTC) + timedelta(days=1), **named)

    monkeypatch.setattr(waiting_job, "observe", later)
    clock.moved = DAY
    assert not waiting._observe(Snapshot(manifest)).ended
    assert real(manifest, now=datetime.now(UTC) + timedelta(days=1)).reason == "deadline"
