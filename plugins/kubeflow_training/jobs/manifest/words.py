"""The words of a manifest: its API, the training container, labels, and the annotations that are written on a job."""

from __future__ import annotations

from typing import Final

API_VERSION: Final = "kubeflow.org/v1"
KIND: Final = "PyTorchJob"
CONTAINER: Final = "pytorch"
"""The admission webhook wants a container of this name in every template."""
AWAIT_MASTER: Final = "await-master"
"""Our init container of workers. Where pods need no names, as on the local cluster, it has nothing to do."""
DEFAULT_GRACE_SECONDS: Final = 30
LONGEST_HOST_NAME: Final = 63

# What the Airflow operator writes on a job so that it can be recognised again; see `jobs.manifest.ownership`.
FINGERPRINT_ANNOTATION: Final = "kubeflow-training/fingerprint"
GANG_ANNOTATION: Final = "kubeflow-training/gang"
OWNER_ANNOTATION: Final = "kubeflow-training/owner"
GENERATION_ANNOTATION: Final = "kubeflow-training/generation"
TOKEN_ANNOTATION: Final = "kubeflow-training/token"  # noqa: S105 - the annotation's name
MLFLOW_RUN_ANNOTATION: Final = "kubeflow-training/mlflow-run"

JOB_NAME_LABEL: Final = "training.kubeflow.org/job-name"
REPLICA_TYPE_LABEL: Final = "training.kubeflow.org/replica-type"
REPLICA_INDEX_LABEL: Final = "training.kubeflow.org/replica-index"
