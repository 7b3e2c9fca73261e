"""A feed whose cluster refuses, forgets, or is left in a hurry: what a real cluster does too seldom to wait for it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from kubeflow_training.jobs.errors import JobForbiddenError, JobRefusedError
from kubeflow_training.jobs.kinds import PYTORCH_JOB
from kubeflow_training.jobs.kubernetes.client import ExpiredError
from kubeflow_training.jobs.kubernetes.watching import feed as feeds
from kubeflow_training.jobs.kubernetes.watching import reflector
from kubeflow_training.jobs.kubernetes.watching.feed import Feed
from kubeflow_training.jobs.kubernetes.watching.reflector import Handler, Reflector
from kubeflow_training.jobs.observation import Phase
from kubeflow_training.jobs.waiting.job import Waiting
from kubeflow_training.jobs.waiting.joblog import JobLog

from tests.kubeflow_training.test_elastic import elastic, manifest, succeeded

FORBIDDEN = JobForbiddenError("pods", "the cluster refuses it (403)", "Give the account the rights this needs")
REFUSED = JobRefusedError("pods", "the cluster refuses it (403)", "Give the account the rights this needs")


class Cluster:
    """Answers with what `answer` says; a watch stays silent."""

    def __init__(self, answer):
        self.answer, self.closed = answer, False

    async def json(self, verb, path, params=(), **_):
        return self.answer(verb, path, dict(params))

    @asynccontextmanager
    async def stream(self, *_):
        async def blocks():
            await asyncio.Event().wait()
            yield b""

        yield blocks()

    async def close(self):
        self.closed = True


class Logs:
    """No lines."""

    def update(self, snapshot):
        pass

    async def finish(self):
        pass

    async def tail(self, pod, lines):
        return []

    async def close(self):
        pass


def listed(*found):
    return {"items": list(found), "metadata": {"resourceVersion": "7"}}


@pytest.mark.parametrize(("may_list", "phase"), [(True, Phase.FAILED), (False, Phase.SUCCEEDED)])
def test_without_the_right_to_see_pods_the_success_of_an_elastic_job_is_believed(may_list, phase):
    job = succeeded(elastic(manifest(), min_nodes=2), minutes=6)
    job["metadata"] = {**job["metadata"], "namespace": "default", "uid": "u", "resourceVersion": "5"}

    def answer(verb, path, params):
        if path.endswith("/pods") and not may_list:
            raise REFUSED
        if path.endswith("/pytorchjobs/job"):
            return job
        return listed(job) if path.endswith("/pytorchjobs") else listed()

    async def main():
        feed = Feed(Cluster(answer), "default", PYTORCH_JOB)
        news = feed.subscribe("job", "u")
        try:
            return await Waiting("job", "u", news, JobLog(lambda _: None), Logs(), settle_seconds=0.1).run()
        finally:
            await news.close()

    end = asyncio.run(asyncio.wait_for(main(), 20))
    assert end.observation.phase is phase
    assert ("cannot be seen" in end.why) is not may_list


def test_who_is_cancelled_while_leaving_closes_the_client_all_the_same():
    async def main():
        cluster = Cluster(lambda *_: listed())
        feed = Feed(cluster, "default", PYTORCH_JOB)
        feed.release = lambda: cluster
        news, slow = feed.subscribe("job"), asyncio.Event()

        async def stubborn():
            try:
                await asyncio.Event().wait()
            finally:
                slow.set()
                await asyncio.sleep(0.05)

        feed._tasks.append(asyncio.create_task(stubborn()))
        await asyncio.sleep(0)
        leaving = asyncio.create_task(news.close())
        await slow.wait()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert leaving.cancelled()
        return cluster.closed

    assert asyncio.run(main())


def test_a_list_that_expires_again_and_again_is_read_ever_more_rarely(monkeypatch):
    waited, lists = [], []

    class Patience:
        def reset(self):
            pass

        async def wait(self):
            waited.append(len(lists))
            await asyncio.sleep(0.01)

    monkeypatch.setattr(reflector, "Backoff", Patience)

    def answer(verb, path, params):
        lists.append(params.get("continue"))
        if len(lists) > 8:
            return listed()
        if "continue" in params:
            raise ExpiredError(path, "410", "It is listed again")
        return {"items": [], "metadata": {"resourceVersion": "7", "continue": "more"}}

    async def main():
        whole = asyncio.Event()
        handler = Handler(lambda *_: whole.set(), lambda *_: None, lambda _: None, lambda: None)
        found = Reflector(Cluster(answer), "/jobs", handler)
        found._listed_at -= 100
        task = asyncio.create_task(found.run())
        await asyncio.wait_for(whole.wait(), 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    # At once after the first time, and after a wait each time more.
    assert waited == [4, 6, 8]


class Eager:
    """No pauses worth waiting for."""

    def reset(self):
        pass

    async def wait(self):
        await asyncio.sleep(0.01)


def only_told(listed=lambda *_: None, well=lambda: None):
    return Handler(listed, lambda *_: None, lambda _: None, well)


@asynccontextmanager
async def running(work):
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_watch_that_was_refused_is_tried_again(monkeypatch):
    monkeypatch.setattr(reflector, "Backoff", Eager)
    monkeypatch.setattr(reflector, "_REFUSED_SECONDS", 0.01)
    monkeypatch.setattr(reflector, "_WATCH_AGAIN_SECONDS", 0.1)
    watched = []

    class Starting(Cluster):
        @asynccontextmanager
        async def stream(self, *more):
            watched.append(more)
            if len(watched) < 3:
                raise FORBIDDEN
            async with super().stream(*more) as blocks:
                yield blocks

    async def main():
        well = asyncio.Event()
        cluster = Starting(lambda *_: listed())
        async with running(Reflector(cluster, "/pods", only_told(well=well.set)).run()):
            await asyncio.wait_for(well.wait(), 10)

    asyncio.run(main())
    assert len(watched) == 3


def test_a_new_list_that_was_asked_for_in_an_outage_is_read_after_it(monkeypatch):
    monkeypatch.setattr(reflector, "Backoff", Eager)
    lists = []

    def answer(*_):
        lists.append(1)
        if len(lists) == 2:
            raise FORBIDDEN
        return listed()

    async def main():
        told = asyncio.Semaphore(0)
        found = Reflector(Cluster(answer), "/pods", only_told(lambda *_: told.release()))
        async with running(found.run()), asyncio.timeout(10):
            await told.acquire()
            found.relist()
            await told.acquire()

    asyncio.run(main())
    assert len(lists) == 3


@pytest.mark.parametrize("patience", [60.0, 0.2])
def test_pods_that_are_refused_for_a_moment_are_kept(monkeypatch, patience):
    monkeypatch.setattr(reflector, "Backoff", Eager)
    monkeypatch.setattr(feeds, "STARTING_SECONDS", patience)
    metadata = {"namespace": "default", "resourceVersion": "5"}
    job = manifest()
    job["metadata"] = {**job["metadata"], **metadata, "uid": "u"}
    owner = {"kind": "PyTorchJob", "name": "job", "uid": "u", "controller": True}
    marks = {PYTORCH_JOB.job_label: "job"}
    pod = {"metadata": {**metadata, "name": "job-worker-0", "uid": "p", "labels": marks, "ownerReferences": [owner]}}
    refused = []

    def answer(verb, path, params):
        if not path.endswith("/pods"):
            return job if path.endswith("/pytorchjobs/job") else listed(job)
        if refused:
            refused.append(path)
            raise FORBIDDEN
        return listed(pod)

    async def until(what):
        async with asyncio.timeout(10):
            while not what():  # noqa: ASYNC110 - any condition
                await asyncio.sleep(0.01)

    async def main():
        feed = Feed(Cluster(answer), "default", PYTORCH_JOB)
        news = feed.subscribe("job", "u")
        try:
            await until(lambda: news.look().known)
            assert len(news.look().snapshot.pods) == 1
            refused.append("from now on")
            feed._pod_reflector.relist()
            await until(lambda: len(refused) > 5)
            if patience < 1:
                await until(lambda: not news.look().snapshot.pods_listed)
            else:
                with pytest.raises(JobForbiddenError):
                    await news.refresh()
            return news.look().snapshot
        finally:
            await news.close()

    seen = asyncio.run(main())
    assert (len(seen.pods), seen.pods_listed) == ((1, True) if patience > 1 else (0, False))
