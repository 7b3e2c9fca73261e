"""The Kubernetes backend without a cluster. What it promises on one is in `contract/`."""

from __future__ import annotations

import pytest
from kubeflow_training.jobs.errors import BackendUnavailableError
from kubeflow_training.jobs.kubernetes import KubernetesCluster
from kubeflow_training.jobs.kubernetes.cursor import nanoseconds


def test_an_unreachable_cluster_says_nothing_about_the_job():
    from kubernetes import client

    configuration = client.Configuration(host="http://127.0.0.1:9")
    configuration.retries = False
    cluster = KubernetesCluster(client.ApiClient(configuration))
    with pytest.raises(BackendUnavailableError):
        cluster.read("job", "default")


def test_time_stamps_with_every_number_of_digits():
    base = 1767225600 * 10**9
    assert nanoseconds("2026-01-01T00:00:00Z") == base
    assert nanoseconds("2026-01-01T00:00:00.123456789Z") == base + 123456789
    assert nanoseconds("2026-01-01T02:00:00.5+02:00") == base + 500_000_000
    assert nanoseconds("not a stamp") is None
    assert nanoseconds("2026-13-01T00:00:00Z") is None
