"""The logs of real pods while one waits: nothing twice, nothing left out unsaid."""

from __future__ import annotations

import asyncio
import json

import pytest
from kubeflow_training.jobs.observation import Phase

from tests.kubeflow_training.kills.installation import until
from tests.kubeflow_training.meeting import MEET
from tests.kubeflow_training.waiter import Place, Waiter

pytestmark = pytest.mark.cluster
COUNT = "i=0; while [ $i -lt {count} ]; do echo $RANK $i; i=$((i+1)); done; "
SLOWLY = "i=0; while [ $i -lt {count} ]; do echo $RANK $i; i=$((i+1)); [ $((i%{each})) = 0 ] && sleep {pause}; done; "
AFTER_THE_OTHERS = MEET + "[ $RANK = 0 ] && sleep 4; exit 0"  # the master's success ends the workers
MEGABYTES = "yes $(printf '%0999d' 0) | head -n {lines} | awk '{{print NR + {first} \" \" $0}}'; "


@pytest.fixture
def place(rights, tmp_path):
    found = Place(rights, tmp_path)
    yield found
    found.close()


def name(snapshot):
    return snapshot.job["metadata"]["name"]


def numbers(rank, count):
    return [f"{rank} {n}" for n in range(count)]


def test_each_line_of_each_rank_comes_once_though_the_connection_breaks(place):
    async def main():
        job = await asyncio.to_thread(
            place.script, SLOWLY.format(count=3000, each=100, pause=0.2) + AFTER_THE_OTHERS, 2
        )
        waiter = Waiter(place, name(job), job.uid, ranks="all")
        breaks = 0
        while not waiter.task.done():
            await asyncio.sleep(1)
            if waiter.log.lines and breaks < 4:
                place.proxy.cut()
                await asyncio.sleep(0.3)
                place.proxy.mend()
                breaks += 1
        return await waiter.end(), waiter, breaks

    end, waiter, breaks = asyncio.run(main())
    assert (end.observation.phase, breaks) == (Phase.SUCCEEDED, 4)
    assert waiter.of("master-0") == numbers(0, 3000)
    assert waiter.of("worker-0") == numbers(1, 3000)
    assert waiter.log.gaps == []


def test_a_job_that_ends_during_an_outage_is_read_to_its_end(place, monkeypatch):
    """The readers' pauses have grown while the cluster was away; when it is back they go on at once."""
    from kubeflow_training.jobs.kubernetes import logs, podlog
    from kubeflow_training.jobs.kubernetes.client import Backoff

    monkeypatch.setattr(podlog, "Backoff", lambda: Backoff(first=60, most=60))
    monkeypatch.setattr(logs, "_FINISH_SECONDS", 5.0)

    async def main():
        job = await asyncio.to_thread(place.script, SLOWLY.format(count=700, each=100, pause=1) + "exit 0")
        waiter = Waiter(place, name(job), job.uid, ranks="all")
        await waiter.until(lambda: waiter.log.lines > 100)
        place.proxy.cut()
        await asyncio.to_thread(
            until, lambda: "completionTime" in place.backend.read(name(job), place.namespace).job.get("status", {})
        )
        place.proxy.mend()
        return await waiter.end(), waiter

    end, waiter = asyncio.run(main())
    assert end.observation.phase is Phase.SUCCEEDED
    assert waiter.of("master-0") == numbers(0, 700)
    assert waiter.log.gaps == []


def test_followed_logs_cost_two_or_three_requests_per_pod(place):
    async def main():
        job = await asyncio.to_thread(place.script, SLOWLY.format(count=300, each=50, pause=0.6) + AFTER_THE_OTHERS, 2)
        waiter = Waiter(place, name(job), job.uid, ranks="all")
        await waiter.end()
        return waiter

    waiter = asyncio.run(main())
    assert waiter.feed.cluster.requests["log"] <= 6
    assert waiter.of("worker-0") == numbers(1, 300)


