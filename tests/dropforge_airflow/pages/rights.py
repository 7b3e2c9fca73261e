"""An auth manager with rights per DAG, as FAB and Keycloak have them: by the name of the user."""

from __future__ import annotations

from typing import Any

from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager


class PerDag(SimpleAuthManager):
    """`elsewhere` sees every DAG but the fine-tune DAG, `nologs` everything but logs, `runsonly` no task."""

    def is_authorized_dag(self, *, method: Any, user: Any, access_entity: Any = None, details: Any = None) -> bool:
        dag = details.id if details is not None else None
        if user.username == "elsewhere" and dag == "dropforge_finetune":
            return False
        if user.username == "nologs" and access_entity is DagAccessEntity.TASK_LOGS:
            return False
        if user.username == "runsonly" and access_entity is DagAccessEntity.TASK_INSTANCE:
            return False
        return super().is_authorized_dag(method=method, user=user, access_entity=access_entity, details=details)
