"""`PyTorchJobSensor`: waits for a job that somebody else started."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseSensorOperator

from kubeflow_training.exceptions import JobFailedForGood
from kubeflow_training.hooks import PyTorchJobHook
from kubeflow_training.jobs.errors import BackendUnavailableError
from kubeflow_training.jobs.observation import Observation, Phase, observe

if TYPE_CHECKING:
    from airflow.sdk import Context


class PyTorchJobSensor(BaseSensorOperator):
    """Succeeds when the job has succeeded and fails when it has ended otherwise. It never deletes the job.

    :param name, namespace: the job; templated.
    :param must_exist: fail if there is no such job, instead of waiting for it.
    :param deferrable: wait in the triggerer; `timeout` counts the same.
    """

    template_fields: Sequence[str] = ("name", "namespace", "backend")

    def __init__(
        self,
        *,
        name: str,
        namespace: str = "default",
        backend: str = "kubernetes",
        kubernetes_conn_id: str = "kubernetes_default",
        home: str | None = None,
        must_exist: bool = False,
        deferrable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.name = name
        self.namespace = namespace
        self.backend = backend
        self.kubernetes_conn_id = kubernetes_conn_id
        self.home = home
        self.must_exist = must_exist
        self.deferrable = deferrable

    def execute(self, context: Context) -> Any:
        if self.deferrable:
            self._wait_in_triggerer()
        return super().execute(context)

    def _wait_in_triggerer(self) -> NoReturn:
        from kubeflow_training.triggers import PyTorchJobTrigger

        trigger = PyTorchJobTrigger(
            name=self.name,
            namespace=self.namespace,
            backend=self.backend,
            kubernetes_conn_id=self.kubernetes_conn_id,
            home=self.home,
            poll_interval=self.poke_interval,
            log_ranks="none",
            deadline=time.time() + self.timeout,
            owned=False,
            must_exist=self.must_exist,
        )
        self.defer(trigger=trigger, method_name=self.resume.__name__)

    def poke(self, context: Context) -> bool:  # noqa: ARG002 - Airflow's signature
        hook = PyTorchJobHook(self.backend, kubernetes_conn_id=self.kubernetes_conn_id, home=self.home)
        try:
            snapshot = hook.connect().read(self.name, self.namespace)
        except BackendUnavailableError as error:
            self.log.warning("cannot ask about the job, and go on trying: %s", error)
            return False
        if snapshot is None and not self.must_exist:
            self.log.info("job %s/%s does not exist yet", self.namespace, self.name)
            return False
        observation = observe(snapshot.job, snapshot.pods, snapshot.events) if snapshot else observe(None)
        self.log.info("job %s/%s is %s: %s", self.namespace, self.name, observation.phase, observation.message)
        return self._done(observation)

    def resume(self, context: Context, event: Mapping[str, Any]) -> None:  # noqa: ARG002 - Airflow's signature
        """Go on after the trigger's event."""
        from airflow.sdk.exceptions import AirflowSensorTimeout

        if event["kind"] == "timeout":
            raise AirflowSensorTimeout(f"job {self.namespace}/{self.name} has not ended within {self.timeout} seconds")
        self._done(Observation.from_dict(event["observation"]))

    def _done(self, observation: Observation) -> bool:
        if observation.ended and observation.phase is not Phase.SUCCEEDED:
            what = f"{observation.phase}, {observation.reason or 'unknown'}: {observation.message}. {observation.mend}."
            raise JobFailedForGood(f"job {self.namespace}/{self.name} {what}")
        return observation.ended