def test_another_triggerer_goes_on_in_the_middle_of_the_log(place):
    async def main():
        job = await asyncio.to_thread(
            place.script, SLOWLY.format(count=5000, each=250, pause=0.2) + AFTER_THE_OTHERS, 2
        )
        lines, left = [], None
        for count in (700, 2500, 6000):
            waiter = Waiter(place, name(job), job.uid, ranks="all", left=left)
            await waiter.until(lambda w=waiter, n=count: w.log.lines > n)
            left = json.loads(json.dumps(await waiter.stop()))
            lines += waiter.lines
        waiter = Waiter(place, name(job), job.uid, ranks="all", left=left)
        await waiter.end()
        # Once more after the end: all has been shown.
        again = Waiter(place, name(job), job.uid, ranks="all", left=waiter.log.state())
        await again.end()
        return lines + waiter.lines, again.lines

    lines, again = asyncio.run(main())
    for replica, rank in (("master-0", 0), ("worker-0", 1)):
        mark = f"[{replica}] "
        assert [line.removeprefix(mark) for line in lines if line.startswith(mark)] == numbers(rank, 5000)
    assert not [line for line in again if line.startswith("[")]


def test_only_the_first_rank_is_shown_if_that_is_wished(place):
    async def main():
        job = await asyncio.to_thread(place.script, COUNT.format(count=3), 2)
        waiter = Waiter(place, name(job), job.uid, ranks="first")
        await waiter.end()
        return waiter

    waiter = asyncio.run(main())
    assert (waiter.of("master-0"), waiter.of("worker-0")) == (numbers(0, 3), [])


def test_last_words_without_a_lines_end_and_bytes_that_are_no_text(place):
    async def main():
        job = await asyncio.to_thread(place.script, r"printf 'a\377b\n'; printf 'the end'; exit 11")
        waiter = Waiter(place, name(job), job.uid, ranks="all")
        return await waiter.end(), waiter

    end, waiter = asyncio.run(main())
    assert waiter.of("master-0") == ["a\ufffdb", "the end"]
    assert end.tails == {"master-0": ["a\ufffdb", "the end"]}


def test_a_pod_that_is_deleted_while_its_log_is_read_loses_no_line(place):
    async def main():
        script = "trap 'echo stopped; exit 3' TERM; " + COUNT.format(count=500) + "while :; do sleep 0.1; done"
        job = await asyncio.to_thread(place.script, script, 2, grace_seconds=20)
        waiter = Waiter(place, name(job), job.uid, ranks="all")
        await waiter.until(lambda: len(waiter.of("worker-0")) == 500)
        await asyncio.to_thread(place.rights._core.delete_namespaced_pod, f"{name(job)}-worker-0", place.namespace)
        await waiter.until(lambda: "stopped" in waiter.of("worker-0"), 20)
        await waiter.stop()
        return waiter

    waiter = asyncio.run(main())
    assert waiter.of("worker-0")[:501] == [*numbers(1, 500), "stopped"]
    assert waiter.log.gaps == []


def test_a_pod_that_is_deleted_while_nobody_could_read_leaves_a_gap_that_is_told(place):
    async def main():
        job = await asyncio.to_thread(place.script, COUNT.format(count=50) + "sleep 600", 2)
        waiter = Waiter(place, name(job), job.uid, ranks="all")
        await waiter.until(lambda: len(waiter.of("worker-0")) == 50)
        place.proxy.cut()
        await asyncio.to_thread(
            place.rights._core.delete_namespaced_pod, f"{name(job)}-worker-0", place.namespace, grace_period_seconds=0
        )
        await asyncio.sleep(1)
        place.proxy.mend()
        await waiter.until(lambda: waiter.log.gaps, 30)
        await waiter.stop()
        return waiter

    waiter = asyncio.run(main())
    (gap,) = waiter.log.gaps
    assert (gap["rank"], gap["to"]) == ("worker-0", None)
    assert gap["from"].startswith("20")
    assert "the pod was removed before its log was read to the end" in gap["why"]
    assert any("[worker-0] -- lines may be missing here, from 20" in line for line in waiter.lines)


