"""One job of the local cluster: its pods start together, and together they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kubeflow_training.jobs.local import processes, status
from kubeflow_training.jobs.local.capacity import Resources, gang_resources, pod_resources
from kubeflow_training.jobs.local.layout import read_json, timestamp, write_json
from kubeflow_training.jobs.manifest import CONTAINER, DEFAULT_GRACE_SECONDS
from kubeflow_training.jobs.reasons import moment

POD_MARK: Final = "KUBEFLOW_TRAINING_POD_UID"
_KEEPER_START_SECONDS: Final = 60
_EVENTS: Final = 50


class Gang:
    """A job's folder, brought forward by `step`. What must survive is in `state.json` or in the pods' folders.

    :raises ValueError: if the folder holds no readable job.
    """

    def __init__(self, folder: Path) -> None:
        job = read_json(folder / "job.json")
        if job is None:
            raise ValueError(f"{folder} holds no job")
        self.folder = folder
        self.manifest: dict[str, Any] = job["manifest"]
        self.uid: str = job["uid"]
        self.order: int = job["order"]
        self.name: str = self.manifest["metadata"]["name"]
        self.key = f"{self.manifest['metadata']['namespace']}/{self.name}"
        self.wants: Resources = gang_resources(self.manifest)
        self.plans = status.pod_plans(self.manifest, self.uid)
        empty: dict[str, Any] = {"status": {}, "pods": [], "events": [], "plan": None, "ending": None, "lost": {}}
        self.state = empty | (read_json(folder / "state.json") or {})
        self._written = json.dumps(self.state, sort_keys=True)
        self._records: dict[str, dict[str, Any]] = {}
        self._keepers: dict[str, subprocess.Popen[bytes]] = {}
        self._spawned: dict[str, float] = {}
        self._ordered: set[tuple[str, str]] = set()
        if not self.state["status"]:
            status.condition(self.state["status"], "Created", "PyTorchJobCreated", "the job is accepted")
            self.save()

    # What the supervisor asks

    @property
    def ended(self) -> bool:
        return status.has(self.state["status"], "Succeeded") or status.has(self.state["status"], "Failed")

    @property
    def queued(self) -> bool:
        return self.state["plan"] is None and not self.ended and not self.deleted

    @property
    def deleted(self) -> bool:
        return (self.folder / "delete.json").exists()

    @property
    def holds(self) -> bool:
        """Whether it uses the machine: it was started, and not all of its pods have ended."""
        return self.state["plan"] is not None and any(not self._over(plan) for plan in self.plans)

    @property
    def port(self) -> int | None:
        return (self.state["plan"] or {}).get("port")

    @property
    def gpus(self) -> list[int]:
        return [gpu for gpus in (self.state["plan"] or {}).get("gpus", {}).values() for gpu in gpus]

    # What the supervisor orders

    def wait(self, message: str) -> None:
        """Say what it waits for."""
        self.state["pods"] = [status.pod(plan, self.manifest, self.uid, waiting=message) for plan in self.plans]
        self.save()

    def refuse(self, reason: str, message: str) -> None:
        """End it before it began."""
        self.state["pods"] = []
        self._event(reason, message, warning=True)
        status.condition(self.state["status"], "Failed", reason, message)
        self.save()

    def start(self, port: int, gpus: Sequence[int]) -> None:
        """Start every pod. The plan is on disk before the first process runs."""
        free = list(gpus)
        given: dict[str, list[int]] = {}
        for plan in self.plans:
            count = pod_resources(self._template(plan)).gpus
            given[plan.name], free = free[:count], free[count:]
        self.state["plan"] = {"port": port, "gpus": given}
        self.state["status"]["startTime"] = timestamp()
        self._event("Started", f"{len(self.plans)} pods start together")
        for plan in self.plans:
            folder = self._pod_folder(plan)
            (folder / "work").mkdir(parents=True, exist_ok=True)
            write_json(folder / "spec.json", self._spec(plan))
        self._show()
        self.save()
        for plan in self.plans:
            self._spawn(plan)

    def adopt(self) -> None:
        """After a restart of the supervisor: start keepers that had not begun; one that has holds its lock."""
        if self.state["plan"] is None:
            return
        for plan in self.plans:
            folder = self._pod_folder(plan)
            if not (folder / "spec.json").exists():
                (folder / "work").mkdir(parents=True, exist_ok=True)
                write_json(folder / "spec.json", self._spec(plan))
            if not (folder / "status.json").exists() and plan.name not in self.state["lost"]:
                self._spawn(plan)

    def end(self, why: str, grace: float | None = None) -> None:
        """With the next `step`, have every pod end, for the first reason given; a later order only shortens the grace.

        Not saved here: readers must see conditions and pods of the same moment.
        """
        ending = self.state["ending"]
        if ending is None:
            self.state["ending"] = {"why": why, "grace": grace, "at": timestamp()}
        elif grace is not None and (ending["grace"] is None or grace < ending["grace"]):
            ending["grace"] = grace

    def step(self) -> None:
        """Look at the pods once and do what follows."""
        if (order := read_json(self.folder / "delete.json")) is not None and order.get("uid") in (None, self.uid):
            self.end("deleted", order.get("grace"))
        if self.state["plan"] is None:
            return
        for plan in self.plans:
            self._look(plan)
        if not self.ended:
            self._judge()
        if self.state["ending"]:
            self._order_pods()
        self._show()
        self.save()

    def reap(self) -> None:
        """Collect the keepers that have ended."""
        for keeper in self._keepers.values():
            keeper.poll()

    def save(self) -> None:
        """Write the state if it has changed."""
        text = json.dumps(self.state, sort_keys=True)
        if text != self._written:
            write_json(self.folder / "state.json", self.state)
            self._written = text

    # How it decides

    def _judge(self) -> None:
        """Set the job's end, once its pods, the clock or an order give one."""
        job, ending = self.state["status"], self.state["ending"]
        codes = {plan.name: self._code(plan) for plan in self.plans}
        master = codes[self.plans[0].name]
        failed = [name for name, code in codes.items() if code not in (None, 0)]
        started = moment(job.get("startTime"))
        deadline = self.manifest["spec"].get("runPolicy", {}).get("activeDeadlineSeconds")
        if ending and ending["why"] == "deleted":
            return
        if ending and ending["why"] == "shutdown":
            if not self.holds:
                kind, reason = ("Succeeded", "PyTorchJobSucceeded") if master == 0 else ("Failed", "NodeShutdown")
                status.condition(
                    job, kind, reason, "the local cluster was stopped" if master else "the master succeeded"
                )
            return
        if master == 0:
            # Workers leave with the master; whoever stays longer than the grace period is ended.
            if not self.holds:
                status.condition(job, "Succeeded", "PyTorchJobSucceeded", "the master succeeded")
            elif (since := self._finished(self.plans[0])) and time.time() - since > self._grace(self.plans[0]):
                self.end("succeeded")
        elif failed:
            self._event("PodFailed", f"{', '.join(failed)} failed; the others are ended", warning=True)
            status.condition(job, "Failed", "PyTorchJobFailed", f"{', '.join(failed)} failed")
            self.end("failed")
        elif deadline is not None and started and time.time() - started.timestamp() > deadline:
            status.condition(
                job, "Failed", "DeadlineExceeded", f"the job ran longer than its deadline of {deadline} seconds"
            )
            self.end("deadline")
        elif all(self._records.get(plan.name) for plan in self.plans) and not status.has(job, "Running"):
            status.condition(job, "Running", "PyTorchJobRunning", "all pods run")

    def _look(self, plan: status.PodPlan) -> None:
        """Read what the pod's keeper wrote, and notice a keeper that died."""
        if self._over(plan):
            return
        folder = self._pod_folder(plan)
        record = read_json(folder / "status.json")
        if record is None:
            keeper = self._keepers.get(plan.name)
            crashed = keeper is not None and keeper.poll() not in (None, 0)
            late = time.monotonic() - self._spawned.get(plan.name, time.monotonic()) > _KEEPER_START_SECONDS
            if crashed or late:
                self._lose(plan, None)
            return
        if "running" in record["state"] and not processes.alive(record.get("keeper")):
            # It may have written the end between our look at the file and our look at the process.
            record = read_json(folder / "status.json") or record
            if "running" in record["state"]:
                self._lose(plan, record.get("session"))
        self._records[plan.name] = record

    def _lose(self, plan: status.PodPlan, session: int | None) -> None:
        processes.kill_marked(f"{POD_MARK}={plan.uid}", session)
        self.state["lost"][plan.name] = timestamp()
        self._event("NodeLost", f"the keeper of {plan.name} was killed; how it ended is unknown", warning=True)

    def _order_pods(self) -> None:
        ending = self.state["ending"]
        for plan in self.plans:
            record = self._records.get(plan.name)
            # Without a record its keeper is still starting and would die of the signal: the next look will do.
            if record is None or self._over(plan):
                continue
            order = (plan.name, str(ending["grace"]))
            if order in self._ordered:
                continue
            write_json(self._pod_folder(plan) / "stop.json", {"grace": ending["grace"]})
            try:
                os.kill(record["keeper"]["pid"], signal.SIGTERM)
            except ProcessLookupError:
                continue
            self._ordered.add(order)

    # What a pod is

    def _over(self, plan: status.PodPlan) -> bool:
        return plan.name in self.state["lost"] or "terminated" in self._records.get(plan.name, {}).get("state", {})

    def _code(self, plan: status.PodPlan) -> int | None:
        terminated = self._records.get(plan.name, {}).get("state", {}).get("terminated")
        if terminated is None:
            return 137 if plan.name in self.state["lost"] else None
        return int(terminated["exitCode"])

    def _finished(self, plan: status.PodPlan) -> float | None:
        at = moment(self._records.get(plan.name, {}).get("state", {}).get("terminated", {}).get("finishedAt"))
        return at.timestamp() if at else None

    def _show(self) -> None:
        shutdown = (self.state["ending"] or {}).get("why") == "shutdown"
        self.state["pods"] = [
            status.pod(
                plan,
                self.manifest,
                self.uid,
                record=self._records.get(plan.name),
                lost=self.state["lost"].get(plan.name),
                shutdown=shutdown,
            )
            for plan in self.plans
        ]

    def _event(self, reason: str, message: str, *, warning: bool = False) -> None:
        self.state["events"] = [
            *self.state["events"][-_EVENTS:],
            status.event(reason, message, self.name, warning=warning),
        ]

    def _template(self, plan: status.PodPlan) -> Mapping[str, Any]:
        template: Mapping[str, Any] = self.manifest["spec"]["pytorchReplicaSpecs"][plan.kind.capitalize()]["template"]
        return template

    def _grace(self, plan: status.PodPlan) -> float:
        return float(self._template(plan)["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS))

    def _pod_folder(self, plan: status.PodPlan) -> Path:
        return self.folder / "pods" / plan.name

    def _spec(self, plan: status.PodPlan) -> dict[str, Any]:
        """What the keeper has to know: the command, and what the training operator would put into the environment."""
        pod = self._template(plan)["spec"]
        container = next(item for item in pod["containers"] if item["name"] == CONTAINER)
        folder = self._pod_folder(plan)
        argv = [*container.get("command", []), *container.get("args", [])]
        if argv[0] in ("python", "python3"):
            argv[0] = sys.executable
        processes_per_node = self.manifest["spec"].get("nprocPerNode", "1")
        each = int(processes_per_node) if str(processes_per_node).isdigit() else 1
        port, gpus = str(self.state["plan"]["port"]), self.state["plan"]["gpus"].get(plan.name, [])
        env = {
            "PYTHONUNBUFFERED": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": str(len(self.plans) * each),
            "RANK": str(plan.rank),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": port,
            "PET_NNODES": str(len(self.plans)),
            "PET_NPROC_PER_NODE": str(processes_per_node),
            "PET_NODE_RANK": str(plan.rank),
            **{item["name"]: item.get("value", "") for item in container.get("env", [])},
            "TERMINATION_LOG": str(folder / "termination-log"),
            "POD_NAME": plan.name,
            POD_MARK: plan.uid,
        }
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
        work = container.get("workingDir") or str(folder / "work")
        return {"argv": argv, "env": env, "cwd": work, "grace": self._grace(plan), "uid": plan.uid}

    def _spawn(self, plan: status.PodPlan) -> None:
        folder = self._pod_folder(plan)
        with (folder / "keeper.log").open("ab") as errors:
            self._keepers[plan.name] = subprocess.Popen(
                [sys.executable, "-m", "kubeflow_training.jobs.local.pod", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        self._spawned[plan.name] = time.monotonic()
