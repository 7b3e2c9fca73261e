"""The log of a job: prefix, limit, progress, and the place where another process goes on."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from kubeflow_training.jobs.errors import JobError
from kubeflow_training.jobs.waiting.joblog import JobLog, LogLimit


def add(log, *lines, pod="p", replica="worker-0"):
    asyncio.run(log.add(pod, replica, lines, lambda index: {"uid": "u", "at": index}))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, LogLimit()),
        (5, LogLimit(lines=5)),
        (0, LogLimit(lines=0)),
        ("5 lines", LogLimit(lines=5)),
        ("1 line", LogLimit(lines=1)),
        ("20MB", LogLimit(bytes=20_000_000)),
        ("20 mb", LogLimit(bytes=20_000_000)),
        ("1.5 KiB", LogLimit(bytes=1536)),
        ("100 bytes", LogLimit(bytes=100)),
        ("7 B", LogLimit(bytes=7)),
    ],
)
def test_amounts(value, expected):
    assert LogLimit.of(value) == expected


@pytest.mark.parametrize("value", ["many", "-1", -1, True, 1.5, "5 apples", "5", "", [5]])
def test_what_is_no_amount(value):
    with pytest.raises(JobError, match="Write a number of lines"):
        LogLimit.of(value)


def test_the_limit_is_said_once_and_progress_goes_on():
    shown = []
    log = JobLog(shown.append, LogLimit(lines=2))
    log.where = "s3://bucket/log"
    add(log, "a", "b", "c", '@progress {"step": 3}', "d")
    assert shown[:2] == ["[worker-0] a", "[worker-0] b"]
    assert len(shown) == 3
    assert "log_limit of 2 lines is reached" in shown[2]
    assert "the rest is at s3://bucket/log" in shown[2]
    assert log.progress.step == 3
    assert log.tails() == {"worker-0": ["a", "b", "c", "d"]}
    # A process that goes on does not begin to count anew.
    again = JobLog(shown.append, LogLimit(lines=2), json.loads(json.dumps(log.state())))
    add(again, "e")
    assert len(shown) == 3


def test_a_limit_in_bytes():
    shown = []
    log = JobLog(shown.append, LogLimit(bytes=4))
    add(log, "a", "b", "c")
    assert shown[:2] == ["[worker-0] a", "[worker-0] b"]
    assert "log_limit of 4 bytes" in shown[2]


def test_a_slow_log_of_many_jobs_leaves_the_loop_free_and_each_job_its_turn():
    def slow(line):
        time.sleep(0.0005)

    async def main():
        logs = [JobLog(slow) for _ in range(20)]
        waits = []

        async def watchdog():
            while True:
                began = time.monotonic()
                await asyncio.sleep(0.01)
                waits.append(time.monotonic() - began)

        dog = asyncio.create_task(watchdog())
        lines = [str(n) for n in range(100)]
        await asyncio.gather(*(log.add("p", "r", lines, lambda index: {"at": index}) for log in logs))
        dog.cancel()
        return waits, logs

    waits, logs = asyncio.run(main())
    assert sorted(waits)[len(waits) // 2] < 0.2  # a busy machine may hold up one of them, the log none
    assert len(waits) > 20
    assert all(log.positions["p"] == {"at": 99} and log.lines == 100 for log in logs)


def test_one_who_is_stopped_in_the_middle_knows_how_far_it_came():
    shown = []

    async def main():
        log = JobLog(lambda line: (shown.append(line), time.sleep(0.001)))
        task = asyncio.create_task(log.add("p", "r", [str(n) for n in range(1000)], lambda index: {"at": index}))
        while not shown:  # noqa: ASYNC110 - the log knows no event for this
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return log

    log = asyncio.run(main())
    assert 0 < len(shown) < 1000
    assert log.positions["p"] == {"at": len(shown) - 1}


def test_a_gap_is_said_and_kept():
    shown = []
    log = JobLog(shown.append)
    log.gap("worker-1", "2026-01-01T00:00:00Z", None, "the pod was removed")
    assert shown == [
        "[worker-1] -- lines may be missing here, from 2026-01-01T00:00:00Z to its end: the pod was removed --"
    ]
    assert log.state()["gaps"] == [
        {"rank": "worker-1", "from": "2026-01-01T00:00:00Z", "to": None, "why": "the pod was removed"}
    ]
