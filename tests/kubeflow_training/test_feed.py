"""A feed whose cluster refuses, forgets, or is left in a hurry: what a real cluster does too seldom to wait for it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from kubeflow_training.jobs.errors import JobRefusedError
from kubeflow_training.jobs.kinds import PYTORCH_JOB
from kubeflow_training.jobs.kubernetes.client import ExpiredError
from kubeflow_training.jobs.kubernetes.watching import reflector
from kubeflow_training.jobs.kubernetes.watching.feed import Feed
from kubeflow_training.jobs.kubernetes.watching.reflector import Handler, Reflector
from kubeflow_training.jobs.observation import Phase
from kubeflow_training.jobs.waiting.job import Waiting
from kubeflow_training.jobs.waiting.joblog import JobLog

from tests.kubeflow_training.test_elastic import elastic, manifest, succeeded

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
            raise ExpiredError(path, "410", "It is listed anew")
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
