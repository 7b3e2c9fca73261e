"""For experiments: a gang that idles with its full environment, and the lines that start the training by hand. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

from kubeflow_training.jobs.errors import ManifestError
from kubeflow_training.jobs.manifest.words import CONTAINER, KIND

RELEASE_FILE: Final = "/tmp/release"  # noqa: S108 - inside the pod
_IDLE: Final = (
    "trap 'exit 143' TERM; "
    f'echo "held: waiting for {RELEASE_FILE}"; '
    f"until [ -e {RELEASE_FILE} ]; do sleep 1 & wait $!; done"
)


def held(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The job with pods that only wait: for the end of the task, or for the file `RELEASE_FILE`.

    :raises ManifestError: if the kind does not allow it.
    """
    if manifest.get("kind") != KIND:
        raise ManifestError(f"a {manifest.get('kind')}", f"only a {KIND} can be held", "Leave `hold` out")
    found = deepcopy(dict(manifest))
    for replica in found["spec"]["pytorchReplicaSpecs"].values():
        for container in _trainers(replica):
            container["command"] = ["sh", "-c", _IDLE]
            container.pop("args", None)
            # A probe would end what idles.
            for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
                container.pop(probe, None)
    return found


def launch_lines(manifest: Mapping[str, Any]) -> list[str]:
    """What to type to start the training of a held job, one line per pod, and what ends it."""
    metadata = manifest["metadata"]
    where = f"kubectl exec -n {metadata['namespace']}"
    lines, last = [], ""
    for kind, replica in sorted(manifest["spec"]["pytorchReplicaSpecs"].items()):
        for index in range(int(replica.get("replicas") or 1)):
            pod = f"{metadata['name']}-{kind.lower()}-{index}"
            for container in _trainers(replica):
                command = [*container.get("command", []), *container.get("args", [])]
                words = shlex.join(command) if command else "# the image's own command"
                lines.append(f"{where} {pod} -c {CONTAINER} -- {words}")
            last = last or f"{where} {pod} -c {CONTAINER} -- touch {RELEASE_FILE}"
    return [*lines, last] if last else lines


def _trainers(replica: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [item for item in replica["template"]["spec"]["containers"] if item.get("name") == CONTAINER]
