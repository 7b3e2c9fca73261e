"""What end-to-end tests ask of a running stack."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import psutil
import pytest

from dropforge import tracking
from dropforge.client.airflow import FINETUNE, SWEEP
from dropforge.client.connection import Connection, connect
from dropforge.client.upload import upload
from dropforge.drop import Drop, read_drop
from dropforge.errors import DropforgeError
from dropforge.stack import control
from dropforge.stack.state import ServiceState, read_state

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

Name = tuple[str, str]  # namespace and name of a data set, by OpenLineage

# Two models on all rows of the sample would take longer than the training.
EVALUATE = "evaluate: {max_rows: 40}\n"
RECIPE = f"extends: tiny\n{EVALUATE}"


def wait(
    what: str, condition: Callable[[], Any], seconds: float = 600, progress: Callable[[], Any] | None = None
) -> Any:
    """The first true value of `condition`; fails with `what` after a time that is far above the usual.

    :param progress: the time begins anew whenever the value of this changes, so that a slow machine is no failure; up
        to three times of it in all.
    """
    begun = time.monotonic()
    end, seen, look = begun + seconds, None, 0.0
    while (now := time.monotonic()) < end:
        value = condition()
        if value:
            return value
        if progress is not None and now > look:
            look, found = now + 10, progress()
            if found != seen:
                seen, end = found, min(now + seconds, begun + 3 * seconds)
        time.sleep(0.2)
    pytest.fail(f"waited {time.monotonic() - begun:.0f} s for {what}")


class Stack:
    """The running stack, with the questions that tests ask."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env: dict[str, str] = {}
        self.connection: Connection = connect(folder)
        self.mlflow: MlflowClient = tracking.client(self.connection.settings.tracking_uri)

    def drop(self, family: str, name: str, files: dict[str, Path], recipe: str | None = RECIPE) -> Drop:
        """Upload files and `_SUCCESS` with an ordinary client; nothing else starts the run."""
        if recipe is not None:
            path = self.folder / "recipes" / f"{family}-{name}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(recipe)
            files = {**files, "recipe.yaml": path}
        upload(self.connection.store, family, name, files)
        return read_drop(self.connection.store, family, name, self.connection.settings.bucket)

    def state(self, dag_run: str) -> str:
        return str(self.connection.airflow.dag_run(FINETUNE, dag_run)["state"])

    def end(self, dag_run: str) -> str:
        """Wait for the end of a run and tell its state; without one, fail with what became of its tasks."""

        def ended() -> str:
            state = self.state(dag_run)
            return state if state in {"success", "failed"} else ""

        return str(self._wait(dag_run, f"the end of {dag_run}", ended, 1200))

    def see(self, dag_run: str, task: str, state: str, seconds: float = 1200) -> None:
        """Wait for a state of a task; without it, fail with what became of the run's tasks."""

        def there() -> bool:
            return bool(self.tasks(dag_run).get(task, {}).get("state") == state)

        self._wait(dag_run, f"{task} to be {state}", there, seconds)

    def _wait(self, dag_run: str, what: str, condition: Callable[[], Any], seconds: float) -> Any:
        """Wait as `wait` does; its failure also tells what became of the run's tasks."""
        try:
            return wait(what, condition, seconds, lambda: self.going(FINETUNE, dag_run))
        except pytest.fail.Exception as error:
            pytest.fail(f"{error}\n{self.unfinished(dag_run)}")

    def going(self, dag: str = "~", dag_run: str = "~") -> list[tuple[Any, ...]]:
        """The states of a run's tasks, or of all: something goes on as long as this changes."""
        found = self.connection.airflow.task_states(dag, dag_run)
        same = {"up_for_reschedule": "running"}  # a sensor that looks now and then
        return sorted(
            (one["dag_run_id"], one["task_id"], one["try_number"], same.get(one["state"], str(one["state"])))
            for one in found
        )

    def unfinished(self, dag_run: str) -> str:
        """The tasks of a run with their states, and the last lines of those that began and did not end."""
        said = []
        for name, task in self.tasks(dag_run).items():
            said.append(f"{name}: {task['state']}, try {task['try_number']}, began {task['start_date']}")
            if task["start_date"] and not task["end_date"]:
                said += self.log(dag_run, name).splitlines()[-20:]
        for log in sorted(self.folder.glob("logs/*.log")):
            errors = [line for line in log.read_text(errors="replace").splitlines() if "rror" in line]
            said += [f"{log.name}: {line[:300]}" for line in errors[-5:]]
        return "\n".join(said)

    def tasks(self, dag_run: str) -> dict[str, dict[str, Any]]:
        return {task["task_id"]: task for task in self.connection.airflow.task_states(FINETUNE, dag_run)}

    def log(self, dag_run: str, task: str) -> str:
        """The log of a task's last try."""
        attempt = int(self.tasks(dag_run)[task]["try_number"])
        return "\n".join(self.connection.airflow.log(FINETUNE, dag_run, task, attempt))

    def tracked(self, dag_run: str) -> list[Run]:
        """The MLflow runs that a DAG run opened: one, whatever happened."""
        return tracking.search(self.mlflow, tracking.TAG_DAG_RUN, dag_run)

    def checkpoints(self, dag_run: str) -> list[str]:
        """The keys of the manifests of a DAG run's complete checkpoints."""
        found = self.tracked(dag_run)
        if not found:
            return []
        prefix = f"runs/{found[0].data.tags[tracking.TAG_RUN]}/checkpoints/"
        return [info.key for info in self.connection.store.list(prefix) if info.key.endswith("/manifest.json")]

    def see_checkpoint(self, dag_run: str) -> None:
        """Wait for the first complete checkpoint; without it, fail with what became of the run's tasks."""

        def there() -> bool:
            if self.state(dag_run) in {"success", "failed"}:
                pytest.fail(f"{dag_run} ended before a checkpoint")
            return bool(self.checkpoints(dag_run))

        self._wait(dag_run, "the first checkpoint", there, 600)

    def champion(self, family: str) -> str | None:
        found = tracking.champion(self.connection.settings.tracking_uri, family)
        return found.version if found else None

    def cancel(self, dag_run: str) -> None:
        """What a person does who marks the run as failed in the UI."""
        self.connection.airflow.fail_run(FINETUNE, dag_run)

    def clear(self, dag_run: str, task: str, *, downstream: bool = True) -> None:
        """What a person does who clears a task and those after it in the UI."""
        self.connection.airflow.clear(FINETUNE, dag_run, task, downstream=downstream)

    def xcom(self, dag: str, run: str, task: str, key: str) -> Any:
        """What a task left under a name."""
        path = f"/api/v2/dags/{dag}/dagRuns/{quote(run, safe='')}/taskInstances/{task}/xcomEntries/{key}"
        return self.connection.airflow._call("GET", path, params={"deserialize": "false"})["value"]

    def lineage(self, dag: str, run: str, task: str, kind: str) -> tuple[set[Name], set[Name]]:
        """What the event of a task's end names: inputs and outputs.

        :param kind: COMPLETE, or FAIL of a try that did not succeed.
        """
        return wait(f"{kind} of {task} of {run}", lambda: self._lineage(dag, run, task, kind), 60)[-1]

    def _lineage(self, dag: str, run: str, task: str, kind: str) -> list[tuple[set[Name], set[Name]]]:
        found = []
        for path in sorted((self.folder / "lineage").iterdir()):
            try:
                event = json.loads(path.read_text())
            except ValueError:
                continue  # it is being written
            if (event["job"]["name"], event["eventType"]) != (f"{dag}.{task}", kind):
                continue
            facet = event["run"]["facets"].get("airflow")  # a task that is marked by hand has none
            if facet is not None and facet["dagRun"]["run_id"] == run:
                named = ({(one["namespace"], one["name"]) for one in event[side]} for side in ("inputs", "outputs"))
                found.append(tuple(named))
        return found

    def backfill(self, dag: str, start: str, end: str) -> str:
        """Ask for a backfill; what Airflow answers if it refuses."""
        try:
            self.connection.airflow._call(
                "POST", "/api/v2/backfills", json={"dag_id": dag, "from_date": start, "to_date": end}
            )
        except DropforgeError as error:
            return str(error)
        return ""

    def dag_runs(self, drop: Drop) -> list[dict[str, Any]]:
        """The fine-tune runs of a drop's partition key."""
        return [
            run
            for run in self.connection.airflow.newest_runs(FINETUNE, 100)
            if drop.id in str(run.get("partition_key"))
        ]

    def end_trainings(self) -> None:
        """End the runs that train now, and wait until nothing of them runs."""
        if not self.ranks():
            return
        for dag in (SWEEP, FINETUNE):
            for run in self.connection.airflow.newest_runs(dag, 100, "running"):
                self.connection.airflow.fail_run(dag, run["dag_run_id"])
        wait("the end of what trains", lambda: not self.ranks())

    def ranks(self) -> list[psutil.Process]:
        """The training processes of this stack."""
        found = []
        for process in psutil.process_iter():
            try:
                home = process.environ().get("DROPFORGE_STATE")
                if home == str(self.folder) and "trainer.rank" in process.cmdline():
                    found.append(process)
            except psutil.Error:
                continue
        return found


