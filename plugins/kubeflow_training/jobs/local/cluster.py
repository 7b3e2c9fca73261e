"""The client of the local cluster: it writes requests and reads files, and starts nothing itself."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kubeflow_training.jobs.backend import LogChunk, Position, Snapshot
from kubeflow_training.jobs.elastic import node_range
from kubeflow_training.jobs.errors import JobError, JobExistsError, JobRefusedError
from kubeflow_training.jobs.local import lock
from kubeflow_training.jobs.local.capacity import Resources, gang_resources, never_fits
from kubeflow_training.jobs.local.layout import HOME_VARIABLE, STALE, Layout, read_json, timestamp, write_json
from kubeflow_training.jobs.local.pod import tail, untimed
from kubeflow_training.jobs.local.records import read_job, read_offers, read_state
from kubeflow_training.jobs.local.standing import MOST, Standing, Waiting, Working
from kubeflow_training.jobs.local.status import event, over
from kubeflow_training.jobs.manifest.canonical import without_nulls
from kubeflow_training.jobs.manifest.checks.pytorch import require_valid
from kubeflow_training.jobs.manifest.words import AWAIT_MASTER, JOB_NAME_LABEL
from kubeflow_training.jobs.shapes import items, mapping
from kubeflow_training.jobs.shapes import labels as labels_of

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_READ = 1 << 20  # bytes of log read at once
NO_SUPERVISOR = "the local cluster's supervisor does not run; start it with `python -m kubeflow_training.jobs.local`"


class LocalCluster:
    """Jobs as processes of this machine. See `jobs.backend.Backend` for the calls.

    :param home: the cluster's folder; `KUBEFLOW_TRAINING_HOME` unless given.
    :raises JobError: if neither is given.
    """

    def __init__(self, home: str | Path | None = None) -> None:
        home = home or os.environ.get(HOME_VARIABLE)
        if not home:
            raise JobError("the local cluster", "no folder is named", f"Set {HOME_VARIABLE}")
        self.layout = Layout(Path(home).absolute())

    def supervisor(self) -> dict[str, Any] | None:
        """The running supervisor's pid and what it offers, or None if none runs."""
        return read_json(self.layout.supervisor) if lock.held(self.layout.lock) else None

    def offers(self) -> Resources | None:
        """What jobs may use altogether; None if no supervisor runs."""
        return read_offers(self.layout.supervisor) if lock.held(self.layout.lock) else None

    def never_fits(self, wants: Resources) -> str:
        """Why jobs that want this much can never start here; empty if they can, or no supervisor says what there is."""
        total = self.offers()
        return "" if total is None else never_fits(wants, total)

    def create(self, manifest: Mapping[str, Any]) -> Snapshot:
        manifest = without_nulls(manifest)
        require_valid(manifest)
        _require_runnable(manifest)
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        self.layout.prepare()
        folder = self.layout.job(namespace, name)
        uid = str(uuid.uuid4())
        making = folder.with_name(STALE + uid)
        making.mkdir(parents=True)
        job = {"uid": uid, "order": time.time_ns(), "created": timestamp(), "manifest": manifest}
        try:
            write_json(making / "job.json", job)
            making.rename(folder)
        except OSError as error:
            shutil.rmtree(making, ignore_errors=True)
            if folder.exists():
                raise JobExistsError(
                    f"job {namespace}/{name}", "a job of that name exists", "Delete it first, or choose another name"
                ) from error
            raise
        self.layout.knock()
        return Snapshot(_job(job, {}, deleting=None))

    def read(self, name: str, namespace: str) -> Snapshot | None:
        folder = self._folder(name, namespace)
        if folder is None:
            return None
        job, state = read_job(folder), read_state(folder)
        if job is None:
            return None
        delete = read_json(folder / "delete.json")
        snapshot = Snapshot(_job(job, state["status"], deleting=delete), state["pods"], state["events"])
        return snapshot if self._supervised(state) else _unsupervised(snapshot, name)

    def jobs(self, namespace: str | None = None, *, labels: Mapping[str, str] | None = None) -> list[Snapshot]:
        found = []
        for folder in self.layout.job_folders():
            job = self.read(folder.name, folder.parent.name) if namespace in (None, folder.parent.name) else None
            if job is not None and (labels or {}).items() <= labels_of(job.job).items():
                found.append(job)
        return sorted(found, key=lambda item: str(item.job["metadata"]["creationTimestamp"]))

    def delete(self, name: str, namespace: str, *, uid: str | None = None, grace_seconds: int | None = None) -> bool:
        folder = self._folder(name, namespace)
        job = read_job(folder) if folder else None
        if folder is None or job is None or uid not in (None, job["uid"]):
            return False
        with contextlib.suppress(FileNotFoundError):
            # The order names the job's uid: a job that comes after it under the same name is not meant.
            write_json(folder / "delete.json", {"uid": job["uid"], "grace": grace_seconds, "at": timestamp()})
        self.layout.knock()
        return True

    def logs(self, pod: Mapping[str, Any], position: Position | None = None, limit: int = 2000) -> LogChunk:
        path, uid = self._log(pod), str(pod["metadata"]["uid"])
        offset = int(position.get("offset", 0)) if position and position.get("uid") == uid else 0
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(_READ)
        except FileNotFoundError:
            return LogChunk([], position)
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)[:limit] if b"\n" in data else []
        offset += sum(len(line) for line in lines)
        return LogChunk([untimed(line.rstrip(b"\n")) for line in lines], {"uid": uid, "offset": offset})

    def tail(self, pod: Mapping[str, Any], lines: int = 20) -> list[str]:
        return tail(self._log(pod), lines)

    def queue(self) -> tuple[list[Waiting], list[Working]]:
        """The jobs that wait, the next one first and those held back last, and the jobs that use the machine."""
        waiting: list[tuple[tuple[Any, ...], Waiting]] = []
        working = []
        for folder in self.layout.job_folders():
            job, state = read_job(folder), read_state(folder)
            if job is None or (folder / "delete.json").exists() or over(state["status"]):
                continue
            uid, manifest, plan = job["uid"], job["manifest"], state["plan"]
            where = (folder.name, folder.parent.name, uid)
            if plan is not None:
                pods = plan.get("pods") if isinstance(plan.get("pods"), list) else None
                working.append(Working(*where, gang_resources(manifest, len(pods or state["pods"]))))
                continue
            standing = Standing.read(folder, uid)
            needs = gang_resources(manifest, node_range(manifest)[0])
            turn = (standing.held, *standing.turn(job["order"], uid))
            waiting.append((turn, Waiting(*where, standing, None, needs, _why(state))))
        found = [item for _, item in sorted(waiting, key=lambda item: item[0])]
        return [
            item if item.standing.held else replace(item, position=place) for place, item in enumerate(found, 1)
        ], working

    def stand(
        self, name: str, namespace: str, uid: str, *, held: bool | None = None, priority: int | None = None
    ) -> Standing:
        """Hold a waiting job back, let it go, or give it a priority; where it stands then.

        :raises JobRefusedError: if it does not wait, or the number is too large. :raises JobError: if it is gone.
        """
        thing = f"job {namespace}/{name}"
        if priority is not None and abs(priority) > MOST:
            raise JobRefusedError(thing, f"a priority of {priority} is too large", f"Give one up to {MOST}")
        folder = self._folder(name, namespace)
        if folder is None or (read_json(folder / "job.json") or {}).get("uid") != uid:
            raise JobError(thing, "it is gone", "Look at the queue again")
        state = read_state(folder)
        if state["plan"] is not None or over(state["status"]):
            raise JobRefusedError(thing, "it does not wait any more", "Only what waits can be held back or moved")
        before = Standing.read(folder, uid)
        standing = Standing(before.held if held is None else held, before.priority if priority is None else priority)
        try:
            standing.write(folder, uid)
        except FileNotFoundError:
            raise JobError(thing, "it is gone", "Look at the queue again") from None
        self.layout.knock()
        return standing

    def _folder(self, name: str, namespace: str) -> Path | None:
        if not (_NAME.fullmatch(name) and _NAME.fullmatch(namespace)):
            return None
        folder = self.layout.job(namespace, name)
        return folder if folder.is_dir() else None

    def _log(self, pod: Mapping[str, Any]) -> Path:
        """The pod's log, also after its job was removed."""
        metadata = mapping(pod.get("metadata"))
        job, name, namespace = labels_of(pod).get(JOB_NAME_LABEL), metadata.get("name"), metadata.get("namespace")
        owner = next((one.get("uid") for one in items(metadata.get("ownerReferences"))), None)
        if not all(_NAME.fullmatch(str(part or "")) for part in (job, name, namespace, owner)):
            raise JobError(f"pod {name}", "its name is none", "Take pods from a snapshot of this cluster")
        folder = self.layout.job(str(namespace), str(job))
        if (read_json(folder / "job.json") or {}).get("uid") != owner:
            folder = self.layout.removed / f"{job}-{owner}"
        return folder / "pods" / str(name) / "log"

    def _supervised(self, state: Mapping[str, Any]) -> bool:
        return "completionTime" in state["status"] or self.supervisor() is not None


