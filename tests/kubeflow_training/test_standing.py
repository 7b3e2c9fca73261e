"""Jobs of the local cluster that wait are held back, released and moved; a kill of the supervisor changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from kubeflow_training.jobs.errors import JobError, JobRefusedError
from kubeflow_training.jobs.kubernetes.standing import Standings
from kubeflow_training.jobs.local.standing import HELD, Standing
from kubeflow_training.jobs.observation import Phase

from tests.kubeflow_training.conftest import Cluster

SLEEP = "import time; time.sleep(600)"


def names(cluster: Cluster) -> list[tuple[str, int | None]]:
    return [(job.name, job.position) for job in cluster.client.queue()[0]]


def stand(cluster: Cluster, name: str, **change: Any) -> Standing:
    found = cluster.read(name)
    assert found is not None
    return cluster.client.stand(name, "default", found.uid, **change)


@pytest.fixture
def crowded(cluster: Cluster) -> Cluster:
    """A machine that one job fills, and three that wait for it."""
    cluster.submit(SLEEP, "first", cpus=4)
    cluster.wait(Phase.RUNNING, name="first")
    for name in ("a", "b", "c"):
        cluster.submit(SLEEP, name, cpus=4)
    cluster.until(lambda: "3 ahead" not in cluster.observe("c").message and "2 ahead" in cluster.observe("c").message)
    return cluster


def test_who_is_held_back_keeps_nobody_waiting(crowded: Cluster) -> None:
    assert names(crowded) == [("a", 1), ("b", 2), ("c", 3)]
    assert stand(crowded, "c", priority=5) == Standing(False, 5)
    assert stand(crowded, "c", held=True) == Standing(True, 5)
    assert stand(crowded, "a", held=True) == Standing(True, 0)
    assert names(crowded) == [("b", 1), ("c", None), ("a", None)]
    crowded.until(lambda: crowded.observe("c").message == HELD)
    assert crowded.observe("c").phase is Phase.QUEUED
    crowded.kill()
    crowded.start()
    crowded.client.delete("first", "default", grace_seconds=0)
    crowded.wait(Phase.RUNNING, name="b")
    assert [job.name for job in crowded.client.queue()[1]] == ["b"]
    crowded.client.delete("b", "default", grace_seconds=0)
    crowded.until(lambda: crowded.read("b") is None)
    assert crowded.observe("a").message == crowded.observe("c").message == HELD  # nothing runs, and they wait on
    assert stand(crowded, "a", held=False) == Standing()
    crowded.wait(Phase.RUNNING, name="a")
    assert crowded.observe("c").phase is Phase.QUEUED


def test_the_highest_priority_goes_first(crowded: Cluster) -> None:
    stand(crowded, "c", priority=1)
    stand(crowded, "a", priority=-1)
    assert names(crowded) == [("c", 1), ("b", 2), ("a", 3)]
    crowded.client.delete("first", "default", grace_seconds=0)
    crowded.wait(Phase.RUNNING, name="c")
    assert names(crowded) == [("b", 1), ("a", 2)]


def test_what_cannot_be_is_refused(crowded: Cluster) -> None:
    with pytest.raises(JobRefusedError, match="does not wait any more"):
        stand(crowded, "first", held=True)
    with pytest.raises(JobRefusedError, match="too large"):
        stand(crowded, "a", priority=10**9)
    with pytest.raises(JobError, match="it is gone"):
        crowded.client.stand("a", "default", "another", held=True)
    with pytest.raises(JobError, match="it is gone"):
        crowded.client.stand("../a", "default", "another", held=True)
    # Whatever else stands in its file, the queue goes on.
    folder = crowded.home / "jobs/default/a"
    for text in ("{", '{"uid": "another", "held": true, "priority": 1}', '{"priority": "x"}'):
        (folder / "queue.json").write_text(text)
        assert names(crowded)[0] == ("a", 1)
    found = crowded.read("a")
    assert found is not None
    with pytest.raises(JobRefusedError, match="no queue holds it back"):
        Standings(None).stand(found.job, held=True)
