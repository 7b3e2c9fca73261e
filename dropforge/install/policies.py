"""Who may speak to whom, as NetworkPolicies: ours are about our own components. Pure.

They need a network that holds to them (Cilium, Calico, EKS's with policies switched on). RDMA of EFA and InfiniBand
goes past them, and so does what the node itself mounts (FSx, EFS, NFS).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dropforge.install.exporter import PORT
from dropforge.install.keys import AIRFLOW

DOOR: Final = "dropforge/door"
"""Label of namespaces that people come through, with any value: that of the ingress controller."""
_NAME: Final = "kubernetes.io/metadata.name"
_POD_IDENTITY: Final = ("169.254.170.23/32", "fd00:ec2::23/128")  # EKS's agent on the node: pods get roles of it
_TRAINER: Final = ("kubeflow-system", 10443)  # which takes the progress of TrainJobs there
_NODE_DNS: Final = "169.254.20.10/32"  # NodeLocal DNSCache, which is the node's and so in no namespace


def policies(training: Sequence[str], ports: Sequence[int] = (443,)) -> list[dict[str, Any]]:
    """For Airflow's namespace and each of trainings.

    :param ports: TCP, of S3 and of the hub of models; and of the servers of Kubernetes' own API, which Spark's drivers
        ask: most networks look once the Service's address is replaced by theirs.
    """
    found = [
        _policy("closed", AIRFLOW, {}),
        _policy("api-server", AIRFLOW, {"component": "api-server"}, [_from([_airflow(), _door()], 8080)]),
        _policy("logs", AIRFLOW, {"tier": "airflow"}, [_from([_pods(component="api-server")], 8793, 8794)]),
        _policy(
            "statsd",
            AIRFLOW,
            {"component": "statsd"},
            [
                {"from": [_airflow()], "ports": [{"port": 9125, "protocol": "UDP"}]},
                _from([_namespace("monitoring")], 9102),
            ],
        ),
        _policy("metrics", AIRFLOW, {"component": "metrics"}, [_from([_namespace("monitoring")], PORT)]),
        _policy(
            "mlflow",
            AIRFLOW,
            {"app.kubernetes.io/name": "mlflow"},
            [_from([_airflow(), _door(), *map(_namespace, ("monitoring", *training))], 5000)],
        ),
        _policy(
            "postgres",
            AIRFLOW,
            {"app.kubernetes.io/name": "postgres"},
            [
                _from(
                    [_airflow(), *(_pods(**{"app.kubernetes.io/name": n}) for n in ("mlflow", "mlflow-migration"))],
                    5432,
                )
            ],
        ),
    ]
    return found + [_of_training(namespace, ports) for namespace in training]


def _of_training(namespace: str, ports: Sequence[int]) -> dict[str, Any]:
    """Pods of a gang among themselves by any port; out to names, MLflow, Trainer, S3 and hub; in for figures alone."""
    policy = _policy("training", namespace, {}, [{"from": [{"podSelector": {}}]}, {"from": [_namespace("monitoring")]}])
    policy["spec"]["policyTypes"].append("Egress")
    policy["spec"]["egress"] = [
        {"to": [{"podSelector": {}}]},
        {
            "to": [_namespace("kube-system"), {"ipBlock": {"cidr": _NODE_DNS}}],
            "ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}],
        },
        {
            "to": [{**_namespace(AIRFLOW), "podSelector": {"matchLabels": {"app.kubernetes.io/name": "mlflow"}}}],
            "ports": [{"port": 5000, "protocol": "TCP"}],
        },
        {"to": [_namespace(_TRAINER[0])], "ports": [{"port": _TRAINER[1], "protocol": "TCP"}]},
        {"to": [{"ipBlock": {"cidr": cidr}} for cidr in _POD_IDENTITY], "ports": [{"port": 80, "protocol": "TCP"}]},
        {"ports": [{"port": port, "protocol": "TCP"} for port in ports]},
    ]
    return policy


def _policy(name: str, namespace: str, pods: dict[str, str], ingress: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"dropforge-{name}", "namespace": namespace},
        "spec": {
            "podSelector": {"matchLabels": pods} if pods else {},
            "policyTypes": ["Ingress"],
            "ingress": list(ingress),
        },
    }


def _from(peers: Sequence[dict[str, Any]], *ports: int) -> dict[str, Any]:
    return {"from": list(peers), "ports": [{"port": port, "protocol": "TCP"} for port in ports]}


def _airflow() -> dict[str, Any]:
    return _pods(tier="airflow")


def _pods(**labels: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": labels}}


def _namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {_NAME: name}}}


def _door() -> dict[str, Any]:
    return {"namespaceSelector": {"matchExpressions": [{"key": DOOR, "operator": "Exists"}]}}
