"""The rights that the package ships: enough for all it does, nothing beyond, and polite where an extra is missing."""

from __future__ import annotations

import json
import time

import pytest
from kubeflow_training.jobs.errors import JobRefusedError
from kubeflow_training.jobs.kubernetes import KubernetesCluster
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.observation import Phase, observe

from tests.kubeflow_training.rights import PARTS, documents

pytestmark = pytest.mark.cluster

WHOLE = {"get", "list", "watch", "create", "delete"}
NEEDED: dict[str, dict[tuple[str, str], set[str]]] = {
    "": {("kubeflow.org", "pytorchjobs"): WHOLE, ("", "pods"): {"list", "watch"}, ("", "pods/log"): {"get"}},
    "train-job": {
        ("trainer.kubeflow.org", "trainjobs"): WHOLE,
        ("trainer.kubeflow.org", "trainingruntimes"): {"get"},
    },
    "spark": {("sparkoperator.k8s.io", "sparkapplications"): WHOLE},
    "indexed-job": {("batch", "jobs"): WHOLE, ("", "services"): {"get", "create", "patch", "delete"}},
    "short-grace": {("", "pods"): {"deletecollection"}},
    "events": {("", "events"): {"list", "create"}},
    "kueue": {
        ("kueue.x-k8s.io", "workloads"): {"list"},
        ("visibility.kueue.x-k8s.io", "localqueues/pendingworkloads"): {"get"},
    },
    "nodes": {("", "nodes"): {"get"}},
}
"""What the code asks of the cluster, file by file."""
OF_NO_NAMESPACE = {("", "nodes")}
EVERYBODYS = {"authorization.k8s.io", "authentication.k8s.io"}
"""API groups of rights that every account of a cluster has."""


def granted(rights) -> set[tuple[str, str, str]]:
    """All that the account may do in its namespace and not everybody may."""
    return {right for right in rights.granted() if right[0] not in EVERYBODYS}


def can_i(rights, group, resource, verb, namespace=None) -> bool:
    from kubernetes import client

    name, _, subresource = resource.partition("/")
    attributes = {
        "group": group,
        "resource": name,
        "subresource": subresource,
        "verb": verb,
        "namespace": namespace or rights.namespace,
    }
    review = client.AuthorizationV1Api(rights.client()).create_self_subject_access_review(
        {"spec": {"resourceAttributes": attributes}}
    )
    return bool(review.status.allowed)


def needed(*parts: str) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for part in ("", *parts)
        for (group, resource), verbs in NEEDED[part].items()
        for verb in verbs
    }


@pytest.mark.parametrize("parts", [(), PARTS])
def test_what_is_granted_is_what_is_needed_and_nothing_beyond(fewer_rights, parts):
    rights = fewer_rights(*parts)
    assert granted(rights) == needed(*parts)
    for group, resource, verb in needed(*parts):
        assert can_i(rights, group, resource, verb), (group, resource, verb)
        if (group, resource) not in OF_NO_NAMESPACE:
            assert not can_i(rights, group, resource, verb, "default"), "another namespace"
    for group, resource, verb in [
        ("", "secrets", "get"),
        ("", "secrets", "list"),
        ("", "pods", "create"),
        ("", "pods", "delete"),
        ("", "pods/exec", "create"),
        ("", "serviceaccounts/token", "create"),
        ("kubeflow.org", "pytorchjobs", "patch"),
        ("kubeflow.org", "pytorchjobs", "deletecollection"),
        ("rbac.authorization.k8s.io", "roles", "create"),
        ("", "namespaces", "list"),
        ("", "nodes", "list"),
        ("", "nodes", "patch"),
    ]:
        assert not can_i(rights, group, resource, verb), (group, resource, verb)


def test_no_rule_has_a_star():
    # The cluster is not needed for this one, but a star would make all the others say little.
    rules = [rule for item in documents("n", *PARTS) if item["kind"].endswith("Role") for rule in item["rules"]]
    assert rules
    assert "*" not in json.dumps(rules)


def submit(rights, script, **more):
    name = f"job-{time.time_ns():x}"
    manifest = pytorch_job(
        name=name,
        namespace=rights.namespace,
        image="test.local/shell:1",
        command=["/bin/sh", "-c", script],
        **({"cpus": 0.05, "memory_gb": 0.05, "grace_seconds": 1} | more),
    )
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        replica["template"]["spec"]["containers"][0]["imagePullPolicy"] = "IfNotPresent"
    return name, manifest


def until(what, seconds=60):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return found


def test_the_required_rights_run_a_job_from_its_beginning_to_its_end(fewer_rights):
    rights = fewer_rights()
    cluster = KubernetesCluster(rights.client())
    name, manifest = submit(rights, "echo hello; sleep 600")
    cluster.create(manifest)

    def running():
        seen = cluster.read(name, rights.namespace)
        return seen if observe(seen.job, seen.pods, seen.events).phase is Phase.RUNNING else None

    seen = until(running)
    assert until(lambda: cluster.logs(seen.pods[0]).lines) == ["hello"]
    assert cluster.tail(seen.pods[0]) == ["hello"]
    assert [item.uid for item in cluster.jobs(rights.namespace)] == [seen.uid]
    assert cluster.delete(name, rights.namespace, uid=seen.uid)
    until(lambda: cluster.read(name, rights.namespace) is None)


def test_without_the_right_to_events_a_job_that_waits_is_still_seen(fewer_rights):
    rights = fewer_rights("events")
    cluster = KubernetesCluster(rights.client())
    name, manifest = submit(rights, "true", cpus=500)
    cluster.create(manifest)
    try:
        until(lambda: cluster.read(name, rights.namespace).events)
        rights.take_away("events")
        until(lambda: not can_i(rights, "", "events", "list"))
        # The scheduler's words stand on the pod, too; only the events are gone.
        snapshot = cluster.read(name, rights.namespace)
        assert list(snapshot.events) == []
        seen = until(
            lambda: (
                found
                if "nsufficient cpu" in (found := observe(*_parts(cluster.read(name, rights.namespace)))).message
                else None
            )
        )
        assert seen.phase is Phase.QUEUED
    finally:
        cluster.delete(name, rights.namespace)


def _parts(snapshot):
    return snapshot.job, snapshot.pods, snapshot.events


def test_a_required_right_that_is_missing_is_named(fewer_rights):
    rights = fewer_rights()
    cluster = KubernetesCluster(rights.client())
    with pytest.raises(JobRefusedError, match=r"cannot list resource \"pytorchjobs\" .* at the cluster scope"):
        cluster.jobs()
    with pytest.raises(JobRefusedError, match=r"cannot list resource \"pytorchjobs\" .* in the namespace \"default\""):
        cluster.jobs("default")
