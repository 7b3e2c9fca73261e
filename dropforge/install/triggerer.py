"""Triggerers for jobs, as a Deployment beside that of Airflow's chart, which makes one alone. Pure.

With `[triggerer] queues_enabled` a task that waits gives its trigger the task's queue, and only a triggerer started
with `--queues` takes it. Watchers of assets have no queue, and only a triggerer without `--queues` takes those: a
thousand jobs fill the triggerers of jobs, and drops are still seen.
"""

from __future__ import annotations

from typing import Any, Final

from dropforge import pod_rights
from dropforge.install.keys import AIRFLOW, AIRFLOW_USER
from dropforge.install.steps import Size

QUEUE: Final = "default"
"""`[operators] default_queue`: that of every task of ours."""
_HOME: Final = "/opt/airflow"
_REPLICAS: Final[dict[Size, int]] = {"laptop": 1, "team": 2, "production": 3}
_ALIVE: Final = "AIRFLOW__LOGGING__LOGGING_LEVEL=ERROR exec airflow jobs check --job-type TriggererJob --local"


def job_triggerer(size: Size, image: str) -> list[dict[str, Any]]:
    """As many as the size has, with settings, keys, account and rights of the chart's triggerer."""
    labels = {"tier": "airflow", "component": "job-triggerer", "release": "airflow"}
    keys = "dropforge-airflow-keys"
    env = [
        {"name": "AIRFLOW_HOME", "value": _HOME},
        {"name": "DROPFORGE_PRESETS", "value": "/opt/dropforge/presets"},
        _from_secret("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "dropforge-airflow-database", "connection"),
        _from_secret("AIRFLOW__CORE__FERNET_KEY", keys, "fernet-key"),
        _from_secret("AIRFLOW__API__SECRET_KEY", keys, "api-secret-key"),
        _from_secret("AIRFLOW__API_AUTH__JWT_SECRET", keys, "jwt-secret"),
    ]
    container = {
        "name": "triggerer",
        "image": image,
        "args": ["airflow", "triggerer", "--queues", QUEUE],
        "envFrom": [
            {"configMapRef": {"name": "dropforge-settings"}},
            {"secretRef": {"name": "dropforge-connections"}},
        ],
        "env": env,
        "ports": [{"name": "triggerer-logs", "containerPort": 8794}],
        "livenessProbe": {
            "exec": {"command": ["sh", "-c", _ALIVE]},
            "initialDelaySeconds": 30,
            "periodSeconds": 60,
            "timeoutSeconds": 30,
            "failureThreshold": 5,
        },
        "resources": {"requests": {"cpu": "250m", "memory": "768Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": pod_rights.container(),
        "volumeMounts": [
            # The chart's: what is set there holds here.
            {"name": "config", "mountPath": f"{_HOME}/airflow.cfg", "subPath": "airflow.cfg", "readOnly": True},
            {"name": "presets", "mountPath": "/opt/dropforge/presets", "readOnly": True},
        ],
    }
    spec = {
        "serviceAccountName": "airflow-triggerer",
        "securityContext": {**pod_rights.pod(AIRFLOW_USER), "runAsGroup": 0, "fsGroup": 0},
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": "airflow-config"}},
            {"name": "presets", "configMap": {"name": "dropforge-presets"}},
        ],
    }
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "airflow-job-triggerer", "namespace": AIRFLOW, "labels": labels},
            "spec": {
                "replicas": _REPLICAS[size],
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": spec},
            },
        }
    ]


def _from_secret(name: str, secret: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
