"""Checks of a pod's spec before any pod exists: pure, with the mend. Kubernetes looks at it only when pods are made."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kubeflow_training.jobs.manifest.checks.problems import Problem
from kubeflow_training.jobs.manifest.words import CONTAINER
from kubeflow_training.jobs.shapes import items, mapping

_SECRET_WORDS: Final = frozenset({"SECRET", "PASSWORD", "PASSWD", "TOKEN", "CREDENTIAL", "CREDENTIALS"})
_SECRET_PARTS: Final = ("ACCESS_KEY", "API_KEY", "PRIVATE_KEY", "APIKEY")
_SECRET_VALUE: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(AKIA|ASIA)[A-Z0-9]{16}\b|://[^/@\s:]+:[^/@\s]+@|\b(ghp|hf|glpat)[_-][A-Za-z0-9]{20,}"
)
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_UNITS: Final = {
    "": 1,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_VARIABLE: Final = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_PULLS: Final = ("Always", "IfNotPresent", "Never")


def quantity(value: Any) -> float:
    """A Kubernetes quantity as a number ("500m" is 0.5, "2Gi" is 2147483648).

    :raises ValueError: if it is none.
    """
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is not a quantity")
    return float(match[1]) * _UNITS[match[2] or ""]


def pod_problems(where: str, pod: Mapping[str, Any]) -> Iterator[Problem]:
    containers = items(pod.get("containers"))
    mains = [item for item in containers if item.get("name") == CONTAINER]
    if len(mains) != 1:
        yield Problem(f"{where}.containers", f"no single container is called `{CONTAINER}`", f"Name it `{CONTAINER}`")
    grace = pod.get("terminationGracePeriodSeconds", 30)
    if not isinstance(grace, int) or isinstance(grace, bool) or grace < 0:
        yield Problem(f"{where}.terminationGracePeriodSeconds", f"{grace!r} is not seconds", "Give a whole number")
    everybody = [*containers, *items(pod.get("initContainers"))]
    for name, count in Counter(str(item.get("name")) for item in everybody).items():
        if count > 1:
            yield Problem(f"{where}.containers", f"{count} containers are called {name!r}", "Give each its own name")
    volumes = [str(mapping(item).get("name")) for item in _list(pod.get("volumes"))]
    for name, count in Counter(volumes).items():
        if count > 1:
            yield Problem(f"{where}.volumes", f"{count} volumes are called {name!r}", "Give each its own name")
    for container in everybody:
        yield from _container(f"{where}.containers.{container.get('name')}", container, volumes)
    for main in mains:
        yield from _shared_memory(where, pod, main)


def _container(inside: str, container: Mapping[str, Any], volumes: list[str]) -> Iterator[Problem]:
    if not isinstance(container.get("image"), str) or not container["image"].strip():
        yield Problem(f"{inside}.image", "it is empty", "Name an image")
    pull = container.get("imagePullPolicy")
    if pull is not None and pull not in _PULLS:
        yield Problem(f"{inside}.imagePullPolicy", f"it is {pull!r}", f"Choose one of {', '.join(_PULLS)}")
    yield from _resources(inside, mapping(container.get("resources")))
    paths = []
    for mount in _list(container.get("volumeMounts")):
        name, path = mapping(mount).get("name"), mapping(mount).get("mountPath")
        paths.append(path)
        if str(name) not in volumes:
            yield Problem(f"{inside}.volumeMounts", f"there is no volume {name!r}", "Add it to `volumes`")
        if not isinstance(path, str) or not path:
            yield Problem(f"{inside}.volumeMounts.{name}", "it has no mountPath", "Name a path")
    for path, count in Counter(map(str, paths)).items():
        if count > 1:
            yield Problem(f"{inside}.volumeMounts", f"{count} volumes are mounted at {path}", "Mount one there")
    for variable in _list(container.get("env")):
        name, value = mapping(variable).get("name"), mapping(variable).get("value")
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            yield Problem(f"{inside}.env", f"{name!r} is no variable's name", "Use letters, digits and underscores")
        if value is not None and not isinstance(value, str):
            yield Problem(f"{inside}.env.{name}", f"{value!r} is not text", f'Write it as "{value}"')
    for argument in [*_list(container.get("command")), *_list(container.get("args"))]:
        if not isinstance(argument, str):
            yield Problem(f"{inside}.command", f"{argument!r} is not a string", "Write every argument as a string")
    yield from secret_problems(inside, container)
    for key in ("command", "args"):
        if container.get(key) is not None and not isinstance(container[key], list | tuple):
            yield Problem(f"{inside}.{key}", f"{container[key]!r} is no list", 'Write a list, like ["python", "x.py"]')


def secret_problems(inside: str, container: Mapping[str, Any]) -> Iterator[Problem]:
    """Values and arguments that look like secrets: whoever may read the job could read them."""
    for variable in _list(container.get("env")):
        name, value = mapping(variable).get("name"), mapping(variable).get("value")
        if isinstance(value, str) and value and (_secret_name(str(name)) or _SECRET_VALUE.search(value)):
            yield Problem(
                f"{inside}.env.{name}",
                "its value looks like a secret, and everyone who may read the job could read it",
                "Put it into a Kubernetes secret and name that under `secrets`",
            )
    for argument in [*_list(container.get("command")), *_list(container.get("args"))]:
        if isinstance(argument, str) and _SECRET_VALUE.search(argument):
            yield Problem(f"{inside}.command", "an argument looks like a secret", "Pass it by a Kubernetes secret")


def pod_secret_problems(where: str, pod: Mapping[str, Any]) -> Iterator[Problem]:
    """The same for all containers of a pod's spec."""
    for container in [*items(pod.get("containers")), *items(pod.get("initContainers"))]:
        yield from secret_problems(f"{where}.containers.{container.get('name')}", container)


