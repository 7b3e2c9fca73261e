"""`python start.py COMMAND...`: `airflow COMMAND...` as soon as its database is there and, but for `db`, fits this Airflow.

It waits in the process that goes on as the service, since importing Airflow is most of a start.
"""

import json
import os
import sys
import time
from pathlib import Path


def keep_passwords() -> None:
    """Put the administrator's password where Airflow's simple login reads it, and nowhere else."""
    password = os.environ.pop("AIRFLOW_PASSWORD", None)
    user = os.environ.pop("AIRFLOW_USERNAME", "admin")
    if password:
        path = Path(os.environ["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE"])
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(json.dumps({user: password}))


def wait(migrated: bool) -> None:
    """:param migrated: whether its tables must fit too."""
    from airflow import settings
    from airflow.utils import db
    from sqlalchemy.exc import SQLAlchemyError

    settings.initialize()
    told = ""
    while True:
        try:
            with settings.engine.connect():
                pass
            if migrated:
                db.check_migrations(timeout=1)
        except (SQLAlchemyError, TimeoutError) as error:
            why = str(error).strip().splitlines()[0]
            if why != told:
                print(f"waiting for the database: {why}", file=sys.stderr, flush=True)
            told = why
            time.sleep(1)
        else:
            settings.engine.dispose()
            return


if __name__ == "__main__":
    keep_passwords()
    wait(migrated=sys.argv[1] != "db")
    from airflow.__main__ import main

    sys.argv = ["airflow", *sys.argv[1:]]
    sys.exit(main())
