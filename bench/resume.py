"""From a job's end to its task going on in a worker: our operator beside the cncf-kubernetes provider's own two.

    python -m bench.resume [--tasks 6 --gap 2.3]    # in full: --tasks 20

Needs KUBECONFIG with the training operator and pretend nodes (see `bench.triggers`). One real Airflow: API server,
scheduler with local workers, one triggerer, DAG processor, on SQLite. One contender after the other runs its mapped
tasks and one to warm up; once all wait, their jobs end one by one. A watcher in this process notes when the API tells
each end; the trigger's event is that of its log; the worker notes the time before anything of the operator's own is
done. The scheduler, whose forks the tasks are, has imported all three operators: none pays for its imports.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import psutil
import typer

from bench.cluster import leave_out_without_cluster

# By DAG: what is said of it, and the kind of object whose end counts.
CONTENDERS = {
    "ours": ("PyTorchJobOperator, by watch", "pytorchjobs"),
    "pod": ("KubernetesPodOperator, 2 s", "pods"),
    "job-2s": ("KubernetesJobOperator, 2 s", "jobs"),
    "job": ("KubernetesJobOperator, 10 s", "jobs"),
}
ENDS = {"Succeeded", "Failed", "Complete"}
PARTS = {
    "api": ("api-server",),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "triggerer": ("triggerer", "--skip-serve-logs"),
    "dags": ("dag-processor",),
}
PRELOAD = (
    "airflow.executors.local_executor",
    "airflow.providers.cncf.kubernetes.operators.job",
    "airflow.providers.cncf.kubernetes.operators.pod",
    "airflow.sdk.execution_time.task_runner",
    "airflow.sdk.execution_time.xcom",
    "kubeflow_training.jobs.kubernetes.watching.sharing",
    "kubeflow_training.operators",
    "kubeflow_training.triggers",
)
BAR = 0.5  # seconds


def main(
    tasks: Annotated[int, typer.Option(help="Tasks of each contender.", min=2)] = 6,
    gap: Annotated[
        float, typer.Option(help="Seconds between two ends; no multiple of a poll interval.", min=0.1)
    ] = 2.3,
    settle: Annotated[float, typer.Option(help="Seconds of rest before the first end.", min=0)] = 8.0,
) -> None:
    """Run each operator's tasks, print how late they go on."""
    leave_out_without_cluster()
    found = {}
    with (
        tempfile.TemporaryDirectory(prefix="dropforge-bench-") as folder,
        _Cluster() as cluster,
        _Airflow(Path(folder), cluster.namespace, tasks) as airflow,
    ):
        print(
            f"{tasks} tasks each, seconds after the job's end: median, 90th percentile, worst; {os.cpu_count()} cores"
        )
        print(f"{'':30}{'trigger fired':>22}{'task resumed':>22}{'load average':>16}", flush=True)
        for dag in CONTENDERS:
            began = os.getloadavg()[0]
            found[dag] = _measure(airflow, cluster, dag, tasks, gap, settle)
            _tell(dag, found[dag], began)
    ours = _figures(found["ours"]["resumed"])
    peers = [_figures(found[dag]["resumed"]) for dag in CONTENDERS if dag != "ours"]
    over = [mine - min(theirs) for mine, *theirs in zip(ours, *peers, strict=True)]
    print("resumed, ours minus the peers' best:" + "".join(f"{it:+7.2f}" for it in over) + f"  (bar {BAR}, median)")
    if over[0] > BAR:
        raise SystemExit(1)


def _tell(dag: str, found: dict[str, list[float]], load: float) -> None:
    both = [_figures(found[at]) for at in ("fired", "resumed")]
    figures = "".join(" " + "".join(f"{it:7.2f}" for it in each) for each in both)
    print(f"{CONTENDERS[dag][0]:30}{figures}{load:9.1f} to {os.getloadavg()[0]:.1f}", flush=True)