def whole_but_for_what_is_told(lines, last):
    """How many of the numbered lines are missing: they come in order, and where some are missing the log says so."""
    missing, known, told = 0, 0, False
    for line in lines:
        if "lines may be missing" in line:
            told = True
            continue
        number = int(line.split(" ")[0])
        assert (number > known + 1) == told, (known, number, told)
        missing, known, told = missing + number - known - 1, number, False
    assert (known, told) == (last, False)
    return missing


def test_rotation_by_the_node_loses_nothing_and_what_nobody_read_in_time_is_a_gap(place):
    """The kubelet rotates at 10 MiB and looks every ten seconds; the API gives the newest file alone."""

    async def main():
        one, two = (MEGABYTES.format(lines=12_000, first=first) for first in (0, 12_000))
        job = await asyncio.to_thread(place.script, f"{one} sleep 14; {two} sleep 14; echo 24001; sleep 600", cpus=0.5)
        follower = Waiter(place, name(job), job.uid, ranks="all")
        stopped = Waiter(place, name(job), job.uid, ranks="all")
        await stopped.until(lambda: stopped.log.lines > 5_000)
        left = await stopped.stop()
        await follower.until(lambda: "24001" in follower.of("master-0")[-1:])
        again = Waiter(place, name(job), job.uid, ranks="all", left=left)
        await again.until(lambda: "24001" in again.of("master-0")[-1:], 30)
        await follower.stop()
        await again.stop()
        return follower, stopped, again

    follower, stopped, again = asyncio.run(main())
    missing = whole_but_for_what_is_told(follower.of("master-0"), 24_001)
    # A machine that is too slow for this log has outrun its reader, and nothing else may be missing.
    assert bool(missing) == bool(follower.log.gaps)
    assert all("faster than it could be read" in gap["why"] for gap in follower.log.gaps)
    # What the file still holds comes, and nothing of it twice.
    assert whole_but_for_what_is_told(stopped.of("master-0") + again.of("master-0"), 24_001) > 0
    gap = again.log.gaps[-1]
    assert "rotated" in gap["why"]
    assert gap["from"] < gap["to"]


def test_a_container_that_is_started_again_keeps_both_logs(place):
    """As long as the second one lives: the node keeps the log of one dead container only."""

    async def main():
        script = (
            "if [ -e /dev/shm/tried ]; then " + COUNT.format(count=30) + "sleep 3; exit 0; fi; touch /dev/shm/tried; "
        )
        script += COUNT.format(count=20) + "exit 1"
        job = await asyncio.to_thread(place.script, script, restart="OnFailure")
        waiter = Waiter(place, name(job), job.uid, ranks="all")
        return await waiter.end(), waiter

    end, waiter = asyncio.run(main())
    assert end.observation.phase is Phase.SUCCEEDED
    assert waiter.of("master-0") == numbers(0, 20) + numbers(0, 30)
    assert waiter.log.gaps == []


def test_the_limit_ends_the_reading_and_progress_is_still_seen(place, monkeypatch):
    from kubeflow_training.jobs.kubernetes import podlog

    monkeypatch.setattr(podlog, "_PROGRESS_SECONDS", 1.0)

    async def main():
        script = COUNT.format(count=500) + "sleep 2; echo '@progress {\"step\": 7}'; sleep 4"
        job = await asyncio.to_thread(place.script, script)
        waiter = Waiter(place, name(job), job.uid, ranks="all", log_limit="100 lines")
        await waiter.until(lambda: waiter.log.progress, 30)
        return await waiter.end(), waiter

    end, waiter = asyncio.run(main())
    assert waiter.of("master-0") == numbers(0, 100)
    assert len([line for line in waiter.lines if "log_limit of 100 lines is reached" in line]) == 1
    assert end.observation.progress.step == 7
