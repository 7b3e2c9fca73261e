"""The observation: a table of situations as the API tells them, and that nothing whatever makes it raise."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubeflow_training.jobs.manifest.checks.pytorch import check
from kubeflow_training.jobs.observation import Observation, Phase, observe, told_best
from kubeflow_training.jobs.observation.progress import Progress, last, parse
from kubeflow_training.jobs.observation.reader import may_replace
from kubeflow_training.jobs.observation.reasons import MENDS, RETRYABLE, Reason
from kubeflow_training.jobs.shapes import storable


def job(*conditions: Any, workers: int = 0, policy: str = "Never", **status: Any) -> dict[str, Any]:
    """A job with conditions given as type, (type, status) or (type, status, reason, message)."""
    whole = [(item, "True") if isinstance(item, str) else item for item in conditions]
    keys = ("type", "status", "reason", "message")
    replicas = {"Master": {"replicas": 1, "restartPolicy": policy}}
    if workers:
        replicas["Worker"] = {"replicas": workers, "restartPolicy": policy}
    return {
        "metadata": {"name": "job", "uid": "u"},
        "spec": {"pytorchReplicaSpecs": replicas},
        "status": {"conditions": [dict(zip(keys, item, strict=False)) for item in whole], **status},
    }


def pod(
    rank: int, phase: str, state: dict[str, Any] | None = None, node: str | None = "n1", **status: Any
) -> dict[str, Any]:
    kind, index = ("master", 0) if rank == 0 else ("worker", rank - 1)
    statuses = [{"name": "pytorch", "state": state}] if state else []
    return {
        "metadata": {
            "name": f"job-{kind}-{index}",
            "labels": {
                "training.kubeflow.org/replica-type": kind,
                "training.kubeflow.org/replica-index": str(index),
            },
        },
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": phase, "containerStatuses": statuses, **status},
    }


def ended(rank: int, code: int, at: int = 0, reason: str = "Error", message: str = "", **status: Any) -> dict[str, Any]:
    terminated = {"exitCode": code, "reason": reason, "message": message, "finishedAt": f"2026-01-01T00:00:{at:02d}Z"}
    terminated["startedAt"] = "2026-01-01T00:00:00Z"
    return pod(rank, "Failed" if code else "Succeeded", {"terminated": terminated}, **status)


def running(rank: int) -> dict[str, Any]:
    return pod(rank, "Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}})


def unscheduled(rank: int, message: str) -> dict[str, Any]:
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]
    return pod(rank, "Pending", node=None, conditions=conditions)


def waiting(rank: int, reason: str, message: str = "") -> dict[str, Any]:
    return pod(rank, "Pending", {"waiting": {"reason": reason, "message": message}})


FAILED = ("Failed", "True", "PyTorchJobFailed", "it failed")
KILLED = json.dumps({"exit_code": 21, "message": "rank 0 was ended by SIGKILL", "rank": 0, "signal": "SIGKILL"})
TOLD = json.dumps({"exit_code": 11, "message": "row 7 is broken", "rank": 5, "step": 1, "steps": 2})

SITUATIONS: dict[str, tuple[Observation, Phase, Reason | None, str]] = {
    "just created": (observe(job()), Phase.QUEUED, None, "waits for its pods"),
    "created": (observe(job("Created")), Phase.QUEUED, None, ""),
    "no node": (
        observe(job("Created"), [unscheduled(0, "0/3 nodes")]),
        Phase.QUEUED,
        Reason.UNSCHEDULABLE,
        "0/3 nodes",
    ),
    "suspended": (observe(job(("Suspended", "True", "x", "by Kueue"))), Phase.QUEUED, None, "by Kueue"),
    "preempted by Kueue and suspended again": (
        observe(job(("Running", "False"), "Suspended")),
        Phase.QUEUED,
        None,
        "suspended",
    ),
    "quota": (
        observe(job("Created"), [], [{"type": "Warning", "message": "pods is forbidden: exceeded quota: q"}]),
        Phase.QUEUED,
        Reason.QUOTA,
        "exceeded quota",
    ),
    "a JobSet that is refused": (
        observe(
            job("Created"),
            [],
            [{"type": "Warning", "reason": "TrainJobResourcesCreationFailed", "message": 'JobSet "t" is invalid: x'}],
        ),
        Phase.QUEUED,
        Reason.USER_ERROR,
        "is invalid",
    ),
    "half of the gang": (
        observe(job("Created", workers=1), [running(0), unscheduled(1, "no gpu")]),
        Phase.STARTING,
        Reason.UNSCHEDULABLE,
        "1 of 2 pods run; no gpu",
    ),
    "container creating": (observe(job("Created"), [waiting(0, "ContainerCreating")]), Phase.STARTING, None, "0 of 1"),
    "first pull failed": (
        observe(job("Created"), [waiting(0, "ErrImagePull", "no such host")]),
        Phase.STARTING,
        Reason.IMAGE,
        "no such host",
    ),
    "image": (
        observe(job("Created"), [waiting(0, "ImagePullBackOff", "x")]),
        Phase.FAILED,
        Reason.IMAGE,
        "job-master-0",
    ),
    "missing secret": (
        observe(job("Created"), [waiting(0, "CreateContainerConfigError", 'secret "s" not found')]),
        Phase.FAILED,
        Reason.USER_ERROR,
        'secret "s"',
    ),
    "running": (observe(job("Created", "Running", workers=1), [running(0), running(1)]), Phase.RUNNING, None, "2 of 2"),
    "master done, worker still at it": (
        observe(job("Running", workers=1), [ended(0, 0), running(1)]),
        Phase.RUNNING,
        None,
        "1 of 2",
    ),
    "the last condition is not the state": (
        observe(job("Succeeded", ("Running", "False"), ("Created", "True")), [ended(0, 0)]),
        Phase.SUCCEEDED,
        None,
        "",
    ),
    "failed sticks": (observe(job("Succeeded", FAILED)), Phase.FAILED, Reason.UNKNOWN, "it failed"),
    "restarting": (observe(job("Restarting", policy="OnFailure"), [running(0)]), Phase.RESTARTING, None, ""),
    "pods recreated": (observe(job("Running")), Phase.RESTARTING, None, "gone"),
    "restarts by policy": (
        observe(job("Running", policy="ExitCode"), [ended(0, 137)]),
        Phase.RESTARTING,
        None,
        "started again",
    ),
    "being deleted": (
        observe({**job("Running"), "metadata": {"deletionTimestamp": "x"}}, [running(0)]),
        Phase.CANCELLED,
        Reason.DELETED,
        "",
    ),
    "gone": (observe(None), Phase.LOST, Reason.DELETED, "no longer exists"),
    "deadline": (
        observe(job(("Failed", "True", "DeadlineExceeded", "longer than the deadline")), [ended(0, 143)]),
        Phase.FAILED,
        Reason.DEADLINE,
        "longer",
    ),
    "unanswering node": (
        observe(job("Running", workers=1), [running(0), pod(1, "Unknown")]),
        Phase.RUNNING,
        Reason.NODE_LOST,
        "job-worker-0",
    ),
}
# exit code or pod status -> reason, for one failed pod of a failed job
CAUSES: dict[str, tuple[dict[str, Any], Reason]] = {
    "10": (ended(0, 10), Reason.USER_ERROR),
    "11": (ended(0, 11), Reason.BAD_DATA),
    "12": (ended(0, 12), Reason.USER_ERROR),
    "13": (ended(0, 13), Reason.IDLE),
    "20": (ended(0, 20), Reason.PREEMPTED),
    "21": (ended(0, 21), Reason.COLLECTIVE_TIMEOUT),
    "22": (ended(0, 22), Reason.NODE_LOST),
    "127": (ended(0, 127), Reason.USER_ERROR),
    "137": (ended(0, 137), Reason.KILLED),
    "21 of a rank that was killed": (ended(0, 21, message=KILLED), Reason.KILLED),
    "21 of a rank that crashed": (ended(0, 21, message=KILLED.replace("KILL", "SEGV")), Reason.COLLECTIVE_TIMEOUT),
    "143": (ended(0, 143), Reason.PREEMPTED),
    "1": (ended(0, 1), Reason.UNKNOWN),
    "1, but the message knows better": (ended(0, 1, message=TOLD), Reason.BAD_DATA),
    "oom killer": (ended(0, 137, reason="OOMKilled"), Reason.OUT_OF_MEMORY),
    "cuda": (ended(0, 1, message="torch.OutOfMemoryError: CUDA out of memory. Tried"), Reason.OUT_OF_MEMORY),
    "nccl": (ended(0, 134, message="Watchdog caught collective operation timeout"), Reason.COLLECTIVE_TIMEOUT),
    "not a json message": (ended(0, 1, message='{"exit_code": '), Reason.UNKNOWN),
    "evicted": (pod(0, "Failed", reason="Evicted", message="The node was low on memory"), Reason.EVICTED),
    "terminated": (pod(0, "Failed", reason="Terminated"), Reason.PREEMPTED),
    "node lost": (pod(0, "Failed", reason="NodeLost"), Reason.NODE_LOST),
    "disruption": (
        pod(
            0, "Failed", conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]
        ),
        Reason.PREEMPTED,
    ),
    "taint": (
        pod(
            0, "Failed", conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]
        ),
        Reason.NODE_LOST,
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_situations(name):
    found, phase, reason, words = SITUATIONS[name]
    assert (found.phase, found.reason) == (phase, reason)
    assert words in found.message
    assert Observation.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize("name", CAUSES)
def test_causes(name):
    failed, reason = CAUSES[name]
    found = observe(job(FAILED), [failed])
    assert (found.phase, found.reason, found.replica, found.node) == (Phase.FAILED, reason, "master-0", "n1")


def test_every_reason_has_consequences():
    assert set(RETRYABLE) == set(MENDS) == set(Reason)
    assert {reason for reason, again in RETRYABLE.items() if again} == {
        Reason.PREEMPTED,
        Reason.EVICTED,
        Reason.NODE_LOST,
        Reason.TOO_FEW_NODES,
        Reason.KILLED,
        Reason.COLLECTIVE_TIMEOUT,
        Reason.UNKNOWN,
    }


FIRSTS = {
    "the earliest": ([ended(0, 1, 5), ended(1, 1, 3), ended(2, 1, 9)], "worker-0"),
    "a broken collective is a victim, even if it ended first": ([ended(0, 21, 1), ended(1, 11, 4)], "worker-0"),
    "a SIGKILL explains a broken collective of the same second": ([ended(0, 21, 1), ended(1, 137, 1)], "worker-0"),
    "a killed rank explains it too": ([ended(0, 21, 1), ended(1, 21, 1, message=KILLED)], "worker-0"),
    "the SIGKILL after a grace period explains nothing": ([ended(0, 137, 40), ended(1, 10, 5)], "worker-0"),
    "who blames its own node comes before those who lost it": ([ended(0, 21, 1), ended(1, 22, 4)], "worker-0"),
    "a SIGTERM is a victim": ([ended(0, 143, 1), ended(1, 1, 1)], "worker-0"),
    "an OOM kill is a cause": ([ended(0, 21, 1), ended(1, 137, 2, reason="OOMKilled")], "worker-0"),
    "only victims: the earliest": ([ended(0, 21, 3), ended(1, 21, 2)], "worker-0"),
    "who ends for idle GPUs has the others end as if preempted": ([ended(0, 20, 1), ended(1, 13, 4)], "worker-0"),
    "all leave together, the lowest rank speaks": ([ended(1, 10, 1), ended(0, 10, 1)], "master-0"),
}


@pytest.mark.parametrize("name", FIRSTS)
def test_who_failed_first(name):
    pods, replica = FIRSTS[name]
    assert observe(job(FAILED, workers=len(pods) - 1), pods).replica == replica


def test_the_message_tells_the_global_rank_and_the_running_time():
    found = observe(
        job(FAILED, workers=1, completionTime="2026-01-01T00:01:00Z"), [ended(0, 143, 9), ended(1, 1, 3, message=TOLD)]
    )
    assert (found.failing_rank, found.exit_code, found.seconds) == (5, 11, 60.0)
    assert (
        found.message
        == "rank 5 (worker-0) failed first on n1 with exit code 11: row 7 is broken (1 more rank failed after it)"
    )


def test_of_two_looks_the_one_that_says_why_counts():
    said = Observation(Phase.FAILED, Reason.EVICTED, "taken away", pod="p", node="n")
    vague = Observation(Phase.FAILED, Reason.UNKNOWN, "it failed", pods_wanted=2)
    done = Observation(Phase.SUCCEEDED)
    assert told_best(said, vague) == said
    assert told_best(vague, said) == said
    assert told_best(said, done) == done


TAKEN = pod(1, "Running", {"running": {}}, conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "x"}])
TAKEN["metadata"]["deletionTimestamp"] = "2999-01-01T00:00:00Z"


def created(pod, count=1, since="2026-01-01T00:00:00Z", word="SuccessfulCreatePod", before="", by="u"):
    told = {"reason": word, "message": f"{before}Created pod: {pod}", "count": count, "firstTimestamp": since}
    return {**told, "involvedObject": {"name": "job", "uid": by}}


def test_a_large_gang_is_not_taken_for_one_whose_pod_was_made_anew():
    """client-go tells the tenth pod and all that follow as one event, under the last one's name."""
    gang, pods = job("Created", "Running", workers=11), [running(rank) for rank in range(12)]
    single = [created(f"job-worker-{n}") for n in range(9)]
    events = [*single, created("job-worker-10", 3, before="(combined from similar events): ")]
    assert observe(gang, pods, events).phase is Phase.RUNNING


