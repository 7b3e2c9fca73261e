"""Record the fixtures of `test_observation` anew: `python -m tests.kubeflow_training.record [SITUATION...]`.

Needs KUBECONFIG of an administrator of a cluster that may be disturbed, with pretend nodes.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kubeflow_training.jobs.observation import observe
from kubernetes import client, config

from tests.kubeflow_training.kueue_situations import KUEUE
from tests.kubeflow_training.situations import SITUATIONS, Job, Situation, Stage

FOLDER = Path(__file__).parent / "fixtures"
_ADDRESSES = ("hostIP", "hostIPs", "podIP", "podIPs", "containerID", "imageID")
_TIMES = ("lastProbeTime", "lastReconcileTime")
_SPEC = ("env", "ports", "volumeMounts", "volumes", "allocatedResources", "terminationMessagePath", "dnsPolicy")
_MORE = ("schedulerName", "securityContext", "enableServiceLinks", "preemptionPolicy", "serviceAccount")
_NOISE = {*_ADDRESSES, *_TIMES, *_SPEC, *_MORE, "managedFields", "resourceVersion", "user", "uncountedTerminatedPods"}


def main(names: list[str]) -> None:
    admin = config.new_client_from_config()
    core = client.CoreV1Api(admin)
    for name, situation in (SITUATIONS | KUEUE).items():
        if names and name not in names:
            continue
        namespace = f"record-{uuid.uuid4().hex[:6]}"
        core.create_namespace({"metadata": {"name": namespace}})
        stage = Stage(admin, namespace)
        try:
            began = time.monotonic()
            data = _record(stage, situation)
            FOLDER.joinpath(f"{name}.json").write_text(json.dumps(trimmed(data), indent=1) + "\n")
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        except AssertionError as error:
            print(f"{name}: NOT RECORDED, last seen: {error}", flush=True)
        finally:
            stage.close()
            core.delete_namespace(namespace)


def _record(stage: Stage, situation: Situation) -> dict[str, Any]:
    job = situation.bring(stage)
    end = time.monotonic() + 60
    while not situation.fits(found := look(job, situation)):
        assert time.monotonic() < end, found
        time.sleep(0.1)
    now = datetime.now(UTC) + (situation.after or timedelta())
    words = {"job": None, "pods": [], "events": last_words(job)}
    seen = job.snapshot
    data = words if seen is None else {"job": seen.job, "pods": list(seen.pods), "events": list(seen.events)}
    return {"now": now.isoformat(), **json.loads(json.dumps(data))}


def look(job: Job, situation: Situation) -> Any:
    """The observation, at the moment at which the situation is looked at."""
    job.look()
    now = datetime.now(UTC) + (situation.after or timedelta())
    if job.snapshot is None:
        return observe(None, (), last_words(job) if situation.gone else ())
    return observe(job.snapshot.job, job.snapshot.pods, job.snapshot.events, now=now)


def last_words(job: Job) -> list[Any]:
    return list(job.stage.backends[job.kind.name].last_words(job.stage.namespace, job.created.uid))


def trimmed(value: Any) -> Any:
    """Without what says nothing about a job."""
    if isinstance(value, dict):
        return {key: trimmed(item) for key, item in value.items() if key not in _NOISE and not _token(item)}
    return [trimmed(item) for item in value if not _token(item)] if isinstance(value, list) else value


def _token(value: Any) -> bool:
    """Whether it is a part of the account's token, which every pod has."""
    return isinstance(value, dict) and str(value.get("name")).startswith("kube-api-access-")


if __name__ == "__main__":
    main(sys.argv[1:])
