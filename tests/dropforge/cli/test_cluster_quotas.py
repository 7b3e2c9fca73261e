"""Quotas that a whole job can never have, or does not have now, are told from those that have room for it."""

from __future__ import annotations

from typing import Any

import pytest

from dropforge.cli.cluster_quotas import queue_finding, quota_findings
from dropforge.stack.doctor import Level

AMOUNTS = {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "8"}
POD: dict[str, Any] = {
    "containers": [{"resources": {"requests": AMOUNTS, "limits": {"memory": "16Gi", "nvidia.com/gpu": "8"}}}]
}


def quota(hard: dict[str, str], used: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "team"}, "spec": {"hard": hard, **spec}, "status": {"hard": hard, "used": used or {}}}


@pytest.mark.parametrize(
    ("hard", "used", "level", "words"),
    [
        ({"requests.nvidia.com/gpu": "16", "pods": "2", "memory": "32Gi", "cpu": "8000m"}, {}, None, ""),
        ({"requests.nvidia.com/gpu": "8"}, {}, Level.FAIL, "2 pods need 16 of requests.nvidia.com/gpu"),
        ({"limits.memory": "31Gi"}, {}, Level.FAIL, "need 32Gi of limits.memory, and ResourceQuota team has 31Gi"),
        ({"memory": "40Gi"}, {"memory": "16Gi"}, Level.WARN, "ResourceQuota team has 24Gi of 40Gi left"),
        ({"cpu": "8"}, {"cpu": "500m"}, Level.WARN, "has 7.5 of 8 left"),
        ({"count/pods": "1"}, {}, Level.FAIL, "need 2 of count/pods"),
        ({"requests.storage": "1Gi", "services": "0"}, {}, None, ""),
    ],
)
def test_a_namespaces_quota_is_held_against_the_whole_job(
    hard: dict[str, str], used: dict[str, str], level: Level | None, words: str
) -> None:
    found = quota_findings([quota(hard, used)], POD, 2)
    assert [one.level for one in found] == ([level] if level else [])
    assert all(words in one.found and one.mend for one in found)


def test_quotas_of_other_pods_are_left_out() -> None:
    scoped = quota({"pods": "0"}, scopes=["BestEffort"])
    classes = quota({"pods": "0"}, scopeSelector={"matchExpressions": [{"scopeName": "PriorityClass"}]})
    assert quota_findings([scoped, classes], POD, 2) == []


def cluster_queue(*flavors: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """:param flavors: the quota of GPUs of each."""
    groups = [{"flavors": [{"resources": [{"name": "nvidia.com/gpu", **flavor}]} for flavor in flavors]}]
    return {"metadata": {"name": "gpus"}, "spec": {"resourceGroups": groups, **spec}}


@pytest.mark.parametrize(
    ("queue", "words"),
    [
        (cluster_queue({"nominalQuota": 16}), ""),
        (cluster_queue({"nominalQuota": 8}, {"nominalQuota": "8"}), "need 16 of nvidia.com/gpu, and no flavor"),
        (cluster_queue({"nominalQuota": 8, "borrowingLimit": 8}, cohortName="all"), ""),
        (
            cluster_queue({"nominalQuota": 8, "borrowingLimit": 4}, cohortName="all"),
            "gpus has more than 12",
        ),
        (cluster_queue({"nominalQuota": 0}, cohortName="all"), ""),
        (cluster_queue({"nominalQuota": 0}), "has more than 0"),
    ],
)
def test_a_queue_that_can_never_admit_a_job_is_told(queue: dict[str, Any], words: str) -> None:
    found = queue_finding(queue, POD, 2)
    assert bool(found) == bool(words)
    assert found is None or (words in found.found and found.level is Level.FAIL)
