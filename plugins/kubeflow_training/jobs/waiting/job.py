"""Waiting for one job: its log is shown, its state told, its limits kept. The same for trigger, sensor and operator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Protocol, TypeVar

from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.errors import BackendUnavailableError, JobError
from kubeflow_training.jobs.observation import Observation, Phase, nodes, observe, told_best
from kubeflow_training.jobs.observation.phases import TAKEN
from kubeflow_training.jobs.observation.progress import for_people
from kubeflow_training.jobs.observation.reader import may_replace
from kubeflow_training.jobs.observation.reasons import Reason
from kubeflow_training.jobs.shapes import mapping, storable
from kubeflow_training.jobs.waiting.joblog import LOG_ANNOTATION, TAIL, JobLog
from kubeflow_training.jobs.waiting.limits import Limits, exceeded, next_check
from kubeflow_training.jobs.waiting.moments import Moments
from kubeflow_training.jobs.waiting.turns import turn

T = TypeVar("T")
_WAITING: Final = frozenset({Phase.QUEUED, Phase.STARTING, Phase.RESTARTING})
_DOUBT_SECONDS: Final = 15.0
_NODE_SECONDS: Final = 3.0
"""From a failure until the nodes are read again: they tell of a broken GPU a moment after a rank has died of it."""
_FIRST_LOOK_SECONDS: Final = 30.0
"""That a limit waits for the first look: a job may have ended in time while no triggerer was there to see it."""
_AGAIN_SECONDS: Final = 1.0
_REFUSED_SECONDS: Final = (
    300.0  # that a cluster may refuse us before it counts as broken; rights change while one waits
)


class Look(Protocol):
    """What is known of a job at a moment; see `jobs.kubernetes.watching.subscription.Look`."""

    @property
    def known(self) -> bool: ...
    @property
    def snapshot(self) -> Snapshot | None: ...
    @property
    def trouble(self) -> JobError | None: ...


class Subscription(Protocol):
    """News of one job, from a feed that many share."""

    def look(self) -> Look: ...
    async def changed(self, within: float | None = None) -> bool: ...
    async def refresh(self) -> None: ...
    async def last_words(self, uid: str) -> Sequence[Mapping[str, Any]]: ...
    def waits(self, waiting: bool) -> None: ...
    async def close(self) -> None: ...


class Logs(Protocol):
    """Readers of a job's logs, which write into a `JobLog`."""

    def update(self, snapshot: Snapshot | None) -> None:
        """The job's pods are these; begin to read, go on, or read to the end."""

    async def finish(self) -> None:
        """The job has ended: return when all that can be read is shown."""

    async def tail(self, pod: Mapping[str, Any], lines: int) -> list[str]: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class End:
    """How the waiting ended.

    :param kind: "ended", or "timeout" if a limit was passed; then the job may still run.
    :param why: one line for a person.
    :param tails: last lines of ranks that failed, by replica.
    """

    kind: Literal["ended", "timeout"]
    observation: Observation | None
    why: str
    tails: dict[str, list[str]] = field(default_factory=dict)


