"""Files in the local cluster's folder that are torn, foreign or of another shape take no other job away."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from kubeflow_training.jobs.local import LocalCluster
from kubeflow_training.jobs.local.records import read_offers
from kubeflow_training.jobs.local.standing import HELD
from kubeflow_training.jobs.local.supervisor import Supervisor
from kubeflow_training.jobs.observation import observe

CONTAINER = {"name": "pytorch", "command": ["x"]}
SPEC = {"pytorchReplicaSpecs": {"Master": {"replicas": 1, "template": {"spec": {"containers": [CONTAINER]}}}}}


def job(name: str, **changed: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default"}
    manifest = {"kind": "PyTorchJob", "apiVersion": "kubeflow.org/v1", "metadata": metadata, "spec": SPEC}
    return {"uid": f"uid-{name}", "order": 1, "created": "2026-11-28T00:00:00.000000Z", "manifest": manifest, **changed}


NESTED = '{"a":' + "[" * 100_000
NO_JOB = {
    "empty": "",
    "torn": json.dumps(job("bad"))[:60],
    "{}": "{}",
    "nested": NESTED,
    "no manifest": json.dumps(job("bad", manifest=None)),
    "no metadata": json.dumps(job("bad", manifest={})),
    "no replicas": json.dumps(job("bad", manifest={**job("bad")["manifest"], "spec": {"pytorchReplicaSpecs": 5}})),
    "odd order": json.dumps(job("bad", order="x")),
}
NO_STATE = {
    "list": "[]",
    "nested": NESTED,
    "status": '{"status": []}',
    "conditions": '{"status": {"conditions": [5, {"type": "Running"}]}}',
    "pods": '{"pods": 5}',
    "pod": '{"pods": [5, {"metadata": 7}, {"metadata": {"name": "p"}, "status": {"conditions": "x"}}]}',
    "plan": '{"plan": {}}',
    "planned pods": '{"plan": {"pods": 7}}',
    "events": '{"events": {"a": 1}}',
    "plan of text": '{"plan": {"port": "x", "gpus": 5, "pods": ["bad-master-0"]}}',
    "ending": '{"ending": 5}',
    "grace": '{"plan": {"pods": ["bad-master-0"]}, "ending": {"why": "deleted", "grace": "x"}}',
    "lost": '{"lost": 5, "restarts": 5}',
}
ENDED = '{"state": {"terminated": {"exitCode": 0, "finishedAt": "2026-11-28T00:00:00Z"}}}'
NO_RECORD = {
    "torn": ENDED[:30],
    "{}": "{}",
    "text": '{"state": 5}',
    "no code": '{"state": {"terminated": {}}}',
    "odd code": '{"state": {"terminated": {"exitCode": "x"}}}',
    "no keeper": '{"state": {"running": {}}, "keeper": 5}',
}


def look(home: Path, bad: str, state: str | None = None) -> set[str]:
    """The names of the jobs that are found beside these files of a job."""
    for name, text in (("good", json.dumps(job("good"))), ("bad", bad)):
        folder = home / "jobs/default" / name
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(text)
    if state is not None:
        (home / "jobs/default/bad/state.json").write_text(state)
    cluster = LocalCluster(home)
    found = {one.job["metadata"]["name"] for one in cluster.jobs() if observe(one.job, one.pods, one.events)}
    waiting, working = cluster.queue()
    assert {item.name for item in [*waiting, *working]} == found
    return found


@pytest.mark.parametrize("name", NO_JOB)
def test_what_is_no_job_is_passed_over(tmp_path: Path, name: str) -> None:
    assert look(tmp_path, NO_JOB[name]) == {"good"}


@pytest.mark.parametrize("name", NO_STATE)
def test_a_state_that_is_none_reads_as_none(tmp_path: Path, name: str) -> None:
    assert look(tmp_path, json.dumps(job("bad")), NO_STATE[name]) == {"good", "bad"}


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"cpus": "x", "memory": 1, "gpus": 0}', '{"cpus": 1, "gpus": 0}'])
def test_a_supervisor_that_says_nothing_sound_offers_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "supervisor.json").write_text(text)
    assert read_offers(tmp_path / "supervisor.json") is None


def supervise(home: Path, **files: str) -> None:
    """Two rounds of the supervisor over a job that somebody holds back, beside one with these files."""
    beside = {"job": json.dumps(job("bad")), "record": ENDED, **files}
    for name, text in (("good", json.dumps(job("good"))), ("bad", beside["job"])):
        folder = home / "jobs/default" / name
        (folder / "pods/bad-master-0").mkdir(parents=True)
        (folder / "job.json").write_text(text)
        (folder / "queue.json").write_text(json.dumps({"uid": f"uid-{name}", "held": True, "priority": 0}))
    (home / "jobs/default/bad/state.json").write_text(beside.get("state", ""))
    (home / "jobs/default/bad/pods/bad-master-0/status.json").write_text(beside["record"])
    supervisor = Supervisor(home)
    try:
        for _ in range(2):
            supervisor.step()
    finally:
        os.close(supervisor._lock)
    assert HELD in (home / "jobs/default/good/state.json").read_text()


@pytest.mark.parametrize("name", NO_JOB)
def test_the_supervisor_goes_on_beside_what_is_no_job(tmp_path: Path, name: str) -> None:
    supervise(tmp_path, job=NO_JOB[name])


@pytest.mark.parametrize("name", NO_STATE)
def test_the_supervisor_goes_on_beside_a_state_that_is_none(tmp_path: Path, name: str) -> None:
    supervise(tmp_path, state=NO_STATE[name])


@pytest.mark.parametrize("name", NO_RECORD)
def test_the_supervisor_goes_on_beside_a_record_of_a_pod_that_is_none(tmp_path: Path, name: str) -> None:
    plan = (
        '{"plan": {"port": 1, "gpus": {}, "pods": ["bad-master-0"]}, "status": {"startTime": "2026-11-28T00:00:00Z"}}'
    )
    supervise(tmp_path, state=plan, record=NO_RECORD[name])
