"""The jobs of a run where they run: processes of this machine, or pods that the user's own kubeconfig may see."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dropforge.client.airflow import FINETUNE
from dropforge.client.named import Named
from dropforge.errors import DropforgeError

if TYPE_CHECKING:
    from kubeflow_training.jobs.backend import Backend, Snapshot
    from kubeflow_training.jobs.kinds import Kind
    from kubeflow_training.jobs.observation import Observation

PURPOSE = "dropforge/purpose"


@dataclass(frozen=True)
class Gang:
    """One job with its pods. :param purpose: of which stage it is, such as `train`."""

    snapshot: Snapshot
    seen: Observation
    purpose: str

    @property
    def name(self) -> str:
        return str(self.snapshot.job["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.snapshot.job["metadata"]["namespace"])

    @property
    def there(self) -> bool:
        """Whether it may still hold anything: a job that is being deleted is there until its last pod is gone."""
        phases = [(pod.get("status") or {}).get("phase") for pod in self.snapshot.pods]
        deleted = bool(self.snapshot.job["metadata"].get("deletionTimestamp"))
        return deleted or not self.seen.ended or "Running" in phases


@dataclass(frozen=True)
class Gangs:
    """The jobs of a DAG run; of all runs, if `dag_run` is empty. :param backends: each of one kind of jobs."""

    backends: Sequence[Backend]
    namespace: str | None
    dag_run: str = ""

    def find(self) -> list[Gang]:
        """All that are known, oldest first. :raises DropforgeError: if the cluster does not answer."""
        from kubeflow_training.jobs.manifest.ownership import DAG_KEY, RUN_KEY, Owner, label_value

        labels = {DAG_KEY: FINETUNE} | ({RUN_KEY: label_value(self.dag_run)} if self.dag_run else {})
        found = []
        for backend, job in jobs_of(self.backends, self.namespace, labels):
            owner = Owner.of(job.job)
            if owner is None or owner.dag_id != FINETUNE or self.dag_run not in ("", owner.run_id):
                continue
            metadata = job.job["metadata"]
            with asking_cluster():
                whole = backend.read(str(metadata["name"]), str(metadata["namespace"]))
            if whole is not None:
                found.append(_gang(whole))
        return sorted(found, key=lambda gang: str(gang.snapshot.job["metadata"].get("creationTimestamp")))

    def newest(self) -> Gang | None:
        """The one that is at work, or was last."""
        found = self.find()
        return found[-1] if found else None


def jobs_of(
    backends: Sequence[Backend], namespace: str | None, labels: Mapping[str, str]
) -> list[tuple[Backend, Snapshot]]:
    """The jobs with these labels, of every kind that the user may see.

    :raises DropforgeError: if the user may see none, or the cluster does not answer.
    """
    from kubeflow_training.jobs.errors import JobForbiddenError

    found, denied = [], []
    with asking_cluster():
        for backend in backends:
            try:
                found += [(backend, job) for job in backend.jobs(namespace, labels=labels)]
            except JobForbiddenError as error:
                denied.append(error)
        if len(denied) == len(backends):
            raise denied[0]
    return found


def _gang(snapshot: Snapshot) -> Gang:
    from kubeflow_training.jobs.observation import observe

    purpose = str((snapshot.job["metadata"].get("labels") or {}).get(PURPOSE, ""))
    return Gang(snapshot, observe(snapshot.job, snapshot.pods, snapshot.events), purpose)


def gangs_of(named: Named) -> Gangs:
    """Where the jobs of an opened run are. :raises DropforgeError: if that place cannot be reached from here."""
    backend = named.params.get("compute.backend", "local")
    return Gangs(places(backend), named.params.get("compute.namespace", "default"), named.dag_run)


def places(backend: str) -> list[Backend]:
    """A cluster by the recipe's word for it, once for each kind of jobs that it trains with.

    :raises DropforgeError: if it cannot be reached from here.
    """
    if backend == "local":
        return [place(backend)]
    return [place(backend, kind) for kind in _served_kinds()]


@functools.cache
def _served_kinds() -> tuple[Kind, ...]:
    from kubeflow_training.jobs.kubernetes.discovery import known_kinds

    with asking_cluster():
        return known_kinds(api_client())


def place(backend: str, kind: Kind | None = None) -> Backend:
    """A cluster by the recipe's word for it. :param kind: of its jobs; PyTorchJobs unless given.

    :raises DropforgeError: if it cannot be reached from here.
    """
    with asking_cluster():
        if backend == "local":
            from kubeflow_training.jobs.local import LocalCluster

            if not os.environ.get("KUBEFLOW_TRAINING_HOME"):
                raise DropforgeError(
                    "the local cluster",
                    "its jobs are processes of the machine where the stack runs, and it is not this one's",
                    "Give the command there, or name its folder by KUBEFLOW_TRAINING_HOME",
                )
            return LocalCluster()
        from kubeflow_training.jobs.kinds import PYTORCH_JOB
        from kubeflow_training.jobs.kubernetes import KubernetesCluster

        return KubernetesCluster(api_client(), kind or PYTORCH_JOB)


def api_client() -> Any:
    """A client with the rights of the user's kubeconfig. :raises DropforgeError: if there is none."""
    from kubernetes import config
    from kubernetes.config.config_exception import ConfigException

    try:
        return config.new_client_from_config()
    except (ConfigException, OSError) as error:
        raise DropforgeError(
            "the Kubernetes cluster",
            f"your kubeconfig leads to none ({error})",
            "Set KUBECONFIG; the rights that count are yours there",
        ) from error


@contextmanager
def asking_cluster() -> Iterator[None]:
    """:raises DropforgeError: instead of the job library's own errors."""
    from kubeflow_training.jobs.errors import JobError

    try:
        yield
    except JobError as error:
        raise DropforgeError(error.thing, error.cause, error.mend) from error
