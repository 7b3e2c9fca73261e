"""Waiting for jobs of the local cluster: one look at all of them per interval, and no line twice or never."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from kubeflow_training.jobs.errors import BackendUnavailableError
from kubeflow_training.jobs.local import LocalCluster
from kubeflow_training.jobs.observation import Phase
from kubeflow_training.jobs.waiting.job import Waiting, run_blocking
from kubeflow_training.jobs.waiting.joblog import LOG_ANNOTATION, JobLog, LogLimit
from kubeflow_training.jobs.waiting.limits import Limits
from kubeflow_training.jobs.waiting.polling import PolledLogs, shared_poll


class Counted(LocalCluster):
    """Counts what is asked, and is away while it is told so."""

    def __init__(self, home):
        super().__init__(home)
        self.reads, self.away = 0, False

    def read(self, name, namespace):
        self.reads += 1
        if self.away:
            raise BackendUnavailableError("the cluster", "it is away", "It is tried again")
        return super().read(name, namespace)


class Waiter:
    def __init__(self, backend, snapshot, *, left=None, interval=0.1, limits=None, log_limit=None):
        self.lines = []
        self.log = JobLog(self.lines.append, LogLimit.of(log_limit), left)
        name = snapshot.job["metadata"]["name"]
        self.news = shared_poll(str(backend.layout.home), lambda: backend).subscribe(
            name, "default", snapshot.uid, interval
        )
        logs = PolledLogs(self.news, self.log, "all", lambda: backend)
        self.waiting = Waiting(name, snapshot.uid, self.news, self.log, logs, limits=limits)
        self.task = asyncio.create_task(self.run())

    async def run(self):
        try:
            return await self.waiting.run()
        finally:
            await self.news.close()

    async def until(self, what):
        async with asyncio.timeout(30):
            while not what():  # noqa: ASYNC110 - any condition
                await asyncio.sleep(0.01)

    async def stop(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        return json.loads(json.dumps(self.log.state()))

    def ranks(self):
        return [line for line in self.lines if line.startswith("[")]


def test_many_jobs_cost_one_look_each_per_interval(cluster):
    backend = Counted(cluster.home)

    async def main():
        jobs = [cluster.submit("import time; print('x'); time.sleep(2)", f"job-{n}", cpus=0.1) for n in range(5)]
        waiters = [Waiter(backend, job, interval=0.25) for job in jobs]
        ends = await asyncio.gather(*(waiter.task for waiter in waiters))
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
        return ends, waiters

    began = time.monotonic()
    ends, waiters = asyncio.run(main())
    seconds = time.monotonic() - began
    assert {end.observation.phase for end in ends} == {Phase.SUCCEEDED}
    assert all(waiter.ranks() == ["[master-0] x"] for waiter in waiters)
    # Besides one look per interval, each end is followed by a few that read the log to its end.
    assert backend.reads <= 5 * (seconds / 0.25 + 5 * 6)


def test_another_process_goes_on_where_the_log_was_left_even_within_a_block(cluster, tmp_path):
    go = tmp_path / "go"
    script = (
        "import os, time\nfor n in range(6000): print(n)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.02)\nfor n in range(6000, 9000): print(n)"
    )
    backend = Counted(cluster.home)

    async def main():
        job = cluster.submit(script)
        lines, left = [], None
        for count in (500, 3100, 6000):
            waiter = Waiter(backend, job, left=left)
            await waiter.until(lambda w=waiter, n=count: w.log.lines >= n)
            left = await waiter.stop()
            lines += waiter.ranks()
        go.touch()
        waiter = Waiter(backend, job, left=left)
        end = await waiter.task
        return end, lines + waiter.ranks()

    end, lines = asyncio.run(main())
    assert end.observation.phase is Phase.SUCCEEDED
    assert lines == [f"[master-0] {n}" for n in range(9000)]


def test_a_log_beyond_its_limit_names_the_place_that_the_job_tells(cluster):
    async def main():
        job = cluster.submit("for n in range(9): print(n)", annotations={LOG_ANNOTATION: "s3://b/runs/r/logs/"})
        waiter = Waiter(Counted(cluster.home), job, log_limit="5 lines")
        await waiter.task
        return waiter

    waiter = asyncio.run(main())
    assert waiter.ranks() == [f"[master-0] {n}" for n in range(5)]
    [told] = [line for line in waiter.lines if "log_limit" in line]
    assert "the rest is at s3://b/runs/r/logs/" in told


def test_a_backend_that_is_away_says_nothing_about_the_job(cluster):
    backend = Counted(cluster.home)

    async def main():
        waiter = Waiter(backend, cluster.submit("import time; time.sleep(1)"))
        await waiter.until(lambda: waiter.waiting.observation)
        backend.away = True
        await asyncio.sleep(1.5)
        assert not waiter.task.done()
        backend.away = False
        return await waiter.task, waiter

    end, waiter = asyncio.run(main())
    assert end.observation.phase is Phase.SUCCEEDED
    complaints = [line for line in waiter.lines if "cannot ask about job" in line]
    assert 1 <= len(complaints) <= 5


def test_a_failure_brings_the_last_lines_of_the_rank(cluster):
    backend = Counted(cluster.home)

    async def main():
        script = "import os, sys, time\nprint('reading')\nif os.environ['RANK'] == '0': time.sleep(60)\nsys.exit(11)"
        return await Waiter(backend, cluster.submit(script, nodes=2, cpus=0.5)).task

    end = asyncio.run(main())
    assert (end.kind, end.observation.phase, end.tails) == ("ended", Phase.FAILED, {"worker-0": ["reading"]})


def test_limits_end_the_waiting_and_a_worker_may_wait_without_a_loop_of_its_own(cluster):
    backend, checks = Counted(cluster.home), []

    async def wait():
        return await Waiter(backend, cluster.submit("import time; time.sleep(60)"), limits=Limits(run_seconds=1)).task

    end = run_blocking(wait(), lambda: checks.append(1), every=0.1)
    assert (end.kind, end.observation.phase) == ("timeout", Phase.RUNNING)
    assert len(checks) > 5


def test_what_the_check_raises_ends_the_waiting(cluster):
    backend = Counted(cluster.home)

    async def wait():
        return await Waiter(backend, cluster.submit("import time; time.sleep(60)")).task

    def check():
        if backend.reads > 3:
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        run_blocking(wait(), check, every=0.05)


def test_a_job_that_ended_in_time_counts_though_its_limit_has_passed_since(cluster):
    snapshot = cluster.submit("print('done')")
    cluster.ended()
    backend = Counted(cluster.home)

    async def wait():
        return await Waiter(backend, snapshot, limits=Limits(until=1.0)).task

    assert asyncio.run(wait()).observation.phase is Phase.SUCCEEDED


def test_a_look_that_breaks_ends_nobodys_waiting(cluster):
    class Broken(Counted):
        def read(self, name, namespace):
            if self.away:
                raise PermissionError("state.json")
            return super().read(name, namespace)

    async def wait():
        backend = Broken(cluster.home)
        backend.away = True
        waiter = Waiter(backend, cluster.submit("print('done')"))
        await waiter.until(lambda: any("PermissionError" in line for line in waiter.lines))
        backend.away = False
        return await waiter.task

    assert asyncio.run(wait()).observation.phase is Phase.SUCCEEDED
