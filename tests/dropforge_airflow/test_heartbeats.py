"""Airflow's processes beat at once when the clock was set."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from airflow.jobs import scheduler_job_runner
from dropforge_airflow import heartbeats

DAY = 86400.0


@pytest.mark.parametrize("step", [-DAY, DAY])
def test_a_clock_that_is_set_silences_nobody_and_lets_nobody_look_dead(
    step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_job_runner, "perform_heartbeat", scheduler_job_runner.perform_heartbeat)
    heartbeats.on_starting(None)
    heartbeats.on_starting(None)
    beats: list[float] = []
    job = SimpleNamespace(latest_heartbeat=datetime.now(UTC) - timedelta(seconds=step), heartrate=5.0)
    # What Airflow writes down is the moment of the beat before.
    job.heartbeat = lambda **_: beats.append((datetime.now(UTC) - job.latest_heartbeat).total_seconds())
    clock = SimpleNamespace(time=lambda: time.time() + step, monotonic=time.monotonic)
    monkeypatch.setattr(heartbeats, "time", clock)
    scheduler_job_runner.perform_heartbeat(job=job, heartbeat_callback=print, only_if_necessary=True)
    assert beats == [pytest.approx(5, abs=1)]
    job.latest_heartbeat = datetime.now(UTC)
    scheduler_job_runner.perform_heartbeat(job, heartbeat_callback=print, only_if_necessary=True)
    assert len(beats) == 1
