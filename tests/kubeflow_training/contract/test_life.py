"""How jobs begin and end: phases, failures, deletion, deadlines, clocks."""

from __future__ import annotations

import copy
import time

import pytest
from kubeflow_training.jobs.errors import JobRefusedError, ManifestError
from kubeflow_training.jobs.observation import Phase, Reason

from tests.kubeflow_training.meeting import MEET

SAY = "> ${TERMINATION_LOG:-/dev/termination-log}"


def test_phases_come_in_order_and_logs_while_it_runs(place):
    job = place.submit("for i in 1 2 3 4 5 6; do echo begin $i; sleep 0.4; done; echo last")
    phases, lines, position = [Phase.QUEUED], [], None
    while not phases[-1].ended:
        seen = job.observe()
        if seen.phase is not phases[-1]:
            phases.append(seen.phase)
        if seen.phase in (Phase.RUNNING, Phase.SUCCEEDED):
            chunk = place.connect().logs(job.pods()[0], position)
            lines, position = lines + chunk.lines, chunk.position
        time.sleep(place.pause)
    order = [Phase.QUEUED, Phase.STARTING, Phase.RUNNING, Phase.SUCCEEDED]
    assert phases == [phase for phase in order if phase in phases]
    assert Phase.RUNNING in phases
    lines += job.backend.logs(job.pods()[0], position).lines
    assert lines == [*(f"begin {n}" for n in range(1, 7)), "last"]


def test_the_rank_that_failed_first_is_named_and_the_others_are_ended(place):
    job = place.submit(
        'if [ "$RANK" = 2 ]; then echo reading; echo \'{"exit_code": 11, "message": "shard 3 is broken", "rank": 2}\' '
        f"{SAY}; exit 11; fi; sleep 600",
        nodes=3,
        grace_seconds=1,
    )
    seen = job.ended()
    assert (seen.phase, seen.reason, seen.retryable) == (Phase.FAILED, Reason.BAD_DATA, False)
    assert (seen.failing_rank, seen.replica, seen.exit_code) == (2, "worker-1", 11)
    assert seen.pod == f"{job.name}-worker-1"
    assert seen.node
    assert "shard 3 is broken" in seen.message
    pod = next(pod for pod in job.pods() if pod["metadata"]["name"] == seen.pod)
    assert job.backend.tail(pod) == ["reading"]


def test_a_killed_rank_is_the_cause_and_broken_peers_are_its_victims(place):
    job = place.submit(MEET + '[ "$RANK" = 1 ] && exit 137; sleep 8; echo Connection closed by peer; exit 21', nodes=2)
    seen = job.ended()
    assert (seen.reason, seen.retryable, seen.replica, seen.exit_code) == (Reason.KILLED, True, "worker-0", 137)


def test_last_lines_stand_in_for_a_termination_message(place):
    job = place.submit("echo 'the model is too large: CUDA out of memory'; exit 1")
    seen = job.ended()
    assert (seen.exit_code, seen.reason) == (1, Reason.OUT_OF_MEMORY)
    assert "too large" in seen.message


def test_a_command_that_does_not_exist_is_the_users_error(place):
    job = place.submit("", command=["no-such-program"])
    seen = job.wait(Phase.FAILED)
    assert (seen.reason, seen.retryable) == (Reason.USER_ERROR, False)
    assert "no-such-program" in seen.message


def test_the_masters_success_is_the_jobs(place):
    job = place.submit('[ "$RANK" = 0 ] && exit 0; sleep 600', nodes=2, grace_seconds=1)
    assert job.ended().phase is Phase.SUCCEEDED


def test_delete_gives_grace_then_kills_and_frees_the_name(place):
    job = place.submit("trap 'echo asked' TERM; echo ready; while true; do sleep 0.1; done", grace_seconds=3)
    place.until(lambda: job.observe().phase is Phase.RUNNING and job.log() == ["ready"])
    pod, began = job.pods()[0], time.monotonic()
    assert job.delete(uid=job.uid) is True
    place.until(lambda: "asked" in job.backend.logs(pod).lines, 15)
    assert job.observe().phase in (Phase.CANCELLED, Phase.LOST)
    job.gone()
    assert 2.5 < time.monotonic() - began < 20
    again = place.create(job.manifest)
    assert again.uid != job.uid
    assert again.delete(uid=job.uid) is False
    assert again.delete(uid=again.uid, grace_seconds=0) is True
    began = time.monotonic()
    again.gone()