def _job(job: Mapping[str, Any], status: Mapping[str, Any], deleting: Mapping[str, Any] | None) -> dict[str, Any]:
    manifest = job["manifest"]
    metadata = {**manifest["metadata"], "uid": job["uid"], "creationTimestamp": job["created"]}
    if deleting is not None:
        metadata["deletionTimestamp"] = deleting.get("at")
    return {**manifest, "metadata": metadata, "status": status}


def _why(state: Mapping[str, Any]) -> str:
    """What a waiting job waits for."""
    for pod in state["pods"]:
        for item in items(pod["status"].get("conditions")):
            if item.get("message"):
                return str(item["message"])
    return "it has just come"


def _unsupervised(snapshot: Snapshot, name: str) -> Snapshot:
    """A snapshot that says why nothing moves."""
    pods = []
    for pod in snapshot.pods:
        conditions = items(pod["status"].get("conditions"))
        if any(item.get("type") == "PodScheduled" for item in conditions):
            told = [{**item, "message": NO_SUPERVISOR} for item in conditions]
            pod = {**pod, "status": {**pod["status"], "conditions": told}}
        pods.append(pod)
    return Snapshot(snapshot.job, pods, [*snapshot.events, event("NoSupervisor", NO_SUPERVISOR, name, warning=True)])