def test_events_of_a_job_that_had_this_name_within_the_same_second_are_not_this_ones():
    gang, pods = job("Created", "Running", workers=1), [running(0), running(1)]
    earlier = [created("job-master-0", by="earlier"), created("job-worker-0", by="earlier")]
    events = [*earlier, created("job-master-0"), created("job-worker-0")]
    assert observe(gang, pods, events).phase is Phase.RUNNING
    assert observe(gang, pods, [*events, created("job-worker-0")]).phase is Phase.FAILED


@pytest.mark.parametrize(("second", "asked"), [(-1, False), (0, True), (1, True)])
def test_a_pod_made_in_the_second_in_which_another_began_may_be_a_new_one(second, asked):
    pods = [running(0), running(1)]
    pods[1]["metadata"]["creationTimestamp"] = (
        f"2026-01-01T00:00:{second:02d}Z" if second >= 0 else "2025-12-31T23:59:59Z"
    )
    assert may_replace(job("Created", "Running", workers=1), pods) is asked
    assert not may_replace(job("Created", "Running", workers=1, policy="OnFailure"), pods)


def test_pods_of_a_job_that_was_suspended_and_resumed_are_not_made_anew():
    gang = job("Created", "Running", ("Suspended", "False"), workers=1)
    gang["status"]["conditions"][-1]["lastTransitionTime"] = "2026-01-01T01:00:00Z"
    pods, twice = [running(0), running(1)], created("job-worker-0", 2)
    assert observe(gang, pods, [created("job-master-0", 2), twice]).phase is Phase.RUNNING
    # Where the controller itself deleted the first one, the second is no surprise, whatever the job's conditions.
    deleted = created("job-worker-0", word="SuccessfulDeletePod")
    assert observe(job("Created", "Running", workers=1), pods, [twice, deleted]).phase is Phase.RUNNING
    # After the resume it counts as ever.
    seen = observe(gang, pods, [created("job-worker-0", 2, "2026-01-01T01:00:01Z")])
    assert (seen.phase, seen.reason, seen.replica) == (Phase.FAILED, Reason.EVICTED, "worker-0")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("CreateContainerConfigError", "failed to sync secret cache: timed out waiting for the condition"),
        ("CreateContainerError", "context deadline exceeded"),
        ("CreateContainerError", 'the name "x" is reserved for "y"'),
    ],
)
def test_what_the_kubelet_tries_again_with_success_is_no_error_of_the_user(word, said):
    seen = observe(job("Created"), [waiting(0, word, said)])
    assert (seen.phase, seen.reason) == (Phase.STARTING, None)
    assert said in seen.message


