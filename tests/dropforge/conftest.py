"""A real MLflow for the tracking and the commands that ask it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dropforge.stack import mlflow_accounts
from tests.mlflow_server import MlflowServer


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of MLflow's server, as the stack starts it; the process is logged in as Airflow's account."""
    server = MlflowServer(tmp_path_factory.mktemp("mlflow"))
    try:
        server.start()
        with pytest.MonkeyPatch.context() as env:
            for name, value in mlflow_accounts.login(mlflow_accounts.AIRFLOW, server.secrets).items():
                env.setenv(name, value)
            yield server.url
    finally:
        server.stop()
