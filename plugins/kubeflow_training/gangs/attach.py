"""A task's gangs: the newest is found again, or the next is started, and never two at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from kubeflow_training.exceptions import JobNotReached
from kubeflow_training.gangs import outcome
from kubeflow_training.gangs.memory import Memory
from kubeflow_training.gangs.reattach import Action, Decision, Identity, created_for, decide, identity
from kubeflow_training.jobs.backend import Backend, Snapshot
from kubeflow_training.jobs.errors import (
    BackendUnauthorizedError,
    BackendUnavailableError,
    JobError,
    JobExistsError,
    JobForbiddenError,
)
from kubeflow_training.jobs.kinds import kind_seen
from kubeflow_training.jobs.manifest.naming import longest_name
from kubeflow_training.jobs.manifest.ownership import OWNER_LABEL, Owner
from kubeflow_training.jobs.manifest.words import DEFAULT_GRACE_SECONDS, OWNER_ANNOTATION, TOKEN_ANNOTATION
from kubeflow_training.jobs.observation import Observation, Phase, observe
from kubeflow_training.jobs.shapes import mapping, whole

_NAP: Final = 0.2  # seconds; how soon a kill is noticed
_OWN_END: Final = 10.0  # seconds that a controller has to tell of its job's end after that of a pod
_TRIES: Final = 6
_PATIENCE: Final = 120.0  # seconds beyond the grace period
_OUTAGE: Final = 75.0  # seconds for which a cluster may not answer a call: an API server that is started anew
_PAUSES: Final = (0.5, 8.0)  # seconds between two calls at first, and at most

T = TypeVar("T")
log = logging.getLogger(__name__)


class Gangs:
    """
    :param still_wanted: called before anything is created and while waiting; raises if the task is to stop.
    :param replaced: whether a gang that failed like this is followed by another.
    :param prepared: the manifest as this gang is created, from the manifest that counts for the fingerprint.
    :param numbered: whether later gangs have their number in the name; else all share it.
    :param keep_failed: whether a failed gang of which nothing runs may stay beside the next one.
    :param place: the backend's name, stored with each gang.
    :param elsewhere: the backend of a gang that an earlier try started as another kind or in another place.
    """

    def __init__(
        self,
        backend: Backend,
        memory: Memory,
        owner: Owner,
        *,
        still_wanted: Callable[[], None],
        replaced: Callable[[Identity, Observation], bool],
        prepared: Callable[[dict[str, Any], Identity], dict[str, Any]] = lambda manifest, _: manifest,
        numbered: bool = True,
        keep_failed: bool = False,
        place: str | None = None,
        elsewhere: Callable[[Identity], Backend] | None = None,
    ) -> None:
        self.backend, self.memory, self.owner = backend, memory, owner
        self._still_wanted, self._replaced, self._prepared = still_wanted, replaced, prepared
        self._numbered, self._keep_failed = numbered, keep_failed
        self._place, self._elsewhere = place, elsewhere
        self._may_be_starting = False

    def attach(self, manifest: Mapping[str, Any], generation: str) -> Decision:
        """The gang to wait for (`ADOPT`, `CREATE` or `REPLACE`, done by then) or whose success is to be told (`TELL`).

        Its identity is stored before the job exists.

        :raises JobNotReached: if the name is another's, or an old gang does not end.
        """
        wanted = replace(identity(manifest, self.owner, generation), backend=self._place)
        longest = longest_name(manifest) if self._numbered else None
        before = self.memory.job
        self._may_be_starting = before is not None and before.uid is not None
        for _ in range(_TRIES):
            stored = self.memory.job
            if stored is not None and not stored.same_place(wanted):
                self._leave(stored, wanted.numbered(stored.gang + 1, longest))
            newest = self._newest(stored, wanted)
            told = stored is not None and newest is None and self._succeeded(stored)
            decision = decide(stored, wanted, newest, self._replaced, longest=longest, succeeded=told)
            job = decision.identity
            log.info("job %s/%s: %s (%s)", job.namespace, job.name, decision.action, decision.why)
            if decision.action is Action.REFUSE:
                raise JobNotReached(
                    f"job {job.namespace}/{job.name}: {decision.why}. Wait for it, delete it, or choose another name"
                )
            if decision.action is Action.TELL:
                return decision
            if decision.action is Action.REPLACE and newest is not None and not self._may_stay(newest, job):
                self.remove(newest)
            found = job if decision.action is Action.ADOPT else self._create(manifest, job)
            if found is not None:
                self.memory.job = found
                return Decision(decision.action, found, decision.why, decision.over)
        raise JobNotReached(f"job {wanted.namespace}/{wanted.name}: its name is taken again and again")

    def remove(self, old: Snapshot, backend: Backend | None = None) -> None:
        """Delete the gang and wait until all of it is gone: two gangs must never write the same checkpoints.

        :param backend: where it is, if elsewhere.
        :raises JobNotReached: if it does not end.
        """
        metadata = old.job["metadata"]
        name, namespace, there = metadata["name"], metadata["namespace"], backend or self.backend
        if not metadata.get("deletionTimestamp"):
            self._asked(lambda: there.delete(name, namespace, uid=old.uid))
        patience = time.monotonic() + _grace(old.job) + _PATIENCE
        while (now := self._asked(lambda: there.read(name, namespace))) is not None and now.uid == old.uid:
            if time.monotonic() > patience:
                raise JobNotReached(
                    f"job {namespace}/{name}: the previous attempt does not end. Look at its pods and their node"
                )
            self._still_wanted()
            time.sleep(_NAP)

    def _newest(self, stored: Identity | None, wanted: Identity) -> Snapshot | None:
        """The task's newest job; what else has its name, where nothing is stored."""
        if stored is not None:
            return self._asked(lambda: self.backend.read(stored.name, stored.namespace))
        labels = {OWNER_LABEL: self.owner.digest}
        jobs = self._asked(lambda: self.backend.jobs(wanted.namespace, labels=labels))
        mine = [item for item in jobs if item.annotations.get(OWNER_ANNOTATION) == wanted.owner]
        # The store may have been emptied while a later gang trains.
        newest = max(
            mine, key=lambda item: str(mapping(item.job.get("metadata")).get("creationTimestamp")), default=None
        )
        name = newest.job["metadata"]["name"] if newest is not None else wanted.name
        return self._asked(lambda: self.backend.read(name, wanted.namespace))

    def _leave(self, stored: Identity, following: Identity) -> None:
        """End the gang of an earlier try that had another kind or place: its job is not to be seen from here.

        :raises JobNotReached: if that place cannot be asked. After a clear it is left with a warning instead.
        """
        if self._elsewhere is None:
            return
        where = f"job {stored.namespace}/{stored.name}"
        try:
            self._leave_there(self._reached(stored), stored, following)
        except JobError as error:
            if _kind_unknown(error):
                log.warning("%s is gone with what held it: %s", where, error)
                return
            place = f"{stored.kind}s of {stored.backend or 'where it was'}"
            if stored.generation == following.generation:
                raise JobNotReached(
                    f"{where} of an earlier try may still run among the {place}, where it cannot be asked about: "
                    f"{error}. Bring that place back, or clear the task, which then leaves that job as it is"
                ) from error
            log.warning("%s may still run among the %s; it is left, as it cannot be ended: %s", where, place, error)

    def _reached(self, stored: Identity) -> Backend:
        assert self._elsewhere is not None
        try:
            return self._elsewhere(stored)
        except JobError:
            raise
        except Exception as error:  # Airflow has an error of its own for a connection that was deleted
            cause = f"there is no way to it: {type(error).__name__}: {error}"
            raise JobError(stored.backend or "its place", cause, "Restore its Airflow connection") from error

    def _leave_there(self, there: Backend, stored: Identity, following: Identity) -> None:
        old = self._asked(lambda: there.read(stored.name, stored.namespace))
        if old is None or (old.uid != stored.uid and old.annotations.get(TOKEN_ANNOTATION) != stored.token):
            return
        if not self._may_stay(old, following):
            log.info("job %s/%s: removed, as the task's job is elsewhere now", stored.namespace, stored.name)
            self.remove(old, there)

    def _asked(self, call: Callable[[], T]) -> T:
        """The cluster's answer. An outage is waited out; a create that went through unseen is known by its token.

        An API server that has just started denies rights for a moment. That may be so where it was away before, and
        where the rights are known to be there since an earlier try.
        """
        until: dict[type[JobError], float] = {}
        pause = _PAUSES[0]
        while True:
            try:
                return call()
            except BackendUnauthorizedError:
                raise  # only a new client has new credentials
            except (BackendUnavailableError, JobForbiddenError) as error:
                if isinstance(error, JobForbiddenError) and not self._may_be_starting:
                    raise
                self._may_be_starting = True
                now = time.monotonic()
                if now >= until.setdefault(type(error), now + _OUTAGE):
                    raise
                log.warning("%s (asked again in %g s)", error, pause)
            back = time.monotonic() + pause
            while time.monotonic() < back:
                time.sleep(min(_NAP, pause))
                self._still_wanted()
            pause = min(2 * pause, _PAUSES[1])

    def _succeeded(self, job: Identity) -> bool:
        """Whether the gang whose job is gone has succeeded; its result is kept then."""
        if self.memory.result(job.uid) is not None:
            return True
        seen = self._asked(lambda: last_observation(self.backend, job.namespace, job.uid))
        if seen.phase is Phase.SUCCEEDED and job.uid is not None:
            self.memory.keep_result(job.uid, outcome.result(seen, job.to_dict()))
        return seen.phase is Phase.SUCCEEDED

    def _create(self, manifest: Mapping[str, Any], job: Identity) -> Identity | None:
        """The created gang; None if its name was taken and has been cleared since: look again."""
        self._still_wanted()
        self.memory.job = job
        try:
            made = self._prepared(job.written_on(manifest, self.owner), job)
            return job.of(self._asked(lambda: self.backend.create(made)))
        except JobExistsError:
            found = self._asked(lambda: self.backend.read(job.name, job.namespace))
        if found is None:
            return None
        if created_for(job, found):
            log.info("job %s/%s exists: an earlier create went through after all", job.namespace, job.name)
            return job.of(found)
        verdict = decide(None, job, found)
        log.info("job %s/%s is in the way: %s (%s)", job.namespace, job.name, verdict.action, verdict.why)
        if verdict.action is Action.ADOPT:
            return verdict.identity
        if verdict.action is Action.REFUSE:
            raise JobNotReached(
                f"job {job.namespace}/{job.name}: {verdict.why}. Wait for it, delete it, or choose another name"
            )
        self.remove(found)
        return None

    def _may_stay(self, old: Snapshot, following: Identity) -> bool:
        seen = observe(old.job, old.pods, old.events)
        apart = old.job["metadata"]["name"] != following.name
        over = seen.ended and not seen.pods_running and kind_seen(old.job).ended(old.job)
        return self._keep_failed and apart and over


