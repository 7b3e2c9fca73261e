"""Who may see what: Airflow's own login and rights, asked for the DAG that is named in the path.

Airflow checks nothing for the routes of plugins. So every route that shows anything has `{dag_id}` in its path and one
of these among its dependencies; a test holds that.
"""

from __future__ import annotations

from typing import Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import requires_access_dag
from airflow.models.dag import DagModel
from fastapi import Depends

SEES_RUNS = Depends(requires_access_dag("GET", DagAccessEntity.RUN))
SEES_TASKS = Depends(requires_access_dag("GET", DagAccessEntity.TASK_INSTANCE))


def sees_logs(dag_id: str, user: Any) -> bool:
    """Whether this user may read the logs of the DAG's tasks: a right of its own."""
    return get_auth_manager().is_authorized_dag(
        method="GET",
        access_entity=DagAccessEntity.TASK_LOGS,
        details=DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id)),
        user=user,
    )
