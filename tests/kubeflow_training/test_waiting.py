"""Waiting for many jobs on a real cluster: one watch for all, and no end missed, whatever happens to the API."""

from __future__ import annotations

import asyncio
import time

import pytest
from kubeflow_training.jobs.kinds import PYTORCH_JOB
from kubeflow_training.jobs.observation import Phase
from kubeflow_training.jobs.observation.reasons import Reason
from kubeflow_training.jobs.waiting.limits import Limits

from tests.kubeflow_training.waiter import Place, Waiter

pytestmark = pytest.mark.cluster


@pytest.fixture
def place(rights, tmp_path):
    found = Place(rights, tmp_path)
    yield found
    found.close()


def name(snapshot):
    return snapshot.job["metadata"]["name"]


async def create(*makers):
    return await asyncio.gather(*(asyncio.to_thread(make) for make in makers))


def test_many_wait_with_two_connections_and_each_sees_its_own_end(place):
    async def main():
        jobs = await create(
            *(lambda n=n: place.pretend("3s", exit_code=n % 3 and 11, nodes=1 + n % 2) for n in range(12))
        )
        waiters = [Waiter(place, name(job), job.uid) for job in jobs]
        cluster = waiters[0].feed.cluster
        ends = [await waiter.end() for waiter in waiters]
        return ends, cluster

    ends, cluster = asyncio.run(main())
    assert [end.observation.phase for end in ends] == [Phase.FAILED if n % 3 else Phase.SUCCEEDED for n in range(12)]
    failed = [end.observation for end in ends if end.observation.phase is Phase.FAILED]
    assert {(item.reason, item.exit_code) for item in failed} == {(Reason.BAD_DATA, 11)}
    # Two lists and two watches for all; a failed job is read once more, with its events.
    assert cluster.requests["watch"] == 2
    assert cluster.requests["list"] - len(failed) <= 4
    assert cluster.requests["get"] == len(failed)


def test_those_who_come_later_see_what_happened_before(place):
    async def main():
        first, second = await create(lambda: place.pretend(None), lambda: place.pretend("1s"))
        waiter = Waiter(place, name(first), first.uid)
        await waiter.until(lambda: waiter.waiting.observation)
        other = Waiter(place, name(second), second.uid)
        assert (await other.end()).observation.phase is Phase.SUCCEEDED
        again = Waiter(place, name(second), second.uid)
        assert (await again.end()).observation.phase is Phase.SUCCEEDED
        late = await asyncio.to_thread(place.pretend, "1s")
        assert (await Waiter(place, name(late), late.uid).end()).observation.phase is Phase.SUCCEEDED
        await waiter.stop()

    asyncio.run(main())


def test_ends_during_an_outage_are_seen_after_it(place):
    async def main():
        jobs = await create(*(lambda: place.pretend(None) for _ in range(6)))
        removed = await asyncio.to_thread(place.pretend, None)
        waiters = [Waiter(place, name(job), job.uid) for job in [*jobs, removed]]
        for waiter in waiters:
            await waiter.until(lambda w=waiter: w.waiting.observation and w.waiting.observation.phase is Phase.RUNNING)
        place.proxy.cut()
        await asyncio.to_thread(place.finish, *jobs, removed)
        end = time.monotonic() + 30
        while "completionTime" not in place.backend.read(name(removed), place.namespace).job.get("status", {}):
            assert time.monotonic() < end
            await asyncio.sleep(0.2)
        # Ended and removed while nobody could look: it counts as it ended.
        place.backend.delete(name(removed), place.namespace)
        await asyncio.sleep(3)
        assert not any(waiter.task.done() for waiter in waiters)
        place.proxy.mend()
        began = time.monotonic()
        ends = [await waiter.end(20) for waiter in waiters]
        return ends, time.monotonic() - began, waiters

    ends, seconds, waiters = asyncio.run(main())
    assert {end.observation.phase for end in ends} == {Phase.SUCCEEDED}
    assert seconds < 15
    assert any("cannot ask about job" in line for line in waiters[0].lines)


