"""`dropforge doctor --cluster --pod`: one pod of the recipe's image and account, which looks at itself and at S3.

What only a pod can say: whether its image can be pulled, what the image has, and whether S3 answers from there.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from dropforge.cli.cluster_checks import Asked
from dropforge.cli.kube import Cluster
from dropforge.errors import DropforgeError
from dropforge.stack.doctor import Finding, Level
from dropforge.text import as_line

PATIENCE: Final = 300.0
"""Seconds for the pull of a large image, and for the pod's own look."""
_PAUSE: Final = 1.0
_LINES: Final = 20  # of a log that is no JSON
_OWN: Final = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "2", "memory": "4Gi"}}


def small_pod(pod: Mapping[str, Any], name: str, bucket: str) -> dict[str, Any]:
    """A pod that stands for one of a job, without its size, its claims and its GPUs. Pure.

    :param pod: spec of the job's pod. :param bucket: which it tries to reach.
    """
    (container,) = pod["containers"]
    kept = ("name", "image", "imagePullPolicy", "env", "envFrom", "securityContext")
    own = {key: container[key] for key in kept if key in container}
    own |= {
        "command": ["python", "-m", "trainer", "doctor", "--json", "--bucket", bucket],
        "resources": _OWN,
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
    }
    left = ("initContainers", "volumes", "topologySpreadConstraints", "affinity", "priorityClassName")
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "512Mi"}},
        {"name": "tmp", "emptyDir": {}},
    ]
    spec = {key: value for key, value in pod.items() if key not in left}
    spec |= {"containers": [own], "volumes": volumes, "restartPolicy": "Never", "activeDeadlineSeconds": int(PATIENCE)}
    labels = {"app.kubernetes.io/managed-by": "dropforge", "dropforge/purpose": "doctor"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def look_from_a_pod(cluster: Cluster, asked: Asked, bucket: str, patience: float = PATIENCE) -> Iterator[Finding]:
    """Start it, wait for its end, read what it says, and delete it whatever happens."""
    name, path = f"dropforge-doctor-{secrets.token_hex(3)}", f"/api/v1/namespaces/{asked.namespace}/pods"
    try:
        cluster.create(path, small_pod(asked.pod, name, bucket))
    except DropforgeError as error:
        yield Finding("pod's start", Level.FAIL, error.cause, error.mend)
        return
    try:
        found, end = None, time.monotonic() + patience
        while time.monotonic() < end:
            found = cluster.get(f"{path}/{name}")
            if found is None or ended(found) or stuck(found):
                break
            time.sleep(_PAUSE)
        log = cluster.text(f"{path}/{name}/log") if found is not None and ended(found) else ""
        yield from pod_findings(found, log)
    finally:
        cluster.remove(f"{path}/{name}")


def ended(pod: Mapping[str, Any]) -> bool:
    """Whether all of it is over."""
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def stuck(pod: Mapping[str, Any]) -> Finding | None:
    """Why its container never starts, in the kubelet's words; None while it may."""
    from kubeflow_training.jobs.observation.reasons import Reason
    from kubeflow_training.jobs.observation.waits import HOPELESS

    for one in pod["status"].get("containerStatuses") or []:
        waiting = (one.get("state") or {}).get("waiting") or {}
        if (reason := HOPELESS.get(str(waiting.get("reason")))) is not None:
            mend = "Create what it names"
            if reason is Reason.IMAGE:
                mend = "Correct `compute.image`, or name a registry's login in `compute.image_pull_secrets`"
            text = as_line(f"{waiting['reason']}: {waiting.get('message', '')}", 300)
            return Finding("pod's start", Level.FAIL, text, mend)
    return None


def pod_findings(pod: Mapping[str, Any] | None, log: str) -> Iterator[Finding]:
    """What a pod that has ended, or never began, says. Pure. :param log: its whole log."""
    if pod is None:
        yield Finding("pod's start", Level.FAIL, "it was deleted meanwhile", "Give the command again")
        return
    if (found := stuck(pod)) is not None:
        yield found
        return
    if not ended(pod):
        reasons = [
            one.get("message", "") for one in pod["status"].get("conditions") or [] if one.get("status") == "False"
        ]
        text = f"it did not end in time: {as_line('; '.join(filter(None, reasons)), 300) or pod['status'].get('phase')}"
        yield Finding("pod's start", Level.FAIL, text, "Look at `kubectl get events` of the namespace")
        return
    try:
        told = json.loads(log)
        wrong = [(str(one["thing"]), str(one["cause"]), str(one["mend"])) for one in told["problems"]]
        versions = {name: str(value) for name, value in told["libraries"].items() if value}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        text = as_line(" ".join(log.splitlines()[-_LINES:]), 300) or "it printed nothing"
        mend = "Take an image of Dropforge's trainer, of this version"
        yield Finding("pod's image", Level.FAIL, f"`python -m trainer doctor` did not answer there: {text}", mend)
        return
    about = ", ".join(
        f"{name} {as_line(versions[name], 40)}" for name in ("torch", "cuda", "transformers") if name in versions
    )
    yield Finding("pod's start", Level.OK, f"its image was pulled, and has {about}")
    for thing, cause, mend in wrong:
        yield Finding(f"pod's {as_line(thing, 40)}", Level.FAIL, as_line(cause, 300), as_line(mend, 300))
    if not any(thing == "S3" for thing, _, _ in wrong):
        yield Finding("pod's S3", Level.OK, "the bucket answers from there")
