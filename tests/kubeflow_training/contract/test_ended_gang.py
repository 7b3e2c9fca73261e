"""What a gang was given, and what is left of it: environment, logs, exit codes, termination message, names."""

from __future__ import annotations

import json
import uuid

import pytest
from kubeflow_training.jobs.errors import JobExistsError
from kubeflow_training.jobs.observation import Phase

from tests.kubeflow_training.meeting import MEET

LINES = 700
SCRIPT = f"""
{MEET}
echo "$RANK $WORLD_SIZE $PET_NNODES $PET_NPROC_PER_NODE $PET_NODE_RANK $OWN $PYTHONUNBUFFERED"
echo "$MASTER_ADDR:$MASTER_PORT $PET_MASTER_ADDR:$PET_MASTER_PORT"
echo "to stderr" >&2
i=0; while [ $i -lt {LINES} ]; do echo "$RANK line $i äöü"; i=$((i+1)); done
printf '%s' "bye from $RANK" > "${{TERMINATION_LOG:-/dev/termination-log}}"
sleep 1  # what comes from the other stream after the last line would be glued to it by the node
printf 'no end of line'
"""


@pytest.fixture(scope="module")
def gang(shared_place):
    """A gang of two pods that has succeeded, both of them: the master's success ends the workers otherwise."""
    env = {"OWN": "x", "PET_NNODES": "77"}
    job = shared_place.submit(SCRIPT, nodes=2, processes_per_node=2, env=env, clean_pod_policy="None")
    shared_place.until(lambda: len(job.pods()) == 2 and job.terminated(0) and job.terminated(1))
    job.seen = job.ended()
    yield job
    job.delete(grace_seconds=0)


def said(gang, rank: int) -> list[str]:
    """The pod's standard output; where its standard error comes in between is the container runtime's affair."""
    return [line for line in gang.log(rank) if line != "to stderr"]


def lines_of(rank: int) -> list[str]:
    body = [f"{rank} line {n} äöü" for n in range(LINES)]
    return [*body, "no end of line"]


def test_it_succeeds_and_says_when(gang):
    seen = gang.seen
    assert (seen.phase, seen.reason, seen.pods_wanted) == (Phase.SUCCEEDED, None, 2)
    assert seen.seconds is not None
    assert 0 <= seen.seconds < 150
    conditions = {item["type"]: item["status"] for item in gang.read().job["status"]["conditions"]}
    assert conditions["Succeeded"] == conditions["Created"] == "True"


def test_every_pod_has_the_training_operators_environment(gang):
    for rank in (0, 1):
        values, meeting = said(gang, rank)[:2]
        assert values == f"{rank} 4 2 2 {rank} x 1"
        ours, torchruns = meeting.split()
        assert ours == torchruns
        assert ours == said(gang, 0)[1].split()[0]
        assert int(ours.rpartition(":")[2]) > 0


def test_pods_are_known_by_their_labels_and_end_with_code_and_message(gang):
    for index, kind in enumerate(("master", "worker")):
        metadata = gang.pods()[index]["metadata"]
        assert metadata["name"] == f"{gang.name}-{kind}-0"
        assert metadata["labels"]["training.kubeflow.org/replica-type"] == kind
        assert metadata["labels"]["training.kubeflow.org/replica-index"] == "0"
        terminated = gang.terminated(index)
        assert (terminated["exitCode"], terminated["message"]) == (0, f"bye from {index}")
        assert terminated["startedAt"] <= terminated["finishedAt"]


@pytest.mark.parametrize("limit", [90, 100_000])
def test_logs_are_whole_in_any_portion_and_for_any_reader(gang, limit):
    for rank in (0, 1):
        pod, lines, position = gang.pods()[rank], [], None
        while True:
            # A new client each time: only the position survives, as over a restart of the triggerer.
            chunk = gang.place.connect().logs(pod, position, limit)
            assert len(chunk.lines) <= limit
            if not chunk.lines:
                break
            lines += chunk.lines
            position = json.loads(json.dumps(chunk.position))
        assert "to stderr" in lines
        assert [line for line in lines if line != "to stderr"][2:] == lines_of(rank)


def test_a_position_of_another_pod_means_the_beginning(gang):
    first, second = gang.pods()
    position = gang.backend.logs(first, None, 50).position
    assert gang.backend.logs(second, position).lines == gang.log(1)


def test_the_tail_is_the_end_of_the_log(gang):
    assert len(gang.backend.tail(gang.pods()[1], 3)) == 3
    # One line more than is compared: the one of the other stream may be anywhere among them.
    tail = gang.backend.tail(gang.pods()[1], 4)
    assert [line for line in tail if line != "to stderr"][-3:] == lines_of(1)[-3:]


def test_it_is_listed_in_its_namespace_alone(gang):
    assert gang.uid in {snapshot.uid for snapshot in gang.backend.jobs(gang.namespace)}
    backend = gang.place.everywhere()
    assert gang.uid in {snapshot.uid for snapshot in backend.jobs()}
    assert gang.uid not in {snapshot.uid for snapshot in backend.jobs("default")}
    assert backend.read(gang.name, "default") is None


def test_its_name_is_taken_once(gang):
    with pytest.raises(JobExistsError, match=gang.name):
        gang.backend.create(gang.manifest)
    assert gang.read().uid == gang.uid == gang.created.uid


def test_only_the_job_that_is_meant_is_deleted(gang):
    assert gang.delete(uid=str(uuid.uuid4())) is False
    assert gang.backend.delete("no-such-job", gang.namespace) is False
    assert gang.backend.delete("no-such-job", gang.namespace, uid=gang.uid, grace_seconds=0) is False
    assert gang.read().uid == gang.uid
    assert gang.backend.read("no-such-job", gang.namespace) is None