def test_a_pod_that_is_taken_away_is_the_cause_of_broken_collectives():
    for status in (job("Running", workers=1), job(FAILED, workers=1)):
        found = observe(status, [ended(0, 21, 1), TAKEN])
        assert (found.phase, found.reason, found.replica) == (Phase.FAILED, Reason.PREEMPTED, "worker-0")
    gone = ended(1, 143, 9, conditions=TAKEN["status"]["conditions"])
    assert observe(job(FAILED, workers=1), [ended(0, 21, 1), gone]).reason is Reason.PREEMPTED


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_words = st.sampled_from(
    [
        "Failed",
        "Succeeded",
        "Running",
        "True",
        "False",
        "Pending",
        "pytorch",
        "OOMKilled",
        "Never",
        "Unknown",
        TOLD,
        "{",
        "0",
        "TrainJob",
        "Job",
        "Workload",
        "Suspended",
        "Complete",
        "QuotaReserved",
        "Evicted",
        "DisruptionTarget",
        "ContainersReady",
        "Ready",
        "ImagePullBackOff",
        "CrashLoopBackOff",
        "SuccessfulCreatePod",
        "2026-01-01T00:00:00Z",
    ]
)
_value = _json | _words


def _some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({}, optional={key: value | _value for key, value in fields.items()}) | _value


