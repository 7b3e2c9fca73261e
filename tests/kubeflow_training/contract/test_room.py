"""Jobs that do not fit: they wait as `queued`, say what is missing, and start when there is room."""

from __future__ import annotations

import pytest
from kubeflow_training.jobs.elastic import elastic, nodes_to_be_had, resized
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


def test_a_rigid_gang_starts_at_the_size_that_fits_and_again_at_its_own(place):
    first = place.create(place.on_small_machine(place.manifest("sleep 600", gpus=2)))
    first.wait(Phase.RUNNING)
    manifest = place.on_small_machine(place.manifest("sleep 600", nodes=3, gpus=1))
    gang = place.create(manifest)
    place.until(lambda: "gpu" in gang.observe().message.lower())
    size = 2
    place.until(lambda: nodes_to_be_had(gang.pods()) == size)
    assert gang.observe().phase in (Phase.QUEUED, Phase.STARTING)
    gang.delete(uid=gang.uid, grace_seconds=0)
    gang.gone()
    smaller = place.create(resized(manifest, size))
    seen = smaller.wait(Phase.RUNNING)
    assert (seen.pods_running, seen.pods_wanted) == (2, 2)
    for job in (smaller, first):
        job.delete(grace_seconds=0)
        job.gone()
    whole = place.create(resized(manifest, 3))
    assert whole.manifest == manifest
    assert whole.wait(Phase.RUNNING).pods_running == 3
    whole.delete(grace_seconds=0)
    whole.gone()


def test_an_elastic_gang_starts_with_what_fits_and_grows(place):
    first = place.create(place.on_small_machine(place.manifest("sleep 600", gpus=2)))
    first.wait(Phase.RUNNING)
    gang = place.create(place.on_small_machine(elastic(place.manifest("sleep 600", nodes=2, gpus=2), min_nodes=1)))
    seen = gang.wait(Phase.RUNNING)
    assert (seen.pods_running, seen.pods_wanted) == (1, 2)
    assert "1 of 2 pods run" in seen.message
    first.delete(grace_seconds=0)
    place.until(lambda: gang.observe().pods_running == 2)
    assert "2 of 2 pods run" in gang.observe().message
    for job in (first, gang):
        job.delete(grace_seconds=0)
        job.gone()


def test_an_elastic_gang_waits_while_not_even_its_least_fits(place):
    first = place.create(place.on_small_machine(place.manifest("sleep 600", gpus=3)))
    first.wait(Phase.RUNNING)
    gang = place.create(place.on_small_machine(elastic(place.manifest("sleep 600", nodes=3, gpus=1), min_nodes=2)))
    seen = place.until(lambda: found if "gpu" in (found := gang.observe()).message.lower() else None)
    assert seen.phase in (Phase.QUEUED, Phase.STARTING)
    place.until(lambda: nodes_to_be_had(gang.pods()) == 1)
    first.delete(grace_seconds=0)
    gang.wait(Phase.RUNNING)
    for job in (first, gang):
        job.delete(grace_seconds=0)
        job.gone()
