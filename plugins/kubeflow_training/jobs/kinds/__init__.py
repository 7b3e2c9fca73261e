"""The kinds of jobs that are understood: PyTorchJob, TrainJob, the plain indexed Job that needs no operator, and
SparkApplication, which trains nothing."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final

from kubeflow_training.jobs.errors import ManifestError
from kubeflow_training.jobs.kinds.indexed import INDEXED_JOB
from kubeflow_training.jobs.kinds.kind import Kind
from kubeflow_training.jobs.kinds.pytorch import PYTORCH_JOB
from kubeflow_training.jobs.kinds.spark import SPARK_APPLICATION
from kubeflow_training.jobs.kinds.train import TRAIN_JOB
from kubeflow_training.jobs.shapes import mapping

__all__ = [
    "INDEXED_JOB",
    "KINDS",
    "KNOWN",
    "PYTORCH_JOB",
    "SPARK_APPLICATION",
    "TRAIN_JOB",
    "Kind",
    "kind_named",
    "kind_of",
    "kind_seen",
]

KINDS: Final[tuple[Kind, ...]] = (PYTORCH_JOB, TRAIN_JOB, INDEXED_JOB)
"""Those that train: a `TrainingJobSpec` is compiled to one of them."""
KNOWN: Final[tuple[Kind, ...]] = (*KINDS, SPARK_APPLICATION)


def kind_of(manifest: Mapping[str, Any]) -> Kind:
    """The kind of a manifest.

    :raises ManifestError: if it is of another kind or API version.
    """
    manifest = mapping(manifest)
    version, name = str(manifest.get("apiVersion") or ""), str(manifest.get("kind") or "")
    for kind in KNOWN:
        if (version, name) == (kind.api_version, kind.name):
            return kind
    nearest = _nearest(name)
    raise ManifestError(
        f"manifest of kind {f'{version} {name}'.strip() or 'unknown'}",
        f"only {', '.join(f'{kind.api_version} {kind.name}' for kind in KNOWN)} are understood",
        f"Did you mean `apiVersion: {nearest.api_version}` with `kind: {nearest.name}`?",
    )


def kind_named(name: str) -> Kind:
    """The kind of that name, like "TrainJob".

    :raises ManifestError: if there is none.
    """
    for kind in KNOWN:
        if kind.name == name:
            return kind
    raise ManifestError(
        f"kind {name!r}",
        f"only {', '.join(kind.name for kind in KNOWN)} are understood",
        f"Did you mean {_nearest(name).name}?",
    )


def kind_seen(job: Mapping[str, Any]) -> Kind:
    """The kind of a job that a backend told; never raises, and takes what names no known kind for a PyTorchJob."""
    return next((kind for kind in KNOWN if kind.name == mapping(job).get("kind")), PYTORCH_JOB)


def _nearest(name: str) -> Kind:
    names = {kind.name.lower(): kind for kind in KNOWN}
    return names[next(iter(difflib.get_close_matches(str(name).lower(), names, 1, 0.3)), PYTORCH_JOB.name.lower())]
