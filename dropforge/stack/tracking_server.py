"""MLflow's server in one process.

`mlflow server` imports all of MLflow, then starts uvicorn in a second process that imports it again, and stays around
only to wait: twice the memory and twice the start. This does what that command does, with the same settings, in place.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="dropforge.stack.tracking_server", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="port of 127.0.0.1")
    parser.add_argument("--artifacts", required=True, help="where artifacts go: s3://bucket/prefix")
    parser.add_argument("--pod-host", help="one more address of this machine to listen on, for a cluster's pods")
    options = parser.parse_args(arguments)

    import uvicorn
    from mlflow.server import constants as server
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
    hosts = ["127.0.0.1", *([options.pod_host] if options.pod_host else [])]
    if options.pod_host:
        names = ["localhost", *hosts]
        os.environ["MLFLOW_SERVER_ALLOWED_HOSTS"] = ",".join(names + [f"{name}:{options.port}" for name in names])
    application = importlib.import_module("mlflow.server.fastapi_app").app  # reads the environment that was set above
    # Collections look at what came since, and not at all of MLflow's modules for a third of a second each.
    gc.collect()
    gc.freeze()
    sockets = [uvicorn.Config("", host=host, port=options.port).bind_socket() for host in hosts]
    uvicorn.Server(uvicorn.Config(application, access_log=False)).run(sockets)


if __name__ == "__main__":
    main()
