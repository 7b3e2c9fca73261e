"""A process with a new Airflow that runs example DAGs as `airflow dags test` does.

Its argument is a JSON object: the DAGs to run, each with its conf. One line per DAG comes back on standard output.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    wanted: dict[str, dict[str, Any]] = json.loads(sys.argv[1])
    # What tasks print belongs to the log; only the results go to standard output.
    with os.fdopen(os.dup(1), "w", buffering=1) as results:
        os.dup2(2, 1)

        from airflow.dag_processing.dagbag import DagBag
        from airflow.utils.db import initdb

        initdb()
        bag = DagBag(os.environ["AIRFLOW__CORE__DAGS_FOLDER"], load_op_links=False)
        told = {"errors": {str(file): text for file, text in bag.import_errors.items()}, "dags": sorted(bag.dags)}
        results.write(json.dumps(told) + "\n")
        for dag, conf in wanted.items():
            results.write(json.dumps({dag: run(bag.dags[dag], conf)}, default=str) + "\n")


def run(dag: Any, conf: dict[str, Any]) -> dict[str, Any]:
    """The run's state, and of each task its state, its number of tries, and what it left in XCom."""
    from airflow import settings
    from airflow.models.xcom import XComModel
    from sqlalchemy import select

    found = dag.test(run_conf=conf)
    session = settings.Session()
    tasks: dict[str, Any] = {}
    for ti in found.get_task_instances(session=session):
        rows = session.scalars(select(XComModel).filter_by(dag_id=dag.dag_id, run_id=ti.run_id, task_id=ti.task_id))
        xcoms = {row.key: plain(row.value) for row in rows}
        tasks[ti.task_id] = {"state": str(ti.state), "tries": ti.try_number, "xcoms": xcoms}
    return {"state": str(found.state), "tasks": tasks}


def plain(value: Any) -> Any:
    """An XCom's value; the column may hold it encoded once more."""
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        return value


if __name__ == "__main__":
    main()
