"""Secrets that an installation makes for itself, as manifests: through a pipe, and kept by the cluster alone."""

from __future__ import annotations

import base64
import secrets
from typing import Any

from dropforge.install.steps import Size

AIRFLOW: str = "airflow"
"""Namespace of Airflow and MLflow."""
AIRFLOW_USER: int = 50000
"""User id of Airflow's image."""


def airflow_keys(size: Size) -> list[dict[str, Any]]:
    """Airflow's keys; on a laptop also the password of the PostgreSQL in the cluster, and its addresses."""
    found = [
        _secret(
            "dropforge-airflow-keys",
            {
                "fernet-key": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
                "api-secret-key": secrets.token_hex(32),
                "jwt-secret": secrets.token_hex(64),
            },
        )
    ]
    if size == "laptop":
        password = secrets.token_hex(24)
        address = f"postgresql+psycopg2://postgres:{password}@postgres.{AIRFLOW}:5432"
        found += [
            _secret("dropforge-postgres", {"password": password}),
            _secret("dropforge-airflow-database", {"connection": f"{address}/airflow"}),
            _secret("dropforge-mlflow-database", {"uri": f"{address}/mlflow"}),
        ]
    return found


def grafana_login() -> list[dict[str, Any]]:
    """Grafana's first login. The chart's own password is in its documentation."""
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "monitoring"}},
        _secret("grafana-login", {"user": "admin", "password": secrets.token_urlsafe(24)}, "monitoring"),
    ]


def _secret(name: str, values: dict[str, str], namespace: str = AIRFLOW) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "type": "Opaque",
        "stringData": values,
    }