_conditions = st.lists(_some(type=_words, status=_words, reason=_words, message=_words), max_size=3)
_state = _some(
    terminated=_some(exitCode=st.integers(-300, 300), reason=_words, message=_words, finishedAt=_words),
    running=_some(startedAt=_words),
    waiting=_some(reason=_words, message=_words),
)
_pod = _some(
    metadata=_some(name=_words, labels=_json, uid=_words, deletionTimestamp=_words, creationTimestamp=_words),
    spec=_some(nodeName=_words),
    status=_some(
        phase=_words, conditions=_conditions, containerStatuses=st.lists(_some(name=_words, state=_state), max_size=2)
    ),
)
_job = _some(
    kind=_words,
    metadata=_some(labels=_some(**{"kueue.x-k8s.io/queue-name": _words}), creationTimestamp=_words),
    spec=_some(runPolicy=_json, pytorchReplicaSpecs=_json, trainer=_json, suspend=st.booleans(), template=_json),
    status=_some(conditions=_conditions, startTime=_words, completionTime=_words),
)
_event = _some(
    kind=_words,
    type=_words,
    reason=_words,
    message=_words,
    count=_json,
    involvedObject=_some(name=_words, kind=_words),
    spec=_some(queueName=_words, active=st.booleans()),
    status=_some(conditions=_conditions),
)