def cut_off(stored: Identity | None, backend: Callable[[Identity], Backend]) -> Identity | None:
    """The task's job, also if its creation was cut off before its answer was here; None if there is none.

    :param stored: what the task remembers as its newest gang.
    """
    if stored is None or stored.uid is not None:
        return stored
    where = f"{stored.namespace}/{stored.name}"
    try:
        found = backend(stored).read(stored.name, stored.namespace)
    except Exception as error:  # a connection that is gone, for example, is no JobError
        log.error("job %s may have been created and may run: %s", where, error)
        return None
    return stored.of(found) if found is not None and created_for(stored, found) else None


def _kind_unknown(error: JobError) -> bool:
    """Whether the cluster does not know the job's kind: what defined it was removed, and its jobs with it."""
    from kubeflow_training.jobs.kubernetes.answers import NotFoundError

    return isinstance(error.__cause__, NotFoundError)


def ends_by_itself(backend: Backend, seen: Snapshot) -> bool:
    """Whether a job that counts as failed has ended by its own status, or does so in a moment because a pod has failed.

    One whose pods wait for an image or a node would go on holding its other nodes.

    :raises JobError: if the cluster does not answer.
    """
    kind, metadata = kind_seen(seen.job), mapping(seen.job.get("metadata"))
    patience = time.monotonic() + _OWN_END
    now: Snapshot | None = seen
    while now is not None and now.uid == seen.uid and not mapping(now.job.get("metadata")).get("deletionTimestamp"):
        if kind.ended(now.job):
            return True
        failed = any(mapping(pod.get("status")).get("phase") == "Failed" for pod in now.pods)
        if kind.restarts(now.job) or not failed or time.monotonic() > patience:
            return False
        time.sleep(_NAP)
        now = backend.read(str(metadata["name"]), str(metadata["namespace"]))
    return True


def last_observation(backend: Backend, namespace: str, uid: str | None) -> Observation:
    """What is known of a job that is gone, from the events that outlive it for a while."""
    words = getattr(backend, "last_words", None)
    return observe(None, (), words(namespace, uid) if words is not None and uid else ())


def _grace(job: Mapping[str, Any]) -> float:
    try:
        specs = kind_seen(job).pod_specs(dict(job))
    except (KeyError, TypeError, AttributeError):
        specs = []
    found = [whole(spec.get("terminationGracePeriodSeconds")) for spec in specs]
    return float(max((seconds for seconds in found if seconds is not None), default=DEFAULT_GRACE_SECONDS))
