"""`PyTorchJobOperator`: runs a distributed training job, watches it to its end, and finds it again after a restart."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from airflow.sdk import BaseOperator

from kubeflow_training import retries
from kubeflow_training.exceptions import JobFailedForGood, JobNotReached, TaskStopped
from kubeflow_training.hooks import PyTorchJobHook
from kubeflow_training.jobs.avoid import away_from
from kubeflow_training.jobs.backend import Backend
from kubeflow_training.jobs.checks import require_valid
from kubeflow_training.jobs.errors import (
    BackendUnavailableError,
    JobError,
    JobExistsError,
    JobRefusedError,
    ManifestError,
)
from kubeflow_training.jobs.manifest import DEFAULT_GRACE_SECONDS
from kubeflow_training.jobs.observation import Observation, Phase
from kubeflow_training.jobs.watch import LogRanks, Watch, last_lines
from kubeflow_training.links import LINK_KEY, PyTorchJobLink, job_link
from kubeflow_training.reattach import Action, Decision, Identity, decide, identity
from kubeflow_training.taskstate import ended_by_user, task_state

if TYPE_CHECKING:
    from airflow.sdk import Context

STATE_KEY: Final = "pytorch_job"
"""Key of the identity in the task state store."""
JOB_KEY: Final = "pytorch_job"
"""XCom with the job's name, namespace, uid, gang and backend, pushed as soon as the job exists."""
_NAP: Final = 0.2  # seconds; how soon a kill is noticed
_CONFLICTS: Final = 5
FAILURES_KEY: Final = "pytorch_job_trigger_failures"
_TRIGGER_FAILURES: Final = 3
_TRIGGER_FAILED: Final = "__fail__"  # Airflow's own sign


