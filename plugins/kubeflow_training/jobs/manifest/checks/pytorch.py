"""Checks of a PyTorchJob before any pod exists: pure, with the mend; the webhook's rules and our own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kubeflow_training.jobs.manifest.checks.metadata import metadata_problems
from kubeflow_training.jobs.manifest.checks.pod import pod_problems
from kubeflow_training.jobs.manifest.checks.problems import Problem, require_none
from kubeflow_training.jobs.manifest.naming import longest_name
from kubeflow_training.jobs.manifest.words import API_VERSION, KIND
from kubeflow_training.jobs.shapes import mapping

_POSITIVE = re.compile(r"0*[1-9][0-9]{0,4}")

# What the admission webhook and the training operator know.
_RESTARTS: Final = ("Never", "OnFailure", "ExitCode", "Always")
_CLEAN: Final = ("Running", "All", "None")
_MANAGERS: Final = ("kubeflow.org/training-operator", "kueue.x-k8s.io/multikueue")
_PROCESSES: Final = ("auto", "cpu", "gpu")


def check(manifest: Mapping[str, Any]) -> list[Problem]:
    """Everything that is wrong with the manifest; an empty list if nothing is. Never raises, whatever it is given."""
    return list(_problems(manifest if isinstance(manifest, Mapping) else {}))


def require_valid(manifest: Mapping[str, Any]) -> None:
    """:raises ManifestError: naming every problem and its mend."""
    require_none(KIND, manifest, check(manifest))


def _problems(manifest: Mapping[str, Any]) -> Iterator[Problem]:
    if (manifest.get("apiVersion"), manifest.get("kind")) != (API_VERSION, KIND):
        yield Problem("kind", f"it is not a {API_VERSION} {KIND}", "Build it with pytorch_job()")
        return
    metadata, spec = mapping(manifest.get("metadata")), mapping(manifest.get("spec"))
    replicas = mapping(spec.get("pytorchReplicaSpecs"))
    yield from metadata_problems(metadata, longest_name({"kind": KIND, "spec": {"pytorchReplicaSpecs": replicas}}))
    yield from _gang(spec, replicas)
    yield from _policy(mapping(spec.get("runPolicy")))
    for kind, replica in replicas.items():
        where = f"spec.pytorchReplicaSpecs.{kind}"
        restart = mapping(replica).get("restartPolicy")
        if restart is not None and restart not in _RESTARTS:
            yield Problem(f"{where}.restartPolicy", f"it is {restart!r}", f"Choose one of {', '.join(_RESTARTS)}")
        pod = mapping(mapping(mapping(replica).get("template")).get("spec"))
        yield from pod_problems(f"{where}.template.spec", pod)


def _gang(spec: Mapping[str, Any], replicas: Mapping[str, Any]) -> Iterator[Problem]:
    where = "spec.pytorchReplicaSpecs"
    processes = spec.get("nprocPerNode")
    if processes is not None and not isinstance(processes, str):
        yield Problem("spec.nprocPerNode", f"{processes!r} is not a string", f'Write it as "{processes}"')
    if unknown := sorted(set(replicas) - {"Master", "Worker"}, key=str):
        yield Problem(where, f"it has {unknown[0]!r}", "Only Master and Worker exist")
    elastic = mapping(spec.get("elasticPolicy"))
    is_elastic = spec.get("elasticPolicy") is not None  # an empty one is one too
    if "Master" not in replicas and not is_elastic:
        yield Problem(f"{where}.Master", "it is missing", "Every job has exactly one master")
    elif "Master" in replicas and mapping(replicas["Master"]).get("replicas") != 1:
        yield Problem(f"{where}.Master.replicas", "it is not 1", "Every job has exactly one master")
    for kind, replica in replicas.items():
        if not isinstance(replica, Mapping):
            yield Problem(f"{where}.{kind}", "it is empty", "Give it replicas and a template, or leave the key out")
        elif "replicas" in replica and _count(replica["replicas"], -1) < 0:
            yield Problem(f"{where}.{kind}.replicas", f"{replica['replicas']!r} is no number", "Give a whole number")
    if "Worker" in replicas and _count(mapping(replicas["Worker"]).get("replicas"), 1) < 1:
        yield Problem(f"{where}.Worker.replicas", "it is less than 1", "Leave the Worker key out for a single node")
    if is_elastic and "Worker" not in replicas:
        yield Problem("spec.elasticPolicy", "an elastic job needs workers", "Add workers or remove elasticPolicy")
    if elastic.get("nProcPerNode") is not None and processes is not None:
        yield Problem("spec.elasticPolicy.nProcPerNode", "nprocPerNode says it too", "Leave it out; it is deprecated")
    if isinstance(processes, str) and processes not in _PROCESSES and not _POSITIVE.fullmatch(processes):
        mend = f"Write a number as text, or one of {', '.join(_PROCESSES)}"
        yield Problem("spec.nprocPerNode", f"{processes!r} is no number of processes", mend)


def _policy(policy: Mapping[str, Any]) -> Iterator[Problem]:
    where = "spec.runPolicy"
    clean, manager = policy.get("cleanPodPolicy"), policy.get("managedBy")
    if clean is not None and clean not in _CLEAN:
        yield Problem(f"{where}.cleanPodPolicy", f"it is {clean!r}", f"Choose one of {', '.join(_CLEAN)}")
    if manager is not None and manager not in _MANAGERS:
        yield Problem(f"{where}.managedBy", f"it is {manager!r}", f"Choose one of {', '.join(_MANAGERS)}")
    for key in ("activeDeadlineSeconds", "ttlSecondsAfterFinished", "backoffLimit"):
        if policy.get(key) is not None and _count(policy[key], -1) < 0:
            yield Problem(f"{where}.{key}", f"{policy[key]!r} is no number of it", "Give a whole number from 0")
    if policy.get("suspend") is not None and not isinstance(policy["suspend"], bool):
        yield Problem(f"{where}.suspend", f"{policy['suspend']!r} is neither true nor false", "Write true or false")


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
