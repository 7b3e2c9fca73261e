"""Checks of a manifest before any pod exists: pure, with the mend; the webhook's rules and our own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kubeflow_training.jobs.errors import ManifestError
from kubeflow_training.jobs.manifest import API_VERSION, CONTAINER, KIND

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SECRET_WORDS = frozenset({"SECRET", "PASSWORD", "PASSWD", "TOKEN", "CREDENTIAL", "CREDENTIALS"})
_SECRET_PARTS = ("ACCESS_KEY", "API_KEY", "PRIVATE_KEY", "APIKEY")
_SECRET_VALUE = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(AKIA|ASIA)[A-Z0-9]{16}\b|://[^/@\s:]+:[^/@\s]+@|\b(ghp|hf|glpat)[_-][A-Za-z0-9]{20,}"
)
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class Problem:
    """
    :param where: path into the manifest, like `spec.pytorchReplicaSpecs.Master`.
    :param cause: what is wrong there.
    :param mend: what to do about it.
    """

    where: str
    cause: str
    mend: str


def check(manifest: Mapping[str, Any]) -> list[Problem]:
    """Everything that is wrong with the manifest; an empty list if nothing is. Never raises, whatever it is given."""
    return list(_problems(manifest if isinstance(manifest, Mapping) else {}))


def require_valid(manifest: Mapping[str, Any]) -> None:
    """:raises ManifestError: naming every problem and its mend."""
    problems = check(manifest)
    if problems:
        name = _mapping(_mapping(manifest).get("metadata")).get("name")
        cause = "; ".join(f"`{problem.where}`: {problem.cause}" for problem in problems)
        raise ManifestError(f"PyTorchJob {name}", cause, " ".join(f"{problem.mend}." for problem in problems))


def quantity(value: Any) -> float:
    """A Kubernetes quantity as a number ("500m" is 0.5, "2Gi" is 2147483648).

    :raises ValueError: if it is none.
    """
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is not a quantity")
    return float(match[1]) * _UNITS[match[2] or ""]


def _problems(manifest: Mapping[str, Any]) -> Iterator[Problem]:
    if (manifest.get("apiVersion"), manifest.get("kind")) != (API_VERSION, KIND):
        yield Problem("kind", f"it is not a {API_VERSION} {KIND}", "Build it with pytorch_job()")
        return
    metadata, spec = _mapping(manifest.get("metadata")), _mapping(manifest.get("spec"))
    replicas = _mapping(spec.get("pytorchReplicaSpecs"))
    yield from _names(metadata, replicas)
    yield from _gang(spec, replicas)
    for kind, replica in replicas.items():
        where = f"spec.pytorchReplicaSpecs.{kind}.template.spec"
        pod = _mapping(_mapping(_mapping(replica).get("template")).get("spec"))
        yield from _pod(where, pod)


def _names(metadata: Mapping[str, Any], replicas: Mapping[str, Any]) -> Iterator[Problem]:
    name, namespace = metadata.get("name"), metadata.get("namespace")
    if not isinstance(name, str) or not _DNS_1035.fullmatch(name):
        yield Problem(
            "metadata.name",
            f"{name!r} is not a DNS-1035 label",
            "Use lower-case letters, digits and dashes, starting with a letter and not ending with a dash",
        )
    else:
        workers = _count(_mapping(replicas.get("Worker")).get("replicas"), 1) if "Worker" in replicas else 0
        room = 63 - (len(f"-worker-{workers - 1}") if workers else len("-master-0"))
        if len(name) > room:
            yield Problem(
                "metadata.name",
                f"it has {len(name)} characters, and a pod's host name of 63 leaves it {room}",
                "Shorten it",
            )
    if not isinstance(namespace, str) or len(namespace) > 63 or not _DNS_1123.fullmatch(namespace):
        yield Problem("metadata.namespace", f"{namespace!r} is not a namespace's name", "Name one, such as `default`")


def _gang(spec: Mapping[str, Any], replicas: Mapping[str, Any]) -> Iterator[Problem]:
    where = "spec.pytorchReplicaSpecs"
    processes = spec.get("nprocPerNode")
    if processes is not None and not isinstance(processes, str):
        yield Problem("spec.nprocPerNode", f"{processes!r} is not a string", f'Write it as "{processes}"')
    if unknown := sorted(set(replicas) - {"Master", "Worker"}, key=str):
        yield Problem(where, f"it has {unknown[0]!r}", "Only Master and Worker exist")
    elastic = _mapping(spec.get("elasticPolicy"))
    if "Master" not in replicas and not elastic:
        yield Problem(f"{where}.Master", "it is missing", "Every gang has exactly one master")
    elif "Master" in replicas and _mapping(replicas["Master"]).get("replicas", 1) != 1:
        yield Problem(f"{where}.Master.replicas", "it is not 1", "Every gang has exactly one master")
    if "Worker" in replicas and _count(_mapping(replicas["Worker"]).get("replicas"), 1) < 1:
        yield Problem(f"{where}.Worker.replicas", "it is less than 1", "Leave the Worker key out for a single node")
    if elastic and "Worker" not in replicas:
        yield Problem("spec.elasticPolicy", "an elastic job needs workers", "Add workers or remove elasticPolicy")


def _pod(where: str, pod: Mapping[str, Any]) -> Iterator[Problem]:
    containers = [item for item in _list(pod.get("containers")) if isinstance(item, Mapping)]
    mains = [item for item in containers if item.get("name") == CONTAINER]
    if len(mains) != 1:
        yield Problem(f"{where}.containers", f"no single container is called `{CONTAINER}`", f"Name it `{CONTAINER}`")
    for main in mains:
        if not main.get("image"):
            yield Problem(f"{where}.containers.{CONTAINER}.image", "it is empty", "Name an image")
    grace = pod.get("terminationGracePeriodSeconds", 30)
    if not isinstance(grace, int) or isinstance(grace, bool) or grace < 0:
        yield Problem(f"{where}.terminationGracePeriodSeconds", f"{grace!r} is not seconds", "Give a whole number")
    for container in containers:
        inside = f"{where}.containers.{container.get('name')}"
        resources = _mapping(container.get("resources"))
        for part in ("requests", "limits"):
            for resource, value in _mapping(resources.get(part)).items():
                try:
                    quantity(value)
                except ValueError:
                    yield Problem(
                        f"{inside}.resources.{part}.{resource}", f"{value!r} is no quantity", "Write 2 or 4Gi"
                    )
        for variable in _list(container.get("env")):
            name, value = _mapping(variable).get("name"), _mapping(variable).get("value")
            if isinstance(value, str) and value and (_secret_name(str(name)) or _SECRET_VALUE.search(value)):
                yield Problem(
                    f"{inside}.env.{name}",
                    "its value looks like a secret, and everybody who may read the job could read it",
                    "Put it into a Kubernetes secret and name that under `secrets`",
                )
        for argument in [*_list(container.get("command")), *_list(container.get("args"))]:
            if not isinstance(argument, str):
                yield Problem(f"{inside}.command", f"{argument!r} is not a string", "Write every argument as a string")
            elif _SECRET_VALUE.search(argument):
                yield Problem(f"{inside}.command", "an argument looks like a secret", "Pass it by a Kubernetes secret")


def _secret_name(name: str) -> bool:
    upper = name.upper()
    return bool(_SECRET_WORDS & set(upper.split("_"))) or any(part in upper for part in _SECRET_PARTS)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
