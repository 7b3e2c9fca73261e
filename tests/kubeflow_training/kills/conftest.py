"""One whole Airflow for the tests of this folder's only file, and the places for its jobs."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubeflow_training.jobs.observation import Phase

from tests.kubeflow_training.kills.installation import Installation, until
from tests.kubeflow_training.kills.places import OnKubernetes, OnThisMachine, Place, connection


@pytest.fixture(scope="module")
def kills_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def airflow(kills_folder: Path, request: pytest.FixtureRequest) -> Iterator[Installation]:
    env = {"KUBEFLOW_TRAINING_HOME": str(kills_folder / "cluster")}
    wanted = any(item.get_closest_marker("cluster") and "kills" in item.nodeid for item in request.session.items)
    if wanted and Path(os.environ.get("KUBECONFIG", "/none")).is_file():
        env |= connection(request.getfixturevalue("rights"))
    found = Installation(kills_folder, env)
    try:
        found.open()
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def on_this_machine(kills_folder: Path) -> Iterator[OnThisMachine]:
    found = OnThisMachine(kills_folder, dict(os.environ))
    yield found
    found.close()


@pytest.fixture(scope="module")
def on_kubernetes(request: pytest.FixtureRequest) -> OnKubernetes:
    return OnKubernetes(request.getfixturevalue("rights"))


BOTH = ["on_this_machine", pytest.param("on_kubernetes", marks=pytest.mark.cluster)]


@pytest.fixture(scope="module", autouse=True, params=BOTH, ids=["local", "kubernetes"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found


class Run:
    """One DAG run with one task, and its job."""

    def __init__(self, airflow: Installation, place: Place, dag: str, make: str, folder: Path) -> None:
        self.airflow, self.place, self.dag = airflow, place, dag
        self.name = self.run = f"{dag.replace('_', '-')}-{uuid.uuid4().hex[:6]}"
        self.hold = folder / f"hold-{self.name}"
        conf = {"manifest": getattr(place, make)(self.name), "backend": place.kind, "hold": str(self.hold)}
        self._logs = airflow.logs(dag, self.run, "train")
        airflow.trigger(dag, self.run, conf)

    # What Airflow says

    def _task(self, column: str) -> Any:
        found = self.airflow.rows(
            f"select {column} from task_instance where dag_id = ? and run_id = ?", self.dag, self.run
        )
        return found[0][0] if found else None

    @property
    def state(self) -> str | None:
        found: str | None = self._task("state")
        return found

    @property
    def tries(self) -> int:
        found: int = self._task("try_number")
        return found

    @property
    def process(self) -> int:
        """The worker's process that executes the task."""
        found: int = self._task("pid")
        return found

    def watched(self) -> bool:
        """Whether the newest try's trigger runs; until then a person who ends the task leaves its job to the reaper."""
        return self.state == "deferred" and any(self._logs.glob(f"attempt={self.tries}.log.trigger.*"))

    @property
    def triggerer(self) -> str | None:
        """The triggerer that has the task's trigger."""
        found = self.airflow.rows("select triggerer_id from trigger where id = ?", self._task("trigger_id"))
        names = {job: name for name, job in self.airflow.triggerer_jobs.items()}
        return names.get(found[0][0]) if found else None

    def watches(self) -> int:
        """How often a triggerer has begun to wait for the job. A slow machine's may lose it to another at any time."""
        return self.text().count(") starting")

    def text(self) -> str:
        """The task's log of all tries, as files: worker's and triggerers'."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self._logs.glob("attempt=*.log*")))

    def lines(self, attempt: int = 1) -> list[str]:
        """Lines of rank 0 in that try's log, as a person sees it."""
        path = f"dags/{self.dag}/dagRuns/{self.run}/taskInstances/train/logs/{attempt}?full_content=true"
        told = [str(item.get("event", "")) for item in self.airflow.call("GET", path)["content"]]
        return [found[1] for line in told if (found := re.search(r"\[master-0\] (.*)", line))]

    def result(self) -> Any:
        return self.airflow.result(self.dag, self.run, "train")

    # What a person does

    def mark(self, state: str) -> None:
        self.airflow.call("PATCH", f"dags/{self.dag}/dagRuns/{self.run}/taskInstances/train", new_state=state)

    def clear(self) -> None:
        path = f"dags/{self.dag}/clearTaskInstances"
        self.airflow.call("POST", path, dry_run=False, dag_run_id=self.run, task_ids=["train"], only_failed=False)

    def once(self) -> None:
        """Airflow has tried the task once; if not, its own account of why."""
        if self.tries == 1:
            return
        scheduler = (self.airflow.folder / "scheduler.log").read_text(errors="replace").splitlines()
        told = [line for line in scheduler if self.run in line or "SchedulerJob" in line or "locked" in line]
        log = "\n".join(told[-60:])
        raise AssertionError(f"{self.name}: {self.tries} tries\n{self.text()[-6000:]}\n== scheduler\n{log[-12000:]}")

    # What one waits for

    def gangs(self) -> list[str]:
        """Names of the gangs that live."""
        return [item.job["metadata"]["name"] for item in self.place.gangs(self.name)]

    def uid(self) -> str:
        """The only gang's."""
        (gang,) = self.place.gangs(self.name)
        return str(gang.uid)

    def phase(self) -> Phase:
        gangs = self.place.gangs(self.name)
        return self.place.observe(gangs[-1]).phase if gangs else Phase.LOST

    def until(self, what: Callable[[], Any], seconds: float = 40) -> Any:
        def why() -> str:
            job = f"{self.name}: task {self.state}, try {self.tries}, gangs {self.gangs()}, {self.phase()}"
            return f"{job}\n{self.text()[-4000:]}\n{self.airflow.log()}"

        return until(what, seconds, why)

    def deferred(self) -> None:
        """Wait until a triggerer waits for the job, which runs."""
        self.until(lambda: self.state == "deferred" and self.triggerer and self.phase() is Phase.RUNNING)
        self.until(lambda: "line 1" in self.text())
        # A scheduler that hears of the worker's end only when the job's end has queued the task anew takes that for a
        # failure, and Airflow tries again.
        self.until(self._worker_has_gone)

    def _worker_has_gone(self) -> bool:
        """Whether the scheduler knows that the worker, which handed over to a triggerer, has ended."""
        log = (self.airflow.folder / "scheduler.log").read_text(errors="replace")
        heard = (line for line in log.splitlines() if "Received executor event with state success" in line)
        return any(f"run_id='{self.run}'" in line for line in heard)

    def running(self) -> None:
        """Wait until the job runs and the worker shows its log."""
        self.until(lambda: self.state == "running" and self.phase() is Phase.RUNNING and "line 1" in self.text())

    def held(self) -> None:
        """Wait until the worker stands between create and deferral."""
        self.until(lambda: self.state == "running" and self.gangs() and "pytorch_job" in self.xcoms())

    def xcoms(self) -> list[str]:
        query = "select key from xcom where dag_id = ? and run_id = ?"
        return [row[0] for row in self.airflow.rows(query, self.dag, self.run)]

    def found_again(self, tries: int = 2) -> None:
        """Wait until a later try has found the job."""
        self.until(lambda: self.tries >= tries and self.text().count(": adopt (") >= tries - 1)

    def ends_well(self, uid: str) -> None:
        """Release the job: it ends, and its success is told once, of the gang that has this uid."""
        assert self.state != "success"
        assert self.uid() == uid
        self.place.release(self.name)
        self.told_once(uid)

    def told_once(self, uid: str, seconds: float = 40) -> None:
        self.until(lambda: self.state == "success", seconds)
        assert self.uid() == uid
        result = self.result()
        assert result["uid"] == uid
        told = f"/{result['name']} succeeded"
        self.until(lambda: told in self.text())  # its log has a way of its own
        assert self.text().count(told) == 1


@pytest.fixture
def new_run(airflow: Installation, place: Place, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(dag: str, make: str = "manifest") -> Run:
        made.append(Run(airflow, place, dag, make, tmp_path))
        return made[-1]

    yield make
    # What a failed test leaves is no matter of the next one.
    airflow.mend()
    for run in made:
        if run.state not in ("success", "failed"):
            run.mark("failed")
        for gang in place.gangs(run.name):
            place.backend.delete(gang.job["metadata"]["name"], place.namespace, grace_seconds=0)
