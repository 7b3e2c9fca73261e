"""What is made and refused before a job is submitted: PyTorchJob manifests (kubeflow.org/v1) as plain values."""

from __future__ import annotations

from typing import Any

from kubeflow_training.jobs.manifest.naming import made_name

__all__ = ["made_name", "pytorch_job"]


def pytorch_job(**arguments: Any) -> dict[str, Any]:
    """The manifest of one gang; the arguments are those of `jobs.spec.TrainingJobSpec`."""
    from kubeflow_training.jobs.spec import TrainingJobSpec

    return TrainingJobSpec(**arguments).manifest()