def test_a_version_that_has_expired_is_listed_anew(place):
    async def main():
        job = await asyncio.to_thread(place.pretend, "12s")
        gone = await asyncio.to_thread(place.pretend, None)
        waiters = [Waiter(place, name(job), job.uid), Waiter(place, name(gone), gone.uid)]
        for waiter in waiters:
            await waiter.until(lambda w=waiter: w.waiting.observation and w.waiting.observation.phase is Phase.RUNNING)
        feed = waiters[0].feed
        lists = feed.cluster.requests["list"]
        place.proxy.cut()
        await asyncio.to_thread(place.backend.delete, name(gone), place.namespace)
        while feed.cluster.requests["list"] < lists + 2:  # once more if a request was on its way already
            assert not waiters[0].task.done()
            place.proxy.cut()
            for reflector in (feed._job_reflector, feed._pod_reflector):
                reflector._version = "1"  # what compaction makes of a version that was good once
            place.proxy.mend()
            await asyncio.sleep(2)
        ends = [await waiter.end() for waiter in waiters]
        return ends, feed.cluster.requests["list"] - lists

    (ended, gone), lists = asyncio.run(main())
    assert ended.observation.phase is Phase.SUCCEEDED
    assert gone.observation.phase in (Phase.LOST, Phase.CANCELLED)
    assert gone.observation.reason is Reason.DELETED
    assert lists >= 2


def test_a_large_gang_that_starts_slowly_is_not_taken_for_broken(place):
    """Beyond ten pods the cluster tells their creations as one event, and events are read while pods start."""

    async def main():
        job = await asyncio.to_thread(place.pretend, nodes=13, starts_after="12s", ends_after="8s")
        waiter, seen = Waiter(place, name(job), job.uid), []
        while not waiter.task.done():
            if (now := waiter.waiting.observation) is not None and (not seen or seen[-1] != now.phase):
                seen.append(now.phase)
            await asyncio.sleep(0.05)
        return await waiter.end(), seen

    end, seen = asyncio.run(main())
    assert end.observation.phase is Phase.SUCCEEDED
    assert Phase.FAILED not in seen
    assert Phase.STARTING in seen


def test_a_revoked_token_is_no_failed_job_and_a_new_one_is_taken(fewer_rights, tmp_path):
    from tests.kubeflow_training.rights import ACCOUNT

    rights = fewer_rights()
    place = Place(rights, tmp_path)

    async def main():
        job = await asyncio.to_thread(place.pretend, "12s")
        waiter = Waiter(place, name(job), job.uid)
        await waiter.until(lambda: waiter.waiting.observation and waiter.waiting.observation.phase is Phase.RUNNING)
        await asyncio.to_thread(rights._core.delete_namespaced_service_account, ACCOUNT, place.namespace)
        await asyncio.to_thread(
            rights._core.create_namespaced_service_account, place.namespace, {"metadata": {"name": ACCOUNT}}
        )
        # A watch that is open goes on; the next request is refused, once the API server forgets that it knew the token.
        end = time.monotonic() + 120  # readers' pauses have grown, and not each trouble is told
        while not any("401" in line for line in waiter.lines):
            assert time.monotonic() < end
            place.proxy.cut()
            place.proxy.mend()
            await asyncio.sleep(1)
        assert not waiter.task.done()
        await asyncio.to_thread(place.renew)
        return await waiter.end(60)

    try:
        assert asyncio.run(main()).observation.phase is Phase.SUCCEEDED
    finally:
        place.backend = type(place.backend)(rights.client())
        place.proxy.close()


