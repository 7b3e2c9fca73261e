"""Asking Airflow about task instances: from inside a task, or from outside through its REST API."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

from kubeflow_training.asking.instance import STORED_NAME, this_instance
from kubeflow_training.jobs.manifest.ownership import Owner
from kubeflow_training.jobs.reaping.orphans import GONE, Task
from kubeflow_training.jobs.reaping.reaper import AirflowSilentError

URL_VARIABLE: Final = "AIRFLOW_API_URL"
TOKEN_VARIABLE: Final = "AIRFLOW_API_TOKEN"  # noqa: S105 - the variable's name
USER_VARIABLE: Final = "AIRFLOW_API_USERNAME"
PASSWORD_VARIABLE: Final = "AIRFLOW_API_PASSWORD"  # noqa: S105
_TIMEOUT: Final = 20.0


class FromTask:
    """Asks as a task of this Airflow does; needs no credentials of its own."""

    def instance(self) -> str | None:
        return this_instance(draw=False)

    def task(self, owner: Owner) -> Task:
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        try:
            answer = RuntimeTaskInstance.get_task_states(
                dag_id=owner.dag_id, task_ids=[owner.task_id], run_ids=[owner.run_id], map_index=owner.map_index
            )
            states: Mapping[str, Any] = dict(answer).get(owner.run_id) or {}
        except Exception as error:
            raise AirflowSilentError(f"the state of {owner} cannot be asked: {error!r}") from error
        key = owner.task_id if owner.map_index < 0 else f"{owner.task_id}_{owner.map_index}"
        if key not in states:
            return GONE
        state = states[key]
        return Task(None if state is None else str(getattr(state, "value", state)))


class FromRest:
    """Asks the REST API. Credentials come from the environment: a token, or a user's name and password.

    :param url: address of the API server.
    :param token: a token of it; without one, `username` and `password` get one.
    """

    def __init__(self, url: str, *, token: str = "", username: str = "", password: str = "") -> None:
        import httpx

        self._username, self._password = username, password
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=url.rstrip("/"), timeout=_TIMEOUT, headers=headers)

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> FromRest:
        """:raises AirflowSilentError: naming the variables that are missing."""
        url, token = env.get(URL_VARIABLE, ""), env.get(TOKEN_VARIABLE, "")
        username, password = env.get(USER_VARIABLE, ""), env.get(PASSWORD_VARIABLE, "")
        if not url or not (token or (username and password)):
            raise AirflowSilentError(
                f"Airflow's address or credentials are missing: set {URL_VARIABLE}, and {TOKEN_VARIABLE} or "
                f"{USER_VARIABLE} with {PASSWORD_VARIABLE}"
            )
        return cls(url, token=token, username=username, password=password)

    def instance(self) -> str | None:
        if name := os.environ.get("KUBEFLOW_TRAINING_INSTANCE"):
            return name
        status, answer = self._get(f"/api/v2/variables/{STORED_NAME}")
        if status == 404:
            return None
        return str(answer["value"]) or None

    def task(self, owner: Owner) -> Task:
        path = f"/api/v2/dags/{_part(owner.dag_id)}/dagRuns/{_part(owner.run_id)}/taskInstances/{_part(owner.task_id)}"
        status, answer = self._get(path if owner.map_index < 0 else f"{path}/{owner.map_index}")
        if status == 404:
            # Any server answers 404 to something: only Airflow's own words count.
            if "Task Instance" in str(answer.get("detail")) and "was not found" in str(answer.get("detail")):
                return GONE
            raise AirflowSilentError(f"{owner}: 404, but not in Airflow's words: {str(answer)[:300]}")
        if (answer.get("dag_run_id"), answer.get("task_id")) != (owner.run_id, owner.task_id) or "state" not in answer:
            raise AirflowSilentError(f"{owner}: this is no answer of Airflow: {str(answer)[:300]}")
        return Task(answer["state"], ended=_moment(answer.get("end_date")))

    def _get(self, path: str) -> tuple[int, dict[str, Any]]:
        import httpx

        try:
            answer = self._http.get(path)
            if answer.status_code == 401 and self._username:
                given = self._http.post(
                    "/auth/token", json={"username": self._username, "password": self._password}
                ).raise_for_status()
                self._http.headers["Authorization"] = f"Bearer {given.json()['access_token']}"
                answer = self._http.get(path)
            if answer.status_code != 404:
                answer.raise_for_status()
            content = answer.json()
        except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise AirflowSilentError(f"Airflow at {self._http.base_url} does not answer {path}: {error}") from error
        if not isinstance(content, dict):
            raise AirflowSilentError(f"Airflow at {self._http.base_url} answers no object to {path}")
        return answer.status_code, content


def _part(text: str) -> str:
    return quote(text, safe="")


def _moment(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp() if text else None
    except ValueError:
        return None
