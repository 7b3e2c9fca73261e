"""From arguments that may be stored to a backend that holds credentials."""

from __future__ import annotations

from typing import Any

from kubeflow_training.jobs.backend import Backend
from kubeflow_training.jobs.errors import JobError


class PyTorchJobHook:
    """Makes backends; keeps none, so that a new one has new credentials.

    :param backend: "local" or "kubernetes".
    :param kubernetes_conn_id: Airflow connection of the cluster; its content never leaves this process.
    :param home: folder of the local cluster; `KUBEFLOW_TRAINING_HOME` unless given.
    """

    def __init__(
        self,
        backend: str = "kubernetes",
        *,
        kubernetes_conn_id: str = "kubernetes_default",
        home: str | None = None,
    ) -> None:
        self.backend, self.kubernetes_conn_id, self.home = backend, kubernetes_conn_id, home

    def connect(self) -> Backend:
        """A backend.

        :raises JobError: if there is none of that name.
        """
        if self.backend == "local":
            from kubeflow_training.jobs.local import LocalCluster

            return LocalCluster(self.home)
        if self.backend == "kubernetes":
            from kubeflow_training.jobs.kubernetes import KubernetesCluster

            return KubernetesCluster(self._api_client())
        raise JobError(f"backend {self.backend!r}", "there is none of that name", "Use `local` or `kubernetes`")

    def _api_client(self) -> Any:
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook

        return KubernetesHook(conn_id=self.kubernetes_conn_id).get_conn()