def test_delete_with_another_grace_overrides_the_pods(place):
    job = place.submit("trap '' TERM; echo ready; while true; do sleep 0.1; done", grace_seconds=600)
    place.until(lambda: job.observe().phase is Phase.RUNNING and job.log() == ["ready"])
    assert job.delete(grace_seconds=1) is True
    job.gone(20)


def test_a_container_that_heeds_sigterm_needs_no_grace(place):
    job = place.submit("trap 'exit 20' TERM; echo ready; while true; do sleep 0.1; done", grace_seconds=600)
    place.until(lambda: job.observe().phase is Phase.RUNNING and job.log() == ["ready"])
    assert job.delete() is True
    job.gone(20)


def test_the_deadline_ends_the_job(place):
    job = place.submit("sleep 600", deadline_seconds=3, grace_seconds=1)
    seen = job.ended()
    assert (seen.phase, seen.reason, seen.retryable) == (Phase.FAILED, Reason.DEADLINE, False)


def test_a_finished_job_goes_after_its_time_to_live(place):
    job = place.submit("true", ttl_seconds=1)
    job.wait(Phase.SUCCEEDED, Phase.LOST)
    job.gone(30)


def test_a_suspended_job_is_queued_until_it_is_resumed_or_refused_where_nobody_resumes(place):
    manifest = place.manifest("true", suspend=True)
    if place.kind == "local":
        with pytest.raises(JobRefusedError, match="suspend"):
            place.create(manifest)
        return
    job = place.create(manifest)
    place.until(lambda: (job.read().job.get("status") or {}).get("conditions"))
    assert job.observe().phase is Phase.QUEUED
    assert job.pods() == []
    place.custom.patch_namespaced_custom_object(
        "kubeflow.org", "v1", place.namespace, "pytorchjobs", job.name, {"spec": {"runPolicy": {"suspend": False}}}
    )
    assert job.ended().phase is Phase.SUCCEEDED


def _without_container(manifest):
    manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["name"] = "main"


def _no_workers(manifest):
    master = manifest["spec"]["pytorchReplicaSpecs"]["Master"]
    manifest["spec"]["pytorchReplicaSpecs"]["Worker"] = {**copy.deepcopy(master), "replicas": 0}


def _number_for_text(manifest):
    manifest["spec"]["nprocPerNode"] = 2


def _bad_name(manifest):
    manifest["metadata"]["name"] = "../../etc"


def _other_kind(manifest):
    manifest["kind"] = "TFJob"


@pytest.mark.parametrize("spoil", [_without_container, _no_workers, _number_for_text, _bad_name, _other_kind])
def test_what_can_never_work_is_refused_with_the_same_error(place, spoil):
    manifest = place.manifest("true")
    spoil(manifest)
    with pytest.raises(ManifestError) as refused:
        place.create(manifest)
    assert refused.value.mend
    names = [job.job["metadata"]["name"] for job in place.backend.jobs(place.namespace)]
    assert manifest["metadata"]["name"] not in names


@pytest.mark.cluster
def test_the_clusters_refusal_comes_in_its_own_words(on_kubernetes):
    manifest = on_kubernetes.manifest("true")
    manifest["metadata"]["namespace"] = "no-such-namespace"
    with pytest.raises(JobRefusedError, match="no-such-namespace"):
        on_kubernetes.create(manifest)


@pytest.mark.cluster
def test_an_image_that_does_not_exist_ends_the_wait(on_kubernetes):
    manifest = on_kubernetes.manifest("true")
    manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["image"] = "test.local/no:1"
    job = on_kubernetes.create(manifest)
    seen = job.wait(Phase.FAILED)
    assert (seen.reason, seen.retryable) == (Reason.IMAGE, False)
    job.delete(grace_seconds=0)
