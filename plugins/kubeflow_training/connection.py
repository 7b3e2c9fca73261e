"""What operator and sensor have in common: the arguments that say where jobs run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar

from kubeflow_training.hooks import PyTorchJobHook
from kubeflow_training.jobs.local.layout import HOME_VARIABLE


class ClusterArguments:
    """A mixin. Its three arguments are templated and mean the same everywhere.

    :param backend: "kubernetes", or "local" for processes of this machine.
    :param kubernetes_conn_id: Airflow connection of the cluster; its content never leaves the process that uses it.
    :param home: folder of the local cluster; `KUBEFLOW_TRAINING_HOME` unless given.
    """

    cluster_fields: ClassVar[Sequence[str]] = ("backend", "kubernetes_conn_id", "home")

    backend: str
    kubernetes_conn_id: str
    home: str | None

    @property
    def place(self) -> str:
        """Where this task's jobs are, as it is stored with each: `kubernetes:CONNECTION`, or `local:HOME`."""
        home = self.home or os.environ.get(HOME_VARIABLE, "")
        return f"{self.backend}:{home if self.backend == 'local' else self.kubernetes_conn_id}"

    def hook(self, kind: str = "PyTorchJob", place: str | None = None) -> PyTorchJobHook:
        """The hook for jobs of that kind, where this task's jobs are or in another place."""
        backend, _, which = (place or self.backend).partition(":")
        connection = which if which and backend != "local" else self.kubernetes_conn_id
        home = which if which and backend == "local" else self.home
        return PyTorchJobHook(backend, kind=kind, kubernetes_conn_id=connection, home=home)
