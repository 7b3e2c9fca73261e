"""How a task leaves its job: with its result, with its failure, or because it was stopped; and whether the job goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from kubeflow_training import retries
from kubeflow_training.asking.task import ended_by_user, task_state
from kubeflow_training.exceptions import TaskStopped
from kubeflow_training.gangs import outcome
from kubeflow_training.gangs.attach import cut_off, ends_by_itself, last_observation
from kubeflow_training.gangs.memory import Memory
from kubeflow_training.gangs.reattach import Identity
from kubeflow_training.jobs.errors import JobError
from kubeflow_training.jobs.observation import Observation, Phase, Reason
from kubeflow_training.jobs.waiting.limits import Limits, size_to_be_had
from kubeflow_training.jobs.waiting.podlog import last_lines

if TYPE_CHECKING:
    from airflow.sdk import Context

    from kubeflow_training.hooks import PyTorchJobHook


class Ending:
    """The last part of one try.

    :param task: the operator, with its `on_finish` and `keep_failed`.
    """

    def __init__(self, task: Any, context: Context) -> None:
        self._task, self._context, self._memory = task, context, Memory(context)

    def ended(self, observation: Observation, job: Mapping[str, Any], tail: Sequence[str] = ()) -> dict[str, Any]:
        """The result, or the failure's exception.

        :param tail: the last lines of the rank that failed, if the trigger read them.
        """
        name = f"job {job['namespace']}/{job['name']}"
        if observation.phase is Phase.LOST and (told := self._memory.result(job["uid"])) is not None:
            return told
        snapshot, alive = None, False
        try:
            backend = self._hook_of(job).connect()
            snapshot = backend.read(job["name"], job["namespace"])
            if snapshot is not None and snapshot.uid != job["uid"]:
                snapshot = None
            if observation.phase is Phase.LOST:
                # A time to live may have removed it before anybody looked: its events may still tell the end.
                observation = last_observation(backend, job["namespace"], job["uid"])
            elif observation.phase is not Phase.SUCCEEDED:
                tail = tail or last_lines(backend, snapshot, observation.pod)
                alive = snapshot is not None and not ends_by_itself(backend, snapshot)
        except JobError as error:
            self._task.log.warning("%s: its last words cannot be read: %s", name, error)
        self._task.gang_ended(job, observation)
        if observation.phase is not Phase.SUCCEEDED:
            # Survivors would hold their GPUs until the collective's own timeout, pods that wait for an image for ever.
            if alive or self._task.on_finish == "delete" or (observation.pods_running and not self._task.keep_failed):
                self.delete(job)
            text = outcome.failure_text(name, job["gang"], observation, tail)
            raise retries.failure(text, self._task, observation, job)
        found = outcome.result(observation, job, outcome.last_words(snapshot))
        # The job may be removed, by us or by its time to live, before the result is told.
        self._memory.keep_result(job["uid"], found)
        self._task.log.info("%s succeeded", name)
        if self._task.on_finish != "keep":
            self.delete(job)
        return found

    def too_long(
        self, job: Mapping[str, Any], seen: Observation | None, why: str, limits: Callable[[Identity], Limits]
    ) -> NoReturn:
        """Delete the job that has passed a limit. If so many nodes are there as will do, the next gang has these."""
        from airflow.sdk.exceptions import AirflowTaskTimeout

        name = f"job {job['namespace']}/{job['name']}"
        stored, deleted = self._memory.job, self.delete(job)
        size = None
        if stored is not None and stored.uid == job["uid"]:
            size = size_to_be_had(limits(stored), seen, time.time())
        if seen is None or stored is None or size is None:
            raise AirflowTaskTimeout(f"{name}: {why}")
        if deleted:
            self._memory.keep_size(stored, size)
        failed = replace(seen, phase=Phase.FAILED, reason=Reason.TOO_FEW_NODES, message=why)
        raise retries.failure(outcome.failure_text(name, job["gang"], failed, ()), self._task, failed, job)

    def stopped(self, job: Mapping[str, Any] | None) -> NoReturn:
        """Raise after a kill. The job goes if a person ended the task, or if no try is left that could find it.

        :param job: the one that is waited for; that of an earlier try, or one just being created, unless given.
        """
        ti, state, why = self._context["ti"], None, ""
        try:
            state = task_state(ti)
        except Exception as error:
            why = f"Airflow does not say why: {error!r}"
        by_user = not why and ended_by_user(state, deferred=False)
        last = ti.try_number > ti.max_tries
        if by_user:
            raise TaskStopped(f"the task was ended ({state}), and {self._gone(job)}")
        found = f"no try is left, and {self._gone(job)}" if last else "the job continues, and a retry finds it"
        raise TaskStopped(f"this worker was stopped, {why or f'while the task was {state}'}; {found}")

    def _gone(self, job: Mapping[str, Any] | None) -> str:
        """Delete the job; what became of it."""
        if job is None:
            stored = cut_off(self._memory.job, lambda item: self._hook_of(item.to_dict()).connect())
            if stored is None:
                return "no job of it is known"
            job = stored.to_dict()
        if self.delete(job):
            return "its job with it"
        return f"its job {job['namespace']}/{job['name']} could not be deleted and may still run"

    def delete(self, job: Mapping[str, Any]) -> bool:
        """Whether the job is deleted, or was gone; a failure is told in the log."""
        where = f"job {job['namespace']}/{job['name']}"
        try:
            backend = self._hook_of(job).connect()
            backend.delete(job["name"], job["namespace"], uid=job["uid"])
            self._task.log.info("%s is deleted", where)
            return True
        except Exception as error:  # a connection that is gone, for example, is no JobError
            self._task.log.error("%s could not be deleted and may still run: %s", where, error)
            return False

    def _hook_of(self, job: Mapping[str, Any]) -> PyTorchJobHook:
        """Where that job is: the task may have become another kind, or moved, while it was deferred."""
        found: PyTorchJobHook = self._task.hook(str(job.get("kind") or "PyTorchJob"), job.get("backend"))
        return found
