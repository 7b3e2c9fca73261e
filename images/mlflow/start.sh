#!/bin/sh
# MLflow's server as soon as its database is there; its tables are brought up to this MLflow first.
# All clients log in (dropforge/stack/mlflow_accounts.py). The database's password is in PGPASSWORD, so that it is
# in no address.
set -eu
look='import os, sqlalchemy; sqlalchemy.create_engine(os.environ["MLFLOW_BACKEND_STORE_URI"]).connect().close()'
until python -c "$look" 2>/tmp/why; do
  tail -n 1 /tmp/why >&2
  sleep 2
done
mlflow db upgrade "$MLFLOW_BACKEND_STORE_URI"
exec python -m dropforge.stack.tracking_server --host 0.0.0.0 --port 5000 --artifacts "$MLFLOW_ARTIFACTS_DESTINATION"
