"""Where the services are: read from the environment, so that only it differs between a laptop and production.

Credentials are not here: boto3 and Airflow's connection find them by themselves (`AWS_*`, `AIRFLOW_CONN_*`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dropforge.errors import DropforgeError


@dataclass(frozen=True)
class Settings:
    """
    :param bucket: S3 bucket of drops, datasets and runs.
    :param bucket_alias: its short name in partition keys, which are limited to 250 characters.
    :param queue_url: SQS queue that the bucket notifies; empty where `drops/` is polled instead.
    :param tracking_uri: address of the MLflow server.
    :param airflow_url: address of Airflow's API server.
    :param state: folder of the embedded stack.
    :param drop_patience: minutes that a drop may wait for files that its `_SUCCESS` lists.
    """

    bucket: str
    bucket_alias: str
    queue_url: str
    tracking_uri: str
    airflow_url: str
    state: Path
    drop_patience: float = 60.0

    @property
    def root(self) -> str:
        """Address of the bucket."""
        return f"s3://{self.bucket}"

    def to_env(self) -> dict[str, str]:
        return {
            "DROPFORGE_BUCKET": self.bucket,
            "DROPFORGE_BUCKET_ALIAS": self.bucket_alias,
            "DROPFORGE_QUEUE_URL": self.queue_url,
            "DROPFORGE_AIRFLOW_URL": self.airflow_url,
            "DROPFORGE_STATE": str(self.state),
            "MLFLOW_TRACKING_URI": self.tracking_uri,
        }


def default_state() -> Path:
    """The state folder: `DROPFORGE_STATE`, else `.dropforge` in the current folder."""
    return Path(os.environ.get("DROPFORGE_STATE") or ".dropforge").absolute()


def without_login(tracking_uri: str) -> str:
    """The address of MLflow, which goes into `run.json`, logs and links: it must not carry a login.

    A password with characters that an address does not allow is found too, and is not repeated in the error.

    :raises DropforgeError: if it does.
    """
    web = tracking_uri.lower().startswith(("http:", "https:"))
    try:
        login = "@" in (tracking_uri if web else urlsplit(tracking_uri).netloc)
    except ValueError:
        login = "@" in tracking_uri
    if login:
        raise DropforgeError(
            "MLflow's address (MLFLOW_TRACKING_URI)",
            "it carries a login, which would stand in run.json, logs and links",
            "Name the server alone, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN",
        )
    return tracking_uri


def from_env(env: Mapping[str, str] = os.environ) -> Settings:
    """:raises DropforgeError: naming the variable that is missing, or an address that carries a login."""

    def need(name: str) -> str:
        if not env.get(name):
            raise DropforgeError(
                f"environment variable {name}",
                "it is not set",
                "Start the stack with `dropforge up`, or set it",
            )
        return env[name]

    bucket = need("DROPFORGE_BUCKET")
    return Settings(
        bucket=bucket,
        bucket_alias=env.get("DROPFORGE_BUCKET_ALIAS") or bucket,
        queue_url=env.get("DROPFORGE_QUEUE_URL", ""),
        tracking_uri=without_login(need("MLFLOW_TRACKING_URI")),
        airflow_url=env.get("DROPFORGE_AIRFLOW_URL", ""),
        state=Path(env.get("DROPFORGE_STATE") or ".dropforge").absolute(),
        drop_patience=_minutes(env, "DROPFORGE_DROP_PATIENCE", Settings.drop_patience),
    )


def _minutes(env: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(env.get(name) or default)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100_000:
        raise DropforgeError(
            f"environment variable {name}", f"{env[name]!r} is no number of minutes", "Give one, as 60"
        )
    return value
