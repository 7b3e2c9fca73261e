"""When jobs that wait may start, by what the jobs ahead of them tell: on this machine, and in a queue of a cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dropforge import tracking
from dropforge.cli.gangs import PURPOSE, Gang, Gangs, jobs_of
from dropforge.cli.top import newest
from dropforge.cli.waits import average, starts
from dropforge.client.comparing.find import Row, tags_of
from dropforge.client.named import Named

if TYPE_CHECKING:
    from kubeflow_training.jobs.backend import Backend
    from kubeflow_training.jobs.local.standing import Waiting, Working


@dataclass(frozen=True)
class Etas:
    """Seconds from now, by the uid of each job; None where they cannot be known.

    :param known: MLflow's rows by DAG run. :param rows: all of them.
    """

    known: Mapping[str, Row]
    rows: Sequence[Row]

    def on_machine(
        self, cluster: Any, queued: Sequence[Waiting], working: Sequence[Working]
    ) -> dict[str, float | None]:
        """Of those that wait for this machine, in the order in which they do."""
        free = cluster.offers()
        if free is None:
            return {}
        for job in working:
            free = free - job.uses
        jobs = {gang.snapshot.uid: gang.snapshot.job for gang in Gangs([cluster], None).find()}
        left = [(job.uses, self._left(jobs.get(job.uid))) for job in working]
        behind = [job for job in queued if not job.standing.held]
        lasts = [(job.needs, self._lasts(jobs.get(job.uid))) for job in behind]
        return dict(zip((job.uid for job in behind), starts(free, left, lasts), strict=True))

    def in_queue(self, clusters: Sequence[Backend], queue: str, waiting: Sequence[Gang]) -> dict[str, float | None]:
        """Of those that wait in a queue of one namespace, as far as all before them are known.

        What is free of its quota is not told to people. The first would not wait if it sufficed, so each is counted as
        if it started on what running jobs of the same queue will leave: it may start sooner.
        """
        from kubeflow_training.jobs.kinds import kind_seen
        from kubeflow_training.jobs.local.capacity import Resources, job_resources
        from kubeflow_training.jobs.observation import kueue

        line: list[Gang] = []
        for gang in sorted(waiting, key=lambda gang: gang.seen.position or 0):
            elsewhere = kueue.others_before(kueue.workload_in(gang.snapshot.events))
            if gang.seen.position == len(line) + 1 and elsewhere == 0:
                line.append(gang)
        if not line:
            return {}
        jobs = [job.job for _, job in jobs_of(clusters, line[0].namespace, {kueue.QUEUE_LABEL: queue})]
        left = []
        for job in jobs:
            if not kind_seen(job).ended(job) and not kind_seen(job).suspended(job):
                with suppress(ArithmeticError, LookupError, StopIteration, TypeError, ValueError):  # others' jobs
                    left.append((job_resources(job), self._left(job)))
        lasts = [(job_resources(gang.snapshot.job), self._lasts(gang.snapshot.job)) for gang in line]
        return dict(zip((gang.snapshot.uid for gang in line), starts(Resources(), left, lasts), strict=True))

    def _left(self, job: Mapping[str, Any] | None) -> float | None:
        """How long a job will still work, as its training tells, else as its family's average does."""
        row = self._training(job)
        if row is None:
            return None
        told = newest(Named("", "", row)).get("train/eta_seconds")
        if told is not None:
            return max(0.0, told.value - max(0.0, time.time() - told.at))
        lasts, began = self._lasts(job), int(row["info"].get("start_time", 0)) / 1000
        return None if lasts is None else max(0.0, lasts - max(0.0, time.time() - began))

    def _lasts(self, job: Mapping[str, Any] | None) -> float | None:
        """How long a training takes, by the finished runs of its family."""
        row = self._training(job)
        if row is None:
            return None
        family = tags_of(row).get(tracking.TAG_FAMILY)
        ended = [
            Named("", "", one)
            for one in self.rows
            if one["info"].get("status") == "FINISHED" and tags_of(one).get(tracking.TAG_FAMILY) == family
        ]
        points = [newest(one).get("wall/seconds") for one in ended]
        return average([point.value for point in points if point is not None])

    def _training(self, job: Mapping[str, Any] | None) -> Row | None:
        """The run whose training the job is."""
        from kubeflow_training.jobs.manifest.ownership import Owner

        owner = None if job is None else Owner.of(job)
        if job is None or owner is None or (job["metadata"].get("labels") or {}).get(PURPOSE) != "train":
            return None
        return self.known.get(owner.run_id)
