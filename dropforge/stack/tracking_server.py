"""MLflow's server in one process.

`mlflow server` imports all of MLflow, then starts uvicorn in a second process that imports it again, and stays around
only to wait: twice the memory and twice the start. This does what that command does, with the same settings, in place.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
from pathlib import Path
from typing import Any

from dropforge.stack import http_bounds, mlflow_accounts
from dropforge.stack.mlflow_guard import Guard
from dropforge.stack.request_log import limit
from dropforge.stack.secrets import Secrets, of_mlflow, read_secrets


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="dropforge.stack.tracking_server", description=__doc__)
    parser.add_argument("--state", type=Path, help="folder of the stack; without it the environment has the passwords")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    parser.add_argument("--artifacts", required=True, help="where artifacts go: s3://bucket/prefix")
    parser.add_argument("--pod-host", help="one more address of this machine to listen on, for a cluster's pods")
    options = parser.parse_args(arguments)

    secrets = of_mlflow(os.environ) if options.state is None else read_secrets(options.state)
    hosts = [options.host]
    if options.pod_host:
        hosts.append(options.pod_host)
        names = ["localhost", *hosts]
        os.environ["MLFLOW_SERVER_ALLOWED_HOSTS"] = ",".join(names + [f"{name}:*" for name in names])
    import uvicorn
    from mlflow.server import constants as server  # reads the names that are let in
    from mlflow.server.handlers import initialize_backend_stores

    store, root = os.environ["MLFLOW_BACKEND_STORE_URI"], "mlflow-artifacts:/"  # it may hold a password
    os.environ.update(
        {
            server.BACKEND_STORE_URI_ENV_VAR: store,
            server.REGISTRY_STORE_URI_ENV_VAR: store,
            server.ARTIFACT_ROOT_ENV_VAR: root,
            server.SERVE_ARTIFACTS_ENV_VAR: "true",
            server.ARTIFACTS_DESTINATION_ENV_VAR: options.artifacts,
            "_MLFLOW_SGI_NAME": "uvicorn",
        }
    )
    initialize_backend_stores(store, store, root)
    application = _with_logins(secrets, store)
    # Collections look at what came since, and not at all of MLflow's modules for a third of a second each.
    gc.collect()
    gc.freeze()
    http_bounds.use()
    sockets = [uvicorn.Config("", host=host, port=options.port).bind_socket() for host in hosts]
    running = uvicorn.Server(uvicorn.Config(application, access_log=False))  # which sets its log up
    limit(map(logging.getLogger, ("", "uvicorn", "mlflow")))
    running.run(sockets)


def _with_logins(secrets: Secrets, database: str) -> Any:
    """MLflow's application, as `--app-name basic-auth` has it, with the stack's accounts."""
    settings = os.memfd_create("mlflow-auth")  # the address of the database may hold a password, which is in no file
    os.write(settings, mlflow_accounts.configuration(database).encode())
    os.environ.update(
        {
            "MLFLOW_AUTH_CONFIG_PATH": f"/proc/self/fd/{settings}",
            "MLFLOW_AUTH_ADMIN_PASSWORD": secrets.mlflow_password,
            "MLFLOW_BASIC_AUTH_FAIL_CLOSED": "true",
            "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.mlflow_secret_key,
        }
    )
    from mlflow.server import auth  # it reads the environment that was set above

    application = auth.create_app()
    mlflow_accounts.provide(auth.store, secrets)
    return Guard(application, mlflow_accounts.passwords(secrets), mlflow_accounts.TRAINER.name)


if __name__ == "__main__":
    main()
