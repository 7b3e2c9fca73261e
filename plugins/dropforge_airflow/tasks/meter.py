"""The hours of a run: written down with each gang, held against the recipe's limits, and shown in MLflow at its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from dropforge import aside, costs, gangs, layout
from dropforge.costs import Hours, Rates, Tariff
from dropforge.gangs import Gang
from dropforge.job import RUN_DIGEST, RUN_FOLDER, queue_timeout
from dropforge.recipes.load import build_recipe
from dropforge.run import RunSpec
from dropforge.settings import from_env
from dropforge.stages import JOBS
from dropforge.store import S3Store, Store
from dropforge.text import counted
from dropforge_airflow import connection
from dropforge_airflow.tasks.opened import RunIdentity, read_spec

if TYPE_CHECKING:
    from kubeflow_training.jobs.observation import Observation

log = logging.getLogger(__name__)

_SECOND: Final = 1.0  # less than that is no time to run


class Meter:
    """What the gangs of a run hold. :param task: whose gang this is about."""

    def __init__(self, store: S3Store, spec: RunSpec, task: str) -> None:
        self.spec: Final = spec
        self._store, self._run, self._task = store, spec.run, task
        recipe = build_recipe(spec.recipe)
        self._compute, self._train = recipe.compute, recipe.train
        self._tariff, self._rates = Tariff.of(self._compute), gangs.rates_of(self._compute, task)

    @classmethod
    def of(cls, manifest: Any) -> Meter:
        """Of the job that a task's manifest asks for."""
        labels, notes = manifest["metadata"]["labels"], manifest["metadata"]["annotations"]
        store = connection.open_store(from_env().bucket)
        opened = RunIdentity(
            run=labels["dropforge/run"],
            family=labels["dropforge/family"],
            root=notes[RUN_FOLDER].rstrip("/"),
            run_digest=notes.get(RUN_DIGEST),
        )
        return cls(store, read_spec(store, opened), labels["dropforge/purpose"])

    def began(self, job: Mapping[str, Any], nodes: int | None = None) -> None:
        """A gang is there, new or found again; those before it have ended, if nobody has told it yet.

        :param nodes: how many it has, if not all of the recipe's.
        """
        now, known = time.time(), gangs.kept(self._store, self._run)
        before = [gang for gang in known if gang.task == self._task and gang.uid != job["uid"]]
        for gang in gangs.closed(before, now, {}):
            gangs.keep(self._store, self._run, gang)
        if all(gang.uid != job["uid"] for gang in known):
            rates = gangs.rates_of(self._compute, self._task, nodes)
            gangs.keep(self._store, self._run, self._gang(job, rates))

    def ended(self, job: Mapping[str, Any], seen: Observation | None) -> None:
        """The gang's end was seen, or is made now."""
        from kubeflow_training.jobs.observation import Phase, Reason

        started = seen.started.timestamp() if seen is not None and seen.started else None
        finished = seen.finished.timestamp() if seen is not None and seen.finished else time.time()
        known = next((gang for gang in gangs.kept(self._store, self._run) if gang.uid == job["uid"]), None)
        if known is not None and known.ended is not None:
            return
        rates = self._rates if known is None else known.rates
        found = self._gang(job, rates, started, finished)
        if seen is not None and seen.phase is not Phase.SUCCEEDED:
            found = replace(found, reason=str(seen.reason or ""))
        if seen is not None and seen.phase is Phase.FAILED:
            found = replace(found, reason=found.reason or str(Reason.UNKNOWN), failed=True)
            if self._task == "train":
                step = None if seen.progress is None else seen.progress.step  # its log may not have been read
                found = replace(found, step=step, saved=self._saved())
        gangs.keep(self._store, self._run, found)

    @property
    def queue_timeout(self) -> timedelta | None:
        """How long the job may wait for its first pod; None for ever."""
        return queue_timeout(self._compute)

    @property
    def min_nodes(self) -> int | None:
        """With how few nodes the training may run; None for all of them alone."""
        return self._compute.min_nodes if self._task == "train" else None

    def failed(self) -> list[Gang]:
        """The run's trainings that failed so far."""
        return gangs.failed(gangs.kept(self._store, self._run), "train")

    def left(self, uid: str | None) -> float | None:
        """Seconds that a gang may run, of all that the recipe lets the run use; None without a limit."""
        known = gangs.kept(self._store, self._run)
        rates = next((gang.rates for gang in known if gang.uid == uid), self._rates)
        found = gangs.used(known, time.time(), self._tariff, but=uid)
        return costs.seconds_left(found, rates, self._compute.limits, self._tariff)

    def used_up(self) -> str | None:
        """What to tell of a run that has used what it may; None of one that has not."""
        known = [gang for gang in gangs.kept(self._store, self._run) if gang.ended is not None]
        found = gangs.used(known, time.time(), self._tariff)
        left = costs.seconds_left(found, self._rates, self._compute.limits, self._tariff)
        if left is None or left >= _SECOND:
            return None
        return (
            f"Run {self._run} has used what it may: {found}, over {counted(len(known), 'job')} with retries, and "
            f"`compute.limits.stop_above` is {self._limit()}. It ends here, and its checkpoints stay. To continue, "
            f"start a run with `base.start: runs/{self._run}/step-N` and more hours"
        )

    def _limit(self) -> str:
        limits = self._compute.limits
        assert limits is not None
        assert limits.stop_above is not None
        found = limits.stop_above.model_dump(exclude_none=True)
        return ", ".join(f"{name} {value:g}" for name, value in found.items())

    def _saved(self) -> int | None:
        """The step of the checkpoint that the next gang will look at first; None if it cannot be looked for."""
        if self.spec.checkpoints_root != self.spec.root or self._train.fast_checkpoints is not None:
            return None  # perhaps on a volume or disks that only pods have
        try:
            folder = S3Store(self._store.bucket, layout.run_prefix(self._run).rstrip("/"), self._store.client)
            found = aside.newest(aside.sealed(folder), aside.known(folder))
        except Exception as error:  # the gang's end is written down all the same
            log.warning("The checkpoints of run %s could not be looked for: %r", self._run, error)
            return None
        return 0 if found is None else found.step

    def _gang(
        self, job: Mapping[str, Any], rates: Rates, started: float | None = None, ended: float | None = None
    ) -> Gang:
        return Gang(
            task=self._task,
            job=str(job["name"]),
            uid=str(job["uid"]),
            number=int(job.get("gang") or 1),
            gpus=rates.gpus,
            cores=rates.cores,
            created=job.get("created"),
            started=started,
            ended=ended,
        )


