"""The pods and the moments of recorded jobs, as a page shows them; and that no shape of JSON makes them raise."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubeflow_training.jobs.observation import observe
from kubeflow_training.jobs.observation.replicas import moments, replicas

from tests.kubeflow_training.record import FOLDER
from tests.kubeflow_training.test_observation import ended, job, pod, running

RECORDED = sorted(path.stem for path in FOLDER.glob("*.json"))
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["metadata", "status", "spec", "conditions", "containerStatuses", "state", "terminated", "name"])
SHAPES = st.dictionaries(KEYS, ANY | st.dictionaries(KEYS, ANY, max_size=3), max_size=4)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_jobs(name: str) -> None:
    data = json.loads((FOLDER / f"{name}.json").read_text())
    shown, told = replicas(data["job"], data["pods"]), moments(data["job"], data["events"])
    assert len(shown) == len(data["pods"])
    found = observe(data["job"], data["pods"], data["events"])
    if found.pod is not None and found.exit_code is not None:
        (first,) = [item for item in shown if item.pod == found.pod]
        assert (first.replica, first.exit_code, first.node) == (found.replica, found.exit_code, found.node)
    times = [item.when for item in told if item.when]
    assert all(one <= two for one, two in pairwise(times))
    assert len(told) >= len(((data["job"] or {}).get("status") or {}).get("conditions") or [])


def test_a_gang_by_rank() -> None:
    message = json.dumps({"exit_code": 12, "message": "the loss is not finite", "rank": 1})
    gang = [ended(2, 143), running(0), ended(1, 1, at=3, message=message), pod(3, "Pending", node=None)]
    shown = replicas(job("Running", workers=3), gang)
    assert [item.replica for item in shown] == ["master-0", "worker-0", "worker-1", "worker-2"]
    assert [item.phase for item in shown] == ["Running", "Failed", "Failed", "Pending"]
    assert [item.exit_code for item in shown] == [None, 12, 143, None]
    assert shown[1].message == "the loss is not finite"
    assert shown[3].node is None


@given(SHAPES, st.lists(SHAPES, max_size=3), st.lists(SHAPES, max_size=3))
@settings(max_examples=200)
def test_nothing_raises(job: Any, pods: Any, events: Any) -> None:
    replicas(job, pods)
    moments(job, events)
