"""The few calls of Airflow's REST API that the command line needs."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote

import httpx

from dropforge.errors import DropforgeError

FINETUNE = "dropforge_finetune"
INTAKE = "dropforge_intake"
ROLLBACK = "dropforge_rollback"


class Airflow:
    """A client that logs in when it must; every answer is plain JSON."""

    def __init__(self, url: str, user: str, password: str) -> None:
        self.url = url.rstrip("/")
        self.user, self.password = user, password
        self._http = httpx.Client(base_url=self.url, timeout=20)

    def _call(self, method: str, path: str, **options: Any) -> Any:
        try:
            answer = self._http.request(method, path, **options)
            if answer.status_code == 401:
                token = self._http.post("/auth/token", json={"username": self.user, "password": self.password})
                token.raise_for_status()
                self._http.headers["Authorization"] = f"Bearer {token.json()['access_token']}"
                answer = self._http.request(method, path, **options)
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 404 and "/dagRuns/" in path:
                name = path.partition("/dagRuns/")[2].partition("/")[0]
                raise DropforgeError(
                    f"run {unquote(name)}", "Airflow knows no such run", "List runs with `dropforge runs`"
                ) from None
            detail = error.response.text[:300]
            raise DropforgeError(
                f"Airflow at {self.url}",
                f"it answered {error.response.status_code} to {path} ({detail})",
                "See its log",
            ) from None
        except httpx.HTTPError as error:
            raise DropforgeError(
                f"Airflow at {self.url}", f"it does not answer ({error})", "Start the stack with `dropforge up`"
            ) from None
        return answer.json() if answer.content else None

    def dag_run(self, dag: str, run: str) -> dict[str, Any]:
        """One DAG run."""
        answer: dict[str, Any] = self._call("GET", f"/api/v2/dags/{dag}/dagRuns/{_quoted(run)}")
        return answer

    def page(self, dag: str, run: str) -> str:
        """Address of a DAG run's page."""
        return f"{self.url}/dags/{dag}/runs/{_quoted(run)}"

    def newest_runs(self, dag: str, limit: int = 20, state: str | None = None) -> list[dict[str, Any]]:
        """The newest runs of a DAG, at most 100; only those in `state`, if it is given."""
        query = {"limit": limit, "order_by": "-run_after"} | ({"state": state} if state else {})
        runs: list[dict[str, Any]] = self._call("GET", f"/api/v2/dags/{dag}/dagRuns", params=query)["dag_runs"]
        return runs

    def task_states(self, dag: str, run: str) -> list[dict[str, Any]]:
        """The task instances of a DAG run."""
        answer = self._call("GET", f"/api/v2/dags/{dag}/dagRuns/{_quoted(run)}/taskInstances", params={"limit": 100})
        states: list[dict[str, Any]] = answer["task_instances"]
        return states

    def log(self, dag: str, run: str, task: str, attempt: int) -> list[str]:
        """The lines of a task's log."""
        content = self._log(dag, run, task, attempt)
        return [str(line.get("event", "")) if isinstance(line, dict) else str(line) for line in content]

    def error(self, dag: str, run: str, task: str, attempt: int) -> str | None:
        """The error that a task's log ends with."""
        return last_error(self._log(dag, run, task, attempt))

    def _log(self, dag: str, run: str, task: str, attempt: int) -> list[Any]:
        path = f"/api/v2/dags/{dag}/dagRuns/{_quoted(run)}/taskInstances/{task}/logs/{attempt}"
        answer = self._call("GET", path, params={"full_content": "true"}, headers={"Accept": "application/json"})
        content = answer.get("content", [])
        return content if isinstance(content, list) else [content]

    def fail_run(self, dag: str, run: str) -> None:
        """Mark a run as failed, which ends what it does."""
        self._call("PATCH", f"/api/v2/dags/{dag}/dagRuns/{_quoted(run)}", json={"state": "failed"})

    def clear(self, dag: str, run: str, task: str) -> None:
        """Clear a task and those after it: they run again."""
        body = {
            "dag_run_id": run,
            "task_ids": [task],
            "include_downstream": True,
            "only_failed": False,
            "dry_run": False,
        }
        self._call("POST", f"/api/v2/dags/{dag}/clearTaskInstances", json=body)

    def question(self, dag: str, run: str, task: str) -> dict[str, Any]:
        """What a task asks, or asked, a person: subject, body, options, and the answer if there is one."""
        path = f"/api/v2/dags/{dag}/dagRuns/{_quoted(run)}/taskInstances/{task}/-1/hitlDetails"
        answer: dict[str, Any] = self._call("GET", path)
        return answer

    def answer(self, dag: str, run: str, task: str, option: str) -> None:
        """Answer a task's question, with this user's rights."""
        path = f"/api/v2/dags/{dag}/dagRuns/{_quoted(run)}/taskInstances/{task}/-1/hitlDetails"
        self._call("PATCH", path, json={"chosen_options": [option], "params_input": {}})

    def trigger(self, dag: str, conf: dict[str, Any]) -> str:
        """Start a DAG run as the form does; returns its id."""
        answer = self._call("POST", f"/api/v2/dags/{dag}/dagRuns", json={"logical_date": None, "conf": conf})
        return str(answer["dag_run_id"])

    def variable(self, key: str) -> str:
        """The value of an Airflow Variable."""
        return str(self._call("GET", f"/api/v2/variables/{key}")["value"])


def last_error(content: list[Any]) -> str | None:
    """The text of the last exception in a log's structured lines, without the last lines of a job that it quotes."""
    for line in reversed(content):
        details = line.get("error_detail") if isinstance(line, dict) else None
        if details:
            text = str(details[-1].get("exc_value") or details[-1].get("exc_type"))
            return text.partition("\nLast lines of ")[0]
    return None


def _quoted(run: str) -> str:
    return quote(run, safe="")
