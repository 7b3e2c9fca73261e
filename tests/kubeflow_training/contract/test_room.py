"""Jobs that do not fit: they wait as `queued`, say what is missing, and start when there is room."""

from __future__ import annotations

import pytest
from kubeflow_training.jobs.elastic import nodes_to_be_had
from kubeflow_training.jobs.observation import Phase

HALF = {"cpus": {"cpus": 2}, "memory": {"memory_gb": 4}, "gpus": {"gpus": 2}}
WORDS = {"cpus": "cpu", "memory": "memory", "gpus": "gpu"}


@pytest.mark.parametrize("what", HALF)
def test_a_job_waits_for_what_is_missing_and_says_so(place, what):
    first = place.create(place.on_small_machine(place.manifest("sleep 600", nodes=2, **HALF[what])))
    first.wait(Phase.RUNNING)
    second = place.create(place.on_small_machine(place.manifest("sleep 600", **HALF[what])))
    seen = place.until(lambda: found if WORDS[what] in (found := second.observe()).message.lower() else None)
    assert (seen.phase, seen.pods_running) == (Phase.QUEUED, 0)
    assert nodes_to_be_had(second.pods()) == 0
    assert second.observe().phase is Phase.QUEUED
    first.delete(grace_seconds=0)
    second.wait(Phase.RUNNING)
    second.delete(grace_seconds=0)
    first.gone()
    second.gone()


def test_how_much_of_a_gang_fits_can_be_seen(place):
    first = place.create(place.on_small_machine(place.manifest("sleep 600", gpus=2)))
    first.wait(Phase.RUNNING)
    gang = place.create(place.on_small_machine(place.manifest("sleep 600", nodes=3, gpus=1)))
    place.until(lambda: "gpu" in gang.observe().message.lower())
    place.until(lambda: nodes_to_be_had(gang.pods()) == 2)
    assert gang.observe().phase in (Phase.QUEUED, Phase.STARTING)
    for job in (gang, first):
        job.delete(grace_seconds=0)
        job.gone()
