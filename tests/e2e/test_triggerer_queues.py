"""As the values for Airflow's chart have it: full triggerers of jobs, and the watcher of drops still sees one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from dropforge_airflow.triggers.drops import DropTrigger
from kubeflow_training.triggers import PyTorchJobTrigger

from dropforge.install.triggerer import QUEUE, job_triggerer
from tests.kubeflow_training.kills import installation
from tests.kubeflow_training.kills.installation import Installation, until

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


@pytest.fixture
def airflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installation]:
    triggerer = yaml.safe_load((ROOT / "helm-values" / "airflow.yaml").read_text())["config"]["triggerer"]
    (arguments,) = (one["args"] for one in job_triggerer("team", "x")[0]["spec"]["template"]["spec"]["containers"])
    assert arguments[0] == "airflow"
    parts = {
        "triggerer-1": ("triggerer", "--skip-serve-logs"),
        "triggerer-2": (*arguments[1:], "--capacity", "2", "--skip-serve-logs"),
    }
    monkeypatch.setattr(installation, "PARTS", installation.PARTS | parts)
    monkeypatch.setattr(installation, "DAGS", 2)
    found = Installation(
        tmp_path / "airflow",
        {
            "AIRFLOW__CORE__DAGS_FOLDER": str(Path(__file__).with_name("triggerer_dags")),
            "AIRFLOW__TRIGGERER__QUEUES_ENABLED": triggerer["queues_enabled"],
            "TEST_DROP": str(tmp_path / "drop"),
        },
    )
    try:
        found.open()
        yield found
    finally:
        found.close()


def test_full_triggerers_of_jobs_do_not_push_out_the_watcher(airflow: Installation, tmp_path: Path) -> None:
    airflow.call("POST", "dags/jobs/dagRuns", logical_date=None)
    waiting = "select count(*) from task_instance where state = 'deferred'"
    until(lambda: airflow.rows(waiting)[0][0] == 3, 60, airflow.log)
    watcher, jobs = (airflow.triggerer_jobs[name] for name in ("triggerer-1", "triggerer-2"))
    taken = f"select count(*) from trigger where queue = '{QUEUE}' and triggerer_id = ?"
    until(lambda: airflow.rows(taken, jobs)[0][0] == 2, 30, airflow.log)  # it is full: the third job waits

    (tmp_path / "drop").write_text("")
    until(lambda: airflow.rows("select count(*) from dag_run where dag_id = 'drops'")[0][0] == 1, 40, airflow.log)
    assert airflow.rows("select count(*) from trigger where queue is null and triggerer_id != ?", watcher) == [(0,)]
    assert airflow.rows(taken, watcher) == [(0,)], "the watcher's triggerer took a job"


def test_our_triggers_go_where_the_values_want_them() -> None:
    assert PyTorchJobTrigger.supports_triggerer_queue
    assert not DropTrigger.supports_triggerer_queue
