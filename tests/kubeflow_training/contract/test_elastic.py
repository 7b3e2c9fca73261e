"""Elastic gangs with real torchrun agents: three ranks lose one, go on with two, and are three again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from kubeflow_training.jobs.elastic import elastic
from kubeflow_training.jobs.observation import Phase, Reason

SCRIPT = Path(__file__).with_name("elastic_training.py")
# A pod that is held back waits before its agent starts, so that the gang without it can be seen.
COMMAND = 'while [ -e "$FOLDER/hold" ]; do sleep 0.1; done; exec "$PYTHON" -m torch.distributed.run "$SCRIPT" "$FOLDER"'
FAST = {"last_call_timeout": "1", "keep_alive_interval": "1", "keep_alive_max_attempt": "3"}


@pytest.fixture
def folder(tmp_path):
    """Seen by all pods, on both places."""
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    return tmp_path


def submit(place, folder, nodes=3, least=2, **more):
    env = {"FOLDER": str(folder), "PYTHON": sys.executable, "SCRIPT": str(SCRIPT), "OMP_NUM_THREADS": "1"}
    env |= {"TORCHELASTIC_ENABLE_FILE_TIMER": "0"} | more.pop("env", {})
    manifest = place.manifest(COMMAND, nodes=nodes, memory_gb=1, env=env, grace_seconds=3, **more)
    manifest = place.with_python(elastic(manifest, min_nodes=least, rendezvous=FAST), folder, SCRIPT.parent)
    return place.create(manifest)


def saved(folder):
    """Step and world of the checkpoint."""
    try:
        found = json.loads((folder / "state.json").read_text())
    except (FileNotFoundError, ValueError):
        return 0, 0
    return found["step"], found["world"]


def trains_with(place, folder, world, seconds=90):
    """The step at which the gang trains with that many ranks, a few steps after it began to."""
    first = place.until(lambda: found[0] if (found := saved(folder))[1] == world else None, seconds)
    return place.until(lambda: found[0] if (found := saved(folder))[0] >= first + 3 and found[1] == world else None)


@pytest.mark.dist
def test_a_gang_loses_a_rank_goes_on_regrows_and_survives_the_loss_of_its_meeting_place(place, folder):
    job = submit(place, folder, nodes=3, least=2)
    before = trains_with(place, folder, 3)
    assert job.observe().phase is Phase.RUNNING
    (folder / "hold").touch()
    place.lose(job, 2)
    during = trains_with(place, folder, 2)
    assert during > before
    assert not job.observe().ended
    (folder / "hold").unlink()
    after = trains_with(place, folder, 3)
    assert after > during
    # With the first pod goes the host of the meeting: all start again, at the price of the step that was not saved.
    place.lose(job, 0)
    place.until(lambda: saved(folder)[0] > after + 30, 120)
    assert not job.observe().ended
    (folder / "finish").touch()
    seen = job.wait(Phase.SUCCEEDED)
    assert (seen.reason, seen.message) == (None, "The job is done")
    assert saved(folder)[0] > after + 30


def test_a_workers_end_is_no_success_without_the_report_of_rank_0(place):
    job = place.create(elastic(place.manifest("true", nodes=2), min_nodes=1))
    seen = job.ended()
    assert (seen.phase, seen.reason, seen.retryable) == (Phase.FAILED, Reason.UNKNOWN, True)
    assert "rank 0 has not reported" in seen.message
    conditions = {item["type"]: item["status"] for item in job.read().job["status"]["conditions"]}
    assert conditions["Succeeded"] == "True"


def test_rank_0_may_report_after_another_worker_has_ended(place):
    script = (
        'case "${POD_NAME:-$HOSTNAME}" in *-worker-1) sleep 8; '
        'echo \'{"exit_code": 0, "rank": 0}\' > ${TERMINATION_LOG:-/dev/termination-log};; *) sleep 4;; esac'
    )
    job = place.create(elastic(place.manifest(script, nodes=2, grace_seconds=10), min_nodes=1))
    place.until(lambda: job.read().job.get("status", {}).get("conditions"))
    assert job.ended().phase is Phase.SUCCEEDED


def test_restarts_are_counted_and_end(place):
    job = place.create(elastic(place.manifest("exit 1", nodes=2), min_nodes=1, restarts=2))
    seen = job.wait(Phase.FAILED, seconds=120)
    assert seen.phase is Phase.FAILED


def test_the_environment_of_an_elastic_gang(place):
    script = "env | grep -E '^(PET_|RANK|WORLD_SIZE|MASTER_)' | sort; sleep 1"
    manifest = elastic(place.manifest(script, nodes=3, processes_per_node=2), min_nodes=2, group_restarts=7)
    job = place.create(manifest)
    place.until(lambda: all(pod["status"]["phase"] == "Succeeded" for pod in job.pods()) and len(job.pods()) == 3)
    values = dict(line.split("=", 1) for line in job.log(1))
    assert values.get("PET_NNODES") == "2:3", (values, job.pods())
    assert values["PET_NPROC_PER_NODE"] == "2"
    assert values["PET_RDZV_BACKEND"] == "c10d"
    assert values["PET_MAX_RESTARTS"] == "7"
    assert "join_timeout=1200" in values["PET_RDZV_CONF"].split(",")
    assert values["PET_RDZV_ENDPOINT"] == dict(line.split("=", 1) for line in job.log(2))["PET_RDZV_ENDPOINT"]
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(values)
