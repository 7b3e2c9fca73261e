"""Names of jobs: one for each gang, one for a job that was given none, and how long they may be. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

from kubeflow_training.jobs.manifest.words import JOB_NAME_LABEL, KIND, LONGEST_HOST_NAME

_OWN_NAME: Final = frozenset(
    {JOB_NAME_LABEL, "batch.kubernetes.io/job-name", "jobset.sigs.k8s.io/jobset-name", "rdzvId", "subdomain"}
)
"""Where manifests of all kinds repeat their own name."""


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
