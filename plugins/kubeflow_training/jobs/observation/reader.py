"""The one reader of a job's state: `observe` turns job, pods and events into an `Observation`.

Pure; it never raises and always has a phase. Operator, sensor, trigger, pages and command line all use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from kubeflow_training.jobs.elastic import (
    REPORT_TIME,
    is_away,
    is_up,
    node_range,
    nodes_to_be_had,
    unplaced_since,
    unproven,
)
from kubeflow_training.jobs.kinds import Kind, kind_seen
from kubeflow_training.jobs.observation import kueue, nodes
from kubeflow_training.jobs.observation.disruptions import removal, sign
from kubeflow_training.jobs.observation.phases import Observation, Phase, told_best
from kubeflow_training.jobs.observation.progress import Progress
from kubeflow_training.jobs.observation.reasons import Ending, Reason, ending, first
from kubeflow_training.jobs.observation.waits import container_wait, creation_wait, scheduling_wait, volume_wait
from kubeflow_training.jobs.shapes import items, mapping, moment, name, text

__all__ = ["Observation", "Phase", "Reason", "may_replace", "nodes_to_ask", "observe", "places", "told_best"]


_WAITS_FOR_MASTER: Final = "init-pytorch"
"""The training operator's own init container of the workers."""
_OVERTIME: Final = 10
"""Seconds that the cluster has to enforce a deadline by itself."""
_NODES_ASKED: Final = 64
_SUCCESS_EVENTS: Final = frozenset({"PyTorchJobSucceeded", "Completed", "SparkApplicationCompleted"})
_FAILURE_EVENTS: Final = frozenset(
    {
        "PyTorchJobFailed",
        "BackoffLimitExceeded",
        "PodFailurePolicy",
        "DeadlineExceeded",
        "SparkApplicationFailed",
        "SparkApplicationSubmissionFailed",
    }
)


def observe(
    job: Mapping[str, Any] | None,
    pods: Sequence[Mapping[str, Any]] = (),
    events: Sequence[Mapping[str, Any]] = (),
    progress: Progress | None = None,
    *,
    now: datetime | None = None,
    pods_listed: bool = True,
) -> Observation:
    """What the job is doing, from the job, its pods and events as the API tells them.

    :param job: of a known kind; None if it is gone, and then the events may still tell its end.
    :param pods: the job's own.
    :param events: oldest first; the job's Kueue Workload and its nodes may be among them.
    :param progress: what its log told.
    :param pods_listed: whether the pods may be seen at all; if not, what only they could prove is believed.
    :param now: when this was; how long a node is silent is counted from it. The present time unless given.
    """
    told = items(list(events))
    if job is None:
        return _observe_gone(told, progress)
    seen = _Seen(mapping(job), items(list(pods)), told, progress, now or datetime.now(UTC), pods_listed)
    return _with_nodes(
        seen,
        _observe_end(seen)
        or _observe_pause(seen)
        or _observe_elastic(seen)
        or _observe_failing_pods(seen)
        or _observe_overtime(seen)
        or _observe_disruptions(seen)
        or _observe_waiting(seen)
        or _observe_pods(seen),
    )


def nodes_to_ask(
    job: Mapping[str, Any],
    pods: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    also: Sequence[str] = (),
) -> list[str]:
    """Names of the nodes that may explain a failure better than the pods did; none while nothing is to be explained.

    :param also: where other pods of the gang were, which are gone.
    """
    seen = observe(job, pods, events)
    names = dict.fromkeys([*([seen.node] if seen.node else []), *places(pods), *also])
    return list(names)[:_NODES_ASKED] if nodes.doubtful(seen) else []


