"""`dropforge doctor --cluster` on a real one: what is missing is told with its mend, and what is there is not."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from dropforge.install.rights import ENFORCED
from dropforge.job import SECRET
from tests.cluster.conftest import REPOSITORY, Namespace
from tests.cluster.queue_yard import queues

pytestmark = pytest.mark.cluster

DROPFORGE = str(Path(sys.executable).parent / "dropforge")


def doctor(folder: Path, kubeconfig: str, *words: str, **compute: Any) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and by check its level with the rest of its line."""
    values = {"backend": "kubernetes", "image": "test.local/shell:1", "cpus": 0.5, "memory_gb": 1, **compute}
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"extends": "tiny", "compute": values}))
    env = {**os.environ, "KUBECONFIG": kubeconfig, "COLUMNS": "700"}
    done = subprocess.run(
        [DROPFORGE, "doctor", "--cluster", "--recipe", str(recipe), *words],
        cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    found = {}
    for line in done.stdout.splitlines()[1:]:
        check, _, rest = line.strip().partition("  ")
        level, _, text = rest.strip().partition(" ")
        before = found.get(check, ("", ""))
        found[check] = (f"{before[0]} {level}".strip(), f"{before[1]}\n{text.strip()}".strip())
    return done.returncode, found


def test_what_is_missing_is_named_and_nothing_is_left_behind(namespace: Namespace, tmp_path: Path) -> None:
    administrator = os.environ["KUBECONFIG"]
    asked: dict[str, Any] = {"namespace": namespace.name, "queue": "nobody-s", "priority": "none-such"}
    asked["volumes"] = [{"claim": "machine", "path": "/m"}, {"claim": "lost", "path": "/l"}]
    code, found = doctor(tmp_path, administrator, **asked, nodes=2, processes_per_node=1)
    assert code == 1
    assert {check: level for check, (level, _) in found.items()} == {
        "cluster": "ok", "kind of job": "ok", "namespace": "ok", "localqueues": "ok", "rights": "ok", "job": "ok",
        "pod": "ok", "secret": found["secret"][0], "claim machine": "ok", "claim lost": "fail", "queue": "fail",
        "priority": "fail", "nodes": found["nodes"][0], "clock": "ok",
    }  # fmt: skip
    assert "enforces baseline" in found["namespace"][1]
    assert "there is no nobody-s" in found["queue"][1]
    assert namespace.jobs() == []
    code, found = doctor(tmp_path, administrator, namespace=namespace.name, cpus=4000)
    assert code == 1
    assert found["nodes"][0] == "fail"
    assert "and the pod asks for 4000" in found["nodes"][1]
    code, found = doctor(tmp_path, administrator, namespace="there-is-none")
    assert (code, found["namespace"][0]) == (1, "fail")
    assert "kubectl create namespace there-is-none" in found["namespace"][1]


def test_a_namespace_that_refuses_the_pods_says_so(namespace: Namespace, tmp_path: Path) -> None:
    administrator = os.environ["KUBECONFIG"]
    namespace.core.patch_namespace(namespace.name, {"metadata": {"labels": {ENFORCED: "restricted"}}})
    try:
        _, found = doctor(tmp_path, administrator, namespace=namespace.name, run_as=None)
        assert found["pod"][0] == "fail"
        assert "violates PodSecurity" in found["pod"][1]
        _, found = doctor(tmp_path, administrator, namespace=namespace.name, nodes=2, processes_per_node=1)
        assert found["pod"][0] == "ok"
        assert found["namespace"][0] == "warn"
    finally:
        namespace.core.patch_namespace(namespace.name, {"metadata": {"labels": {ENFORCED: "baseline"}}})


def test_quotas_that_one_pod_keeps_and_the_gang_does_not_are_told(namespace: Namespace, tmp_path: Path) -> None:
    gang: dict[str, Any] = {"namespace": namespace.name, "nodes": 2, "processes_per_node": 1, "queue": "training"}
    namespace.core.create_namespaced_resource_quota(
        namespace.name, {"metadata": {"name": "small"}, "spec": {"hard": {"requests.memory": "1500M"}}}
    )
    mark = namespace.name[-8:]
    amounts = {"cpus": 8, "memory_gb": 1.5}
    teams = {
        "flavors": {f"nodes-{mark}": {}},
        "teams": {
            namespace.name: {"queue": "training", "quota": {f"nodes-{mark}": amounts}, "namespace": namespace.name}
        },
    }
    try:
        with queues(teams):
            code, found = doctor(tmp_path, os.environ["KUBECONFIG"], **gang)
    finally:
        namespace.core.delete_namespaced_resource_quota("small", namespace.name)
    assert (code, found["pod"][0], found["quota"][0], found["queue quota"][0]) == (1, "ok", "fail", "fail")
    assert "the job's 2 pods need 2G of requests.memory" in found["quota"][1]
    assert "need 2G of memory, and no flavor of ClusterQueue" in found["queue quota"][1]


def test_the_account_of_the_tasks_is_told_what_it_may_not_look_at(namespace: Namespace, tmp_path: Path) -> None:
    code, found = doctor(tmp_path, str(namespace.kubeconfig), namespace=namespace.name)
    assert code == 0
    assert (found["job"][0], found["kind of job"][0]) == ("ok", "ok")
    for check in ("namespace", "pod", "secret", "nodes"):
        assert found[check][0] == "warn"
        assert "this account may not" in found[check][1]
    assert "it is not shown why pods wait" in found["rights"][1]  # it has rbac.yaml alone


def test_an_administrator_looks_at_the_rights_of_the_tasks_account(namespace: Namespace, tmp_path: Path) -> None:
    administrator = os.environ["KUBECONFIG"]
    for account, level in ((f"{namespace.name}:kubeflow-training", "warn"), (f"{namespace.name}:default", "fail")):
        _, found = doctor(tmp_path, administrator, "--account", account, namespace=namespace.name)
        assert level in found["rights"][0]
        assert account in found["rights"][1]


def test_an_account_that_is_not_there_is_told(namespace: Namespace, tmp_path: Path) -> None:
    code, found = doctor(tmp_path, os.environ["KUBECONFIG"], namespace=namespace.name, service_account="nobody-s")
    assert (code, found["pod"][0]) == (1, "fail")
    assert 'serviceaccount "nobody-s" not found' in found["pod"][1]


def test_a_pod_looks_at_its_image_and_at_s3_and_is_removed(namespace: Namespace, tmp_path: Path) -> None:
    administrator = os.environ["KUBECONFIG"]
    with suppress(client.ApiException):  # a stack of these tests has made it
        namespace.core.create_namespaced_secret(namespace.name, {"metadata": {"name": SECRET}})
    _, found = doctor(tmp_path, administrator, "--pod", "b", namespace=namespace.name, image="test.local/none-such:1")
    assert found["pod's start"][0] == "fail"
    assert "compute.image_pull_secrets" in found["pod's start"][1]
    _, found = doctor(tmp_path, administrator, "--pod", "b", namespace=namespace.name)  # an image without a trainer
    assert found["pod's image"][0] == "fail"
    left = namespace.core.list_namespaced_pod(namespace.name, label_selector="dropforge/purpose=doctor").items
    assert left == []
