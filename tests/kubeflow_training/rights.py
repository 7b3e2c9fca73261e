"""A namespace and an account on a real cluster, with the rights that the package ships and no others."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import kubeflow_training
import yaml

ACCOUNT = "kubeflow-training"
PARTS = ("train-job", "indexed-job", "spark", "events", "kueue", "short-grace", "nodes")
"""The files `rbac-PART.yaml`, beside `rbac.yaml`."""
MANIFESTS = Path(kubeflow_training.__file__).parent / "manifests"


def admin() -> Any:
    """A client with the rights of KUBECONFIG: for making and removing namespaces, never for what is tested."""
    from kubernetes import config

    return config.new_client_from_config(os.environ["KUBECONFIG"])


def documents(namespace: str, *parts: str) -> list[dict[str, Any]]:
    """The shipped manifests for this namespace."""
    files = [MANIFESTS / "rbac.yaml", *(MANIFESTS / f"rbac-{part}.yaml" for part in parts)]
    return [
        document for file in files for document in yaml.safe_load_all(file.read_text().replace("NAMESPACE", namespace))
    ]


def create(client: Any, namespace: str, *shipped: dict[str, Any]) -> None:
    """Make shipped manifests on the cluster; what belongs to no namespace may be there already."""
    from kubernetes.client import ApiException, CoreV1Api, RbacAuthorizationV1Api

    core, rbac = CoreV1Api(client), RbacAuthorizationV1Api(client)
    make = {
        "ServiceAccount": core.create_namespaced_service_account,
        "Role": rbac.create_namespaced_role,
        "RoleBinding": rbac.create_namespaced_role_binding,
    }
    make_everywhere = {
        "ClusterRole": rbac.create_cluster_role,
        "ClusterRoleBinding": rbac.create_cluster_role_binding,
    }
    for document in shipped:
        if document["kind"] in make:
            make[document["kind"]](namespace, document)
            continue
        try:
            make_everywhere[document["kind"]](document)
        except ApiException as error:
            if error.status != 409:
                raise


def write_kubeconfig(path: Path, namespace: str, account: str, server: str | None = None) -> Path:
    """A kubeconfig with a new token of the namespace's account.

    :param server: another address than the cluster's own, such as that of a proxy which a test cuts.
    """
    from kubernetes.client import CoreV1Api

    answer = CoreV1Api(admin()).create_namespaced_service_account_token(
        account, namespace, {"spec": {"expirationSeconds": 7200}}
    )
    known = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    current = next(item for item in known["contexts"] if item["name"] == known["current-context"])["context"]
    cluster = dict(next(item for item in known["clusters"] if item["name"] == current["cluster"])["cluster"])
    if server is not None:
        host = cluster["server"].split("://")[1].split(":")[0].split("/")[0]
        cluster |= {"server": server, "tls-server-name": cluster.get("tls-server-name", host)}
    context = {"cluster": "cluster", "user": account, "namespace": namespace}
    path.touch(mode=0o600)
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "restricted",
                "clusters": [{"name": "cluster", "cluster": cluster}],
                "users": [{"name": account, "user": {"token": answer.status.token}}],
                "contexts": [{"name": "restricted", "context": context}],
            }
        )
    )
    return path


class Rights:
    """A namespace of its own, and an account in it that has `rbac.yaml` and the parts that are named.

    :param folder: where its kubeconfig is written.
    """

    def __init__(self, folder: Path, *parts: str) -> None:
        from kubernetes import client

        self.namespace = f"test-{uuid.uuid4().hex[:10]}"
        self._admin = admin()
        self._core, self._rbac = client.CoreV1Api(self._admin), client.RbacAuthorizationV1Api(self._admin)
        self._core.create_namespace({"metadata": {"name": self.namespace}})
        shipped = documents(self.namespace, *parts)
        create(self._admin, self.namespace, *shipped)
        self._everywhere = [item["metadata"]["name"] for item in shipped if item["kind"] == "ClusterRoleBinding"]
        self.kubeconfig = folder / f"{self.namespace}.kubeconfig"
        self.write(self.kubeconfig)
        self._wait_for(shipped)

    def write(self, path: Path, server: str | None = None, account: str = ACCOUNT) -> Path:
        """A kubeconfig with a new token of the account.

        :param server: another address than the cluster's own, such as that of a proxy which a test cuts.
        """
        return write_kubeconfig(path, self.namespace, account, server)

    def _wait_for(self, shipped: list[dict[str, Any]]) -> None:
        """The API server hears of bindings a moment after they are made."""
        rules = [rule for role in shipped if role["kind"].endswith("Role") for rule in role["rules"]]
        wanted = {
            (group, resource, verb)
            for rule in rules
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        end = time.monotonic() + 30
        while lacking := wanted - self.granted():
            assert time.monotonic() < end, lacking

    def granted(self) -> set[tuple[str, str, str]]:
        """All that the account may do in its namespace, as the cluster tells it: group, resource, verb."""
        from kubernetes import client

        review = client.AuthorizationV1Api(self.client()).create_self_subject_rules_review(
            {"spec": {"namespace": self.namespace}}
        )
        return {
            (group, resource, verb)
            for rule in review.status.resource_rules
            for group in rule.api_groups or ()
            for resource in rule.resources or ()
            for verb in rule.verbs
        }

    def client(self) -> Any:
        """A client with these rights."""
        from kubernetes import config

        return config.new_client_from_config(str(self.kubeconfig))

    def person(self, path: Path, role: Path) -> Path:
        """A kubeconfig of somebody who has the rights of this Role alone."""
        name = "ann"
        rules = yaml.safe_load(role.read_text())
        self._core.create_namespaced_service_account(self.namespace, {"metadata": {"name": name}})
        self._rbac.create_namespaced_role(self.namespace, rules)
        binding = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": rules["metadata"]["name"]},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": self.namespace}],
        }
        self._rbac.create_namespaced_role_binding(self.namespace, binding)
        return self.write(path, account=name)

    def take_away(self, part: str) -> None:
        """The account loses the rights of a part."""
        self._rbac.delete_namespaced_role_binding(f"{ACCOUNT}-{part}", self.namespace)

    def close(self) -> None:
        """Delete the namespace with all that is in it, and what binds its account; its end is not waited for."""
        for name in self._everywhere:
            self._rbac.delete_cluster_role_binding(name)
        self._core.delete_namespace(self.namespace, grace_period_seconds=0)
