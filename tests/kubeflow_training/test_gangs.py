"""Whether a job that counts as failed is over: one that lives on would hold its nodes."""

from __future__ import annotations

import pytest
from kubeflow_training.gangs import attach as gangs
from kubeflow_training.gangs.attach import ends_by_itself
from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.observation import Phase, observe

from tests.kubeflow_training.test_observation import ended, job, pod, running


class Backend:
    """Tells of a job as it is at each look; None for one that is gone."""

    def __init__(self, *looks):
        self.looks = list(looks)

    def read(self, name, namespace):
        assert (name, namespace) == ("job", "ns")
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


def snapshot(*conditions, pods=(), policy="Never", **metadata):
    found = job(*conditions, workers=1, policy=policy)
    found["metadata"] |= {"namespace": "ns", **metadata}
    return Snapshot(found, list(pods), [])


NO_IMAGE = pod(1, "Pending", {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
BROKEN = [running(0), ended(1, 1)]


@pytest.mark.parametrize(
    ("looks", "over"),
    [
        ([snapshot("Failed", pods=BROKEN)], True),
        ([snapshot(pods=[running(0), NO_IMAGE])], False),
        ([snapshot(pods=[NO_IMAGE])], False),
        # The controller tells of the end a moment after the pod's, or never.
        ([snapshot(pods=BROKEN), snapshot(pods=BROKEN), snapshot("Failed", pods=BROKEN)], True),
        ([snapshot(pods=BROKEN)], False),
        ([snapshot(pods=BROKEN), None], True),
        ([snapshot(pods=BROKEN), snapshot(pods=BROKEN, uid="another")], True),
        ([snapshot(pods=[NO_IMAGE], deletionTimestamp="2026-01-01T00:00:00Z")], True),
        # The cluster would start the pod again.
        ([snapshot(pods=BROKEN, policy="OnFailure")], False),
    ],
)
def test_whether_a_failed_job_is_over_or_lives_on(monkeypatch, looks, over):
    monkeypatch.setattr(gangs, "_NAP", 0.01)
    monkeypatch.setattr(gangs, "_OWN_END", 0.1)
    assert ends_by_itself(Backend(*looks[1:] or looks), looks[0]) is over


def test_the_image_counts_as_failed_although_the_job_lives():
    found = snapshot(pods=[running(0), NO_IMAGE])
    assert observe(found.job, found.pods).phase is Phase.FAILED
