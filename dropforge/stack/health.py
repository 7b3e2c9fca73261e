"""Is a service ready? Each check asks the service itself, over 127.0.0.1 or by its file, and takes seconds at most."""

from __future__ import annotations

import http.client
import json
import os
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dropforge.stack import processes
from dropforge.stack.listeners import other_user
from dropforge.stack.secrets import read_json
from dropforge.web import Watch

_TIMEOUT = 3.0  # for each step of an answer
_WHOLE = 6.0
_MOST = 16 << 20  # bytes
_FRESH = 0.5  # seconds for which one report of Airflow's serves all its parts
_SILENT = 60.0  # seconds; a cluster touches its signature every five, if the machine lets it
_reports: dict[int, tuple[float, dict[str, Any]]] = {}


def fetch(
    port: int, path: str, headers: dict[str, str] | None = None, body: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """HTTP status and body of a GET, or of a POST of JSON. :raises OSError: if nothing answers, or not in time.

    Another program may have the port: one of another user is told nothing, and one that sends little by little, or
    without an end, is not heard out.
    """
    if (uid := other_user(port)) is not None:
        raise OSError(f"port {port} is taken by a program of another user (uid {uid})")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
    connection.connect()
    try:
        with Watch(_WHOLE) as watch:
            watch.add(connection.sock)
            if body is None:
                connection.request("GET", path, headers=headers or {})
            else:
                connection.request(
                    "POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})}
                )
            answer = connection.getresponse()
            text = answer.read(_MOST + 1)
            if len(text) > _MOST:
                raise OSError(f"it answers with more than {_MOST >> 20} MiB")
            return answer.status, text
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()


def answers(port: int, path: str) -> bool:
    """Whether the address answers with 200."""
    return fetch(port, path)[0] == 200


def airflow_part(port: int, part: str, since: float) -> bool:
    """Whether a part of Airflow (scheduler, triggerer, dag_processor, metadatabase) is healthy.

    A heartbeat from before `since` is an earlier process's and does not count.
    """
    report = _airflow_report(port).get(part) or {}
    if report.get("status") != "healthy":
        return False
    if part == "metadatabase":
        return True
    beat = report.get(f"latest_{part}_heartbeat")
    return beat is not None and datetime.fromisoformat(beat).timestamp() >= since


def _airflow_report(port: int) -> dict[str, Any]:
    at, report = _reports.get(port, (0.0, {}))
    if time.monotonic() - at > _FRESH:
        status, body = fetch(port, "/api/v2/monitor/health")
        report = json.loads(body) if status == 200 else {}
        _reports[port] = (time.monotonic(), report)
    return report


@dataclass
class DagsRead:
    """Whether Airflow knows each of these DAGs, or why its file has none. Once it does it is not asked again.

    :param wanted: the file of each, by name of the DAG. Each is asked for by itself, as a list has pages.
    """

    port: int
    user: str
    password: str
    wanted: dict[str, str]
    _seen: bool = False

    def __call__(self) -> bool:
        """:raises OSError: if nothing answers."""
        self._seen = self._seen or self._look()
        return self._seen

    def _look(self) -> bool:
        status, body = fetch(self.port, "/auth/token", body={"username": self.user, "password": self.password})
        if status != 201:
            return False
        login = {"Authorization": f"Bearer {json.loads(body)['access_token']}"}
        lacking = {
            file for dag, file in self.wanted.items() if fetch(self.port, f"/api/v2/dags/{dag}", login)[0] != 200
        }
        return not lacking or lacking <= self._broken(login)

    def _broken(self, login: dict[str, str]) -> set[str]:
        status, body = fetch(self.port, "/api/v2/importErrors?limit=100", login)
        return {Path(item["filename"]).name for item in json.loads(body)["import_errors"]} if status == 200 else set()


@dataclass
class LocalCluster:
    """Whether the supervisor that signed the cluster's folder lives and works on.

    It signs once it has the lock and can take jobs, and touches its signature as it goes round. How old that looks
    hangs on a clock that people set, so what counts is whether it changes. What a killed one left behind does not
    count.
    """

    home: Path
    _touched: int = 0
    _changed: float = 0.0

    def __call__(self) -> bool:
        path, now = self.home / "supervisor.json", time.monotonic()
        try:
            signed = read_json(path)
            process = processes.look(int(signed["pid"]))
            signature = (signed["start"], signed["boot"])
            touched = path.stat().st_mtime_ns
        except (OSError, ValueError, LookupError, TypeError):  # none, or a torn one
            return False
        if process is None or process.zombie or signature != (process.start, processes.boot_id()):
            return False
        if touched != self._touched:
            self._touched, self._changed = touched, now
        # On a disk that is read-only it cannot be touched.
        return now - self._changed < _SILENT or not os.access(path, os.W_OK)