@contextmanager
def running(folder: Path, env: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """A stack that is ready. The environment is as before, with `env` for its processes only."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (env or {}).items():
            patched.setenv(name, value)
        control.start(folder)
    try:
        control.wait_ready(folder)
        before = dict(os.environ)
        found = Stack(folder)  # connecting puts the stack's addresses into the environment
        found.env = {key: value for key, value in os.environ.items() if before.get(key) != value}
        os.environ.clear()
        os.environ.update(before)
        yield found
    finally:
        control.stop(folder)


@contextmanager
def logged_in(stack: Stack) -> Iterator[None]:
    """The stack's addresses and logins in the environment."""
    with pytest.MonkeyPatch.context() as patched:
        for key, value in stack.env.items():
            patched.setenv(key, value)
        yield


def services(stack: Stack) -> dict[str, ServiceState]:
    state = read_state(stack.folder)
    assert state is not None
    return state.services


def kill(stack: Stack, name: str, within: float = 60) -> None:
    """SIGKILL a service, and wait until the supervisor has brought it back. :param within: seconds."""
    pid = services(stack)[name].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    see_back(stack, name, pid, within)


def see_back(stack: Stack, name: str, pid: int, within: float) -> None:
    """Wait until a service whose process had this number is well again. :param within: seconds."""

    def back() -> bool:
        now = services(stack)[name]
        return now.pid not in (None, pid) and now.status == "healthy"

    wait(f"{name} to come back", back, within)


def typed(stack: Stack, *words: str) -> subprocess.CompletedProcess[str]:
    """A command, as a person types it."""
    command = [sys.executable, "-c", "from dropforge.cli.app import main; main()", *words, "--state", str(stack.folder)]
    env = {**os.environ, "COLUMNS": "300"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