@settings(max_examples=400, deadline=None)
@given(st.none() | _job, st.lists(_pod, max_size=3), st.lists(_event, max_size=3))
def test_it_never_raises_and_always_has_a_phase(some_job, pods, events):
    found = observe(some_job, pods, events)
    assert isinstance(found.phase, Phase)
    assert isinstance(found.retryable, bool)
    json.dumps(found.to_dict())
    check(some_job)


def test_progress_lines():
    assert parse('@progress {"step": 12, "steps": 120, "loss": 3.21}') == Progress(12, 120, {"loss": 3.21})
    for line in (
        "@progress",
        "@progress {",
        "@progress []",
        '@progress {"step": "x"}',
        'say @progress {"step": 1}',
        "",
    ):
        assert parse(line) is None
    assert parse('@progress {"step": 1, "loss": NaN}') == Progress(1)
    assert last(['@progress {"step": 1}', "x", '@progress {"step": 2}', "y"]) == Progress(2)


@pytest.mark.parametrize("number", ["1e30", "18446744073709551616", "1e308", "-1", "9" * 400])
def test_no_number_of_a_pod_ends_the_triggerer_which_sends_64_bits(number):
    assert parse(f'@progress {{"step": {number}}}') is None
    assert parse(f'@progress {{"step": 1, "steps": {number}}}') in (Progress(1), None)
    for told in (f'{{"exit_code": {number}, "rank": 0}}', f'{{"exit_code": 11, "rank": {number}}}'):
        seen = observe(job(FAILED), [ended(0, 1, message=told)])
        msgspec.msgpack.encode(seen.to_dict())
    msgspec.msgpack.encode(storable({"a": [json.loads(number)]}))


def test_names_of_a_progress_can_be_stored_and_are_not_many():
    names = {"\u0000": 1, "\ud800": 1, "loss": 2} | {f"n{number}": 1 for number in range(200)}
    found = parse(f"@progress {json.dumps({'step': 1} | names)}")
    assert found.values["loss"] == 2
    assert len(found.values) == 100
    assert all(name.isprintable() for name in found.values)


@given(st.text())
def test_progress_never_raises(text):
    parse("@progress " + text)
