"""What a wait reads at last: the cause of a failure is kept, events are found, and the leading pod's log is shown."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.elastic import elastic
from kubeflow_training.jobs.errors import BackendUnavailableError
from kubeflow_training.jobs.kinds import PYTORCH_JOB, TRAIN_JOB
from kubeflow_training.jobs.kubernetes.client import NotThereError
from kubeflow_training.jobs.kubernetes.logs import KubernetesLogs
from kubeflow_training.jobs.kubernetes.watching.events import EventReader
from kubeflow_training.jobs.kubernetes.watching.subscription import Look
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.observation import Observation, Phase, observe
from kubeflow_training.jobs.observation.phases import told_best
from kubeflow_training.jobs.observation.reasons import Reason
from kubeflow_training.jobs.waiting.job import Waiting
from kubeflow_training.jobs.waiting.joblog import JobLog

from tests.kubeflow_training.test_observation import ended, job, running

FAILED = ("Failed", "True", "PyTorchJobFailed", "the job failed")


class News:
    """A subscription to looks that are given; each `refresh` and each change brings the next, the last one stays."""

    def __init__(self, *snapshots):
        self.left = list(snapshots)

    def look(self):
        return Look(True, self.left[0])

    async def changed(self, within=None):
        self._next()
        return True

    async def refresh(self):
        self._next()

    def waits(self, waiting):
        pass

    def _next(self):
        if len(self.left) > 1:
            self.left.pop(0)


class Silent:
    def __init__(self, on_finish=lambda: None):
        self.on_finish = on_finish

    def update(self, snapshot):
        pass

    async def finish(self):
        self.on_finish()

    async def tail(self, pod, lines):
        return []

    async def close(self):
        pass


CAUSE = Snapshot(job(FAILED, workers=1), [ended(0, 21, 5), ended(1, 11, 3)], [])
GONE = Snapshot(job(FAILED, workers=1), [], [])


@pytest.mark.parametrize(
    "looks",
    [(CAUSE, GONE), (Snapshot(CAUSE.job, [running(0), ended(1, 11, 3)], []), CAUSE, GONE)],
    ids=["at once", "while a survivor ends"],
)
def test_the_last_look_does_not_lose_the_cause(looks):
    assert observe(GONE.job, []).reason is Reason.UNKNOWN
    end = asyncio.run(Waiting("job", "u", News(*looks), JobLog(lambda _: None, None), Silent()).run())
    seen = end.observation
    assert (seen.phase, seen.reason, seen.replica, seen.pods_running) == (Phase.FAILED, Reason.BAD_DATA, "worker-0", 0)


def test_pods_that_go_while_the_log_is_read_take_no_cause_along():
    news = News(CAUSE, CAUSE, GONE)
    waiting = Waiting("job", "u", news, JobLog(lambda _: None, None), Silent(news._next))
    assert asyncio.run(waiting.run()).observation.reason is Reason.BAD_DATA


@pytest.mark.parametrize(
    ("first", "kept"),
    [
        (Reason.NODE_LOST, Reason.NODE_LOST),
        (Reason.PREEMPTED, Reason.PREEMPTED),
        (Reason.COLLECTIVE_TIMEOUT, Reason.EVICTED),  # its pod was only the first to feel it
    ],
)
def test_who_took_the_pods_is_not_forgotten_when_they_are_gone(first, kept):
    before = Observation(Phase.FAILED, first, "taken away", pod="job-worker-0", node="node-1")
    seen = told_best(before, Observation(Phase.FAILED, Reason.EVICTED, "one was removed from outside"))
    assert (seen.reason, seen.node) == (kept, "node-1" if kept is first else None)


def train_job(*conditions, pods=()):
    status = {"conditions": [{"type": word, "status": "True", "message": word} for word in conditions]}
    metadata = {"name": "train", "namespace": "ns", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    found = {"kind": "TrainJob", "apiVersion": TRAIN_JOB.api_version, "metadata": metadata, "status": status}
    return Snapshot({**found, "spec": {"trainer": {"numNodes": 1}}}, list(pods), [])


def train_pod(**more):
    labels = {TRAIN_JOB.job_label: "train", "jobset.sigs.k8s.io/replicatedjob-name": "node"}
    metadata = {"name": "train-node-0-0-abcde", "namespace": "ns", "labels": labels, **more}
    taken = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "NoExecute"}
    conditions = [taken] if more else []
    container = {"name": "node", "state": {"running": {"startedAt": "2026-01-01T00:00:10Z"}}}
    status = {"phase": "Running", "conditions": conditions, "containerStatuses": [container]}
    return {"metadata": metadata, "spec": {"nodeName": "node-1", "containers": [{"name": "node"}]}, "status": status}


@pytest.mark.parametrize("back", [False, True], ids=["gone", "there-again"])
def test_who_takes_a_pod_of_a_job_that_may_restart_is_not_forgotten(back):
    taken = train_job(pods=[train_pod(deletionTimestamp="2026-01-01T00:01:00Z")])
    looks = [taken, *([train_job(pods=[train_pod()])] if back else []), train_job(), train_job("Failed")]
    waiting = Waiting("job", "u", News(*looks), JobLog(lambda _: None, None), Silent())
    seen = asyncio.run(waiting.run()).observation
    assert (seen.phase, seen.reason) == (Phase.FAILED, Reason.EVICTED if back else Reason.NODE_LOST)
    assert seen.node == (None if back else "node-1")


# Events


class Cluster:
    """Answers lists of events as the API does for field selectors of one object, and every log with one line."""

    def __init__(self, *events):
        self.events = events

    async def json(self, verb, path, params):
        key, value = dict(params)["fieldSelector"].removeprefix("involvedObject.").split("=")
        return {"items": [event for event in self.events if event["involvedObject"].get(key) == value], "metadata": {}}

    @asynccontextmanager
    async def stream(self, verb, path, params, silence):
        async def blocks():
            yield f"2026-01-01T00:00:01Z of {path.split('/')[-2]}\n".encode()

        yield blocks()


def warning(of, text, at, **more):
    return {"involvedObject": of, "message": text, "type": "Warning", "lastTimestamp": at, "metadata": {}, **more}


def test_the_quota_of_a_train_job_is_told_by_its_child():
    born = "2026-01-01T00:00:00Z"
    metadata = {"name": "train", "namespace": "ns", "uid": "u", "creationTimestamp": born}
    train = {"kind": "TrainJob", "apiVersion": "trainer.kubeflow.org/v1alpha1", "metadata": metadata}
    train["spec"] = {"trainer": {"numNodes": 2}}
    child = {"name": "train-node-0", "uid": "c"}
    text = 'pods "train-node-0-0" is forbidden: exceeded quota: small'
    cluster = Cluster(
        warning(child, "of an earlier job of that name", "2025-12-31T00:00:00Z", reason="FailedCreate"),
        warning(child, text, "2026-01-01T00:00:05Z", reason="FailedCreate"),
    )
    events = EventReader(cluster, "ns", TRAIN_JOB)
    asyncio.run(events.read_about(Snapshot(train, [], [])))
    told = events.about(train, [])
    assert [event["message"] for event in told] == [text]
    seen = observe(train, [], told)
    assert (seen.phase, seen.reason, seen.message) == (Phase.QUEUED, Reason.QUOTA, text)


def test_events_are_told_in_the_order_in_which_they_were():
    thing = {"uid": "u"}
    cluster = Cluster(
        warning(thing, "second", "2026-01-01T00:00:05.9Z"),
        warning(thing, "first", "2026-01-01T00:00:05Z"),
        warning(thing, "third", "2026-01-01T01:00:06+01:00"),
    )
    told = asyncio.run(EventReader(cluster, "ns", PYTORCH_JOB).last_words("u"))
    assert [event["message"] for event in told] == ["first", "second", "third"]


class Bare(Cluster):
    """It has no node."""

    async def json(self, verb, path, params=()):
        if not params:
            raise NotThereError("node", "it is not there", "")
        return await super().json(verb, path, params)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Marking for deletion Pod ns/job-worker-0", Reason.NODE_LOST),
        ("Cancelling deletion of Pod ns/job-worker-0", Reason.UNKNOWN),
    ],
)
def test_pods_that_were_forced_off_their_silent_node_are_told_of_by_their_events(text, reason):
    over = job(FAILED, workers=1)
    before = [{**pod, "metadata": {**pod["metadata"], "uid": pod["metadata"]["name"]}} for pod in map(running, (0, 1))]
    about = {"uid": before[1]["metadata"]["name"], "kind": "Pod", "name": before[1]["metadata"]["name"]}
    cluster = Bare(warning(about, text, "2026-01-01T00:00:05Z", reason="TaintManagerEviction"))
    events = EventReader(cluster, "ns", PYTORCH_JOB)
    asyncio.run(events.read_about(Snapshot(over, [], []), before))
    seen = observe(over, [], events.about(over, []))
    assert (seen.phase, seen.reason) == (Phase.FAILED, reason), seen
    assert (text in seen.message) == (reason is Reason.NODE_LOST)


# Logs


def gang(*, with_master):
    manifest = pytorch_job(name="job", image="i", command=["c"], nodes=2)
    if not with_master:
        manifest = elastic(manifest, min_nodes=1)
    made = {**manifest, "metadata": {**manifest["metadata"], "uid": "u"}}
    pods = [ended(0, 0), ended(1, 0)] if with_master else [ended(1, 0), ended(2, 0)]
    for pod in pods:
        pod["metadata"] |= {"uid": pod["metadata"]["name"], "namespace": "ns"}
        pod["spec"]["containers"] = [{"name": "pytorch"}]
    return Snapshot(made, pods, [])


@pytest.mark.parametrize(("with_master", "leads"), [(True, "master-0"), (False, "worker-0")])
def test_the_first_rank_is_the_worker_of_node_rank_0_where_there_is_no_master(with_master, leads):
    async def lines():
        found = []
        logs = KubernetesLogs(Cluster(), PYTORCH_JOB, JobLog(found.append, None), "first")
        logs.update(gang(with_master=with_master))
        await logs.finish()
        return found

    assert asyncio.run(lines()) == [f"[{leads}] of job-{leads}"]


def test_a_job_whose_end_is_told_before_its_pods_shows_their_log():
    """After an outage the watch of the jobs may come back before that of the pods."""
    done = gang(with_master=True)
    before = [{**pod, "status": {"phase": "Pending"}} for pod in done.pods]
    over = {**done.job, "status": {"conditions": [{"type": "Succeeded", "status": "True"}]}}

    async def lines(pods):
        found = []
        log = JobLog(found.append, None)
        news = News(Snapshot(over, pods, []), Snapshot(over, done.pods, []))
        await Waiting("job", "u", news, log, KubernetesLogs(Cluster(), PYTORCH_JOB, log, "all")).run()
        return sorted(line for line in found if line.startswith("["))

    shown = ["[master-0] of job-master-0", "[worker-0] of job-worker-0"]
    assert asyncio.run(lines(before)) == asyncio.run(lines([])) == shown


class Away(News):
    """The first reading meets an API that is away."""

    async def refresh(self):
        if not (self.left and self.left[0] is None):
            self.left.insert(0, None)
            raise BackendUnavailableError("pods", "the cluster cannot be reached", "It is tried again")
        self._next()
        self._next()

    def look(self):
        return Look(True, next(one for one in self.left if one is not None))

    async def changed(self, within=None):
        return False


@pytest.mark.parametrize("condition", ["Succeeded", "Failed"])
def test_an_api_that_is_away_at_the_end_is_asked_again(condition):
    done = gang(with_master=True)
    before = [{**pod, "status": {"phase": "Pending"}} for pod in done.pods]
    over = {**done.job, "status": {"conditions": [{"type": condition, "status": "True"}]}}
    found = []

    async def end():
        log = JobLog(found.append, None)
        news = Away(Snapshot(over, before, []), Snapshot(over, done.pods, []))
        return await Waiting("job", "u", news, log, KubernetesLogs(Cluster(), PYTORCH_JOB, log, "all")).run()

    assert asyncio.run(end()).observation.phase == condition.lower()
    assert {line for line in found if line.startswith("[")} == {
        "[master-0] of job-master-0",
        "[worker-0] of job-worker-0",
    }


def test_a_job_that_succeeded_and_is_removed_meanwhile_has_succeeded():
    over = {**gang(with_master=True).job, "status": {"conditions": [{"type": "Succeeded", "status": "True"}]}}
    news = News(Snapshot(over, [], []), None)
    end = asyncio.run(Waiting("job", "u", news, JobLog(lambda _: None, None), Silent()).run())
    assert end.observation.phase is Phase.SUCCEEDED
