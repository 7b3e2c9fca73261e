"""Namespaces, accounts and what Airflow may do where trainings run. Pure: texts go in, manifests come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml

from dropforge.errors import DropforgeError
from dropforge.install.access import COMPONENTS
from dropforge.install.keys import AIRFLOW
from dropforge.install.steps import Size

#: Files of `plugins/kubeflow_training/manifests` whose Roles Airflow gets, `rbac-spark.yaml` where Spark's operator is.
ROLES: Final = (
    "rbac.yaml",
    "rbac-events.yaml",
    "rbac-indexed-job.yaml",
    "rbac-kueue.yaml",
    "rbac-nodes.yaml",
    "rbac-short-grace.yaml",
    "rbac-spark.yaml",
    "rbac-train-job.yaml",
)
_STANDARD: Final = "pod-security.kubernetes.io"
STANDARDS: Final = ("baseline", "restricted")
ENFORCED: Final = f"{_STANDARD}/enforce"
"""Label of a namespace by which it refuses pods that ask for more than a Pod Security Standard allows."""
_RBAC: Final = "rbac.authorization.k8s.io"


def namespaces(training: Sequence[str], enforced: str = STANDARDS[0]) -> list[dict[str, Any]]:
    """Of Airflow and of trainings. Privileged pods are refused; what is not restricted is warned of.

    :param enforced: of `STANDARDS`; `restricted` refuses the PyTorchJobs of several nodes of an unchanged operator.
    :raises DropforgeError: if there is no such standard.
    """
    if enforced not in STANDARDS:
        raise DropforgeError(f"standard {enforced!r}", "no pods are held to such", f"Give {' or '.join(STANDARDS)}")
    labels = {f"{_STANDARD}/{mode}": "restricted" for mode in ("warn", "audit")}
    labels[ENFORCED] = enforced
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        for name in (AIRFLOW, *training)
    ]


def rights(training: Sequence[str], size: Size, roles: Mapping[str, str]) -> list[dict[str, Any]]:
    """In each namespace of trainings: accounts for its pods, the shipped Roles, and who of Airflow has them.

    The ClusterRole is for all of them: nodes belong to no namespace.

    :param roles: texts of the files of `ROLES`.
    """
    # Tasks start and delete jobs, the triggerer watches them. With LocalExecutor tasks have the scheduler's account.
    holders = ["airflow-worker", "airflow-triggerer", *(["airflow-scheduler"] if size == "laptop" else [])]
    subjects = [{"kind": "ServiceAccount", "name": name, "namespace": AIRFLOW} for name in holders]
    found: list[dict[str, Any]] = []
    for namespace in training:
        for component in COMPONENTS:
            if not component.airflow and component.name != "mlflow":
                metadata = {"name": component.account, "namespace": namespace}
                found.append(
                    {
                        "apiVersion": "v1",
                        "kind": "ServiceAccount",
                        "metadata": metadata,
                        # Spark's drivers, which make executors, ask for it themselves.
                        "automountServiceAccountToken": False,
                    }
                )
        for role in _shipped(roles, "Role"):
            found += _bound(role, subjects, {"namespace": namespace})
    for role in _shipped(roles, "ClusterRole"):
        found += _bound(role, subjects, {})
    return found


def _shipped(roles: Mapping[str, str], kind: str) -> list[dict[str, Any]]:
    return [one for text in roles.values() for one in yaml.safe_load_all(text) if one["kind"] == kind]


def _bound(
    role: Mapping[str, Any], subjects: Sequence[Mapping[str, str]], place: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A role, and that these accounts have it. :param place: its namespace, if it has one."""
    kind, name = role["kind"], role["metadata"]["name"]
    return [
        {**role, "metadata": {"name": name, **place}},
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": f"{kind}Binding",
            "metadata": {"name": f"{name}-airflow", **place},
            "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": name},
            "subjects": subjects,
        },
    ]
