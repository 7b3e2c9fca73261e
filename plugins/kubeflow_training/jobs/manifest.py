"""PyTorchJob manifests (kubeflow.org/v1) as plain values: the builder's short form, names, and the fingerprint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

API_VERSION: Final = "kubeflow.org/v1"
KIND: Final = "PyTorchJob"
CONTAINER: Final = "pytorch"
"""The admission webhook wants a container of this name in every template."""
AWAIT_MASTER: Final = "await-master"
"""Our init container of workers. Where pods need no names, as on the local cluster, it has nothing to do."""
DEFAULT_GRACE_SECONDS: Final = 30
LONGEST_HOST_NAME: Final = 63

# What the Airflow operator writes on a job so that it can be recognised again; see `jobs.ownership`.
FINGERPRINT_ANNOTATION: Final = "kubeflow-training/fingerprint"
GANG_ANNOTATION: Final = "kubeflow-training/gang"
OWNER_ANNOTATION: Final = "kubeflow-training/owner"
GENERATION_ANNOTATION: Final = "kubeflow-training/generation"
TOKEN_ANNOTATION: Final = "kubeflow-training/token"  # noqa: S105 - the annotation's name
MLFLOW_RUN_ANNOTATION: Final = "kubeflow-training/mlflow-run"

JOB_NAME_LABEL: Final = "training.kubeflow.org/job-name"
REPLICA_TYPE_LABEL: Final = "training.kubeflow.org/replica-type"
REPLICA_INDEX_LABEL: Final = "training.kubeflow.org/replica-index"
_OWN_NAME: Final = frozenset(
    {JOB_NAME_LABEL, "batch.kubernetes.io/job-name", "jobset.sigs.k8s.io/jobset-name", "rdzvId", "subdomain"}
)
"""Where manifests of all kinds repeat their own name."""


def pytorch_job(**arguments: Any) -> dict[str, Any]:
    """The manifest of one gang; the arguments are those of `jobs.spec.TrainingJobSpec`."""
    from kubeflow_training.jobs.spec import TrainingJobSpec

    return TrainingJobSpec(**arguments).manifest()


def without_nulls(value: Any) -> Any:
    """As the API reads it: a field that is null is a field that is not there."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """SHA-256 over what makes this job this job: name, namespace and spec; labels and annotations do not count."""
    metadata = manifest.get("metadata") or {}
    content = [metadata.get("name"), metadata.get("namespace"), manifest.get("spec")]
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def renamed(manifest: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The manifest with another name; selectors of its own pods by the job's name go with it."""
    metadata = {key: value for key, value in (manifest.get("metadata") or {}).items() if key != "generateName"}
    old = metadata.get("name") or ""
    found = _reselected(manifest, old, name)
    return {**found, "metadata": {**metadata, "name": name}}


def gang_name(name: str, gang: int, longest: int) -> str:
    """The name of a gang's job: the first has the job's own, later ones its number, like `train-g2`.

    :param longest: how long it may be. What is too long is cut, and told apart by four characters of its hash.
    """
    if gang <= 1:
        return name
    tail = f"-g{gang}"
    if len(name) + len(tail) <= longest:
        return name + tail
    digest = hashlib.sha256(name.encode()).hexdigest()[:4]
    return f"{name[: longest - len(tail) - 5].rstrip('-')}-{digest}{tail}"


def made_name(prefix: str, owner: str, longest: int) -> str:
    """A name for a job that was given none: always the same for the same owner, and no other owner's.

    :param prefix: what it should begin with; what is no DNS-1035 label is bent until it is one.
    """
    digest = hashlib.sha256(owner.encode()).hexdigest()[:8]
    head = re.sub(r"[^a-z0-9]+", "-", prefix.lower()).strip("-")
    head = head if head[:1].isalpha() else f"job-{head}".rstrip("-")
    return f"{head[: max(1, min(longest, 40) - 9)].rstrip('-')}-{digest}"


def longest_name(manifest: Mapping[str, Any]) -> int:
    """How long the job's name may be, so that the host name of its last pod still is one."""
    if manifest.get("kind") != KIND:
        return LONGEST_HOST_NAME - len("-node-0-9999-abcde")
    replicas = (manifest.get("spec") or {}).get("pytorchReplicaSpecs")
    worker = replicas.get("Worker") if isinstance(replicas, Mapping) else None
    if worker is None:
        return LONGEST_HOST_NAME - len("-master-0")
    count = worker.get("replicas", 1) if isinstance(worker, Mapping) else 1
    last = count - 1 if isinstance(count, int) and count > 0 else 0
    return LONGEST_HOST_NAME - max(len(f"-worker-{last}"), len("-master-0"))


def _reselected(value: Any, old: str, new: str) -> Any:
    if isinstance(value, Mapping):
        return {
            key: new if key in _OWN_NAME and item == old else _reselected(item, old, new) for key, item in value.items()
        }
    return [_reselected(item, old, new) for item in value] if isinstance(value, list | tuple) else value
