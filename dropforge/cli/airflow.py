"""The few calls of Airflow's REST API that the command line needs."""

from __future__ import annotations

import re
import time
from typing import Any, Final
from urllib.parse import quote, unquote

import httpx

from dropforge.errors import DropforgeError

FINETUNE = "dropforge_finetune"
INTAKE = "dropforge_intake"
ROLLBACK = "dropforge_rollback"
SWEEP = "dropforge_sweep"
_PAGE = 50  # more than 100 Airflow gives nobody
#: Seconds, for a busy machine: who gives up on a change does not know whether it was made.
_TIMEOUT: Final = httpx.Timeout(60, connect=20)
_TAKEN: Final = 60.0  # seconds from an answer to the end of a task that has nothing else to do
_OF_A_DAG: Final = re.compile(r"/api/v2/dags/([^/]+)(?:/dagRuns)?")
_ON_ITS_WAY: Final = frozenset(
    {None, "awaiting_input", "deferred", "scheduled", "queued", "running", "up_for_retry", "restarting"}
)


class NoSuchRunError(DropforgeError):
    """Airflow has no DAG run of this name."""


class Airflow:
    """A client that logs in when it must; every answer is plain JSON."""

    def __init__(self, url: str, user: str, password: str) -> None:
        self.url = url.rstrip("/")
        self.user, self.password = user, password
        self._http = httpx.Client(base_url=self.url, timeout=_TIMEOUT)

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
                raise NoSuchRunError(
                    f"run {unquote(name)}", "Airflow knows no such run", "List runs with `dropforge runs`"
                ) from None
            # Below other addresses of a DAG it may be a run or a task that is not there.
            if error.response.status_code == 404 and (asked := _OF_A_DAG.fullmatch(path)):
                raise DropforgeError(
                    f"DAG {asked[1]}",
                    "Airflow knows no such DAG",
                    f"See the import errors on {self.url}/dags: its file may be broken, or gone",
                ) from None
            detail = _detail(error.response)
            if error.response.status_code in {401, 403}:
                login = f"user {self.user!r}" if self.user else "nobody, as AIRFLOW_USERNAME is not set,"
                raise DropforgeError(
                    f"Airflow at {self.url}",
                    f"{login} may not do this ({method} {path}: {detail})",
                    "Log in as somebody who may (AIRFLOW_USERNAME, AIRFLOW_PASSWORD), or ask for the right",
                ) from None
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

    def is_paused(self, dag: str) -> bool:
        """Whether new runs of a DAG wait until somebody unpauses it."""
        return bool(self._call("GET", f"/api/v2/dags/{dag}")["is_paused"])

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

    def count_runs(self, dag: str, state: str) -> int:
        """How many runs of a DAG are in a state."""
        query: dict[str, str | int] = {"limit": 1, "state": state}
        return int(self._call("GET", f"/api/v2/dags/{dag}/dagRuns", params=query)["total_entries"])

    def task_states(self, dag: str, run: str) -> list[dict[str, Any]]:
        """The task instances of a DAG run."""
        return self._instances(f"/api/v2/dags/{dag}/dagRuns/{_quoted(run)}/taskInstances")

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

    def clear(self, dag: str, run: str, task: str, *, downstream: bool = True) -> None:
        """Clear a task and those after it: they run again."""
        body = {
            "dag_run_id": run,
            "task_ids": [task],
            "include_downstream": downstream,
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

    def see_taken(self, dag: str, run: str, task: str) -> bool:
        """Wait until a task has taken its answer, at most a minute; False if it has not by then.

        A task that waits for another answer, as after a clear, has taken this one.
        """
        end = time.monotonic() + _TAKEN
        while time.monotonic() < end:
            question = self.question(dag, run, task)
            state = question["task_instance"]["state"]
            if state not in _ON_ITS_WAY or (state == "awaiting_input" and not question["response_received"]):
                return True
            time.sleep(0.5)
        return False

    def mapped_states(self, dag: str, run: str, task: str) -> dict[int, str]:
        """The states of a mapped task's instances by their index; none before it is expanded."""
        found = self._instances(f"/api/v2/dags/{dag}/dagRuns/{_quoted(run)}/taskInstances/{task}/listMapped")
        return {int(one["map_index"]): str(one["state"] or "") for one in found}

    def _instances(self, path: str) -> list[dict[str, Any]]:
        """All task instances of a list that Airflow hands out in pages."""
        found: list[dict[str, Any]] = []
        while True:
            page = self._call("GET", path, params={"limit": _PAGE, "offset": len(found)})["task_instances"]
            found += page
            if len(page) < _PAGE:
                return found

    def trigger(self, dag: str, conf: dict[str, Any], run: str | None = None) -> str:
        """Start a DAG run as the form does; returns its id. :param run: the id it shall have."""
        body = {"logical_date": None, "conf": conf} | ({"dag_run_id": run} if run else {})
        answer = self._call("POST", f"/api/v2/dags/{dag}/dagRuns", json=body)
        return str(answer["dag_run_id"])

    def variable(self, key: str) -> str:
        """The value of an Airflow Variable."""
        return str(self._call("GET", f"/api/v2/variables/{key}")["value"])


def _detail(answer: httpx.Response) -> str:
    """The server's own words."""
    try:
        found = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        found = answer.text
    return " ".join(str(found).split())[:300]


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
