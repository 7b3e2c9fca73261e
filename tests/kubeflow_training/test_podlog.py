"""The log of a pod whose cluster denies it, for a moment or for good, and readers that break."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.errors import BackendUnavailableError, JobForbiddenError, JobRefusedError
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
REFUSED = JobRefusedError("the log", "the cluster refuses it (400): not found", "Look at it")
LINES = b"2026-01-01T00:00:01Z one\n2026-01-01T00:00:02Z two\n"


class Cluster:
    """Answers each reading with the next of what is given, the last one again and again.

    :param before: the same for the log of the container before.
    """

    def __init__(self, *answers, before=()):
        self.answers, self.before, self.asked = list(answers), list(before), 0

    @asynccontextmanager
    async def stream(self, what, path, params, silence):
        self.asked += 1
        answers = self.before if ("previous", "true") in params else self.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
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


def read(cluster, left=None, found=None):
    shown = []
    log = JobLog(shown.append, None, left)
    reader = PodLog(cluster, PYTORCH_JOB, log, found or pod(), True)
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


def restarted(times):
    found = pod()
    found["status"]["containerStatuses"][0]["restartCount"] = times
    return found


EARLIER = b"2026-01-01T00:00:00Z nought\n2026-01-01T00:00:00.5Z its last words"
BOTH = ["[master-0] nought", "[master-0] its last words", "[master-0] one", "[master-0] two"]


@pytest.mark.parametrize(
    "before",
    [[[EARLIER]], [AWAY, FORBIDDEN, [EARLIER]], [[EARLIER[:28], AWAY], [EARLIER]]],
    ids=["at once", "after an outage", "with an outage in its middle"],
)
def test_what_the_container_before_said_is_read_although_the_cluster_was_away(before):
    shown, log = read(Cluster([LINES], before=before), found=restarted(1))
    assert shown == BOTH
    assert log.gaps == []


def test_a_log_of_the_container_before_that_is_gone_is_stated():
    shown, log = read(Cluster([LINES], before=[REFUSED]), found=restarted(1))
    assert shown[-2:] == BOTH[-2:]
    assert "rotated it away" in log.gaps[0]["why"]


def test_logs_that_no_node_keeps_are_stated_once():
    shown, log = read(Cluster([LINES], before=[AWAY, [EARLIER]]), found=restarted(4))
    assert shown[-4:] == BOTH
    [gap] = log.gaps
    assert "started 5 times" in gap["why"]


def test_a_gap_is_not_stated_while_the_cluster_that_can_close_it_is_away():
    left = {"positions": {"job-master-0": {"uid": "p", "at": 1767225600 * 10**9, "seen": 1}}}
    shown, log = read(Cluster([LINES], before=[AWAY, [EARLIER]]), left, restarted(1))
    assert shown == BOTH[1:]
    assert log.gaps == []


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


class Rotating(Cluster):
    """Follows a log whose middle file was left out by the node, while nothing came of it."""

    def __init__(self):
        super().__init__([LINES])
        self.seen = asyncio.Event()
        self.newest = [b"2026-01-01T00:00:01Z one", b"2026-01-01T00:00:01Z one", b"2026-01-01T00:00:05Z three"]

    @asynccontextmanager
    async def stream(self, what, path, params, silence):
        async def first_line():
            line = self.newest.pop(0) if len(self.newest) > 1 else self.newest[0]
            yield line
            if line.endswith(b"three"):
                self.seen.set()

        async def followed():
            yield LINES
            await self.seen.wait()
            yield b"2026-01-01T00:00:09Z four\n"

        yield first_line() if ("limitBytes", "64") in params else followed()


def test_a_file_that_the_node_left_out_in_a_silence_is_stated(monkeypatch):
    monkeypatch.setattr(podlog, "_ROTATION_SECONDS", 0.01)
    monkeypatch.setattr(podlog, "_FILE_BYTES", len(LINES))
    shown, told = [], asyncio.Event()

    def show(line):
        shown.append(line)
        if line == "[master-0] four":
            told.set()

    log = JobLog(show, None, None)

    async def followed():
        reading = asyncio.ensure_future(PodLog(Rotating(), PYTORCH_JOB, log, pod(running(0)), True).run())
        await told.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(asyncio.wait_for(followed(), 60))
    [gap] = log.gaps
    assert (gap["from"], gap["to"]) == ("2026-01-01T00:00:02Z", "2026-01-01T00:00:09Z")
    assert shown[:2] == ["[master-0] one", "[master-0] two"]
    assert shown[-1] == "[master-0] four"
