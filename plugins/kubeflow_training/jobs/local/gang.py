"""One job of the local cluster: its pods start together, and together they end; those of an elastic one come and go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kubeflow_training.jobs.elastic import node_range
from kubeflow_training.jobs.local import processes, status
from kubeflow_training.jobs.local.capacity import Resources, gang_resources, pod_resources, size_that_fits
from kubeflow_training.jobs.local.environment import POD_MARK, grace_seconds, pod_spec, template
from kubeflow_training.jobs.local.layout import read_json, timestamp, write_json
from kubeflow_training.jobs.local.pods import Pods
from kubeflow_training.jobs.local.records import read_job, read_record, read_state, seconds
from kubeflow_training.jobs.local.standing import Standing
from kubeflow_training.jobs.shapes import moment

_KEEPER_START_SECONDS: Final = 60
_EVENTS: Final = 50
_LONGEST_PAUSE: Final = 60.0  # seconds before an elastic gang's pod is started again; the first pause is one second


class Gang:
    """A job's folder, brought forward by `step`. What must survive is in `state.json` or in the pods' folders.

    :raises ValueError: if the folder holds no readable job.
    """

    def __init__(self, folder: Path) -> None:
        job = read_job(folder)
        if job is None:
            raise ValueError(f"{folder} holds no job")
        self.folder = folder
        self.manifest: dict[str, Any] = job["manifest"]
        self.uid: str = job["uid"]
        self.order: int = job["order"]
        self.name: str = self.manifest["metadata"]["name"]
        self.key = f"{self.manifest['metadata']['namespace']}/{self.name}"
        self.least: Resources = gang_resources(self.manifest, node_range(self.manifest)[0])
        self.state = read_state(folder)
        self.pods = Pods(folder, self.manifest, self.uid, self.state)
        self.plans, self.elastic = self.pods.plans, self.pods.elastic
        self._written = json.dumps(self.state, sort_keys=True)
        self._keepers: dict[str, subprocess.Popen[bytes]] = {}
        self._spawned: dict[str, float] = {}
        self._since: dict[float, float] = {}
        self._before: dict[float, float] = {}
        self._ordered: set[tuple[str, str]] = set()
        if not self.state["status"]:
            status.condition(self.state["status"], "Created", "PyTorchJobCreated", "the job is accepted")
            self.save()

    # What the supervisor asks

    @property
    def ended(self) -> bool:
        return status.over(self.state["status"])

    @property
    def queued(self) -> bool:
        return self.state["plan"] is None and not self.ended and not self.deleted

    @property
    def standing(self) -> Standing:
        """What people have said of its place in the queue."""
        return Standing.read(self.folder, self.uid)

    @property
    def deleted(self) -> bool:
        return (self.folder / "delete.json").exists()

    @property
    def holds(self) -> bool:
        """Whether it uses the machine: it was started, and not all of its pods have ended."""
        return any(not self.pods.over(plan) for plan in self.pods.placed())

    @property
    def held(self) -> Resources:
        """What it uses, until its last pod has ended."""
        return gang_resources(self.manifest, len(self.pods.placed())) if self.holds else Resources()

    @property
    def growing(self) -> bool:
        """Whether it runs with fewer pods than it asked for, and takes more."""
        room = self.elastic and len(self.pods.placed()) < len(self.plans)
        return room and self.holds and not self.ended and self.state["ending"] is None

    @property
    def port(self) -> int | None:
        return (self.state["plan"] or {}).get("port")

    @property
    def gpus(self) -> list[str]:
        return [str(gpu) for gpus in (self.state["plan"] or {}).get("gpus", {}).values() for gpu in gpus]

    @property
    def pods_placed(self) -> int:
        return len(self.pods.placed())

    def placeable(self, free: Resources) -> int:
        """How many of its pods there would be room for, one by one."""
        sizes = range(len(self.plans), 0, -1)
        return next((n for n in sizes if not gang_resources(self.manifest, n).missing(free)), 0)

    def seconds_since(self, moment: float) -> float:
        """Seconds since something was first seen here that happened at this Unix time: the clock may have been set."""
        return time.monotonic() - self._since.setdefault(moment, time.monotonic())

    def fits(self, free: Resources) -> int:
        """How many of its pods could run with that much free; 0 if too few."""
        return size_that_fits(self.manifest, free)

    # What the supervisor orders

    def wait(self, message: str, fitting: int = 0) -> None:
        """Say what it waits for.

        :param fitting: how many of its pods would have room.
        """
        self.state["pods"] = [
            status.pod(plan, self.manifest, self.uid, waiting=message, fits=plan.rank < fitting) for plan in self.plans
        ]
        self.save()

    def refuse(self, reason: str, message: str) -> None:
        """End it before it began."""
        self.state["pods"] = []
        self._event(reason, message, warning=True)
        status.condition(self.state["status"], "Failed", reason, message)
        self.save()

    def start(self, port: int, gpus: Sequence[str] | None, pods: int | None = None) -> None:
        """Start its pods. The plan is on disk before the first process runs.

        :param gpus: for its pods, each of which gets its own; None on a machine that has none at all.
        :param pods: how many, the first ones; all of them unless given.
        """
        self.state["plan"] = {"port": port, "gpus": {}, "pods": []}
        self.state["status"]["startTime"] = timestamp()
        self._event("Started", f"{pods or len(self.plans)} of {len(self.plans)} pods start together")
        try:
            self.grow(gpus, len(self.plans) if pods is None else pods)
        except OSError:
            if not self._spawned:  # a full disk: it waits on
                self.state["plan"] = None
            raise

    def grow(self, gpus: Sequence[str] | None, pods: int) -> None:
        """Start as many more of its pods."""
        placed = len(self.pods.placed())
        new, free = self.plans[placed : placed + pods], list(gpus or ())
        for plan in new:
            if gpus is not None:
                count = pod_resources(template(plan, self.manifest)).gpus
                self.state["plan"]["gpus"][plan.name], free = free[:count], free[count:]
            self._prepare(plan)
        self.state["plan"]["pods"] = [plan.name for plan in self.plans[: placed + pods]]
        if placed:
            self._event("Grown", f"{', '.join(plan.name for plan in new)} joins")
        self.state["pods"] = self.pods.shown()
        self.save()
        for plan in new:
            self._spawn(plan)

    def adopt(self) -> None:
        """After a restart of the supervisor: start keepers that had not begun; one that has holds its lock."""
        for plan in self.pods.placed():
            folder = self.pods.folder(plan)
            if not (folder / "spec.json").exists():
                self._prepare(plan)
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
            self.end("deleted", seconds(order.get("grace")))
        if self.state["plan"] is None:
            return
        for plan in self.pods.placed():
            self._look(plan)
        if not self.ended:
            self._judge()
        self._revive()
        if self.state["ending"]:
            self._order_pods()
        self.state["pods"] = self.pods.shown()
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
        leader = self.pods.leader()
        master = self.pods.code(leader) if leader else None
        failed = [plan.name for plan in self.pods.placed() if self.pods.over(plan) and self.pods.code(plan) != 0]
        started = moment(job.get("startTime"))
        deadline = (self.manifest["spec"].get("runPolicy") or {}).get("activeDeadlineSeconds")
        if ending and ending["why"] == "deleted":
            return
        if ending and ending["why"] == "shutdown":
            if not self.holds:
                kind, reason = ("Succeeded", "PyTorchJobSucceeded") if master == 0 else ("Failed", "NodeShutdown")
                told = f"{leader.name} succeeded" if leader and master == 0 else "the local cluster was stopped"
                self._note_end()
                status.condition(job, kind, reason, told)
            return
        if leader and master == 0:
            # Workers leave with the master; whoever stays longer than the grace period is ended.
            if not self.holds:
                self._note_end()
                status.condition(job, "Succeeded", "PyTorchJobSucceeded", f"{leader.name} succeeded")
            elif (since := self.pods.finished(leader)) and self.seconds_since(since) > grace_seconds(
                leader, self.manifest
            ):
                self.end("succeeded")
        elif failed:
            self._event("PodFailed", f"{', '.join(failed)} failed; the others are ended", warning=True)
            limit = " and the limit of restarts is reached" if self.elastic else ""
            self._note_end()
            status.condition(job, "Failed", "PyTorchJobFailed", f"{', '.join(failed)} failed{limit}")
            self.end("failed")
        elif deadline is not None and started and self.age(started.timestamp()) > deadline:
            status.condition(
                job, "Failed", "DeadlineExceeded", f"the job ran longer than its deadline of {deadline} seconds"
            )
            self.end("deadline")
        elif all(self.pods.records.get(plan.name) for plan in self.pods.placed()) and not status.has(job, "Running"):
            status.condition(job, "Running", "PyTorchJobRunning", "its pods run")

    def _note_end(self) -> None:
        """The job ends when the last of its pods did: what these ran is right, whatever the clock was set to."""
        ends = [end for plan in self.pods.placed() if (end := self.pods.finished(plan)) is not None]
        self.state["status"].setdefault("completionTime", timestamp(max(ends, default=None)))

    def age(self, moment: float) -> float:
        """Seconds since this Unix time: by the clock up to this supervisor's first look, and not by it from then on."""
        self._before.setdefault(moment, max(0.0, time.time() - moment))
        return self._before[moment] + self.seconds_since(moment)

    def _revive(self) -> None:
        """Start the pods of an elastic gang again, each after a pause that doubles with every time."""
        for plan in self.pods.placed():
            if not self.pods.returns(plan):
                continue
            count, ended = self.state["restarts"].get(plan.name, 0), self.pods.finished(plan)
            keeper = self.pods.records.get(plan.name, {}).get("keeper")
            pause = min(2.0 ** min(count, 10), _LONGEST_PAUSE)
            if (ended is not None and self.seconds_since(ended) < pause) or processes.alive(keeper):
                continue
            folder = self.pods.folder(plan)
            self.state["restarts"][plan.name] = count + 1
            self.state["lost"].pop(plan.name, None)
            self._event("Restarted", f"{plan.name} ended with exit code {self.pods.code(plan)} and is started again")
            self.pods.records.pop(plan.name, None)
            self._keepers.pop(plan.name, None)
            self.save()
            # Whoever is killed here finds a pod without status, and starts it.
            (folder / "termination-log").unlink(missing_ok=True)
            if (folder / "status.json").exists():
                (folder / "status.json").replace(folder / "previous.json")
            self._spawn(plan)

    def _look(self, plan: status.PodPlan) -> None:
        """Read what the pod's keeper wrote, and notice a keeper that died."""
        if self.pods.down(plan):
            return
        folder = self.pods.folder(plan)
        record = read_record(folder / "status.json")
        if record is None:
            keeper = self._keepers.get(plan.name)
            crashed = keeper is not None and keeper.poll() not in (None, 0)
            late = time.monotonic() - self._spawned.setdefault(plan.name, time.monotonic()) > _KEEPER_START_SECONDS
            if crashed or late:
                self._lose(plan, None)
            return
        if "running" in record["state"] and not processes.alive(record.get("keeper")):
            # It may have written the end between our look at the file and our look at the process.
            record = read_record(folder / "status.json") or record
            if "running" in record["state"]:
                self._lose(plan, record.get("session"))
        self.pods.records[plan.name] = record

    def _lose(self, plan: status.PodPlan, session: int | None) -> None:
        processes.kill_marked(f"{POD_MARK}={plan.uid}", session)
        self.state["lost"][plan.name] = timestamp()
        self._event("NodeLost", f"the process that runs {plan.name} was killed; how it ended is unknown", warning=True)

    def _order_pods(self) -> None:
        ending = self.state["ending"]
        for plan in self.pods.placed():
            record = self.pods.records.get(plan.name)
            # Without a record its keeper is still starting and would die of the signal: the next look will do.
            if record is None or self.pods.down(plan):
                continue
            order = (plan.name, str(ending["grace"]))
            if order in self._ordered:
                continue
            write_json(self.pods.folder(plan) / "stop.json", {"grace": ending["grace"]})
            try:
                os.kill(record["keeper"]["pid"], signal.SIGTERM)
            except ProcessLookupError:
                continue
            self._ordered.add(order)

    # What it writes and starts

    def _event(self, reason: str, message: str, *, warning: bool = False) -> None:
        self.state["events"] = [
            *self.state["events"][-_EVENTS:],
            status.event(reason, message, self.name, warning=warning),
        ]

    def _prepare(self, plan: status.PodPlan) -> None:
        folder = self.pods.folder(plan)
        (folder / "work").mkdir(parents=True, exist_ok=True)
        gpus = self.state["plan"]["gpus"].get(plan.name)
        write_json(folder / "spec.json", pod_spec(plan, self.manifest, folder, self.state["plan"]["port"], gpus))

    def _spawn(self, plan: status.PodPlan) -> None:
        folder = self.pods.folder(plan)
        with (folder / "keeper.log").open("ab") as errors:
            self._keepers[plan.name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "kubeflow_training.jobs.local.pod", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        self._spawned[plan.name] = time.monotonic()