def test_an_account_that_may_not_watch_lists_instead(fewer_rights, tmp_path, monkeypatch):
    from kubeflow_training.jobs.kubernetes.watching import reflector

    monkeypatch.setattr(reflector, "_REFUSED_SECONDS", 1.0)
    rights = fewer_rights()
    role = rights._rbac.read_namespaced_role("kubeflow-training", rights.namespace)
    for rule in role.rules:
        rule.verbs = [verb for verb in rule.verbs if verb != "watch"]
    rights._rbac.replace_namespaced_role("kubeflow-training", rights.namespace, role)
    place = Place(rights, tmp_path)

    async def main():
        job = await asyncio.to_thread(place.pretend, "3s")
        waiter = Waiter(place, name(job), job.uid)
        end = await waiter.end()
        return end, waiter.feed.cluster.requests

    try:
        end, requests = asyncio.run(main())
        assert end.observation.phase is Phase.SUCCEEDED
        assert requests["list"] > 4
    finally:
        place.proxy.close()


def test_limits_are_kept_without_any_news(place):
    async def main():
        running = await asyncio.to_thread(place.pretend, None)
        queued = await asyncio.to_thread(place.pretend, None, cpus=10_000)
        now = time.time()
        waiters = [
            Waiter(place, name(running), running.uid, limits=Limits(queue_until=now + 5, run_seconds=4)),
            Waiter(place, name(queued), queued.uid, limits=Limits(queue_until=now + 6, run_seconds=1)),
            Waiter(place, name(queued), queued.uid, limits=Limits(until=now + 3)),
        ]
        return [await waiter.end(20) for waiter in waiters], now, waiters

    (ran, queued, over), now, waiters = asyncio.run(main())
    assert {end.kind for end in (ran, queued, over)} == {"timeout"}
    assert "it runs for" in ran.why
    assert 4 <= waiters[0].ended_at - ran.observation.started.timestamp() < 9
    assert "it waits in the queue" in queued.why
    assert "nsufficient cpu" in queued.why
    assert 0 <= waiters[1].ended_at - (now + 6) < 4
    assert 0 <= waiters[2].ended_at - (now + 3) < 4


def test_a_job_that_is_not_there_is_lost_or_waited_for(place):
    async def main():
        lost = await Waiter(place, "no-such-job").end(20)
        missing = "wait-for-me"
        waiter = Waiter(place, missing, must_exist=False, limits=Limits(until=time.time() + 2))
        over = await waiter.end(20)
        other = await asyncio.to_thread(place.pretend, None)
        replaced = await Waiter(place, name(other), "00000000-0000-0000-0000-000000000000").end(20)
        return lost, over, replaced

    lost, over, replaced = asyncio.run(main())
    assert lost.observation.phase is Phase.LOST
    assert (over.kind, over.observation) == ("timeout", None)
    assert replaced.observation.phase is Phase.LOST


def test_when_the_last_one_leaves_all_is_closed(place):
    async def main():
        job = await asyncio.to_thread(place.pretend, None)
        waiters = [Waiter(place, name(job), job.uid) for _ in range(3)]
        for waiter in waiters:
            await waiter.until(lambda w=waiter: w.waiting.observation)
        session = waiters[0].feed.cluster._session
        for waiter in waiters:
            await waiter.stop()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert left == []
        assert session._client.rest_client.pool_manager.closed
        # And the next one begins anew.
        again = Waiter(place, name(job), job.uid)
        await again.until(lambda: again.waiting.observation)
        await again.stop()

    asyncio.run(main())


@pytest.mark.parametrize("kind", [PYTORCH_JOB], ids=str)
def test_a_namespace_that_does_not_exist_says_so(place, kind):
    from kubeflow_training.jobs.kubernetes.client import from_kubeconfig
    from kubeflow_training.jobs.kubernetes.watching.sharing import shared_feed

    async def main():
        feed = shared_feed("nowhere", lambda: from_kubeconfig(str(place.path)), "no-such-namespace", kind)
        news = feed.subscribe("job")
        async with asyncio.timeout(20):
            while news.look().trouble is None:
                await news.changed()
        found = news.look()
        await news.close()
        return found

    found = asyncio.run(main())
    # The account has no rights there, and Kubernetes tells no more than that.
    assert "forbidden" in str(found.trouble)
    assert not found.known
