"""What the training operator does not see: it stands still for a moment. Runs alone, since all gangs wait for it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest
from kubeflow_training.jobs.observation import Phase, Reason, observe

from tests.kubeflow_training.kills.installation import until
from tests.kubeflow_training.kills.test_api_server import TOOL
from tests.kubeflow_training.waiter import Place, Waiter

pytestmark = [pytest.mark.cluster, pytest.mark.outage]


@pytest.fixture
def standing_still() -> Callable[[], AbstractContextManager[None]]:
    if not TOOL.is_file():
        pytest.skip("the training operator may be another cluster's")
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] and Path(process.info["cmdline"][0]).name == "training-operator":
            break
    else:
        pytest.skip("the training operator of this cluster is no process of this machine")

    @contextmanager
    def stopped() -> Iterator[None]:
        process.send_signal(signal.SIGSTOP)
        try:
            until(lambda: process.status() == psutil.STATUS_STOPPED)
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    return stopped


@pytest.fixture
def place(rights, tmp_path):
    found = Place(rights, tmp_path)
    yield found
    found.close()


def test_a_gang_whose_pod_was_made_anew_has_failed_and_stays_so(place, standing_still):
    """A pod that is removed unseen is made again and runs, and the job stays Running: its gang cannot take it in."""

    def removed(name, seen):
        with standing_still():
            pod = f"{name}-worker-0"
            place.rights._core.delete_namespaced_pod(pod, place.namespace, grace_period_seconds=0)
            until(lambda: seen().pods_running == 1)

    async def main():
        job = await asyncio.to_thread(place.pretend, nodes=2)
        name = job.job["metadata"]["name"]
        waiter = Waiter(place, name, job.uid)
        await waiter.until(lambda: waiter.waiting.observation and waiter.waiting.observation.pods_running == 2)
        await asyncio.sleep(1.1)  # the API tells whole seconds
        await asyncio.to_thread(removed, name, lambda: waiter.waiting.observation)
        end = await waiter.end()

        def again():
            found = place.backend.read(name, place.namespace)
            return found if sum(pod["status"]["phase"] == "Running" for pod in found.pods) == 2 else None

        # One who comes when both run again sees the same. After an outage of the API server, such as the test before
        # this one makes, the operator's watch of pods may begin anew only after a minute: client-go's own backoff.
        later = await asyncio.to_thread(until, again, 120)
        late = Waiter(place, name, job.uid)
        return [end.observation, observe(later.job, later.pods, later.events), (await late.end()).observation]

    for seen in asyncio.run(main()):
        assert (seen.phase, seen.reason, seen.replica) == (Phase.FAILED, Reason.EVICTED, "worker-0"), seen
        assert "removed from outside" in seen.message
