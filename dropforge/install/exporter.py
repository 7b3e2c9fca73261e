"""Dropforge's metrics in a cluster: the exporter, and what lets Prometheus and Grafana find what is shipped. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dropforge import pod_rights
from dropforge.install.access import COMPONENTS
from dropforge.install.keys import AIRFLOW, AIRFLOW_USER

PORT: Final = 9469
_NAME: Final = "dropforge-metrics"
ACCOUNT: Final = next(one.account for one in COMPONENTS if one.name == "metrics")
_MONITORING: Final = "monitoring"


def exporter(image: str) -> list[dict[str, Any]]:
    """One process, whose account reads ledger and runs and writes nothing; its Service, and who is scraped."""
    labels = {"tier": "airflow", "component": "metrics", "app.kubernetes.io/name": _NAME}
    container = {
        "name": "metrics",
        "image": image,
        "args": ["dropforge", "metrics", "--host", "::", "--port", str(PORT)],  # of IPv4 too, within the cluster
        "envFrom": [
            {"configMapRef": {"name": "dropforge-settings"}},
            {"secretRef": {"name": "dropforge-connections"}},
            # AIRFLOW_USERNAME and AIRFLOW_PASSWORD; without it nothing is told of the DAGs.
            {"secretRef": {"name": "dropforge-metrics-login", "optional": True}},
        ],
        "env": [{"name": "DROPFORGE_AIRFLOW_URL", "value": f"http://airflow-api-server.{AIRFLOW}:8080"}],
        "ports": [{"name": "metrics", "containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/metrics", "port": "metrics"}, "periodSeconds": 30},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": pod_rights.container(),
    }
    pod = {
        "serviceAccountName": ACCOUNT,
        "automountServiceAccountToken": False,
        "securityContext": pod_rights.pod(AIRFLOW_USER),
        "containers": [container],
    }
    metadata = {"name": _NAME, "namespace": AIRFLOW, "labels": labels}
    account = {"name": ACCOUNT, "namespace": AIRFLOW, "labels": labels}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account, "automountServiceAccountToken": False},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": labels, "ports": [{"name": "metrics", "port": PORT, "targetPort": "metrics"}]},
        },
        _monitor(_NAME, labels, "metrics"),
        # Beside ours, for the panels of the services; neither chart has one.
        _monitor("airflow-statsd", {"tier": "airflow", "component": "statsd"}, "statsd-scrape"),
        _monitor("mlflow", {"app.kubernetes.io/name": "mlflow"}, "http"),
    ]


def _monitor(name: str, labels: Mapping[str, str], port: str) -> dict[str, Any]:
    """Lets Prometheus' operator find the Services of these labels. :param port: its name."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": {"name": name, "namespace": AIRFLOW, "labels": dict(labels)},
        "spec": {"selector": {"matchLabels": dict(labels)}, "endpoints": [{"port": port, "interval": "30s"}]},
    }


def alerts(rules: Mapping[str, Any]) -> dict[str, Any]:
    """The shipped rules, for Prometheus' operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "dropforge", "namespace": _MONITORING},
        "spec": dict(rules),
    }


def dashboards(files: Mapping[str, str]) -> dict[str, Any]:
    """The shipped dashboards, where Grafana's sidecar finds them. :param files: texts by name."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "dropforge-dashboards",
            "namespace": _MONITORING,
            "labels": {"grafana_dashboard": "1"},
        },
        "data": dict(files),
    }
