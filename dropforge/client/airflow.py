"""The few calls of Airflow's REST API that the command line needs."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote, unquote

import httpx

from dropforge.errors import DropforgeError
from dropforge.web import Watch

FINETUNE = "dropforge_finetune"
INTAKE = "dropforge_intake"
ROLLBACK = "dropforge_rollback"
SWEEP = "dropforge_sweep"
_PAGE = 50  # more than 100 Airflow gives nobody
#: Seconds, for a busy machine: who gives up on a change does not know whether it was made.
_TIMEOUT: Final = httpx.Timeout(60, connect=20)
_WHOLE: Final = 300.0  # seconds of one answer
_LARGEST: Final = 256 << 20  # bytes of one: a task's log has most
_PIECE: Final = 1 << 16
_MOST: Final = 50_000  # task instances of a run
_INSTANCE: Final = "dag_id", "dag_run_id", "task_id", "map_index"  # what tells it from others, also of several runs
_CONNECTED: Final = frozenset({"connection.connect_tcp.complete", "connection.start_tls.complete"})
_TAKEN: Final = 60.0  # seconds from an answer to the end of a task that has nothing else to do
_OF_A_DAG: Final = re.compile(r"/api/v2/dags/([^/]+)(?:/dagRuns)?")
_ON_ITS_WAY: Final = frozenset(
    {None, "awaiting_input", "deferred", "scheduled", "queued", "running", "up_for_retry", "restarting"}
)


def _is_moment(value: Any) -> bool:
    try:
        return value is None or datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


_KINDS: Final[Mapping[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("dag_run_id", "task_id", "access_token", "subject"), lambda value: isinstance(value, str)),
    **dict.fromkeys(("state", "body", "run_after"), lambda value: isinstance(value, str | None)),
    **dict.fromkeys(("dag_runs", "task_instances", "options"), lambda value: isinstance(value, list)),
    **dict.fromkeys(("map_index", "total_entries"), lambda value: isinstance(value, int)),
    **dict.fromkeys(("is_paused", "response_received"), lambda value: isinstance(value, bool)),
    "try_number": lambda value: isinstance(value, int | None),
    "start_date": _is_moment,
    "end_date": _is_moment,
}


class _Told(dict[str, Any]):
    """An object of an answer: what it lacks is an error of the server's, and none of ours."""

    def __init__(self, values: Mapping[str, Any], strange: Callable[[str], DropforgeError]) -> None:
        super().__init__(values)
        self._strange = strange

    def __missing__(self, key: str) -> Any:
        raise self._strange(f"an object without `{key}`")


class NoSuchRunError(DropforgeError):
    """Airflow has no DAG run of this name."""


class RunExistsError(DropforgeError):
    """Airflow has a DAG run of this name already."""


