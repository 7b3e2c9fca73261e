"""`PyTorchJobSensor`: waits for a job that somebody else started."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseSensorOperator

from kubeflow_training.connection import ClusterArguments
from kubeflow_training.exceptions import JobFailedForGood, JobNotReached
from kubeflow_training.gangs import outcome
from kubeflow_training.gangs.attach import last_observation
from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.errors import BackendUnavailableError, JobError
from kubeflow_training.jobs.observation import Observation, Phase, observe
from kubeflow_training.links import PodLogsLink, PyTorchJobLink, addresses
from kubeflow_training.state_mismatch import ResumableTask, first_event_at

if TYPE_CHECKING:
    from airflow.sdk import Context


class PyTorchJobSensor(ClusterArguments, ResumableTask, BaseSensorOperator):
    """Succeeds when the job has succeeded and fails when it has ended otherwise. It never deletes the job.

    The result is the operator's: phase, name, namespace, uid, durations, message, progress.

    :param name, namespace: the job; templated.
    :param kind: "PyTorchJob", "TrainJob" or "Job"; templated.
    :param backend, kubernetes_conn_id, home: see `connection.ClusterArguments`; templated.
    :param must_exist: fail if there is no such job, instead of waiting for it.
    :param deferrable: wait in the triggerer; `timeout` and `execution_timeout` count the same.
    :param job_url, logs_url: addresses for the task's links, see `links`; templated.
    """

    template_fields: Sequence[str] = (
        "name",
        "namespace",
        "kind",
        "job_url",
        "logs_url",
        *ClusterArguments.cluster_fields,
    )
    operator_extra_links = (PyTorchJobLink(), PodLogsLink())
    ui_color = "#f7c6bb"

    def __init__(
        self,
        *,
        name: str,
        namespace: str = "default",
        kind: str = "PyTorchJob",
        backend: str = "kubernetes",
        kubernetes_conn_id: str = "kubernetes_default",
        home: str | None = None,
        must_exist: bool = False,
        deferrable: bool = True,
        job_url: str | None = None,
        logs_url: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.name, self.namespace, self.kind = name, namespace, kind
        self.backend, self.kubernetes_conn_id, self.home = backend, kubernetes_conn_id, home
        self.must_exist, self.deferrable = must_exist, deferrable
        self.job_url, self.logs_url = job_url, logs_url
        self._result: dict[str, Any] | None = None
        self._uid: str | None = None

    def execute(self, context: Context) -> Any:
        values = {"name": self.name, "namespace": self.namespace, "uid": None, "gang": None, "run": None}
        for key, url in addresses({"job": self.job_url, "logs": self.logs_url}, values).items():
            context["ti"].xcom_push(key=key, value=url)
        if self.deferrable:
            self.explain_retry(context)
            if self.poke(context):
                return self._result
            self.note_wait(context)
            self._wait_in_triggerer(time.time() + min(self.timeout, self._longest_try))
        super().execute(context)
        return self._result

    def poke(self, context: Context) -> bool:  # noqa: ARG002 - Airflow's signature
        try:
            backend = self.hook(self.kind).connect()
            snapshot = backend.read(self.name, self.namespace)
            if snapshot is None and self._uid is not None:
                # It was there at an earlier look: its events may still tell the end.
                observation = last_observation(backend, self.namespace, self._uid)
            else:
                observation = observe(snapshot.job, snapshot.pods, snapshot.events) if snapshot else observe(None)
        except BackendUnavailableError as error:
            self.log.warning("cannot ask about the job, and keep trying: %s", error)
            return False
        except JobError as error:
            raise JobFailedForGood(str(error)) from error
        if snapshot is None and self._uid is None and not self.must_exist:
            self.log.info("job %s/%s does not exist yet", self.namespace, self.name)
            return False
        self._uid = snapshot.uid if snapshot else self._uid
        self.log.info("job %s/%s: %s. %s", self.namespace, self.name, observation.phase, observation.message)
        if observation.ended:
            self._result = self._finish(observation, snapshot)
        return observation.ended

    def resume(self, context: Context, event: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """Go on after the trigger's event."""
        from airflow.sdk.exceptions import AirflowSensorTimeout, AirflowTaskTimeout

        if event["kind"] == "timeout":
            if self._longest_try < self.timeout:
                # What a worker raises for it: the next try waits again, which it does not after `timeout`.
                raise AirflowTaskTimeout(f"job {self.namespace}/{self.name}: execution_timeout is over")
            why = event.get("why") or f"it has not ended within {self.timeout} seconds"
            raise AirflowSensorTimeout(f"job {self.namespace}/{self.name}: {why}")
        if event["kind"] == "broken":
            raise JobNotReached(f"job {self.namespace}/{self.name}: {event.get('why')}")
        snapshot = None
        try:
            snapshot = self.hook(self.kind).connect().read(self.name, self.namespace)
        except JobError as error:
            self.log.warning("its last words cannot be read: %s", error)
        return self._finish(Observation.from_dict(event["observation"]), snapshot)

    @property
    def _longest_try(self) -> float:
        """Seconds; a worker keeps Airflow's `execution_timeout` itself, and the triggerer knows nothing of it."""
        return self.execution_timeout.total_seconds() if self.execution_timeout is not None else math.inf

    def _wait_in_triggerer(self, until: float) -> NoReturn:
        from kubeflow_training.triggers import PyTorchJobTrigger

        trigger = PyTorchJobTrigger(
            name=self.name,
            namespace=self.namespace,
            kind=self.kind,
            backend=self.backend,
            kubernetes_conn_id=self.kubernetes_conn_id,
            home=self.home,
            poll_interval=self.poke_interval,
            log_ranks="none",
            deadline=until,
            owned=False,
            must_exist=self.must_exist,
            not_before=first_event_at(),
        )
        self.defer(trigger=trigger, method_name=self.resume.__name__)

    def _finish(self, observation: Observation, snapshot: Snapshot | None) -> dict[str, Any]:
        job: dict[str, Any] = {"name": self.name, "namespace": self.namespace}
        if observation.phase is not Phase.SUCCEEDED:
            what = f"{observation.phase}, {observation.reason or 'unknown'}: {observation.message}. {observation.mend}."
            raise JobFailedForGood(f"job {self.namespace}/{self.name} {what}", observation, job)
        if snapshot is not None:
            job |= {"uid": snapshot.uid, "created": outcome.created(snapshot), "gang": outcome.gang(snapshot)}
        return outcome.result(observation, job, outcome.last_words(snapshot))
