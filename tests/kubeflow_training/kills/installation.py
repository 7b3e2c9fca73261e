"""A whole Airflow for tests: API server, scheduler with local workers, two triggerers, DAG processor, on SQLite."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

HERE = Path(__file__).parent
TRIGGERERS = ("triggerer-1", "triggerer-2")
TRIGGERER_DEAD = 4  # seconds without a heartbeat
DAGS = 15
BEAT = 1  # seconds between a worker's heartbeats
PARTS = {
    "api": ("api-server",),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    **dict.fromkeys(TRIGGERERS, ("triggerer", "--skip-serve-logs")),
    "dags": ("dag-processor",),
}


def until(what: Callable[[], Any], seconds: float = 40, why: Callable[[], Any] = str) -> Any:
    """The first true value of `what`."""
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, f"waited in vain: {why()}"
        time.sleep(0.1)
    return value


class Installation:
    """
    :param folder: of this Airflow alone.
    :param env: beyond what Airflow needs: connections, the local cluster's folder.
    """

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder, self.home = folder, folder / "airflow"
        self.home.mkdir(parents=True)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("AIRFLOW", "_AIRFLOW"))}
        self.env = {**clean, **self._options(), **env, "AIRFLOW_HOME": str(self.home), "NO_COLOR": "1"}
        self.pids: dict[str, int] = {}
        self.triggerer_jobs: dict[str, int] = {}
        self._http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def _options(self) -> dict[str, str]:
        options: dict[str, dict[str, Any]] = {
            "core": {
                "executor": "LocalExecutor",
                "parallelism": 6,
                "dags_folder": HERE / "dags",
                "plugins_folder": self.folder / "none",
                "load_examples": False,
                "dags_are_paused_at_creation": False,
                "auth_manager": "airflow.api_fastapi.auth.managers.simple.simple_auth_manager.SimpleAuthManager",
                "simple_auth_manager_all_admins": True,
                "execution_api_server_url": f"{self.url}/execution/",
                "hostname_callable": "socket.gethostname",
                "mp_start_method": "fork",
            },
            # An API server that is away is noticed by heartbeats, not hidden by repeating one for a minute.
            "workers": {
                "min_heartbeat_interval": BEAT,
                "max_failed_heartbeats": 3,
                "execution_api_retries": 2,
                "execution_api_retry_wait_min": 0.1,
                "execution_api_retry_wait_max": 0.3,
            },
            "database": {"sql_alchemy_conn": f"sqlite:///{self.home}/airflow.db"},
            "api": {"host": "127.0.0.1", "port": self.port, "base_url": self.url, "workers": 1, "secret_key": "s" * 32},
            "api_auth": {"jwt_secret": "j" * 64},
            "scheduler": {
                "scheduler_idle_sleep_time": 0.2,
                "job_heartbeat_sec": 1,
                "scheduler_heartbeat_sec": 1,
                # A scheduler without a heartbeat for longer resets its own tasks, and they are tried again. Locks of
                # the database last as long as SQLite waits for them, five seconds: longer, and it stands still longer.
                "scheduler_health_check_threshold": 15,
                "orphaned_tasks_check_interval": 1,
                "task_instance_heartbeat_timeout": 12,
                "task_instance_heartbeat_timeout_detection_interval": 1,
            },
            "triggerer": {"job_heartbeat_sec": 1, "triggerer_health_check_threshold": TRIGGERER_DEAD},
            "dag_processor": {"refresh_interval": 300, "min_file_process_interval": 3600, "stale_dag_threshold": 7200},
            "logging": {"base_log_folder": self.home / "logs", "colored_console_log": False},
        }
        return {
            f"AIRFLOW__{section}__{name}".upper(): str(value)
            for section, values in options.items()
            for name, value in values.items()
        }

    # Its processes

    def open(self) -> None:
        with (self.folder / "nursery.log").open("wb") as log:
            self._nursery = subprocess.Popen(
                [sys.executable, str(HERE / "nursery.py")],
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self._nursery.stdout
        assert self._nursery.stdout.readline(), (self.folder / "nursery.log").read_text()[-3000:]
        migration = self._spawn("migrate", ("db", "migrate"))
        until(lambda: not _alive(migration), 90)
        self.start("dags")
        self.start("api")
        self.start("scheduler")
        for name in TRIGGERERS:
            self.start(name)
        self.serving()
        self._http.headers["Authorization"] = f"Bearer {self._http.get('/auth/token').json()['access_token']}"
        until(lambda: self.rows("select count(*) from dag where not is_paused")[0][0] == DAGS, 60, self.log)

    def start(self, name: str) -> None:
        """Start one of the parts; it has announced itself when this returns, if it is a triggerer."""
        before = self.rows("select max(id) from job") if name in TRIGGERERS else []
        self.pids[name] = self._spawn(name, PARTS[name])
        if name in TRIGGERERS:
            query = "select max(id) from job where job_type = 'TriggererJob' having max(id) > ?"
            found = until(lambda: self.rows(query, before[0][0] or 0), 40, self.log)
            self.triggerer_jobs[name] = found[0][0]

    def _spawn(self, name: str, arguments: tuple[str, ...]) -> int:
        assert self._nursery.stdin
        assert self._nursery.stdout
        request = {"arguments": arguments, "log": str(self.folder / f"{name}.log")}
        self._nursery.stdin.write(json.dumps(request) + "\n")
        self._nursery.stdin.flush()
        return int(self._nursery.stdout.readline())

    def serving(self) -> None:
        """Wait until the API server answers."""

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return self._http.get("/api/v2/version").status_code == 200
            return False

        until(answers, 60, self.log)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a part and all of its descendants."""
        for process in [psutil.Process(self.pids[name]), *psutil.Process(self.pids[name]).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        if number == signal.SIGKILL:
            until(lambda: not _alive(self.pids[name]))

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)

    def stop(self, name: str) -> None:
        """Stop a part with SIGSTOP, at a point at which it holds no lock of the database that all parts share."""

        def stopped() -> bool:
            self.signal(name, signal.SIGSTOP)
            until(lambda: psutil.Process(self.pids[name]).status() == psutil.STATUS_STOPPED)
            try:
                with contextlib.closing(sqlite3.connect(self.home / "airflow.db", timeout=2)) as database:
                    database.execute("begin exclusive").execute("rollback")
                return True
            except sqlite3.OperationalError:
                self.signal(name, signal.SIGCONT)
                return False

        until(stopped)

    def mend(self) -> None:
        """Start what does not run."""
        for name in PARTS:
            if not _alive(self.pids[name]):
                self.start(name)
                self.serving()
            else:
                self.signal(name, signal.SIGCONT)

    def close(self) -> None:
        for name, pid in self.pids.items():
            if _alive(pid):
                self.kill(name)
        if self._nursery.stdin:
            self._nursery.stdin.close()
        self._nursery.wait(20)

    def log(self) -> str:
        """The ends of all parts' logs."""
        tails = []
        for name in ("nursery", *self.pids):
            path = self.folder / f"{name}.log"
            tails.append(f"== {name}\n{path.read_text(errors='replace')[-1500:] if path.exists() else '-'}")
        return "\n".join(tails)

    # What it knows and does

    def rows(self, query: str, *values: Any) -> list[Any]:
        """Asked of the database itself: the API server may be away."""
        with contextlib.closing(sqlite3.connect(f"file:{self.home}/airflow.db?mode=ro", uri=True, timeout=30)) as found:
            return found.execute(query, values).fetchall()

    def call(self, method: str, path: str, **json: Any) -> Any:
        """A call of the REST API, as a person's browser makes it."""
        for _ in range(5):  # SQLite may be locked for longer than a request waits
            answer = self._http.request(method, f"/api/v2/{path}", json=json or None)
            if answer.status_code != 500:
                break
        assert answer.is_success, answer.text
        return answer.json()

    def trigger(self, dag: str, run: str, conf: dict[str, Any]) -> None:
        """Start a DAG run."""
        self.call("POST", f"dags/{dag}/dagRuns", dag_run_id=run, logical_date=None, conf=conf)

    def result(self, dag: str, run: str, task: str) -> Any:
        """What a task has returned."""
        path = f"dags/{dag}/dagRuns/{run}/taskInstances/{task}/xcomEntries/return_value?deserialize=true"
        return self.call("GET", path)["value"]

    def logs(self, dag: str, run: str, task: str) -> Path:
        """The folder of a task's logs: of each try those of the worker and of the triggerers."""
        return self.home / "logs" / f"dag_id={dag}" / f"run_id={run}" / f"task_id={task}"

    @contextlib.contextmanager
    def without_api(self) -> Iterator[None]:
        self.kill("api")
        try:
            yield
        finally:
            self.start("api")
            self.serving()


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
