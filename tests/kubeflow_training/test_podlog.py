"""The log of a pod whose cluster denies it, for a moment or for good, and readers that break."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.errors import BackendUnavailableError, JobForbiddenError
from kubeflow_training.jobs.kinds import PYTORCH_JOB
from kubeflow_training.jobs.kubernetes import podlog
from kubeflow_training.jobs.kubernetes.client import Backoff
from kubeflow_training.jobs.kubernetes.logs import KubernetesLogs
from kubeflow_training.jobs.kubernetes.podlog import PodLog
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.waiting.joblog import JobLog

from tests.kubeflow_training.test_observation import ended, running

FORBIDDEN = JobForbiddenError("the log", "the cluster refuses it (403)", "Give the account the rights this needs")
AWAY = BackendUnavailableError("the log", "it is away", "It is tried again")
LINES = b"2026-01-01T00:00:01Z one\n2026-01-01T00:00:02Z two\n"


class Cluster:
    """Answers each reading with the next of what is given, the last one again and again."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), 0

    @asynccontextmanager
    async def stream(self, *_):
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer

        async def blocks():
            for block in answer:
                if isinstance(block, Exception):
                    raise block
                yield block

        yield blocks()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(podlog, "Backoff", lambda: Backoff(0.01, 0.02))


def pod(found=None):
    found = found or ended(0, 0)
    found["metadata"] |= {"uid": "p", "namespace": "ns"}
    found["spec"]["containers"] = [{"name": "pytorch"}]
    return found


def read(cluster, left=None):
    shown = []
    log = JobLog(shown.append, None, left)
    reader = PodLog(cluster, PYTORCH_JOB, log, pod(), True)
    asyncio.run(asyncio.wait_for(reader.run(), 10))
    return shown, log


@pytest.mark.parametrize(
    "answers",
    [(FORBIDDEN, FORBIDDEN, [LINES]), ([LINES[:25], AWAY], FORBIDDEN, FORBIDDEN, [LINES])],
    ids=["before the first line", "after it"],
)
def test_a_log_that_is_denied_for_a_moment_is_read_to_its_end(answers):
    shown, log = read(Cluster(*answers))
    assert shown == ["[master-0] one", "[master-0] two"]
    assert (log.gaps, log.positions["job-master-0"]["done"]) == ([], True)


def test_a_log_that_is_denied_for_good_states_what_is_missing_and_may_be_gone_on_with(monkeypatch):
    monkeypatch.setattr(podlog, "STARTING_SECONDS", 0.1)
    _, log = read(Cluster([LINES[:25], AWAY], FORBIDDEN))
    [gap] = log.gaps
    assert (gap["rank"], gap["from"], gap["to"]) == ("master-0", "2026-01-01T00:00:01Z", None)
    shown, log = read(Cluster([LINES]), log.state())
    assert shown == ["[master-0] two"]


def test_without_any_right_to_logs_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(podlog, "STARTING_SECONDS", 0.1)
    cluster = Cluster(FORBIDDEN)
    shown, log = read(cluster)
    assert len(shown) == 1
    assert "its log cannot be shown" in shown[0]
    assert log.gaps == []
    assert cluster.asked > 2


def test_a_reader_that_breaks_says_what_is_missing(caplog):
    shown = []

    async def main():
        log = JobLog(shown.append, None)
        logs = KubernetesLogs(Cluster([LINES, ValueError("odd")]), PYTORCH_JOB, log, "all")
        job = pytorch_job(name="job", image="i", command=["c"])
        logs.update(Snapshot(job, [pod()], []))
        await asyncio.wait_for(logs.finish(), 10)
        return log

    [gap] = asyncio.run(main()).gaps
    assert gap["from"] == "2026-01-01T00:00:02Z"
    assert "odd" in gap["why"]
    assert shown[:2] == ["[master-0] one", "[master-0] two"]
    assert "odd" in caplog.text


def test_only_news_of_the_pod_itself_cut_a_pause_short(monkeypatch):
    monkeypatch.setattr(podlog, "Backoff", lambda: Backoff(60, 60))

    async def main():
        cluster = Cluster(AWAY, [LINES])
        shown = []
        reader = PodLog(cluster, PYTORCH_JOB, JobLog(shown.append, None), pod(running(0)), True)
        reader._news.clear()
        task = asyncio.create_task(reader.run())
        for _ in range(5):
            await asyncio.sleep(0.02)
            reader.update(pod(running(0)))  # told again, as in an outage
        before = cluster.asked
        reader.update(pod())
        await asyncio.wait_for(task, 20)
        return before, shown

    before, shown = asyncio.run(main())
    assert (before, shown) == (1, ["[master-0] one", "[master-0] two"])
