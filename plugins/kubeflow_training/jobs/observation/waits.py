"""Why pods that do not run yet wait, and which of these waits never end by themselves. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kubeflow_training.jobs.observation.reasons import Reason
from kubeflow_training.jobs.shapes import items, mapping, name

# What a kubelet tells of a container that waits for what will not come. A single ErrImagePull is not among them.
HOPELESS: Final = {
    "ImagePullBackOff": Reason.IMAGE,
    "InvalidImageName": Reason.IMAGE,
    "ErrImageNeverPull": Reason.IMAGE,
    "ImageInspectError": Reason.IMAGE,
    "CreateContainerConfigError": Reason.USER_ERROR,
    "CreateContainerError": Reason.USER_ERROR,
    "RunContainerError": Reason.USER_ERROR,
}
# What is away or busy comes back: the kubelet goes on trying, as long as the limits of the wait allow.
_PASSING: Final = re.compile(
    r"i/o timeout|connection refused|connection reset|toomanyrequests|too many requests|\b(429|50[0234])\b"
    r"|context deadline exceeded|TLS handshake timeout|temporary failure|unexpected EOF|QPS exceeded"
    r"|timed out waiting for the condition|failed to sync (secret|configmap) cache|name is reserved|is reserved for",
    re.I,
)
_CREATION: Final = frozenset({"FailedCreatePod", "FailedCreate", "TrainJobResourcesCreationFailed"})
_VOLUMES: Final = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})


@dataclass(frozen=True)
class Wait:
    """
    :param pod: the pod that waits, if it is one.
    :param hopeless: whether it never ends by itself.
    :param restarting: whether the container has ended and is started again.
    """

    reason: Reason | None
    message: str
    pod: Mapping[str, Any] | None = None
    hopeless: bool = False
    restarting: bool = False


def container_wait(pods: Sequence[Mapping[str, Any]]) -> Wait | None:
    """The gravest wait of any container, init containers included."""
    found = [wait for pod in pods for wait in _container_waits(pod)]
    return next((wait for wait in found if wait.hopeless), found[0] if found else None)


def creation_wait(events: Sequence[Mapping[str, Any]]) -> Wait | None:
    """What keeps pods from being created: the newest warning of the controller that should create them."""
    for event in reversed(events):
        text = str(event.get("message") or "").strip()
        if event.get("type") != "Warning":
            continue
        if "exceeded quota" in text:
            return Wait(Reason.QUOTA, text)
        if str(event.get("reason")) in _CREATION:
            return Wait(Reason.USER_ERROR if "is forbidden" in text or "is invalid" in text else None, text)
    return None


def scheduling_wait(pod: Mapping[str, Any]) -> Wait | None:
    """Why the pod has no node yet, or None if it has one."""
    status = mapping(pod.get("status"))
    if status.get("phase") not in (None, "Pending") or mapping(pod.get("spec")).get("nodeName"):
        return None
    for condition in items(status.get("conditions")):
        if condition.get("type") == "PodScheduled" and condition.get("status") != "True":
            refused = condition.get("reason") == "Unschedulable"
            return Wait(Reason.UNSCHEDULABLE if refused else None, str(condition.get("message") or ""), pod)
    return Wait(None, "", pod)


def volume_wait(pods: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> Wait | None:
    """A volume that a pod with a node waits for: only its events tell."""
    names = {name(pod): pod for pod in pods if mapping(pod.get("status")).get("phase") == "Pending"}
    for event in reversed(events):
        pod = names.get(str(mapping(event.get("involvedObject")).get("name")))
        if pod is not None and str(event.get("reason")) in _VOLUMES:
            text = str(event.get("message") or "").strip()
            missing = "not found" in text or "is not registered" in text
            return Wait(Reason.USER_ERROR if missing else None, f"{name(pod)}: {text}", pod)
    return None


def _container_waits(pod: Mapping[str, Any]) -> Iterator[Wait]:
    status, where = mapping(pod.get("status")), name(pod) or "a pod"
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in items(status.get(key)):
            waiting = mapping(mapping(container.get("state")).get("waiting"))
            word, text = str(waiting.get("reason") or ""), str(waiting.get("message") or "").strip()
            said = f"{where}: {word}: {text}" if text else f"{where}: {word}"
            if reason := HOPELESS.get(word):
                passing = bool(_PASSING.search(text))
                # What passes is no fault of the manifest's; an image that is waited for is told as such.
                yield Wait(reason if reason is Reason.IMAGE or not passing else None, said, pod, hopeless=not passing)
            elif word == "ErrImagePull":
                yield Wait(Reason.IMAGE, said, pod)
            elif word == "CrashLoopBackOff":
                code = mapping(mapping(container.get("lastState")).get("terminated")).get("exitCode")
                what = f"container {container.get('name')} ended with exit code {code} and is started again"
                yield Wait(None, f"{where}: {what} (restart {container.get('restartCount')})", pod, restarting=True)