def _require_runnable(manifest: Mapping[str, Any]) -> None:
    """Refuse what only Kubernetes can do, rather than run something else than was asked for."""
    spec = manifest["spec"]
    wrong: list[tuple[str, str]] = []
    policy = spec.get("elasticPolicy") or {}
    if policy and "Master" in spec["pytorchReplicaSpecs"]:
        wrong.append(("spec.elasticPolicy with a Master", "Make all pods workers, as ElasticPolicy does"))
    if policy.get("rdzvBackend", "c10d") != "c10d":
        wrong.append(("spec.elasticPolicy.rdzvBackend", "Use c10d"))
    if policy.get("metrics"):
        wrong.append(("spec.elasticPolicy.metrics", "Remove them: an elastic job takes what is free"))
    if (spec.get("runPolicy") or {}).get("suspend"):
        wrong.append(("spec.runPolicy.suspend", "Remove the queue: the local cluster queues by itself"))
    for kind, replica in spec["pytorchReplicaSpecs"].items():
        pod, where = replica["template"]["spec"], f"spec.pytorchReplicaSpecs.{kind}"
        if replica.get("restartPolicy", "Never") not in (("Never", "OnFailure") if policy else ("Never",)):
            wrong.append((f"{where}.restartPolicy", "Use Never, and let Airflow retry the job"))
        wrong += [
            (f"{where}: {resource}", "Ask for cpu, memory and GPUs only")
            for resource in _extended(pod["containers"][0])
        ]
        # Waiting for the master's name is for pods that need names.
        first = [item for item in pod.get("initContainers") or [] if item.get("name") != AWAIT_MASTER]
        if len(pod["containers"]) > 1 or first:
            wrong.append((f"{where}: more than one container", "Leave only the container `pytorch`"))
        container = pod["containers"][0]
        if not container.get("command"):
            wrong.append((f"{where}: no command", "Name the command: there is no image to take it from"))
        shm = {item.get("name") for item in pod.get("volumes", []) if "emptyDir" in item}
        if any(mount.get("name") not in shm for mount in container.get("volumeMounts", [])):
            wrong.append((f"{where}: volumes", "Use addresses in S3 or paths of this machine instead"))
        if any("valueFrom" in item for item in container.get("env", [])):
            wrong.append(
                (f"{where}: env with valueFrom", "Set it in the environment of the local cluster's supervisor")
            )
    if wrong:
        name = f"job {manifest['metadata']['namespace']}/{manifest['metadata']['name']}"
        cause = f"the local cluster cannot do this: {', '.join(f'`{what}`' for what, _ in wrong)}"
        raise JobRefusedError(name, cause, " ".join(f"{mend}." for _, mend in wrong))


def _extended(container: Mapping[str, Any]) -> list[str]:
    """Resources that only Kubernetes' device plugins know; whole GPUs are ours too."""
    resources = container.get("resources") or {}
    asked = {*(resources.get("limits") or {}), *(resources.get("requests") or {})}
    return sorted(name for name in asked if "/" in name and not name.endswith("/gpu"))
