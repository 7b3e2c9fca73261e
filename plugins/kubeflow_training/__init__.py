"""Distributed training jobs for Airflow: operator, sensor, trigger and links for PyTorchJob."""

from __future__ import annotations

from typing import Any

PACKAGE_NAME = "apache-airflow-providers-kubeflow-training"


def get_provider_info() -> dict[str, Any]:
    """What Airflow's provider discovery reads."""
    return {
        "package-name": _shipped_by(),
        "name": "Kubeflow Training",
        "description": "Distributed training jobs (PyTorchJob) on Kubernetes or on one machine.",
        "integrations": [{"integration-name": "Kubeflow Training", "tags": ["service"]}],
        "operators": [
            {
                "integration-name": "Kubeflow Training",
                "python-modules": ["kubeflow_training.operators", "kubeflow_training.reaper"],
            },
        ],
        "sensors": [{"integration-name": "Kubeflow Training", "python-modules": ["kubeflow_training.sensors"]}],
        "triggers": [{"integration-name": "Kubeflow Training", "python-modules": ["kubeflow_training.triggers"]}],
        "hooks": [{"integration-name": "Kubeflow Training", "python-modules": ["kubeflow_training.hooks"]}],
        "extra-links": [
            "kubeflow_training.links.PyTorchJobLink",
            "kubeflow_training.links.PodLogsLink",
            "kubeflow_training.links.MlflowRunLink",
        ],
    }


def _shipped_by() -> str:
    """The distribution that ships this package: Airflow refuses a provider that names another one."""
    from importlib.metadata import entry_points

    for entry in entry_points(group="apache_airflow_provider"):
        if entry.value == f"{__name__}:get_provider_info" and entry.dist is not None:
            return entry.dist.name.lower().replace("_", "-")
    return PACKAGE_NAME