class Waiting:
    """
    :param job: what to call the job in messages.
    :param uid: the job's; None for whichever has the name.
    :param must_exist: whether a job that is not there is lost, or is waited for.
    :param settle_seconds: how long to wait, after the first failure, for the other pods' ends and last lines.
    """

    def __init__(
        self,
        job: str,
        uid: str | None,
        subscription: Subscription,
        log: JobLog,
        logs: Logs,
        *,
        limits: Limits | None = None,
        must_exist: bool = True,
        settle_seconds: float = 15.0,
    ) -> None:
        self._job, self._uid, self._subscription, self._log, self._logs = job, uid, subscription, log, logs
        self._must_exist, self._settle = must_exist, settle_seconds
        self.observation: Observation | None = None
        self.version = 0
        """Rises with every change of the observation."""
        self._said: tuple[Phase, str] | None = None
        self._trouble = 0
        self._told_trouble: JobError | None = None
        self._refused_since: float | None = None
        self._snapshot: Snapshot | None = None
        self._sign: Observation | None = None
        self._known = False
        self._moments = Moments(limits or Limits())

    async def run(self) -> End:
        """Until the job has ended or a limit is passed.

        :raises JobError: if the cluster refuses for good to tell about the job.
        """
        first = time.monotonic() + _FIRST_LOOK_SECONDS
        try:
            while True:
                async with turn():
                    seen = self._see()
                if seen is not None and seen.ended and (end := await self._settled()):
                    return end
                if not self._known and (left := first - time.monotonic()) > 0:
                    await self._subscription.changed(left)
                    continue
                limits, by_now = self._moments.by_now(seen)
                now = time.time()
                if why := exceeded(limits, by_now, now):
                    return End("timeout", seen, why)
                await self._subscription.changed(_pause(limits, by_now, now))
        finally:
            await self._logs.close()

    def _see(self) -> Observation | None:
        """Look, say what is new, and tell the readers of the log."""
        look = self._subscription.look()
        self._complain(look.trouble)
        self._known = self._known or look.known
        if not look.known:
            return self.observation
        if look.snapshot is None and self._snapshot is None and not self._must_exist:
            self._say(Phase.QUEUED, "The job does not exist yet")
            return None
        if look.snapshot is not None:
            self._snapshot = look.snapshot
            self._log.where = look.snapshot.annotations.get(LOG_ANNOTATION)
        self._logs.update(look.snapshot)
        seen = self._with_sign(self._observe(look.snapshot))
        self._subscription.waits(seen.phase in _WAITING or _may_replace(look.snapshot))
        self._say(seen.phase, seen.message)
        if seen != self.observation:
            self.observation = seen
            self.version += 1
        return seen

    def _with_sign(self, seen: Observation) -> Observation:
        """The same, or who took the pods of a job that has failed: one that may restart fails when they are gone."""
        if seen.phase is Phase.FAILED:
            return seen if self._sign is None else told_best(self._sign, seen)
        if seen.reason in TAKEN and seen.pod is not None:
            self._sign = replace(seen, phase=Phase.FAILED)
        elif seen.phase is Phase.RUNNING and seen.reason is None:
            self._sign = None  # its node speaks again
        return seen

    def _see_again(self, before: Observation) -> Observation | None:
        """Look, and keep what the look before knew better: the pods may be gone."""
        seen = self._see()
        return None if seen is None else told_best(before, seen)

    async def _settled(self) -> End | None:
        """Whether an ended job has nothing more to tell: the rank that failed first may be the last to say so."""
        began = time.monotonic()
        until, seen = began + self._settle, self.observation
        if seen is not None and seen.phase is Phase.FAILED:
            await self._refresh(until)
            seen = self._see_again(seen)
            while seen is not None and seen.phase is Phase.FAILED and seen.pods_running:
                left = until - time.monotonic()
                if left <= 0:
                    break
                await self._subscription.changed(left)
                seen = self._see_again(seen)
            if seen is not None and self._snapshot is not None and nodes.silent(seen, self._snapshot.events):
                await asyncio.sleep(max(0.0, min(until, began + _NODE_SECONDS) - time.monotonic()))
                await self._refresh(until)
                seen = self._see_again(seen)
        if seen is not None and seen.phase is Phase.SUCCEEDED and _unbegun(self._snapshot):
            # After an outage the job's end may be told before that of its pods, whose logs would never be begun.
            await self._refresh(until)
            again = self._see_again(seen)
            seen = again if again is not None and again.phase is Phase.SUCCEEDED else seen  # it may be gone by now
        if seen is not None and seen.phase is Phase.LOST:
            seen = await self._last_words() or seen
        if seen is None or not seen.ended:
            return None
        await self._logs.finish()
        last = self._subscription.look().snapshot
        at_last = self._observe(last) if last is not None else None
        if at_last is not None and at_last.ended:
            seen = told_best(seen, at_last)
        else:
            seen = replace(seen, progress=self._log.progress)
        self.observation = seen
        self.version += 1
        return End("ended", seen, seen.message, await self._tails(seen))

    async def _tails(self, seen: Observation) -> dict[str, list[str]]:
        if seen.phase is Phase.SUCCEEDED or seen.replica is None:
            return {}
        known = self._log.tails().get(seen.replica)
        if known and not self._log.full:
            return {seen.replica: known}
        pods = self._snapshot.pods if self._snapshot else ()
        pod = next((item for item in pods if (item.get("metadata") or {}).get("name") == seen.pod), None)
        lines = for_people(await self._logs.tail(pod, 2 * TAIL)) if pod is not None else []
        return {seen.replica: storable(lines[-TAIL:] or known or [])}

    async def _last_words(self) -> Observation | None:
        """How a job ended that is gone: it may have been removed after its end, while nobody could look."""
        uid = self._uid or (self._snapshot.uid if self._snapshot else None)
        if uid is None:
            return None
        try:
            return observe(None, (), await self._subscription.last_words(uid), self._log.progress)
        except JobError as error:
            self._log.say(f"job {self._job} is gone; how it ended cannot be read: {error}")
            return None

    async def _refresh(self, until: float) -> None:
        """Ask for what a watch has not told yet. An API that is away is asked again until then (monotonic seconds)."""
        while True:
            try:
                await self._subscription.refresh()
                return
            except JobError as error:
                left = until - time.monotonic()
                if not isinstance(error, BackendUnavailableError) or left <= 0:
                    self._log.say(f"job {self._job} has ended; more about it cannot be read: {error}")
                    return
                await self._subscription.changed(min(left, _AGAIN_SECONDS))

    def _observe(self, snapshot: Snapshot | None) -> Observation:
        if snapshot is None:
            return observe(None, (), (), self._log.progress)
        listed, progress = snapshot.pods_listed, self._log.progress
        seen = observe(snapshot.job, snapshot.pods, snapshot.events, progress, pods_listed=listed)
        if seen.reason is not Reason.DEADLINE:
            return seen
        # By the clock it runs too long, and that may have been set meanwhile.
        now = self._moments.now_by(seen.started)
        return observe(snapshot.job, snapshot.pods, snapshot.events, progress, now=now, pods_listed=listed)

    def _say(self, phase: Phase, message: str) -> None:
        if self._said != (phase, message):
            self._said = (phase, message)
            self._log.say(f"job {self._job}: {phase}. {message}")

    def _complain(self, trouble: JobError | None) -> None:
        """Say so the first time, and then ever more rarely; a refusal that lasts is an error."""
        if trouble is None:
            self._trouble, self._refused_since = 0, None
        elif trouble is not self._told_trouble:
            self._trouble += 1
            if self._trouble & (self._trouble - 1) == 0:
                self._log.say(f"cannot ask about job {self._job}, and keep trying: {trouble}")
            if isinstance(trouble, BackendUnavailableError):
                self._refused_since = None
            else:
                self._refused_since = self._refused_since or time.monotonic()
                if time.monotonic() - self._refused_since > _REFUSED_SECONDS:
                    raise trouble
        self._told_trouble = trouble