def _figures(values: list[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return median(ordered), ordered[math.ceil(0.9 * len(ordered)) - 1], ordered[-1]


def _measure(
    airflow: _Airflow, cluster: _Cluster, dag: str, tasks: int, gap: float, settle: float
) -> dict[str, list[float]]:
    """Seconds from each job's end to its trigger's event and to its task's resumption."""
    names, patience = [f"{dag}-{number}" for number in range(tasks + 1)], 120 + 10 * tasks
    airflow.run(dag)
    airflow.until(lambda: airflow.states(dag).count("deferred") == len(names), patience, dag)
    airflow.until(lambda: cluster.running(names) == len(names), 60, dag)
    seen = cluster.watch(CONTENDERS[dag][1])
    cluster.end(names[0])
    airflow.until(lambda: airflow.states(dag).count("success") == 1, patience, dag)
    time.sleep(settle)  # the peers' triggers look for the start first, every 5 seconds
    began = time.monotonic()
    for number, name in enumerate(names[1:]):
        time.sleep(max(0.0, began + gap * number - time.monotonic()))
        cluster.end(name)
    airflow.until(lambda: airflow.states(dag).count("success") == len(names), patience, dag)
    airflow.until(lambda: seen.keys() >= set(names), 10, dag)
    fired, resumed = airflow.fired(dag), airflow.resumed(dag)
    return {
        "fired": [fired[number] - seen[names[number]] for number in range(1, tasks + 1)],
        "resumed": [resumed[number] - seen[names[number]] for number in range(1, tasks + 1)],
    }


class _Cluster:
    """A namespace of its own."""

    def __init__(self) -> None:
        from kubernetes import client, config

        api = config.new_client_from_config()
        self.namespace = f"bench-resume-{uuid.uuid4().hex[:6]}"
        self._core, self._batch, self._custom = (
            client.CoreV1Api(api),
            client.BatchV1Api(api),
            client.CustomObjectsApi(api),
        )

    def __enter__(self) -> _Cluster:
        self._core.create_namespace({"metadata": {"name": self.namespace}})
        return self

    def __exit__(self, *_: object) -> None:
        self._core.delete_namespace(self.namespace)

    def running(self, names: list[str]) -> int:
        pods = self._core.list_namespaced_pod(self.namespace).items
        return sum(pod.status.phase == "Running" and _job(pod.to_dict()["metadata"]) in names for pod in pods)

    def end(self, name: str) -> None:
        """Let the pods of a job end."""
        body = {"metadata": {"annotations": {"test.local/ends-after": "0.1s"}}}
        for pod in self._core.list_namespaced_pod(self.namespace).items:
            if _job(pod.to_dict()["metadata"]) == name:
                self._core.patch_namespaced_pod(pod.metadata.name, self.namespace, body)

    def watch(self, plural: str) -> dict[str, float]:
        """The times at which the API tells the ends of these objects; it fills itself."""
        seen: dict[str, float] = {}
        ready = threading.Event()
        threading.Thread(target=self._watch, args=(plural, seen, ready), daemon=True).start()
        ready.wait(10)
        return seen

    def _watch(self, plural: str, seen: dict[str, float], ready: threading.Event) -> None:
        from kubernetes import client, config

        api = config.new_client_from_config()  # of this thread alone
        custom, where = client.CustomObjectsApi(api), ("kubeflow.org", "v1", self.namespace, "pytorchjobs")
        call = {
            "pods": partial(client.CoreV1Api(api).list_namespaced_pod, self.namespace),
            "jobs": partial(client.BatchV1Api(api).list_namespaced_job, self.namespace),
            "pytorchjobs": partial(custom.list_namespaced_custom_object, *where),
        }[plural]
        version = json.loads(call(_preload_content=False).data)["metadata"]["resourceVersion"]
        stream = call(watch=True, resource_version=version, _preload_content=False)
        ready.set()
        rest = b""
        with contextlib.suppress(Exception):  # the namespace and this process may go first
            for block in stream.stream(65536):
                now = time.time()
                *lines, rest = (rest + block).split(b"\n")
                for item in (json.loads(line)["object"] for line in lines if line):
                    status = item.get("status") or {}
                    words = {it["type"] for it in status.get("conditions") or () if it["status"] == "True"}
                    if ENDS & {*words, status.get("phase")}:
                        seen.setdefault(_job(item["metadata"]), now)


def _job(metadata: dict[str, Any]) -> str:
    labels = metadata.get("labels") or {}
    found = labels.get("training.kubeflow.org/job-name") or labels.get("batch.kubernetes.io/job-name")
    # The provider's job operator puts a word of its own before the name.
    return str(found or metadata["name"]).replace("job-job-", "job-", 1)


class _Airflow:
    """Four processes, started as a person starts them."""

    def __init__(self, folder: Path, namespace: str, tasks: int) -> None:
        self._folder, self._home, self._notes = folder, folder / "airflow", folder / "notes"
        self._home.mkdir()
        self._notes.touch()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        connection = {"conn_type": "kubernetes", "extra": {"kube_config_path": os.environ["KUBECONFIG"]}}
        # The provider's pod operator takes a KUBECONFIG beside a connection for a mistake.
        foreign = ("AIRFLOW", "_AIRFLOW", "KUBECONFIG")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        self._env = {
            **clean,
            **_options(self._home, url, port),
            "AIRFLOW_HOME": str(self._home),
            "AIRFLOW_CONN_KUBERNETES_DEFAULT": json.dumps(connection),
            "BENCH_NAMESPACE": namespace,
            "BENCH_TASKS": str(tasks + 1),
            "BENCH_NOTES": str(self._notes),
            "NO_COLOR": "1",
        }
        self._http = httpx.Client(base_url=url, timeout=30, trust_env=False)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> _Airflow:
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _open(self) -> None:
        self._start("migration", "db", "migrate")
        if self._processes.pop("migration").wait(120):
            raise SystemExit(self._log("migration"))
        for name, arguments in PARTS.items():
            self._start(name, *arguments)

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return self._http.get("/api/v2/version").status_code == 200
            return False

        self.until(answers, 120, "the API server")
        self._http.headers["Authorization"] = f"Bearer {self._http.get('/auth/token').json()['access_token']}"
        dags = "select count(*) from dag where not is_paused"
        self.until(lambda: self._rows(dags)[0][0] == len(CONTENDERS), 120, "the DAGs")
        alive = "select count(*) from job where state = 'running' and job_type in ('SchedulerJob', 'TriggererJob')"
        self.until(lambda: self._rows(alive)[0][0] == 2, 120, "scheduler and triggerer")

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                for member in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.kill()
            process.wait()

    def _start(self, name: str, *arguments: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            imports = f"import {', '.join(PRELOAD)}; " if name == "scheduler" else ""
            code = f"{imports}import runpy; runpy.run_module('airflow', run_name='__main__')"
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def until(self, what: Callable[[], Any], seconds: float, of: str) -> None:
        end = time.monotonic() + seconds
        while not what():
            if time.monotonic() > end:
                logs = "\n".join(self._log(name) for name in self._processes)
                states = self.states(of) if of in CONTENDERS else ""
                raise SystemExit(f"waited in vain for {of} {states}\n{logs}")
            time.sleep(0.25)

    def _log(self, name: str) -> str:
        return f"== {name}\n" + (self._folder / f"{name}.log").read_text(errors="replace")[-1500:]

    def _rows(self, query: str, *values: Any) -> list[Any]:
        path = f"file:{self._home}/airflow.db?mode=ro"
        with contextlib.closing(sqlite3.connect(path, uri=True, timeout=30)) as found:
            return found.execute(query, values).fetchall()

    def run(self, dag: str) -> None:
        for _ in range(5):  # SQLite may be locked for longer than a request waits
            body = {"dag_run_id": dag, "logical_date": None}
            if (answer := self._http.post(f"/api/v2/dags/{dag}/dagRuns", json=body)).status_code != 500:
                break
        answer.raise_for_status()

    def states(self, dag: str) -> list[str]:
        found = [row[0] for row in self._rows("select state from task_instance where dag_id = ?", dag)]
        if "failed" in found:
            logs = "\n".join(path.read_text()[-3000:] for path in sorted(self._logs(dag).rglob("*.log"))[:1])
            raise SystemExit(f"{dag}: a task failed\n{logs}")
        return found

    def fired(self, dag: str) -> dict[int, float]:
        """By map index, when the trigger's event was there."""
        found = {}
        for path in self._logs(dag).rglob("attempt=*.log.trigger.*"):
            for line in path.read_text().splitlines():
                if "Trigger fired event" in line:
                    if "'ended'" not in line and "'success'" not in line:
                        raise SystemExit(f"{dag}: a trigger told of something else than an end: {line[:1000]}")
                    number = int(next(part[10:] for part in path.parts if part.startswith("map_index=")))
                    found[number] = datetime.fromisoformat(json.loads(line)["timestamp"]).timestamp()
        return found

    def resumed(self, dag: str) -> dict[int, float]:
        """By map index, when a worker went on with the task; the first time, should there be several."""
        found: dict[int, float] = {}
        for line in self._notes.read_text().splitlines():
            name, number, at = line.split()
            if name == dag:
                found.setdefault(int(number), float(at))
        return found

    def _logs(self, dag: str) -> Path:
        return self._home / "logs" / f"dag_id={dag}"


def _options(home: Path, url: str, port: int) -> dict[str, str]:
    options: dict[str, dict[str, Any]] = {
        "core": {
            "executor": "LocalExecutor",
            "parallelism": 8,
            "max_active_tasks_per_dag": 100,
            "dags_folder": Path(__file__).parent / "dags",
            "plugins_folder": home / "none",
            "load_examples": False,
            "dags_are_paused_at_creation": False,
            "auth_manager": "airflow.api_fastapi.auth.managers.simple.simple_auth_manager.SimpleAuthManager",
            "simple_auth_manager_all_admins": True,
            "execution_api_server_url": f"{url}/execution/",
            "hostname_callable": "socket.gethostname",
            "mp_start_method": "fork",
        },
        "database": {"sql_alchemy_conn": f"sqlite:///{home}/airflow.db"},
        "api": {"host": "127.0.0.1", "port": port, "base_url": url, "workers": 1, "secret_key": "s" * 32},
        "api_auth": {"jwt_secret": "j" * 64},
        "scheduler": {"scheduler_idle_sleep_time": 0.2},
        "dag_processor": {"refresh_interval": 300, "min_file_process_interval": 3600, "stale_dag_threshold": 7200},
        "logging": {"base_log_folder": home / "logs", "colored_console_log": False},
    }
    return {
        f"AIRFLOW__{section}__{name}".upper(): str(value)
        for section, values in options.items()
        for name, value in values.items()
    }


if __name__ == "__main__":
    typer.run(main)