def settle(store: Store, spec: RunSpec, mlflow_run: str, starts: Mapping[str, float | None] | None = None) -> Hours:
    """The end of a run, however it ended: what its gangs have used, in MLflow as metrics and in a line.

    :param starts: see `seen_starts`; a gang whose end nobody has told has ended now. Without it nobody knows when it
        ended, and it is left out.
    """
    from dropforge import tracking

    run, now = spec.run, time.time()
    compute = build_recipe(spec.recipe).compute
    if starts is not None:
        for gang in gangs.closed(gangs.kept(store, run), now, starts):
            gangs.keep(store, run, gang)
    known = gangs.kept(store, run)
    ended = [gang for gang in known if gang.ended is not None]
    found = gangs.used(ended, now, Tariff.of(compute))
    told = [f"{found}; {counted(len(ended), 'job')}, retries among them"]
    if len(ended) < len(known):
        told.append(f"without {len(known) - len(ended)} whose end was not seen")
    limits = compute.limits
    if limits is not None and limits.stop_above is not None:
        told += costs.passed(found, limits.stop_above, "compute.limits.stop_above")
    uri = from_env().tracking_uri
    tracking.log_hours(uri, mlflow_run, found.metrics("cost"), tracking.TAG_COST, "; ".join(told))
    return found


def seen_starts(ti: Any) -> dict[str, float | None]:
    """When the newest gang of each task was seen to start, by uid; None if it was not.

    :param ti: of a task of the run: what triggers saw of jobs that were ended in the middle is in their tasks' XComs.
    """
    from kubeflow_training.jobs.observation import Observation
    from kubeflow_training.triggers import POSITION_KEY

    found: dict[str, float | None] = {}
    for task in JOBS:
        seen = ti.xcom_pull(task_ids=task, key=POSITION_KEY)
        if isinstance(seen, dict) and seen.get("uid") and seen.get("observation"):
            started = Observation.from_dict(seen["observation"]).started
            found[str(seen["uid"])] = started.timestamp() if started else None
    return found
