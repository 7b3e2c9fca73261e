"""Airflow's processes beat after the clock was set back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from airflow.jobs import scheduler_job_runner
from dropforge_airflow import heartbeats


@pytest.mark.parametrize("back", [timedelta(hours=1), timedelta(days=1)])
def test_a_last_beat_in_the_future_silences_nobody(back: timedelta, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_job_runner, "perform_heartbeat", scheduler_job_runner.perform_heartbeat)
    heartbeats.on_starting(None)
    heartbeats.on_starting(None)
    beats: list[str] = []
    job = SimpleNamespace(
        latest_heartbeat=datetime.now(UTC) + back, heartrate=5.0, heartbeat=lambda **_: beats.append("one")
    )
    scheduler_job_runner.perform_heartbeat(job=job, heartbeat_callback=print, only_if_necessary=True)
    assert beats == ["one"]
    job.latest_heartbeat = datetime.now(UTC)
    scheduler_job_runner.perform_heartbeat(job, heartbeat_callback=print, only_if_necessary=True)
    assert beats == ["one"]
