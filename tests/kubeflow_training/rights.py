"""A namespace and an account on a real cluster, with the rights that the package ships and no others."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

import kubeflow_training
import yaml

ACCOUNT = "kubeflow-training"
PARTS = ("train-job", "indexed-job", "spark", "events", "kueue", "short-grace")
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
        for document in documents(self.namespace, *parts):
            create = {
                "ServiceAccount": self._core.create_namespaced_service_account,
                "Role": self._rbac.create_namespaced_role,
                "RoleBinding": self._rbac.create_namespaced_role_binding,
            }[document["kind"]]
            create(self.namespace, document)
        self.kubeconfig = folder / f"{self.namespace}.kubeconfig"
        self.write(self.kubeconfig)

    def write(self, path: Path, server: str | None = None) -> Path:
        """A kubeconfig with a new token of the account.

        :param server: another address than the cluster's own, such as that of a proxy which a test cuts.
        """
        answer = self._core.create_namespaced_service_account_token(
            ACCOUNT, self.namespace, {"spec": {"expirationSeconds": 7200}}
        )
        known = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
        current = next(item for item in known["contexts"] if item["name"] == known["current-context"])["context"]
        cluster = dict(next(item for item in known["clusters"] if item["name"] == current["cluster"])["cluster"])
        if server is not None:
            host = cluster["server"].split("://")[1].split(":")[0].split("/")[0]
            cluster |= {"server": server, "tls-server-name": cluster.get("tls-server-name", host)}
        path.touch(mode=0o600)
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "restricted",
                    "clusters": [{"name": "cluster", "cluster": cluster}],
                    "users": [{"name": ACCOUNT, "user": {"token": answer.status.token}}],
                    "contexts": [
                        {
                            "name": "restricted",
                            "context": {"cluster": "cluster", "user": ACCOUNT, "namespace": self.namespace},
                        }
                    ],
                }
            )
        )
        return path

    def client(self) -> Any:
        """A client with these rights."""
        from kubernetes import config

        return config.new_client_from_config(str(self.kubeconfig))

    def take_away(self, part: str) -> None:
        """The account loses the rights of a part."""
        self._rbac.delete_namespaced_role_binding(f"{ACCOUNT}-{part}", self.namespace)

    def close(self) -> None:
        """Delete the namespace with all that is in it; its end is not waited for."""
        self._core.delete_namespace(self.namespace, grace_period_seconds=0)
