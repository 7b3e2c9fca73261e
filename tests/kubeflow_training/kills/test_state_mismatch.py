"""A late report of the executor ends a task that waits, just as it is resumed: its next try does no harm."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.observation import Phase

from tests import late_reports, local_settings
from tests.kubeflow_training.kills.installation import Installation, until
from tests.kubeflow_training.kills.places import OnThisMachine
from tests.late_reports import POINTS, Order, Point, order

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("point", POINTS)]


@pytest.fixture(scope="module")
def airflow(kills_folder: Path) -> Iterator[Installation]:
    """An Airflow whose executor reports late where it is asked to."""
    found = Installation(kills_folder, {"KUBEFLOW_TRAINING_HOME": str(kills_folder / "cluster")})
    local_settings.install(found.home, late_reports.__file__)
    try:
        found.open()
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module", autouse=True)
def place(on_this_machine: OnThisMachine) -> OnThisMachine:
    return on_this_machine


class Work:
    """The task `work` of one DAG run, on which a report comes late."""

    def __init__(self, airflow: Installation, dag: str, point: Point, **conf: Any) -> None:
        self.airflow, self.dag, self.run = airflow, dag, f"{dag}-{point}-{uuid.uuid4().hex[:6]}".replace("_", "-")
        self.order: Order = order(airflow.home, dag, self.run, "work", point)
        airflow.trigger(dag, self.run, conf)

    @property
    def row(self) -> tuple[str | None, int]:
        """State and number of tries."""
        query = "select state, try_number from task_instance where dag_id = ? and run_id = ? and task_id = 'work'"
        found: tuple[str | None, int] = self.airflow.rows(query, self.dag, self.run)[0]
        return found

    def text(self, attempt: int) -> str:
        folder = self.airflow.logs(self.dag, self.run, "work")
        return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob(f"attempt={attempt}.log*")))

    def _why(self) -> str:
        return f"{self.run}: {self.row}\n{self.text(1)}\n== 2\n{self.text(2)}\n{self.airflow.log()}"

    def waits(self, state: str = "deferred") -> None:
        until(lambda: self.row[0] == state, 60, self._why)

    def over(self) -> bool:
        """Whether the DAG run has ended; a clear before that may be lost on SQLite."""
        found = self.airflow.rows("select state from dag_run where dag_id = ? and run_id = ?", self.dag, self.run)
        return found[0][0] in ("success", "failed")

    def ends(self, state: str) -> None:
        """Wait for the end, which is the second try's: one mismatch, told in one line."""
        until(self.over, 90, self._why)
        assert self.row == (state, 2), self._why()
        assert self.order.marked("read"), "it was not resumed before the report came"
        told = "Try 1 waited, and Airflow ended it as it was resumed"
        assert [self.text(number).count(told) for number in (1, 2)] == [0, 1], self._why()
        events = "select count(*) from log where event = 'state mismatch' and dag_id = ? and run_id = ?"
        assert self.airflow.rows(events, self.dag, self.run) == [(1,)]

    def result(self) -> Any:
        return self.airflow.result(self.dag, self.run, "work")


def name() -> str:
    return f"late-{uuid.uuid4().hex[:6]}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The end of the run that a task waits for."""
    return tmp_path / "end"


def awaited(airflow: Installation, file: Path) -> str:
    """A run that goes on until the file is there."""
    airflow.trigger("awaited", run := name(), {"file": str(file)})
    return run


def ended(airflow: Installation, run: str) -> bool:
    """Whether an awaited run has ended."""
    return airflow.rows("select state from dag_run where dag_id = 'awaited' and run_id = ?", run)[0][0] == "failed"


def began(airflow: Installation, run: str) -> int:
    """How often an awaited run has begun its task."""
    found = airflow.rows("select try_number from task_instance where dag_id = 'awaited' and run_id = ?", run)
    return int(found[0][0])


def test_a_job_that_succeeds(airflow: Installation, place: OnThisMachine, point: Point) -> None:
    job = name()
    work = Work(airflow, "late_job", point, manifest=place.manifest(job), backend="local")
    work.waits()
    (gang,) = place.gangs(job)
    place.release(job)
    work.ends("success")
    assert [one.uid for one in place.gangs(job)] == [gang.uid]
    assert (work.result()["uid"], work.result()["gang"]) == (gang.uid, 1)


