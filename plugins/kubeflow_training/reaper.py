"""`JobReaperOperator`: deletes live jobs that nobody waits for, because a worker died at the wrong moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from airflow.sdk import BaseOperator

from kubeflow_training.asking.states import FromTask
from kubeflow_training.exceptions import JobNotReached
from kubeflow_training.jobs.backend import Backend
from kubeflow_training.jobs.reaping.reaper import GRACE, JobReaper, Summary
from kubeflow_training.state_mismatch import ResumableTask

if TYPE_CHECKING:
    from airflow.sdk import Context

SEEN_KEY: Final = "job_reaper_seen"
"""Key of the first look's orphans in the task state store."""


class JobReaperOperator(ResumableTask, BaseOperator):
    """Delete the live jobs of this Airflow whose tasks are finished or gone.

    The task looks; if it finds orphans, it waits for the grace in the triggerer and looks again: only what was an
    orphan both times is deleted. The result is a dictionary: deleted, waiting, kept, unclear, problems. With a problem,
    such as a cluster that cannot be reached, the task fails after it has done what could be done.

    :param backend: "kubernetes", or "local" for processes of this machine.
    :param kubernetes_conn_id: Airflow connection of the cluster.
    :param home: folder of the local cluster; `KUBEFLOW_TRAINING_HOME` unless given.
    :param namespaces: where to look; None means everywhere, which needs rights for the whole cluster.
    :param kinds: kinds of jobs to look at.
    :param also: kinds to look at too, where the cluster has them and the account may list them.
    :param grace: how long a task must have been over.
    :param dry_run: say what would be deleted, and delete nothing.
    """

    template_fields: Sequence[str] = ("backend", "namespaces")

    def __init__(
        self,
        *,
        backend: str = "kubernetes",
        kubernetes_conn_id: str = "kubernetes_default",
        home: str | None = None,
        namespaces: Sequence[str] | None = ("default",),
        kinds: Sequence[str] = ("PyTorchJob",),
        also: Sequence[str] = (),
        grace: timedelta = GRACE,
        dry_run: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.backend, self.kubernetes_conn_id, self.home = backend, kubernetes_conn_id, home
        self.namespaces, self.kinds, self.also = namespaces, kinds, also
        self.grace, self.dry_run_only = grace, dry_run

    def execute(self, context: Context) -> dict[str, Any]:
        from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger

        self.explain_retry(context)
        reaper = self._reaper()
        summary = reaper.visit()
        if summary.waiting:
            # Not as arguments of the method: `dag.test()` loses those.
            store: Any = context["task_state_store"]
            store.set(SEEN_KEY, {"seen": reaper.seen, "deleted": summary.deleted})
            self.note_wait(context)
            self.defer(trigger=TimeDeltaTrigger(self.grace), method_name=self.look_again.__name__)
        return self._told(context, summary)

    def look_again(self, context: Context, event: Any = None) -> dict[str, Any]:  # noqa: ARG002
        """After the grace: delete what is still an orphan."""
        store: Any = context["task_state_store"]
        before = store.get(SEEN_KEY)
        reaper = self._reaper()
        reaper.seen = before["seen"]
        summary = reaper.visit()
        summary.deleted = [*before["deleted"], *summary.deleted]
        return self._told(context, summary)

    @staticmethod
    def _told(context: Context, summary: Summary) -> dict[str, Any]:
        result = summary.to_dict()
        if summary.problems:
            # A reaper that cannot look must be seen; what it did is told all the same.
            context["ti"].xcom_push(key="return_value", value=result)
            raise JobNotReached("; ".join(summary.problems))
        return result

    def _reaper(self) -> JobReaper:
        where = self.backend, self.kubernetes_conn_id, self.home
        optional = backends(where[0], self.also, *where[1:]) if self.also else {}
        return JobReaper(
            optional | backends(where[0], self.kinds, *where[1:]),
            FromTask(),
            namespaces=self.namespaces,
            grace=self.grace,
            dry_run=self.dry_run_only,
            optional=optional,
        )


def backends(
    backend: str, kinds: Sequence[str], kubernetes_conn_id: str = "kubernetes_default", home: str | None = None
) -> dict[str, Callable[[], Backend]]:
    """How to reach each kind of job."""
    from kubeflow_training.hooks import PyTorchJobHook

    if backend != "kubernetes":
        return {backend: PyTorchJobHook(backend, home=home).connect}
    hooks = {kind: PyTorchJobHook(backend, kind=kind, kubernetes_conn_id=kubernetes_conn_id) for kind in kinds}
    return {f"{kind} on {kubernetes_conn_id}": hook.connect for kind, hook in hooks.items()}
