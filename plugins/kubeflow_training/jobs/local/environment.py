"""What a pod's process is started with: its command, and the environment as the training operator gives it. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kubeflow_training.jobs.elastic import node_range
from kubeflow_training.jobs.local.devices import VISIBLE_VARIABLE
from kubeflow_training.jobs.local.status import PodPlan
from kubeflow_training.jobs.manifest.words import CONTAINER, DEFAULT_GRACE_SECONDS

POD_MARK: Final = "KUBEFLOW_TRAINING_POD_UID"
_HOST: Final = "127.0.0.1"


def template(plan: PodPlan, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pod's template in the manifest."""
    found: Mapping[str, Any] = manifest["spec"]["pytorchReplicaSpecs"][plan.kind.capitalize()]["template"]
    return found


def grace_seconds(plan: PodPlan, manifest: Mapping[str, Any]) -> float:
    return float(template(plan, manifest)["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS))


def pod_spec(
    plan: PodPlan, manifest: Mapping[str, Any], folder: Path, port: int, gpus: Sequence[str] | None
) -> dict[str, Any]:
    """What the pod's keeper has to know: argv, env, cwd, grace, uid.

    :param port: of the gang's meeting place.
    :param gpus: the pod's own; None on a machine that has none at all.
    """
    container = next(item for item in template(plan, manifest)["spec"]["containers"] if item["name"] == CONTAINER)
    argv = [*container.get("command", []), *container.get("args", [])]
    if argv[0] in ("python", "python3"):
        argv[0] = sys.executable
    # The operator adds its own to what the manifest says, and the last of one name counts.
    env = {
        **{item["name"]: item.get("value", "") for item in container.get("env", [])},
        "PYTHONUNBUFFERED": "1",
        "PET_NPROC_PER_NODE": str(manifest["spec"].get("nprocPerNode", "1")),
        **_gang(plan, manifest, str(port)),
        "TERMINATION_LOG": str(folder / "termination-log"),
        "POD_NAME": plan.name,
        POD_MARK: plan.uid,
    }
    if gpus is not None:
        # Empty for a pod without GPUs: it must not find those of the others.
        env[VISIBLE_VARIABLE] = ",".join(gpus)
    work = container.get("workingDir") or str(folder / "work")
    return {"argv": argv, "env": env, "cwd": work, "grace": grace_seconds(plan, manifest), "uid": plan.uid}


def _gang(plan: PodPlan, manifest: Mapping[str, Any], port: str) -> dict[str, str]:
    """Who the others are and where they meet."""
    spec = manifest["spec"]
    least, nodes = node_range(manifest)
    each = str(spec.get("nprocPerNode", "1"))
    world = nodes * (int(each) if each.isdigit() else 1)
    if not (policy := spec.get("elasticPolicy")):
        return {
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": port,
            "WORLD_SIZE": str(world),
            "RANK": str(plan.rank),
            "PET_MASTER_ADDR": _HOST,
            "PET_MASTER_PORT": port,
            "PET_NNODES": str(nodes),
            "PET_NODE_RANK": str(plan.rank),
        }
    # On one machine every address is everybody's own: say who hosts the meeting, as the service's name does elsewhere.
    settings = {item["key"]: item["value"] for item in policy.get("rdzvConf") or []}
    settings["is_host"] = "true" if plan.rank == 0 else "false"
    env = {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{_HOST}:{port}",
        "PET_RDZV_CONF": ",".join(f"{key}={value}" for key, value in settings.items()),
        "PET_NNODES": f"{least}:{nodes}",
    }
    if policy.get("rdzvId") is not None:
        env["PET_RDZV_ID"] = str(policy["rdzvId"])
    if policy.get("maxRestarts") is not None:
        env["PET_MAX_RESTARTS"] = str(policy["maxRestarts"])
    return env
