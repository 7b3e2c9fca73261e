"""The tab of a job that waits on a real cluster: in a queue of Kueue, held back there, and for a node."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dropforge_airflow.assets import FINETUNE_DAG
from kubeflow_training.jobs.kubernetes.standing import Standings
from kubeflow_training.jobs.manifest.ownership import Owner

from tests.dropforge_airflow.pages.conftest import Server
from tests.e2e.harness import wait
from tests.kubeflow_training.kueue_situations import GANG, QUEUE, queue
from tests.kubeflow_training.rights import Rights, admin
from tests.kubeflow_training.situations import PRETEND, SLEEP, Job, Stage

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path(os.environ.get("KUBECONFIG", "/none")).is_file(), reason="KUBECONFIG names no cluster"),
]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A namespace that Airflow's connection may see, and a queue with room for one gang."""
    rights = Rights(tmp_path, "events", "kueue", "short-grace")
    connection = {"conn_type": "kubernetes", "extra": {"kube_config_path": str(rights.kubeconfig)}}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps(connection))
    found = Stage(admin(), rights.namespace, rights.client())
    queue(found)
    yield found
    found.close()
    rights.close()


def submitted(server: Server, stage: Stage, **job: Any) -> tuple[str, Job]:
    """A run whose training is this job."""
    run = f"manual__{uuid.uuid4().hex}"
    owner = Owner(FINETUNE_DAG, run, "train")
    made = stage.submit(SLEEP, labels=owner.labels("0.0", 1), annotations=owner.annotations("0.0", 1), **job)
    where = {"name": made.name, "namespace": stage.namespace, "uid": made.created.uid, "gang": 1}
    server.run(run, job={**where, "kind": "PyTorchJob", "backend": "kubernetes"})
    return run, made


def test_why_a_job_waits(server: Server, stage: Stage) -> None:
    def shown(run: str) -> dict[str, Any]:
        found: dict[str, Any] = server.tab(run).json()["job"]
        return found

    first, made = submitted(server, stage, **GANG)
    made.running()
    page = server.tab(first).json()
    assert (page["job"]["phase"], page["job"]["pods_running"]) == ("running", 2)
    # Nobody answers for the logs of a pretend node, as for those of a node that is lost: the job is shown all the same.
    assert [part["what"] for part in page["unseen"] if part["what"].startswith("the log of ")]

    second, made = submitted(server, stage, **GANG)
    job = wait("its place", lambda: (job := shown(second))["position"] and job["reason"] and job, 60)
    assert (job["phase"], job["reason"], job["queue"], job["position"]) == ("queued", "quota", QUEUE, 1)
    assert job["message"].startswith("waits at position 1 of queue training: couldn't assign flavors")
    assert job["mend"]
    Standings(admin()).stand(made.created.job, held=True)
    job = wait("that it is held back", lambda: (job := shown(second))["position"] is None and job, 60)
    assert (job["phase"], job["reason"], job["mend"]) == ("queued", None, "")
    assert job["message"].startswith("held back from queue training: a user has set it inactive")
    assert shown(first)["phase"] == "running"

    third, _ = submitted(server, stage, nodes=2, gpus=100, **PRETEND)
    # One pod may be refused before the other is made.
    pods = "that no node is large enough for either pod"
    job = wait(pods, lambda: (job := shown(third))["reason"] and len(job["replicas"]) == 2 and job, 60)
    assert (job["phase"], job["reason"], job["queue"]) == ("queued", "unschedulable", None)
    assert "nsufficient nvidia.com/gpu" in job["message"]
    assert (job["pods_running"], job["pods_wanted"]) == (0, 2)
    assert [replica["phase"] for replica in job["replicas"]] == ["Pending", "Pending"]