class Airflow:
    """A client that logs in when it must; every answer is JSON of Airflow's, or an error that says that it is not.

    :param pages: address of its pages for browsers, where that is another one.
    """

    def __init__(self, url: str, user: str, password: str, pages: str = "") -> None:
        self.url = url.rstrip("/")
        self.pages = (pages or url).rstrip("/")
        self.user, self.password = user, password
        try:
            self._http = httpx.Client(base_url=self.url, timeout=_TIMEOUT)
        except httpx.InvalidURL as error:
            mend = "Set DROPFORGE_AIRFLOW_URL to http://HOST:PORT"
            raise DropforgeError(f"Airflow at {self.url}", f"it is no address ({error})", mend) from error
        self._sockets: list[socket.socket] = []

    def _call(self, method: str, path: str, **options: Any) -> Any:
        """The answer's JSON; None for none. :raises DropforgeError: for whatever else comes."""
        status, data = self._send(method, path, **options)
        if status == 401:
            login = {"username": self.user, "password": self.password}
            status, data = self._send("POST", "/auth/token", json=login)
            if _is_good(status):
                token = self._object(data, "/auth/token")["access_token"]
                self._http.headers["Authorization"] = f"Bearer {token}"
                status, data = self._send(method, path, **options)
        if not _is_good(status):
            raise self._refusal(method, path, status, data)
        return self._json(data, path) if data else None

    def _send(self, method: str, path: str, **options: Any) -> tuple[int, bytes]:
        """Status and body of an answer."""
        parts: list[bytes] = []
        self._sockets = [known for known in self._sockets if known.fileno() >= 0]  # the others are closed
        with Watch(_WHOLE) as watch:
            for known in self._sockets:
                watch.add(known)

            def trace(event: str, told: Mapping[str, Any]) -> None:
                if event in _CONNECTED:
                    self._sockets.append(new := told["return_value"].get_extra_info("socket"))
                    watch.add(new)

            try:
                with self._http.stream(method, path, extensions={"trace": trace}, **options) as answer:
                    for part in answer.iter_bytes(_PIECE):
                        parts.append(part)
                        if len(parts) * _PIECE > _LARGEST:
                            raise self._strange(path, f"more than {_LARGEST >> 20} MiB")
            except httpx.HTTPError as error:
                if not watch.over:
                    raise DropforgeError(
                        f"Airflow at {self.url}", f"it does not answer ({error})", "Start the stack with `dropforge up`"
                    ) from None
            if watch.over:  # it may look like an end
                raise self._strange(path, f"an answer that has not ended after {_WHOLE:.0f} s")
        return answer.status_code, b"".join(parts)

    def _refusal(self, method: str, path: str, status: int, data: bytes) -> DropforgeError:
        if status == 404 and "/dagRuns/" in path:
            name = path.partition("/dagRuns/")[2].partition("/")[0]
            return NoSuchRunError(
                f"run {unquote(name)}", "Airflow knows no such run", "List runs with `dropforge runs`"
            )
        # Below other addresses of a DAG it may be a run or a task that is not there.
        if status == 404 and (asked := _OF_A_DAG.fullmatch(path)):
            return DropforgeError(
                f"DAG {asked[1]}",
                "Airflow knows no such DAG",
                f"See the import errors on {self.url}/dags: its file may be broken, or gone",
            )
        detail = _detail(data)
        if status == 409 and method == "POST" and path.endswith("/dagRuns"):
            return RunExistsError("run", f"Airflow has one of this name ({detail})", "List runs with `dropforge runs`")
        if status in {401, 403}:
            login = f"user {self.user!r}" if self.user else "an anonymous user (AIRFLOW_USERNAME is not set)"
            return DropforgeError(
                f"Airflow at {self.url}",
                f"{login} may not do this ({method} {path}: {detail})",
                "Log in as a user who may (AIRFLOW_USERNAME, AIRFLOW_PASSWORD), or ask for the permission",
            )
        return DropforgeError(f"Airflow at {self.url}", f"it answered {status} to {path} ({detail})", "See its log")

    def _strange(self, path: str, what: str) -> DropforgeError:
        return DropforgeError(
            f"Airflow at {self.url}",
            f"it answers no JSON of Airflow to {path}, but {what}",
            "See that DROPFORGE_AIRFLOW_URL is the address of an Airflow 3, and no other server is in front of it",
        )

    def _json(self, data: bytes, path: str) -> Any:
        try:
            return json.loads(data, object_hook=lambda pairs: _Told(pairs, lambda what: self._strange(path, what)))
        except (ValueError, RecursionError):
            raise self._strange(path, "something else") from None

    def _object(self, data: bytes | _Told | None, path: str) -> _Told:
        """What has to be an object with fields of Airflow's kinds."""
        found = self._json(data, path) if isinstance(data, bytes) else data
        if not isinstance(found, _Told):
            raise self._strange(path, "no object")
        if wrong := next((name for name, fits in _KINDS.items() if name in found and not fits(found[name])), None):
            raise self._strange(path, f"a `{wrong}` of another kind")
        return found

    def _ask(self, method: str, path: str, **options: Any) -> _Told:
        return self._object(self._call(method, path, **options), path)

    def _rows(self, path: str, name: str, query: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A list of objects."""
        found = self._ask("GET", path, params=query)[name]
        return [self._object(row, path) for row in found]

    def is_paused(self, dag: str) -> bool:
        """Whether new runs of a DAG wait until somebody unpauses it."""
        return bool(self._ask("GET", f"/api/v2/dags/{dag}")["is_paused"])

    def dag_run(self, dag: str, run: str) -> dict[str, Any]:
        """One DAG run."""
        return self._ask("GET", f"/api/v2/dags/{dag}/dagRuns/{_quoted(run)}")

    def page(self, dag: str, run: str) -> str:
        """Address of a DAG run's page."""
        return f"{self.pages}/dags/{dag}/runs/{_quoted(run)}"

    def newest_runs(self, dag: str, limit: int = 20, state: str | None = None) -> list[dict[str, Any]]:
        """The newest runs of a DAG, at most 100; only those in `state`, if it is given."""
        query = {"limit": limit, "order_by": "-run_after"} | ({"state": state} if state else {})
        return self._rows(f"/api/v2/dags/{dag}/dagRuns", "dag_runs", query)

    def count_runs(self, dag: str, state: str) -> int:
        """How many runs of a DAG are in a state."""
        query: dict[str, str | int] = {"limit": 1, "state": state}
        return int(self._ask("GET", f"/api/v2/dags/{dag}/dagRuns", params=query)["total_entries"])

    def task_states(self, dag: str, run: str) -> list[dict[str, Any]]:
        """The task instances of a DAG run."""
        return self._instances(f"/api/v2/dags/{dag}/dagRuns/{_quoted(run)}/taskInstances")

    def xcom(self, dag: str, run: str, task: str, key: str) -> Any:
        """What a task has left under a key; None if nothing."""
        try:
            path = f"/api/v2/dags/{dag}/dagRuns/{_quoted(run)}/taskInstances/{task}/xcomEntries/{key}"
            found = self._ask("GET", path)["value"]
        except NoSuchRunError:
            return None
        with suppress(ValueError):  # as the database has it: JSON, mostly once more
            return json.loads(found) if isinstance(found, str) else found
        return found

    def log(self, dag: str, run: str, task: str, attempt: int) -> list[str]:
        """The lines of a task's log."""
        content = self._log(dag, run, task, attempt)
        return [str(line.get("event", "")) if isinstance(line, dict) else str(line) for line in content]

    def error(self, dag: str, run: str, task: str, attempt: int) -> str | None:
        """The error that a task's log ends with."""
        return last_error(self._log(dag, run, task, attempt))

    def _log(self, dag: str, run: str, task: str, attempt: int) -> list[Any]:
        path = f"/api/v2/dags/{dag}/dagRuns/{_quoted(run)}/taskInstances/{task}/logs/{attempt}"
        answer = self._ask("GET", path, params={"full_content": "true"}, headers={"Accept": "application/json"})
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
        answer = self._ask("GET", path)
        self._object(answer["task_instance"], path)
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
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        for offset in range(0, _MOST, _PAGE):
            page = self._rows(path, "task_instances", {"limit": _PAGE, "offset": offset})
            before = len(found)
            found |= {tuple(str(one.get(name)) for name in _INSTANCE): one for one in page}
            if len(page) < _PAGE:
                return list(found.values())
            if len(found) == before:  # a list may move while it is read, by some of it
                break
        raise self._strange(path, "a list that does not end")

    def trigger(self, dag: str, conf: dict[str, Any], run: str | None = None) -> str:
        """Start a DAG run as the form does; returns its id. :param run: the id it shall have.

        :raises RunExistsError: if there is one of that id.
        """
        body = {"logical_date": None, "conf": conf} | ({"dag_run_id": run} if run else {})
        answer = self._ask("POST", f"/api/v2/dags/{dag}/dagRuns", json=body)
        return str(answer["dag_run_id"])

    def variable(self, key: str) -> str:
        """The value of an Airflow Variable."""
        return str(self._ask("GET", f"/api/v2/variables/{key}")["value"])


def _is_good(status: int) -> bool:
    return 200 <= status < 300


def _detail(data: bytes) -> str:
    """The server's own words."""
    try:
        found = json.loads(data)["detail"]
    except (ValueError, KeyError, TypeError, RecursionError):
        found = data[:2000].decode(errors="replace")
    return " ".join(str(found).split())[:300]


def last_error(content: list[Any]) -> str | None:
    """The text of the last exception in a log's structured lines, without the last lines of a job that it quotes."""
    for line in reversed(content):
        details = line.get("error_detail") if isinstance(line, dict) else None
        # The first is what ended the task; its causes follow.
        if isinstance(details, list) and details and isinstance(details[0], dict):
            text = str(details[0].get("exc_value") or details[0].get("exc_type"))
            return text.partition("\nLast lines of ")[0]
    return None


def _quoted(run: str) -> str:
    return quote(run, safe="")