def _pause(limits: Limits, seen: Observation | None, now: float) -> float | None:
    """Seconds until there may be something to see without any news; None if never."""
    at = next_check(limits, seen)
    # What is wrong with a pod or node may count only once it has lasted.
    doubtful = seen is not None and (seen.phase in _WAITING or seen.reason is not None)
    pauses = [max(0.05, at - now)] if at is not None else []
    return min([*pauses, _DOUBT_SECONDS] if doubtful else pauses, default=None)


def _unbegun(snapshot: Snapshot | None) -> bool:
    """Whether a job's pods are known from before they began, or not at all."""
    if snapshot is None or not snapshot.pods_listed:
        return False
    phases = [mapping(pod.get("status")).get("phase") for pod in snapshot.pods]
    return not phases or "Pending" in phases


def _may_replace(snapshot: Snapshot | None) -> bool:
    return snapshot is not None and may_replace(snapshot.job, snapshot.pods)


def run_blocking(work: Coroutine[Any, Any, T], check: Callable[[], None], every: float = 0.2) -> T:
    """Wait in a thread that has no event loop, as a worker's has none.

    :param check: called again and again; what it raises ends the waiting.
    """

    async def both() -> T:
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                check()
                await asyncio.wait({task}, timeout=every)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return asyncio.run(both())
