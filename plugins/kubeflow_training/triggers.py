"""Waiting for a job in the triggerer, with its log streamed into the task's log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from airflow.triggers.base import BaseTrigger, TriggerEvent

from kubeflow_training.asking.task import ended_by_user, task_state
from kubeflow_training.hooks import PyTorchJobHook
from kubeflow_training.jobs.observation import Observation
from kubeflow_training.jobs.shapes import storable
from kubeflow_training.jobs.waiting.job import Waiting
from kubeflow_training.jobs.waiting.joblog import JobLog, LogLimit
from kubeflow_training.jobs.waiting.limits import Limits
from kubeflow_training.jobs.waiting.turns import turn
from kubeflow_training.state_mismatch import reach

POSITION_KEY: Final = "pytorch_job_log"
"""XCom with the last observation, and where the log was left, so that another triggerer goes on there."""
_SAVES_PER_SECOND: Final = 20  # of all triggers of a process together
_RARER: Final = 60  # times the usual pause, at most, while saving fails
_ASKED: Final = 4  # times, before a trigger that is cancelled leaves its job as it is
_DELETING: Final = 30.0  # seconds in which the job of an ended task is deleted
_PAUSE: Final = 2.0  # seconds before that is tried again
_keeping = 0


class PyTorchJobTrigger(BaseTrigger):
    """Waits until a job has ended or a limit is passed, with one event at its end.

    The event is a dictionary: `kind` ("ended"; "timeout" when a limit is passed; "broken" when the waiting itself went
    wrong, which says nothing about the job), `job` (name, namespace, uid, `gang`), `observation` (or None), `why` (one
    line), and `tails` (the last lines of the rank that failed). The arguments are stored: no secret is among them.

    :param name, namespace, uid: the job; another job of that name counts as its loss.
    :param gang: number of the attempt, repeated in the event.
    :param kind, backend, kubernetes_conn_id, home: see `PyTorchJobHook`.
    :param poll_interval: seconds between two looks at the local cluster; Kubernetes reports news by itself.
    :param log_ranks: whose log lines to show: "all", "first" or "none".
    :param log_limit: how much of the log to show: a number of lines, or text like "20 MB"; None for all of it.
    :param deadline: Unix time at which to stop waiting; it survives a restart of the triggerer.
    :param queue_until: Unix time by which the job's first container must have started.
    :param queue_seconds: how long it may wait for that, counted again each time it is suspended or let go.
    :param run_seconds: how long the job may run; time in the queue or suspended does not count.
    :param min_nodes, place_seconds: when to stop waiting for all nodes, see `jobs.waiting.limits.Limits`.
    :param owned: whether the job is deleted when a user ends the task. Never when a triggerer does.
    :param must_exist: whether a job that was never seen is lost, or waited for.
    :param not_before: Unix time before which no event comes, see `state_mismatch.first_event_at`.
    """

    def __init__(
        self,
        *,
        name: str,
        namespace: str,
        uid: str | None = None,
        gang: int = 1,
        kind: str = "PyTorchJob",
        backend: str = "kubernetes",
        kubernetes_conn_id: str = "kubernetes_default",
        home: str | None = None,
        poll_interval: float = 2.0,
        log_ranks: str = "all",
        log_limit: int | str | None = None,
        deadline: float | None = None,
        queue_until: float | None = None,
        queue_seconds: float | None = None,
        run_seconds: float | None = None,
        min_nodes: int | None = None,
        place_seconds: float | None = None,
        owned: bool = True,
        must_exist: bool = True,
        not_before: float | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.namespace, self.uid, self.gang = name, namespace, uid, gang
        self.kind, self.backend, self.kubernetes_conn_id, self.home = kind, backend, kubernetes_conn_id, home
        self.poll_interval, self.log_ranks, self.log_limit = poll_interval, log_ranks, log_limit
        self.deadline, self.queue_until, self.run_seconds = deadline, queue_until, run_seconds
        self.queue_seconds = queue_seconds
        self.min_nodes, self.place_seconds = min_nodes, place_seconds
        self.owned, self.must_exist, self.not_before = owned, must_exist, not_before
        self._fired = False
        self._unsaved = 0  # failures in a row
        self._saved: tuple[int, int] | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            "kubeflow_training.triggers.PyTorchJobTrigger",
            {
                "name": self.name,
                "namespace": self.namespace,
                "uid": self.uid,
                "gang": self.gang,
                "kind": self.kind,
                "backend": self.backend,
                "kubernetes_conn_id": self.kubernetes_conn_id,
                "home": self.home,
                "poll_interval": self.poll_interval,
                "log_ranks": self.log_ranks,
                "log_limit": self.log_limit,
                "deadline": self.deadline,
                "queue_until": self.queue_until,
                "queue_seconds": self.queue_seconds,
                "run_seconds": self.run_seconds,
                "min_nodes": self.min_nodes,
                "place_seconds": self.place_seconds,
                "owned": self.owned,
                "must_exist": self.must_exist,
                "not_before": self.not_before,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        try:
            event = await self._wait()
        except Exception as error:
            # An exception would end the task as one whose job is not known; an event lets the operator decide.
            self.log.exception("waiting for job %s/%s broke", self.namespace, self.name)
            event = self._event("broken", None, f"{type(error).__name__}: {error}")
        await reach(self.not_before)
        self._fired = True
        yield event

    async def _wait(self) -> TriggerEvent:
        left = await self._left_at()
        async with turn():
            pass  # a triggerer may start a thousand of us at once
        log = JobLog(self._show, LogLimit.of(self.log_limit), left)
        waits = self._hook().waiting(
            self.name,
            self.namespace,
            log,
            uid=self.uid,
            ranks=self.log_ranks,
            limits=Limits(
                self.deadline,
                self.queue_until,
                self.run_seconds,
                self.min_nodes,
                self.place_seconds,
                self.queue_seconds,
            ),
            must_exist=self.must_exist,
            poll_interval=self.poll_interval,
        )
        async with waits as waiting:
            keeper = asyncio.create_task(self._keep(log, waiting))
            try:
                end = await waiting.run()
            finally:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
                await self._save(log, waiting)
        return self._event(end.kind, end.observation, end.why, tails=end.tails)

    async def on_kill(self) -> None:
        """Delete the job if a person ended the task; this is also called when another triggerer took over."""
        if not self.owned or self._fired:
            return
        for left in reversed(range(_ASKED)):
            try:
                state = await asyncio.to_thread(task_state, self.task_instance)
                break
            except Exception as error:
                if left:
                    await asyncio.sleep(1)
                    continue
                self.log.warning(
                    "job %s/%s is left as it is: Airflow does not say why: %r", self.namespace, self.name, error
                )
                return
        if not ended_by_user(state, deferred=True):
            self.log.info("job %s/%s continues: the task is %s", self.namespace, self.name, state)
            return
        await self._delete(state)

    async def _delete(self, state: str | None) -> None:
        """Nobody else comes after us: an outage that is short is waited out, and what became of it is told."""
        until, problem = time.monotonic() + _DELETING, "the cluster did not answer"
        for left in reversed(range(_ASKED)):
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await asyncio.to_thread(
                        lambda: self._hook().connect().delete(self.name, self.namespace, uid=self.uid)
                    )
                self.log.info("job %s/%s is deleted: the task was ended (%s)", self.namespace, self.name, state)
                return
            except TimeoutError:
                break
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                if left:
                    await asyncio.sleep(_PAUSE)
        self.log.error(
            "job %s/%s could not be deleted and may still run, although the task was ended (%s): %s",
            self.namespace,
            self.name,
            state,
            problem,
        )

    def _hook(self) -> PyTorchJobHook:
        return PyTorchJobHook(self.backend, kind=self.kind, kubernetes_conn_id=self.kubernetes_conn_id, home=self.home)

    def _show(self, line: str) -> None:
        self.log.info("%s", line)

    def _event(self, kind: str, observation: Observation | None, why: str, **more: Any) -> TriggerEvent:
        job = {"name": self.name, "namespace": self.namespace, "uid": self.uid, "gang": self.gang}
        return TriggerEvent(  # type: ignore[no-untyped-call]
            {
                "kind": kind,
                "job": job,
                "observation": observation.to_dict() if observation else None,
                "why": storable(why),
                **more,
            }
        )

    # What another triggerer and the pages have to know

    async def _left_at(self) -> dict[str, Any]:
        """Where an earlier triggerer left this job's log."""
        if (ti := self.task_instance) is None or not self.owned:
            return {}
        from airflow.sdk.execution_time.xcom import XCom

        try:
            found = await asyncio.to_thread(XCom.get_one, key=POSITION_KEY, **_address(ti))
        except Exception as error:
            self.log.warning("where the log was left is not known; it is shown from its beginning: %r", error)
            return {}
        return found if isinstance(found, dict) and found.get("uid") == self.uid else {}

    async def _keep(self, log: JobLog, waiting: Waiting) -> None:
        """Save what is new, the more rarely the more triggers of this process do so."""
        global _keeping
        _keeping += 1
        try:
            while True:
                await self._save(log, waiting)
                await asyncio.sleep(max(1.0, _keeping / _SAVES_PER_SECOND) * min(2**self._unsaved, _RARER))
        finally:
            _keeping -= 1

    async def _save(self, log: JobLog, waiting: Waiting) -> None:
        version = (log.version, waiting.version)
        if (ti := self.task_instance) is None or not self.owned or version == self._saved:
            return
        from airflow.sdk.execution_time.xcom import XCom

        seen = waiting.observation
        value = {"uid": self.uid, "observation": seen.to_dict() if seen else None, "at": time.time(), **log.state()}
        try:
            await _to_the_end(XCom.set, POSITION_KEY, value, **_address(ti))
            self._saved, self._unsaved = version, 0
        except Exception as error:
            if not self._unsaved:
                self.log.warning("where the log is cannot be kept; another triggerer would repeat it: %r", error)
            self._unsaved += 1


async def _to_the_end(function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Call in a thread, and return or be cancelled only when that has ended: what is written next comes after it."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **named))
    try:
        await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.gather(call, return_exceptions=True)
        raise


def _address(ti: Any) -> dict[str, Any]:
    return {"dag_id": ti.dag_id, "task_id": ti.task_id, "run_id": ti.run_id, "map_index": ti.map_index}