class PyTorchJobOperator(BaseOperator):
    """Run a PyTorchJob to its end.

    A retry finds the job that an earlier try started and goes on with it; a failed gang is replaced whole by the next.
    A cleared task or a changed spec starts a new job. Whether a failure is retried follows from its reason. The result
    is a dictionary: phase, name, namespace, uid, gang, seconds, progress.

    :param manifest: the job, as `jobs.manifest.pytorch_job` makes it; templated, may come from another task.
    :param backend: "kubernetes", or "local" for processes of this machine; templated.
    :param kubernetes_conn_id: Airflow connection of the cluster.
    :param home: folder of the local cluster; `KUBEFLOW_TRAINING_HOME` unless given.
    :param deferrable: wait in the triggerer instead of in a worker; everything else is the same.
    :param poll_interval: seconds between two looks at the job.
    :param log_ranks: whose log lines come into the task's log: "all", "first" or "none".
    :param job_url: address of the job's page with $namespace and $name; see `links.PyTorchJobLink`.
    """

    template_fields: Sequence[str] = ("manifest", "backend")
    template_fields_renderers: ClassVar[dict[str, str]] = {"manifest": "json"}
    operator_extra_links = (PyTorchJobLink(),)
    ui_color = "#ee4c2c"
    ui_fgcolor = "#ffffff"

    def __init__(
        self,
        *,
        manifest: Mapping[str, Any] | Any,
        backend: str = "kubernetes",
        kubernetes_conn_id: str = "kubernetes_default",
        home: str | None = None,
        deferrable: bool = True,
        poll_interval: float = 2.0,
        log_ranks: LogRanks = "all",
        job_url: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.manifest = manifest
        self.backend = backend
        self.kubernetes_conn_id = kubernetes_conn_id
        self.home = home
        self.deferrable = deferrable
        self.poll_interval = poll_interval
        self.log_ranks = log_ranks
        self.job_url = job_url
        self._killed = False
        retries.require_retries(self)

    # Airflow's entry points

    def execute(self, context: Context) -> dict[str, Any]:
        from airflow.sdk.exceptions import AirflowTaskTimeout

        limit = self.execution_timeout
        deadline = time.time() + limit.total_seconds() if limit is not None else None
        job: Identity | None = None
        try:
            job = self._attach(context)
            self._publish(context, job)
            if self.deferrable:
                self._stop_if_killed(context, job)
                self.defer(trigger=self._trigger(job, deadline), method_name=self.resume.__name__)
            return self._finish(self._watch_here(context, job), self._event_job(job))
        except AirflowTaskTimeout:
            if job is not None:
                self._delete(job.name, job.namespace, job.uid)
            raise
        except (JobRefusedError, ManifestError) as error:
            raise JobFailedForGood(str(error)) from error
        except JobError as error:
            raise JobNotReached(str(error)) from error

    def resume(self, context: Context, event: Mapping[str, Any]) -> dict[str, Any]:
        """Go on after the trigger's event."""
        from airflow.sdk.exceptions import AirflowTaskTimeout

        job = event["job"]
        if event["kind"] == "timeout":
            self._delete(job["name"], job["namespace"], job["uid"])
            raise AirflowTaskTimeout(f"job {job['namespace']}/{job['name']} took longer than execution_timeout")
        result = self._finish(Observation.from_dict(event["observation"]), job)
        # Killed in these last moments: success is told by the retry, which finds the job ended well.
        self._stop_if_killed(context, None)
        return result

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        # A trigger that broke says nothing about the job: find the job again and go on waiting, a few times.
        if next_method == _TRIGGER_FAILED:
            store = context["task_state_store"]
            failures = store.get(FAILURES_KEY, 0)
            count = failures + 1 if isinstance(failures, int) else 1
            if count <= _TRIGGER_FAILURES:
                store.set(FAILURES_KEY, count)
                self.log.warning("the trigger failed, and the job is watched anew (%d of %d)", count, _TRIGGER_FAILURES)
                return self.execute(context)
        return super().resume_execution(next_method, next_kwargs, context)

    def on_kill(self) -> None:
        # A signal handler: it may run in the middle of anything, so it only leaves a note. `execute` then raises.
        self._killed = True

    # Finding or starting the job

    def _attach(self, context: Context) -> Identity:
        """The gang to wait for, found or created. Its identity is stored before the job exists."""
        manifest = self.manifest
        require_valid(manifest)
        ti = context["ti"]
        owner = f"{ti.dag_id}/{ti.run_id}/{ti.task_id}/{ti.map_index}"
        wanted = identity(manifest, owner, retries.generation(context))
        store = context["task_state_store"]
        backend = self._hook().connect()
        for _ in range(_CONFLICTS):
            stored = Identity.from_dict(store.get(STATE_KEY))
            decision = decide(
                stored,
                wanted,
                backend.read(wanted.name, wanted.namespace),
                lambda job, seen: retries.replaced(self, context, seen, job.to_dict()),
            )
            self.log.info("job %s/%s: %s (%s)", wanted.namespace, wanted.name, decision.action, decision.why)
            try:
                return self._act(context, backend, decision)
            except JobExistsError:
                # Somebody was faster, or an earlier create went through after all: look again.
                continue
        raise JobNotReached(f"job {wanted.namespace}/{wanted.name}: its name is taken again and again")

    def _act(self, context: Context, backend: Backend, decision: Decision) -> Identity:
        job, store = decision.identity, context["task_state_store"]
        if decision.action is Action.REFUSE:
            raise JobNotReached(
                f"job {job.namespace}/{job.name}: {decision.why}. Wait for it, delete it, or choose another name"
            )
        if decision.action is Action.REPLACE:
            self._remove(context, backend, job)
        if decision.action is not Action.ADOPT:
            self._stop_if_killed(context, None)
            store.set(STATE_KEY, job.to_dict())
            store.delete(FAILURES_KEY)
            # After the fingerprint was taken: a node to avoid makes no other job of it.
            avoided = [item.node for item in retries.avoided(context)]
            snapshot = backend.create(away_from(job.written_on(self.manifest), avoided))
            job = Identity(**{**job.to_dict(), "uid": snapshot.uid})
        store.set(STATE_KEY, job.to_dict())
        return job

    def _remove(self, context: Context, backend: Backend, job: Identity) -> None:
        """Delete the old gang and wait until all of it is gone: two gangs must never write the same checkpoints."""
        old = backend.read(job.name, job.namespace)
        if old is None:
            return
        backend.delete(job.name, job.namespace, uid=old.uid)
        patience = time.monotonic() + _grace(old.job) + 120
        while (now := backend.read(job.name, job.namespace)) is not None and now.uid == old.uid:
            if time.monotonic() > patience:
                raise JobNotReached(
                    f"job {job.namespace}/{job.name}: the old gang does not end. Look at its pods and their node"
                )
            self._stop_if_killed(context, None)
            time.sleep(_NAP)

    def _publish(self, context: Context, job: Identity) -> None:
        ti = context["ti"]
        ti.xcom_push(key=JOB_KEY, value={**self._event_job(job), "backend": self.backend})
        if link := job_link(self.job_url, {"name": job.name, "namespace": job.namespace}):
            ti.xcom_push(key=LINK_KEY, value=link)

    # Waiting

    def _trigger(self, job: Identity, deadline: float | None) -> Any:
        from kubeflow_training.triggers import PyTorchJobTrigger

        return PyTorchJobTrigger(
            name=job.name,
            namespace=job.namespace,
            uid=job.uid,
            gang=job.gang,
            backend=self.backend,
            kubernetes_conn_id=self.kubernetes_conn_id,
            home=self.home,
            poll_interval=self.poll_interval,
            log_ranks=self.log_ranks,
            deadline=deadline,
        )

    def _watch_here(self, context: Context, job: Identity) -> Observation:
        watch = Watch(self._hook().connect, job.name, job.namespace, uid=job.uid, ranks=self.log_ranks)
        while True:
            step = watch.step()
            for line in step.lines:
                self.log.info("%s", line)
            if step.final and step.observation is not None:
                self._stop_if_killed(context, job)
                return step.observation
            until = time.monotonic() + self.poll_interval
            while True:
                self._stop_if_killed(context, job)
                if (left := until - time.monotonic()) <= 0:
                    break
                time.sleep(min(_NAP, left))

    def _stop_if_killed(self, context: Context, job: Identity | None) -> None:
        """Raise after a kill. The job goes only if a person ended the task; a stopped worker leaves it to the retry."""
        if not self._killed:
            return
        try:
            state = task_state(context["ti"])
        except Exception as error:
            raise TaskStopped(
                f"this worker was stopped, and the job goes on; Airflow does not say why: {error!r}"
            ) from error
        if not ended_by_user(state, deferred=False):
            raise TaskStopped(
                f"this worker was stopped while the task was {state}; the job goes on, and a retry finds it"
            )
        if job is not None:
            self._delete(job.name, job.namespace, job.uid)
        raise TaskStopped(f"the task was ended ({state}), and its job with it")

    # The end

    def _finish(self, observation: Observation, job: Mapping[str, Any]) -> dict[str, Any]:
        """The result, or the failure's text."""
        name = f"job {job['namespace']}/{job['name']}"
        if observation.phase is Phase.SUCCEEDED:
            self.log.info("%s succeeded", name)
            return {
                "phase": str(observation.phase),
                **job,
                "seconds": observation.seconds,
                "progress": observation.progress.to_dict() if observation.progress else None,
            }
        tail: list[str] = []
        try:
            backend = self._hook().connect()
            snapshot = backend.read(job["name"], job["namespace"])
            if snapshot is not None and snapshot.uid == job["uid"]:
                tail = last_lines(backend, snapshot, observation.pod)
                if observation.pods_running:
                    # Survivors would hold their GPUs until the collective's own timeout.
                    backend.delete(job["name"], job["namespace"], uid=job["uid"])
        except BackendUnavailableError as error:
            self.log.warning("%s: its last lines cannot be read: %s", name, error)
        raise retries.failure(failure_text(name, job["gang"], observation, tail), self, observation, job)

    def _delete(self, name: str, namespace: str, uid: str | None) -> None:
        try:
            self._hook().connect().delete(name, namespace, uid=uid)
            self.log.info("job %s/%s is deleted", namespace, name)
        except JobError as error:
            self.log.error("job %s/%s could not be deleted and may still run: %s", namespace, name, error)

    def _hook(self) -> PyTorchJobHook:
        return PyTorchJobHook(self.backend, kubernetes_conn_id=self.kubernetes_conn_id, home=self.home)

    @staticmethod
    def _event_job(job: Identity) -> dict[str, Any]:
        return {"name": job.name, "namespace": job.namespace, "uid": job.uid, "gang": job.gang}


def failure_text(name: str, gang: int, observation: Observation, tail: Sequence[str]) -> str:
    """What a job that ended badly has to say: rank, exit code, node, reason, mend and last lines."""
    reason = observation.reason or "unknown"
    lines = [f"{name} (gang {gang}) {observation.phase}, {reason}: {observation.message}. {observation.mend}."]
    if observation.progress:
        lines.append(f"It had come to {observation.progress}.")
    if tail:
        lines.append(f"Last lines of {observation.replica}:")
        lines += [f"    {line}" for line in tail]
    return "\n".join(lines)


def _grace(job: Mapping[str, Any]) -> float:
    replicas = job.get("spec", {}).get("pytorchReplicaSpecs", {}).values()
    grace = [item["template"]["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS) for item in replicas]
    return float(max(grace, default=DEFAULT_GRACE_SECONDS))
