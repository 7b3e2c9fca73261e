"""Waiting for a job in the triggerer, with its log streamed into the task's log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from airflow.triggers.base import BaseTrigger, TriggerEvent

from kubeflow_training.hooks import PyTorchJobHook
from kubeflow_training.jobs.limits import Limits, exceeded
from kubeflow_training.jobs.progress import Progress
from kubeflow_training.jobs.watch import Watch
from kubeflow_training.taskstate import ended_by_user, task_state

POSITION_KEY: Final = "pytorch_job_log"
"""XCom with where the log was left, so that another triggerer goes on there."""
_LINES_AT_ONCE: Final = 200


class PyTorchJobTrigger(BaseTrigger):
    """Waits until a job has ended or a limit is passed. Its arguments are stored in the database: no secret is among them.

    :param name, namespace, uid: the job; another job of that name counts as its loss.
    :param gang: number of the gang, told again in the event.
    :param kind, backend, kubernetes_conn_id, home: see `PyTorchJobHook`.
    :param poll_interval: seconds between two looks.
    :param log_ranks: whose log lines to show: "all", "first" or "none".
    :param log_limit: how much of the log to show: a number of lines, or text like "20 MB"; None for all of it.
    :param deadline: Unix time at which to stop waiting; it survives a restart of the triggerer.
    :param queue_until: Unix time by which the job must have left its queue.
    :param run_seconds: how long the job may run; time in the queue or suspended does not count.
    :param owned: whether the job goes when a person ends the task. Never when a triggerer does.
    :param must_exist: whether a job that was never seen is lost, or waited for.
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
        run_seconds: float | None = None,
        owned: bool = True,
        must_exist: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.namespace, self.uid, self.gang = name, namespace, uid, gang
        self.kind, self.backend, self.kubernetes_conn_id, self.home = kind, backend, kubernetes_conn_id, home
        self.poll_interval, self.log_ranks, self.log_limit = poll_interval, log_ranks, log_limit
        self.deadline, self.queue_until, self.run_seconds = deadline, queue_until, run_seconds
        self.owned, self.must_exist = owned, must_exist
        self._fired = False
        self._saving = True

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
                "run_seconds": self.run_seconds,
                "owned": self.owned,
                "must_exist": self.must_exist,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        positions, progress = await self._left_at()
        watch = await asyncio.to_thread(self._watch, positions, progress)
        limits, last = Limits(self.deadline, self.queue_until, self.run_seconds), None
        while True:
            step = await asyncio.to_thread(watch.step)
            for number, line in enumerate(step.lines):
                self.log.info("%s", line)
                if number % _LINES_AT_ONCE == _LINES_AT_ONCE - 1:
                    await asyncio.sleep(0)  # other triggers share this loop
            if step.lines:
                await self._save(watch)
            if step.final and step.observation is not None:
                self._fired = True
                yield self._event("ended", observation=step.observation.to_dict(), why=step.observation.message)
                return
            if step.observation is not None:
                last = step.observation
            if why := exceeded(limits, last, time.time()):
                self._fired = True
                yield self._event("timeout", observation=last.to_dict() if last else None, why=why)
                return
            await asyncio.sleep(self.poll_interval)

    async def on_kill(self) -> None:
        """Delete the job if a person ended the task; this is also called when another triggerer took over."""
        if not self.owned or self._fired:
            return
        try:
            state = await asyncio.to_thread(task_state, self.task_instance)
        except Exception as error:
            self.log.warning(
                "job %s/%s is left as it is: Airflow does not say why: %r", self.namespace, self.name, error
            )
            return
        if not ended_by_user(state, deferred=True):
            self.log.info("job %s/%s goes on: the task is %s", self.namespace, self.name, state)
            return
        self.log.info("job %s/%s is deleted: the task was ended (%s)", self.namespace, self.name, state)
        await asyncio.to_thread(lambda: self._hook().connect().delete(self.name, self.namespace, uid=self.uid))

    def _hook(self) -> PyTorchJobHook:
        return PyTorchJobHook(self.backend, kubernetes_conn_id=self.kubernetes_conn_id, home=self.home)

    def _watch(self, positions: dict[str, Any], progress: Progress | None) -> Watch:
        return Watch(
            self._hook().connect,
            self.name,
            self.namespace,
            uid=self.uid,
            ranks=self.log_ranks,  # type: ignore[arg-type]
            positions=positions,
            progress=progress,
            must_exist=self.must_exist,
        )

    def _event(self, kind: str, **more: Any) -> TriggerEvent:
        job = {"name": self.name, "namespace": self.namespace, "uid": self.uid, "gang": self.gang}
        return TriggerEvent(  # type: ignore[no-untyped-call]
            {"kind": kind, "job": job, **more}
        )

    async def _left_at(self) -> tuple[dict[str, Any], Progress | None]:
        """Where an earlier triggerer left this job's log."""
        ti = self.task_instance
        if ti is None or not self.owned:
            return {}, None
        from airflow.sdk.execution_time.xcom import XCom

        try:
            found = await asyncio.to_thread(
                XCom.get_one,
                key=POSITION_KEY,
                dag_id=ti.dag_id,
                task_id=ti.task_id,
                run_id=ti.run_id,
                map_index=ti.map_index,
            )
        except Exception as error:
            self.log.warning("where the log was left is not known; it is shown from its beginning: %r", error)
            return {}, None
        if not isinstance(found, dict) or found.get("uid") != self.uid:
            return {}, None
        return dict(found.get("positions") or {}), Progress.from_dict(found.get("progress"))

    async def _save(self, watch: Watch) -> None:
        ti = self.task_instance
        if ti is None or not self.owned or not self._saving:
            return
        from airflow.sdk.execution_time.xcom import XCom

        value = {
            "uid": self.uid,
            "positions": {name: dict(position) for name, position in watch.positions.items()},
            "progress": watch.progress.to_dict() if watch.progress else None,
        }
        try:
            await asyncio.to_thread(
                XCom.set,
                POSITION_KEY,
                value,
                dag_id=ti.dag_id,
                task_id=ti.task_id,
                run_id=ti.run_id,
                map_index=ti.map_index,
            )
        except Exception as error:
            self._saving = False
            self.log.warning("where the log is cannot be kept; another triggerer would repeat it: %r", error)
