"""Rank 0's last words, wherever rank 0 is."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from kubeflow_training.gangs.outcome import failure_text, last_words, result
from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.observation import Observation, Phase, Reason, observe
from kubeflow_training.jobs.shapes import moment
from kubeflow_training.jobs.waiting.joblog import JobLog


def words(*told: Any) -> Any:
    """The last words of a gang of workers whose pods left these messages."""
    pods = [
        {
            "metadata": {
                "name": f"job-worker-{index}",
                "labels": {
                    "training.kubeflow.org/replica-type": "worker",
                    "training.kubeflow.org/replica-index": str(index),
                },
            },
            "spec": {"containers": [{"name": "pytorch"}]},
            "status": {"containerStatuses": [{"name": "pytorch", "state": {"terminated": {"message": message}}}]},
        }
        for index, message in enumerate(told)
    ]
    return last_words(Snapshot({"kind": "PyTorchJob", "spec": {"pytorchReplicaSpecs": {"Worker": {}}}}, pods))


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (["done", ""], "done"),
        (['{"model": "m"}', '{"rank": 0}'], {"model": "m"}),
        (["", '{"rank": 0, "model": "m"}'], {"rank": 0, "model": "m"}),  # an elastic gang whose rank 0 came second
        (['{"rank": 1}', '{"rank": 0}'], {"rank": 0}),
        (['{"rank": 1}', '{"rank": 2}'], {"rank": 1}),
        (["", '{"rank": false}'], None),
        ([None, ""], None),
        (["[1]", json.dumps("x" * 9000)], [1]),
    ],
)
def test_rank_0_is_found_by_its_own_word_or_its_place(told, found):
    assert words(*told) == found


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ('{"a": 1e999, "b": NaN}', {"a": "inf", "b": "NaN"}),
        ('{"\\u0000": ["\\u0000", "\\ud800"]}', {"\ufffd": ["\ufffd", "?"]}),
        ("a\0b", "a\ufffdb"),
        ("a\ud800b", "a?b"),
        ("[" * 99 + "]" * 99, "[" * 99 + "]" * 99),
    ],
)
def test_what_no_database_takes_is_not_told(told, found):
    assert words(told) == found


def test_an_observation_and_a_log_bring_nothing_that_no_database_takes():
    seen = Observation(Phase.FAILED, Reason.USER_ERROR, "rank 0 failed: a\0b\ud800", queue="q\0")
    assert (seen.to_dict()["message"], seen.to_dict()["queue"]) == ("rank 0 failed: a\ufffdb?", "q\ufffd")
    assert "a\ufffdb?" in failure_text("job", 1, seen, ["c\0"])
    assert failure_text("job", 1, seen, ["c\0"]).endswith("c\ufffd")
    log = JobLog(lambda line: None)
    asyncio.run(log.add("pod", "master-0", ["a\0b", "c\ud800"], lambda _: {}))
    asyncio.run(log.add("pod", "master-0", ['@progress {"step": 1, "\\u0000": 2}'], lambda _: {}))
    log.gap("master-0", None, None, "it said \0")
    assert log.tails()["master-0"][:2] == ["a\ufffdb", "c?"]
    assert log.state()["gaps"][0]["why"] == "it said \ufffd"
    assert log.state()["progress"] == {"step": 1, "steps": None}


def test_the_time_with_a_node_and_without_a_container_is_told_as_the_pull():
    started, placed = datetime(2026, 1, 1, 10, 1, 40, tzinfo=UTC), datetime(2026, 1, 1, 10, 1, 0, tzinfo=UTC)
    seen = Observation(Phase.SUCCEEDED, started=started, placed=placed)
    created = datetime(2026, 1, 1, 10, 0, 0, tzinfo=UTC).timestamp()
    assert result(seen, {"created": created})["durations"] == {"queued": 100.0, "pulled": 40.0, "running": None}
    assert Observation.from_dict(seen.to_dict()) == seen
    assert result(replace(seen, placed=None), {})["durations"] == {"queued": None, "pulled": None, "running": None}


def test_the_pull_is_that_of_the_container_that_started_first():
    def pod(index: int, placed: str, started: str) -> dict[str, Any]:
        return {
            "metadata": {"name": f"job-worker-{index}"},
            "spec": {"containers": [{"name": "pytorch"}], "nodeName": "n"},
            "status": {
                "phase": "Running",
                "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": placed}],
                "containerStatuses": [{"name": "pytorch", "state": {"running": {"startedAt": started}}}],
            },
        }

    job = {"kind": "PyTorchJob", "spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 2}}}}
    seen = observe(
        job,
        [
            pod(0, "2026-01-01T10:00:30Z", "2026-01-01T10:02:00Z"),
            pod(1, "2026-01-01T10:00:10Z", "2026-01-01T10:01:00Z"),
        ],
        [],
    )
    assert (seen.placed, seen.started) == (moment("2026-01-01T10:00:10Z"), moment("2026-01-01T10:01:00Z"))