def _resources(inside: str, resources: Mapping[str, Any]) -> Iterator[Problem]:
    found: dict[str, dict[str, float]] = {"requests": {}, "limits": {}}
    for part, values in found.items():
        for resource, value in mapping(resources.get(part)).items():
            try:
                values[resource] = quantity(value)
            except ValueError:
                yield Problem(f"{inside}.resources.{part}.{resource}", f"{value!r} is no quantity", "Write 2 or 4Gi")
    for resource, value in found["requests"].items():
        limit = found["limits"].get(resource)
        if limit is not None and value > limit:
            cause = "more is requested than its limit allows"
            yield Problem(f"{inside}.resources.requests.{resource}", cause, "Ask for no more than the limit")
        elif "/" in resource and value != limit:
            cause = "of a device, request and limit are the same"
            yield Problem(f"{inside}.resources.requests.{resource}", cause, "Give both the same number")


def _shared_memory(where: str, pod: Mapping[str, Any], main: Mapping[str, Any]) -> Iterator[Problem]:
    """A memory-backed volume counts as the container's own memory: what it may hold must fit into the limit."""
    mounted = {str(mapping(mount).get("name")) for mount in _list(main.get("volumeMounts"))}
    limit = mapping(mapping(main.get("resources")).get("limits")).get("memory")
    total = 0.0
    try:
        for volume in _list(pod.get("volumes")):
            empty = mapping(mapping(volume).get("emptyDir"))
            name = str(mapping(volume).get("name"))
            if empty.get("medium") == "Memory" and name in mounted and "sizeLimit" in empty:
                total += quantity(empty["sizeLimit"])
        allowed = quantity(limit) if limit is not None else None
    except ValueError as error:
        yield Problem(f"{where}.volumes", str(error), "Write 2 or 4Gi")
        return
    if allowed is not None and total >= allowed > 0:
        cause = f"its memory-backed volumes may hold {total / 1e9:g} GB, and the memory limit is {allowed / 1e9:g} GB"
        yield Problem(f"{where}.volumes", cause, "Make `shm_gb` smaller, or `memory_gb` larger: one contains the other")


def _secret_name(name: str) -> bool:
    upper = name.upper()
    return bool(_SECRET_WORDS & set(upper.split("_"))) or any(part in upper for part in _SECRET_PARTS)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