def test_a_job_that_fails_and_is_worth_another_gang(
    airflow: Installation, place: OnThisMachine, point: Point, tmp_path: Path
) -> None:
    """Two gangs, as without the mismatch: the budget is one failure, which it does not spend."""
    job, go = name(), tmp_path / "go"
    script = f"while [ ! -e {go} ]; do sleep 0.1; done; kill -9 $$"
    manifest = pytorch_job(name=job, image="none", command=["/bin/sh", "-c", script], cpus=1, memory_gb=0.1)
    work = Work(airflow, "late_job", point, manifest=manifest, backend="local")
    work.waits()
    go.touch()
    until(work.over, 90, work._why)
    assert work.row[0] == "failed"
    assert len(place.gangs(job)) == 2
    assert {place.observe(gang).phase for gang in place.gangs(job)} == {Phase.FAILED}
    assert work.order.marked("read")


def test_a_sensor(airflow: Installation, place: OnThisMachine, point: Point) -> None:
    job = name()
    place.backend.create(place.manifest(job))
    work = Work(airflow, "late_sensor", point, job=job, backend="local")
    work.waits()
    place.release(job)
    work.ends("success")
    assert work.result()["phase"] == "succeeded"


@pytest.mark.parametrize("end", ["success", "failed"])
def test_the_wait_for_a_run(airflow: Installation, point: Point, file: Path, end: str) -> None:
    run = awaited(airflow, file)
    work = Work(airflow, "late_await", point, run=run)
    work.waits()
    file.write_text(end)
    work.ends(end)
    assert began(airflow, run) == 1


@pytest.mark.parametrize("end", ["success", "failed"])
def test_a_trial(airflow: Installation, point: Point, file: Path, end: str) -> None:
    """A failed one is not run again."""
    run = name()
    work = Work(airflow, "late_trial", point, run=run, conf={"file": str(file)})
    work.waits()
    file.write_text(end)
    work.ends(end)
    assert began(airflow, run) == 1


def test_a_trial_that_is_cleared_runs_again_once(airflow: Installation, point: Point, file: Path) -> None:
    file.write_text("failed")
    run = awaited(airflow, file)
    until(lambda: began(airflow, run) == 1 and ended(airflow, run))
    work = Work(airflow, "late_trial", point, run=run, conf={"file": str(file)})
    work.ends("failed")
    assert began(airflow, run) == 2


def test_no_alarm_for_a_run_that_is_on_time(airflow: Installation, point: Point, file: Path) -> None:
    work = Work(airflow, "late_alarm", point, run=awaited(airflow, file), since=time.time(), limit=3600)
    work.waits()
    file.write_text("success")
    work.ends("success")
    assert work.result() == "on time"


def test_an_alarm_for_a_run_that_is_late(airflow: Installation, point: Point, file: Path) -> None:
    work = Work(airflow, "late_alarm", point, run=awaited(airflow, file), since=time.time(), limit=15)
    work.waits()
    work.ends("failed")
    assert "It continues; end it on its page if it hangs" in work.text(2)
    file.write_text("success")


@pytest.mark.parametrize("option", ["Yes", "No"])
def test_a_person_who_has_answered(airflow: Installation, point: Point, option: str) -> None:
    """Is not asked again by the next try, and is by a clear."""
    work = Work(airflow, "late_question", point)
    work.waits("awaiting_input")
    page = f"dags/{work.dag}/dagRuns/{work.run}/taskInstances/work/-1/hitlDetails"
    airflow.call("PATCH", page, chosen_options=[option], params_input={})
    work.ends("success")
    logs = work.text(1) + work.text(2)
    assert logs.count("The answer is waited for until ") == 1
    assert f"taken: {option.lower()}" in work.text(2)
    assert work.result() == {"asked": True, "told": f"Anonymous said {option.lower()}"}
    body = {"dag_run_id": work.run, "task_ids": ["work"], "only_failed": False, "dry_run": False}
    airflow.call("POST", f"dags/{work.dag}/clearTaskInstances", **body)
    work.waits("awaiting_input")
    assert airflow.call("GET", page)["response_received"] is False
    airflow.call("PATCH", page, chosen_options=["Yes"], params_input={})
    until(lambda: work.row[0] == "success", 60, work._why)
    assert work.result() == {"asked": True, "told": "Anonymous said yes"}