def places(pods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the nodes that the pods have."""
    return [found for pod in pods if (found := text(mapping(pod.get("spec")).get("nodeName")))]


def may_replace(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a pod may have been made after another one ran, in a gang that takes in none: events tell if it is new.

    Times are told in whole seconds, so a pod that was made in the second in which another one began counts. Running
    pods have no need of events otherwise, so this says when to read them all the same.
    """
    kind = kind_seen(job)
    if kind.restarts(job):
        return False
    begun = min((start for pod in pods if (start := _started(pod, kind))), default=None)
    born = (moment(mapping(pod.get("metadata")).get("creationTimestamp")) for pod in pods)
    return begun is not None and any(when is not None and when >= begun for when in born)


class _Seen:
    """The material of one observation, with what several steps need."""

    def __init__(
        self,
        job: Mapping[str, Any],
        pods: list[Mapping[str, Any]],
        events: list[Mapping[str, Any]],
        progress: Progress | None,
        now: datetime,
        pods_listed: bool = True,
    ) -> None:
        self.pods_listed = pods_listed
        self.job, self.pods, self.events, self.progress, self.now = job, pods, events, progress, now
        self.kind = kind_seen(job)
        self.status = mapping(job.get("status"))
        # The last condition is not the state: only those that are true count, whatever their order.
        self.conditions = self.kind.conditions(job)
        self.endings = [found for pod in pods if (found := ending(pod, self.kind, job))]
        self.wanted = self.kind.wanted(job) or len(pods)
        begun = [(start, _placed(pod)) for pod in pods if (start := _started(pod, self.kind))]
        first = min(begun, key=lambda times: times[0], default=None)
        self.started: datetime | None = first[0] if first else None
        self.placed: datetime | None = first[1] if first else None
        self.running = sum(1 for pod in pods if mapping(pod.get("status")).get("phase") == "Running")

    def observation(self, phase: Phase, message: str, reason: Reason | None = None, **more: Any) -> Observation:
        started = self.started or (moment(self.status.get("startTime")) if phase.ended else None)
        return Observation(
            phase,
            reason,
            message,
            progress=self.progress,
            started=started,
            placed=self.placed,
            pods_running=self.running,
            pods_wanted=self.wanted,
            pods_placed=nodes_to_be_had(self.pods),
            unplaced_since=None if phase.ended else unplaced_since(self.pods),
            held_since=None if phase.ended else self.kind.held_since(self.job),
            **more,
        )

    def where(self, pod: Mapping[str, Any] | None) -> dict[str, Any]:
        """The fields of an observation that name a pod."""
        if pod is None:
            return {}
        return {
            "pod": name(pod) or None,
            "replica": self.kind.replica(pod),
            "failing_rank": self.kind.node_rank(pod, self.job),
            "node": text(mapping(pod.get("spec")).get("nodeName")),
        }

    def failure(self, cause: Ending | None, fallback: str, reason: Reason | None = None) -> Observation:
        finished = moment(self.status.get("completionTime")) or (cause.when if cause else None)
        if cause is None:
            return self.observation(Phase.FAILED, fallback, reason or Reason.UNKNOWN, finished=finished)
        rank = cause.rank if cause.rank is not None else cause.index
        victims = len(self.endings) - 1
        return self.observation(
            Phase.FAILED,
            _told(cause, rank, victims),
            reason or cause.reason,
            failing_rank=rank,
            replica=cause.replica,
            pod=cause.pod,
            node=cause.node,
            exit_code=cause.exit_code,
            finished=finished,
            victims=victims,
        )


def _told(cause: Ending, rank: int, victims: int) -> str:
    """The first failure in one line."""
    where = f" on {cause.node}" if cause.node else ""
    code = f" with exit code {cause.exit_code}" if cause.exit_code is not None else ""
    part = f" in init container {cause.init_container}" if cause.init_container else ""
    # Last words of a log end with what raised; a JSON message is one line.
    last = f": {cause.message.splitlines()[-1][:500]}" if cause.message else ""
    if cause.init_container == _WAITS_FOR_MASTER and not last:
        last = ": it waited in vain for the address of the master"
    also = f" ({victims} more {'rank' if victims == 1 else 'ranks'} failed after it)" if victims else ""
    return f"rank {rank} ({cause.replica}) failed first{where}{part}{code}{last}{also}"


def _with_nodes(seen: _Seen, found: Observation) -> Observation:
    """The same observation, or that of a failure which a node of the gang explains."""
    why = nodes.blamed(found, seen.events)
    if why is None:
        return found
    found = replace(found, reason=why.reason, message=f"{found.message}; node {why.node} {why.message}")
    pod = next((item for item in seen.pods if mapping(item.get("spec")).get("nodeName") == why.node), None)
    if pod is None or why.node == found.node:
        return replace(found, node=why.node)  # its controller may have removed the pod by now
    code = next((item.exit_code for item in seen.endings if item.pod == name(pod)), None)
    return replace(found, exit_code=code, **seen.where(pod))


def _observe_gone(events: list[Mapping[str, Any]], progress: Progress | None) -> Observation:
    """A job that is gone: its own last events tell an end before the removal, as a time to live brings it."""
    for event in reversed(events):
        word = str(event.get("reason") or "")
        when = moment(event.get("lastTimestamp") or event.get("eventTime"))
        if word in _SUCCESS_EVENTS:
            message = "The job is done, and was removed since"
            return Observation(Phase.SUCCEEDED, None, message, progress=progress, finished=when)
        if word in _FAILURE_EVENTS:
            said = str(event.get("message") or "").strip() or "the job failed"
            reason = Reason.DEADLINE if _deadline(word, said) else Reason.UNKNOWN
            message = f"{said}; the finished job was removed since"
            return Observation(Phase.FAILED, reason, message, progress=progress, finished=when)
    return Observation(Phase.LOST, Reason.DELETED, "The job no longer exists and left no result", progress=progress)


def _observe_end(seen: _Seen) -> Observation | None:
    if failed := seen.kind.failed(seen.job):
        word, message = str(failed.get("reason") or ""), str(failed.get("message") or "")
        reason = None
        if _deadline(word, message):
            reason = Reason.DEADLINE
        elif word == "NeverFits":
            reason = Reason.QUOTA
        elif word == "TrainingRuntimeNotSupported":
            reason = Reason.USER_ERROR
        message = message or word or "The job failed"
        found = seen.failure(None, message, reason) if reason else _failure(seen, message)
        return found if found.finished else replace(found, finished=moment(failed.get("lastTransitionTime")))
    if succeeded := seen.kind.succeeded(seen.job):
        finished = moment(seen.status.get("completionTime")) or moment(succeeded.get("lastTransitionTime"))
        if doubt := unproven(seen.job, seen.pods):
            if not seen.pods_listed:
                message = "The job is done; whether rank 0 reported it cannot be seen without its pods"
                return seen.observation(Phase.SUCCEEDED, message, finished=finished)
            if seen.running and finished and seen.now - finished < REPORT_TIME:
                return seen.observation(Phase.RUNNING, f"{doubt}; pods that still run: {seen.running}")
            return seen.observation(Phase.FAILED, doubt, Reason.UNKNOWN, finished=finished)
        return seen.observation(Phase.SUCCEEDED, "The job is done", finished=finished)
    if mapping(seen.job.get("metadata")).get("deletionTimestamp"):
        return seen.observation(Phase.CANCELLED, "The job is being deleted", Reason.DELETED)
    return None


def _failure(seen: _Seen, message: str) -> Observation:
    """Why a failed job failed: a pod's own end, or that pods were taken away, or what is left of that to see."""
    cause, taken = first(seen.endings), sign(seen.job, seen.pods, seen.events, seen.now)
    if cause is not None and not (cause.victim and taken and taken.final):
        return seen.failure(cause, message)
    if taken is not None:
        said = f"{taken.message}; {message}"
        finished = moment(seen.status.get("completionTime"))
        return seen.observation(Phase.FAILED, said, taken.reason, finished=finished, **seen.where(taken.pod))
    if by := removal(seen.events):
        return seen.failure(None, f"{message} {by[1]}", by[0])
    if seen.pods_listed and seen.kind.keeps_failed_pods(seen.job):
        # A pod that failed would still be there: this one was removed, which counts as its failure.
        return seen.failure(None, f"{message} No pod ended badly: one was removed from outside", Reason.EVICTED)
    return seen.failure(None, message)


def _observe_pause(seen: _Seen) -> Observation | None:
    if not seen.kind.suspended(seen.job):
        return None
    workload = kueue.workload_in(seen.events)
    if workload is not None:
        held = kueue.read(workload)
        return seen.observation(Phase.QUEUED, held.message, held.reason, queue=held.queue, position=held.position)
    message = str(mapping(seen.conditions.get("Suspended")).get("message") or "")
    queue = kueue.queue_of(seen.job)
    waits = f"it waits in queue {queue}" if queue else message or "it is suspended until a user or its queue resumes it"
    return seen.observation(Phase.QUEUED, waits, queue=queue)


def _observe_elastic(seen: _Seen) -> Observation | None:
    """An elastic gang runs while the least of its pods do, whatever became of the others."""
    least, most = node_range(seen.job)
    if least == most:
        return None
    up = [name(pod) for pod in seen.pods if is_up(pod)]
    away = [name(pod) for pod in seen.pods if is_away(pod)]
    told = f"; started again: {', '.join(away)}" if away else ""
    if len(up) >= least:
        return seen.observation(Phase.RUNNING, f"{len(up)} of {most} pods run, {least} suffice{told}")
    return seen.observation(Phase.RESTARTING, f"{len(up)} pods run, {least} are needed{told}") if away else None


def _observe_failing_pods(seen: _Seen) -> Observation | None:
    """A failed pod ends a gang that never restarts, even before the job's own condition says so."""
    if not seen.endings or _leader_done(seen):
        return None
    cause = first(seen.endings)
    if not seen.kind.restarts(seen.job):
        return _failure(seen, "A pod failed")
    message = _told(cause, cause.index, len(seen.endings) - 1) if cause else "A pod failed"
    return seen.observation(Phase.RESTARTING, f"{message}; it may be started again")


def _observe_overtime(seen: _Seen) -> Observation | None:
    """A deadline that nobody enforces: the training operator looks at it only when something else happens."""
    seconds, begun = seen.kind.deadline_seconds(seen.job), moment(seen.status.get("startTime"))
    if seconds is None or begun is None or seen.now.timestamp() < begun.timestamp() + seconds + _OVERTIME:
        return None
    message = f"It runs longer than its deadline of {seconds} seconds"
    return seen.observation(Phase.FAILED, message, Reason.DEADLINE, finished=seen.now)


def _observe_disruptions(seen: _Seen) -> Observation | None:
    """Nodes that are silent, and pods that are taken away."""
    if _leader_done(seen) or (found := sign(seen.job, seen.pods, seen.events, seen.now)) is None:
        return None
    if found.final and not seen.kind.restarts(seen.job):
        return seen.observation(Phase.FAILED, found.message, found.reason, finished=seen.now, **seen.where(found.pod))
    return seen.observation(Phase.RUNNING, found.message, found.reason, **seen.where(found.pod))


def _observe_waiting(seen: _Seen) -> Observation | None:
    """Containers that wait for what will not come, and pods that something keeps away."""
    if wait := container_wait(seen.pods):
        if wait.hopeless:
            return seen.observation(Phase.FAILED, wait.message, wait.reason, **seen.where(wait.pod))
        phase = Phase.RESTARTING if wait.restarting else Phase.STARTING
        return seen.observation(phase, wait.message, wait.reason, **seen.where(wait.pod))
    if len(seen.pods) < seen.wanted and (wait := creation_wait(seen.events)):
        return seen.observation(Phase.QUEUED, wait.message, wait.reason)
    return None


def _observe_pods(seen: _Seen) -> Observation:
    if "Restarting" in seen.conditions:
        return seen.observation(Phase.RESTARTING, "Pods are started again")
    if not seen.pods:
        if "Running" in seen.conditions:
            return seen.observation(Phase.RESTARTING, "The pods are gone; new ones are awaited")
        return seen.observation(Phase.QUEUED, _warning(seen) or "The job waits for its pods")
    done = sum(1 for pod in seen.pods if mapping(pod.get("status")).get("phase") == "Succeeded")
    if seen.running + done >= max(seen.wanted, 1):
        ended = f", {done} are done" if done else ""
        return seen.observation(Phase.RUNNING, f"{seen.running} of {seen.wanted} pods run{ended}")
    waits = [wait for pod in seen.pods if (wait := scheduling_wait(pod)) is not None]
    told = next((wait for wait in waits if wait.message), None)
    if told is None:
        told = volume_wait(seen.pods, seen.events)
    reason, more = (told.reason, told.message) if told else (None, "")
    if len(waits) == len(seen.pods):
        return seen.observation(Phase.QUEUED, more or "The pods wait for a node", reason)
    message = f"{seen.running} of {seen.wanted} pods run" + (f"; {more}" if more else "")
    return seen.observation(Phase.STARTING, message, reason)


def _leader_done(seen: _Seen) -> bool:
    """Whether the pod whose success is the job's success has succeeded."""
    return seen.kind.leader_decides and any(
        seen.kind.node_rank(pod, seen.job) == 0 and mapping(pod.get("status")).get("phase") == "Succeeded"
        for pod in seen.pods
    )


def _warning(seen: _Seen) -> str:
    return next((str(e.get("message") or "") for e in reversed(seen.events) if e.get("type") == "Warning"), "")


def _deadline(word: str, message: str) -> bool:
    return "deadline" in f"{word} {message}".lower()


def _placed(pod: Mapping[str, Any]) -> datetime | None:
    for condition in items(mapping(pod.get("status")).get("conditions")):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "True":
            return moment(condition.get("lastTransitionTime"))
    return None


def _started(pod: Mapping[str, Any], kind: Kind) -> datetime | None:
    wanted = kind.training_container(pod)
    for container in items(mapping(pod.get("status")).get("containerStatuses")):
        state = mapping(container.get("state"))
        begun = mapping(state.get("running")).get("startedAt") or mapping(state.get("terminated")).get("startedAt")
        if container.get("name") == wanted and (found := moment(begun)):
            return found
    return None
