"""`PyTorchJobOperator`: runs a distributed training job, watches it to its end, and finds it again after a restart."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NoReturn

from airflow.sdk import BaseOperator

from kubeflow_training import retries
from kubeflow_training.asking.instance import this_instance
from kubeflow_training.asking.task import ended_by_user, task_state
from kubeflow_training.connection import ClusterArguments
from kubeflow_training.exceptions import JobFailedForGood, JobNotReached, TaskStopped
from kubeflow_training.gangs import outcome
from kubeflow_training.gangs.attach import Gangs, ends_by_itself, last_observation
from kubeflow_training.gangs.memory import STATE_KEY, Memory
from kubeflow_training.gangs.reattach import Action, Identity, created_for
from kubeflow_training.hooks import PyTorchJobHook
from kubeflow_training.jobs.avoid import away_from
from kubeflow_training.jobs.elastic import require_sizes, resized
from kubeflow_training.jobs.errors import JobError, JobRefusedError, ManifestError
from kubeflow_training.jobs.kinds import kind_of
from kubeflow_training.jobs.manifest.experiments import held, launch_lines
from kubeflow_training.jobs.manifest.ownership import Owner
from kubeflow_training.jobs.manifest.words import MLFLOW_RUN_ANNOTATION
from kubeflow_training.jobs.observation import Observation, Phase, Reason
from kubeflow_training.jobs.reaping.orphans import marked
from kubeflow_training.jobs.source import job_of
from kubeflow_training.jobs.spec import TrainingJobSpec
from kubeflow_training.jobs.waiting.job import End, run_blocking
from kubeflow_training.jobs.waiting.joblog import JobLog, LogLimit
from kubeflow_training.jobs.waiting.limits import Limits, size_to_be_had
from kubeflow_training.jobs.waiting.podlog import LogRanks, last_lines
from kubeflow_training.links import MlflowRunLink, PodLogsLink, PyTorchJobLink, addresses

if TYPE_CHECKING:
    import jinja2
    from airflow.sdk import Context

__all__ = ["JOB_KEY", "STATE_KEY", "PyTorchJobOperator"]

JOB_KEY: Final = "pytorch_job"
"""XCom with the job's name, namespace, uid, gang, kind and backend, pushed as soon as the job exists."""
_TRIGGER_FAILURES: Final = 3
_TRIGGER_FAILED: Final = "__fail__"  # Airflow's own sign
_NAP: Final = 0.2  # seconds; how soon a kill is noticed

OnFinish = Literal["keep", "delete", "delete_succeeded"]


class PyTorchJobOperator(ClusterArguments, BaseOperator):
    """Run a PyTorchJob (or TrainJob, or indexed Job) to its end.

    A retry finds the job that an earlier try started and goes on with it; a failed gang is replaced whole by the next.
    A cleared task or a changed spec starts a new job. Whether a failure is retried follows from its reason. The result
    is a dictionary: phase, name, namespace, uid, gang, durations, message (rank 0's termination message), progress.

    :param manifest: the job: a mapping, YAML text, or the name of a template file (.yaml, .yml, .json); templated, may
        come from another task. Without a name it gets one of DAG, task and run.
    :param spec: the job in typed words instead, a `TrainingJobSpec` or a mapping of its fields; templated.
    :param kind: what a `spec` is compiled to: "PyTorchJob", "TrainJob" or "Job".
    :param backend, kubernetes_conn_id, home: see `connection.ClusterArguments`; templated.
    :param deferrable: wait in the triggerer instead of in a worker; everything else is the same.
    :param poll_interval: seconds between two looks at the job, where it cannot be watched.
    :param log_ranks: whose log lines come into the task's log: "all", "first" or "none".
    :param log_limit: how much of the log to show: a number of lines, or text like "20 MB"; None for all of it.
    :param queue_timeout: how long the job may wait before its first pod runs.
    :param min_nodes: with how few nodes it may run. A gang of which so many pods have a node, but a pod has none for
        `queue_timeout`, is deleted, and the next starts with the nodes there are; the one after has all again.
    :param run_timeout: how long it may run; time in a queue or suspended does not count.
    :param number_gangs: later gangs have their number in the job's name, like `train-g2`; else all share one name.
    :param keep_failed: keep the ended pods of a failed gang until the job's `ttl_seconds`, also beside the next gang.
    :param on_finish: "keep" the finished job until its `ttl_seconds`, "delete" it, or "delete_succeeded".
    :param hold: start the gang idle, with its full environment, and print what starts the training in each pod.
    :param job_url, logs_url, mlflow_url: addresses for the task's links, see `links`; templated.
    :param mlflow_run: id of the job's MLflow run; that of the manifest's annotation unless given; templated.
    """

    template_fields: Sequence[str] = (
        "manifest",
        "spec",
        "kind",
        "job_url",
        "logs_url",
        "mlflow_url",
        "mlflow_run",
        *ClusterArguments.cluster_fields,
    )
    template_ext: Sequence[str] = (".yaml", ".yml", ".json")
    template_fields_renderers: ClassVar[dict[str, str]] = {"manifest": "yaml", "spec": "json"}
    operator_extra_links = (PyTorchJobLink(), PodLogsLink(), MlflowRunLink())
    ui_color = "#ee4c2c"
    ui_fgcolor = "#ffffff"

    def __init__(
        self,
        *,
        manifest: Mapping[str, Any] | str | Any = None,
        spec: TrainingJobSpec | Mapping[str, Any] | Any = None,
        kind: str | None = None,
        backend: str = "kubernetes",
        kubernetes_conn_id: str = "kubernetes_default",
        home: str | None = None,
        deferrable: bool = True,
        poll_interval: float = 2.0,
        log_ranks: LogRanks = "all",
        log_limit: int | str | None = None,
        queue_timeout: timedelta | None = None,
        min_nodes: int | None = None,
        run_timeout: timedelta | None = None,
        number_gangs: bool = True,
        keep_failed: bool = False,
        on_finish: OnFinish = "keep",
        hold: bool = False,
        job_url: str | None = None,
        logs_url: str | None = None,
        mlflow_url: str | None = None,
        mlflow_run: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.manifest = manifest
        # Plain values: templates and other tasks' results inside are found, and the DAG can be stored.
        self.spec = spec.to_dict() if isinstance(spec, TrainingJobSpec) else spec
        self.kind = kind
        self.backend, self.kubernetes_conn_id, self.home = backend, kubernetes_conn_id, home
        self.deferrable, self.poll_interval = deferrable, poll_interval
        self.log_ranks, self.log_limit = log_ranks, log_limit
        self.queue_timeout, self.min_nodes, self.run_timeout = queue_timeout, min_nodes, run_timeout
        self.number_gangs, self.keep_failed, self.on_finish, self.hold = number_gangs, keep_failed, on_finish, hold
        self.job_url, self.logs_url, self.mlflow_url, self.mlflow_run = job_url, logs_url, mlflow_url, mlflow_run
        self._killed = False
        if min_nodes is not None and (min_nodes < 1 or queue_timeout is None):
            raise ValueError(f"task {self.task_id}: min_nodes={min_nodes}; give 1 or more, and a queue_timeout")
        retries.require_retries(self)

    # Airflow's entry points

    def render_template(
        self,
        content: Any,
        context: Context,
        jinja_env: jinja2.Environment | None = None,
        seen_oids: set[int] | None = None,
    ) -> Any:
        # Only `manifest` and `spec` themselves name template files; `config.yaml` inside a command is a text like any.
        named = isinstance(content, str) and content.endswith(tuple(self.template_ext))
        if named and content not in (self.manifest, self.spec):
            environment = jinja_env or self.get_template_env()
            return self._render(environment.from_string(content), context)
        return super().render_template(content, context, jinja_env, seen_oids)

    def execute(self, context: Context) -> dict[str, Any]:
        from airflow.sdk.exceptions import AirflowTaskTimeout

        job: Identity | None = None
        try:
            manifest = self._manifest(context)
            gangs = self._gangs(context, manifest)
            decision = gangs.attach(held(manifest) if self.hold else manifest, retries.generation(context))
            job = decision.identity
            if decision.action is Action.TELL:
                return Memory(context).result(job.uid) or {}
            self._publish(context, manifest, job)
            limits = self._limits(context, job)
            if self.deferrable:
                self._stop_if_killed(context, job)
                self.defer(trigger=self._trigger(job, limits), method_name=self.resume.__name__)
            seen, tail = self._watch_here(context, job, limits)
            return self._finish(context, seen, self._event_job(job), tail)
        except AirflowTaskTimeout:
            if (job := job or self._cut_off(context)) is not None:
                self._delete(self._event_job(job))
            raise
        except (JobRefusedError, ManifestError) as error:
            raise JobFailedForGood(str(error)) from error
        except JobError as error:
            raise JobNotReached(str(error)) from error

    def resume(self, context: Context, event: Mapping[str, Any]) -> dict[str, Any]:
        """Go on after the trigger's event."""
        job = event["job"]
        stored = Memory(context).job
        if stored is not None and stored.uid is not None and stored.uid != job["uid"]:
            # The number of a trigger whose task was cleared may be given again while that trigger still speaks.
            return self._watch_anew(context, f"the trigger told of gang {job['gang']}, not of gang {stored.gang}")
        known = self._event_job(stored) if stored is not None and stored.uid == job["uid"] else dict(job)
        if event["kind"] == "timeout":
            seen = Observation.from_dict(event["observation"]) if event.get("observation") else None
            self._too_long(context, known, seen, str(event.get("why") or "it took longer than it may"))
        if event["kind"] == "broken":
            return self._watch_anew(context, str(event.get("why") or ""))
        tails = event.get("tails") or {}
        seen = Observation.from_dict(event["observation"])
        found = self._finish(context, seen, known, tails.get(seen.replica) or [])
        # Killed in these last moments: success is told by the retry, which finds the job ended well.
        self._stop_if_killed(context, None)
        return found

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        # A trigger that broke says nothing about the job: find the job again and go on waiting, a few times.
        if next_method == _TRIGGER_FAILED and Memory(context).failures < _TRIGGER_FAILURES:
            return self._watch_anew(context, str((next_kwargs or {}).get("error") or "the trigger broke"))
        return super().resume_execution(next_method, next_kwargs, context)

    def on_kill(self) -> None:
        # A signal handler: it may run in the middle of anything, so it only leaves a note. `execute` then raises.
        self._killed = True

    # Finding or starting the job

    def _manifest(self, context: Context) -> dict[str, Any]:
        """The valid manifest that counts for the fingerprint."""
        manifest = job_of(self.manifest, self.spec, self.kind, _owner(context))
        if self.hold and self.backend == "local":
            cause = "all held jobs of a machine would wait for the same file"
            raise ManifestError(f"task {self.task_id}, hold on backend local", cause, "Hold it on Kubernetes")
        kind = kind_of(manifest)
        kind.require_valid(manifest)
        if self.min_nodes is not None:
            require_sizes(manifest, self.min_nodes, kind.wanted(manifest))
        return manifest

    def _gangs(self, context: Context, manifest: Mapping[str, Any]) -> Gangs:
        return Gangs(
            self.hook(str(manifest["kind"])).connect(),
            Memory(context),
            _owner(context),
            still_wanted=lambda: self._stop_if_killed(context, None),
            replaced=lambda job, seen: retries.replaced(self, context, seen, job.to_dict()),
            # After the fingerprint was taken: neither a node to avoid nor fewer nodes make another job of it.
            prepared=lambda made, job: marked(
                away_from(self._sized(context, made, job), [item.node for item in retries.avoided(context)]),
                this_instance(),
            ),
            numbered=self.number_gangs,
            keep_failed=self.keep_failed,
            place=self.backend,
            elsewhere=lambda job: self.hook(job.kind, job.backend).connect(),
        )

    def _sized(self, context: Context, manifest: dict[str, Any], job: Identity) -> dict[str, Any]:
        nodes = Memory(context).size(job)
        if nodes is None:
            return manifest
        self.log.info("job %s/%s: gang %d starts with %d nodes", job.namespace, job.name, job.gang, nodes)
        return resized(manifest, nodes)

    def _cut_off(self, context: Context) -> Identity | None:
        """The job of this task whose creation was cut off before its answer was here; None if there is none."""
        job = Memory(context).job
        if job is None or job.uid is not None:
            return job
        try:
            found = self.hook(job.kind, job.backend).connect().read(job.name, job.namespace)
        except JobError as error:
            self.log.error("job %s/%s may have been created and may run: %s", job.namespace, job.name, error)
            return None
        return job.of(found) if found is not None and created_for(job, found) else None

    def _publish(self, context: Context, manifest: Mapping[str, Any], job: Identity) -> None:
        ti = context["ti"]
        if self.do_xcom_push:
            value = {**self._event_job(job), "kind": manifest["kind"], "backend": self.backend}
            ti.xcom_push(key=JOB_KEY, value=value)
        urls = {"job": self.job_url, "logs": self.logs_url, "mlflow": self.mlflow_url}
        notes = manifest["metadata"].get("annotations") or {}
        values = {**self._event_job(job), "run": self.mlflow_run or notes.get(MLFLOW_RUN_ANNOTATION)}
        for key, url in addresses(urls, values).items():
            ti.xcom_push(key=key, value=url)
        if self.hold:
            self.log.info("The gang is held. What starts the training in each pod, and what ends the hold:")
            named = {**manifest, "metadata": {**manifest["metadata"], "name": job.name}}
            for line in launch_lines(named):
                self.log.info("    %s", line)

    # Waiting

    def _limits(self, context: Context, job: Identity) -> Limits:
        """Absolute times, which survive deferral: the try's own, and those of the job since its creation."""
        queued = self.queue_timeout.total_seconds() if self.queue_timeout is not None else None
        return Limits(
            Memory(context).until(self.execution_timeout),
            None if queued is None else (job.created or time.time()) + queued,
            self.run_timeout.total_seconds() if self.run_timeout is not None else None,
            self.min_nodes,
            queued if self.min_nodes is not None else None,
        )

    def _trigger(self, job: Identity, limits: Limits) -> Any:
        from kubeflow_training.triggers import PyTorchJobTrigger

        return PyTorchJobTrigger(
            name=job.name,
            namespace=job.namespace,
            uid=job.uid,
            gang=job.gang,
            kind=job.kind,
            backend=self.backend,
            kubernetes_conn_id=self.kubernetes_conn_id,
            home=self.home,
            poll_interval=self.poll_interval,
            log_ranks=self.log_ranks,
            log_limit=self.log_limit,
            deadline=limits.until,
            queue_until=limits.queue_until,
            run_seconds=limits.run_seconds,
            min_nodes=limits.min_nodes,
            place_seconds=limits.place_seconds,
        )

    def _watch_here(self, context: Context, job: Identity, limits: Limits) -> tuple[Observation, list[str]]:
        """The end, with the last lines of the rank that failed: what the trigger does, in this worker."""

        async def wait() -> End:
            log = JobLog(lambda line: self.log.info("%s", line), LogLimit.of(self.log_limit))
            async with self.hook(job.kind).waiting(
                job.name,
                job.namespace,
                log,
                uid=job.uid,
                ranks=self.log_ranks,
                limits=limits,
                poll_interval=self.poll_interval,
            ) as waiting:
                return await waiting.run()

        end = run_blocking(wait(), lambda: self._stop_if_killed(context, job), every=_NAP)
        if end.kind == "timeout" or end.observation is None:
            self._too_long(context, self._event_job(job), end.observation, end.why)
        assert end.observation is not None
        self._stop_if_killed(context, job)
        return end.observation, end.tails.get(end.observation.replica or "") or []

    def _watch_anew(self, context: Context, why: str) -> dict[str, Any]:
        count = Memory(context).count_failure()
        if count > _TRIGGER_FAILURES:
            raise JobNotReached(f"the trigger broke {count} times, the last time: {why}. The job is left as it is")
        self.log.warning("%s; the job is watched anew (%d of %d)", why, count, _TRIGGER_FAILURES)
        return self.execute(context)

    def _stop_if_killed(self, context: Context, job: Identity | None) -> None:
        """Raise after a kill. The job goes if a person ended the task, or if no try is left that could find it."""
        if not self._killed:
            return
        ti, state, why = context["ti"], None, ""
        try:
            state = task_state(ti)
        except Exception as error:
            why = f"Airflow does not say why: {error!r}"
        ended = not why and ended_by_user(state, deferred=False)
        last = ti.try_number > ti.max_tries
        if job is not None and (ended or last):
            self._delete(self._event_job(job))
        if ended:
            raise TaskStopped(f"the task was ended ({state}), and its job with it")
        found = "its job with it, as no try is left" if last else "the job goes on, and a retry finds it"
        raise TaskStopped(f"this worker was stopped, {why or f'while the task was {state}'}; {found}")

    def _too_long(self, context: Context, job: Mapping[str, Any], seen: Observation | None, why: str) -> NoReturn:
        """Delete the job that has passed a limit. If so many nodes are there as will do, the next gang has these."""
        from airflow.sdk.exceptions import AirflowTaskTimeout

        name, memory = f"job {job['namespace']}/{job['name']}", Memory(context)
        stored, deleted = memory.job, self._delete(job)
        size = None
        if stored is not None and stored.uid == job["uid"]:
            size = size_to_be_had(self._limits(context, stored), seen, time.time())
        if seen is None or stored is None or size is None:
            raise AirflowTaskTimeout(f"{name}: {why}")
        if deleted:
            memory.keep_size(stored, size)
        failed = replace(seen, phase=Phase.FAILED, reason=Reason.TOO_FEW_NODES, message=why)
        raise retries.failure(outcome.failure_text(name, job["gang"], failed, ()), self, failed, job)

    # The end

    def _finish(
        self, context: Context, observation: Observation, job: Mapping[str, Any], tail: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The result, or the failure's exception.

        :param tail: the last lines of the rank that failed, if the trigger read them.
        """
        name, memory = f"job {job['namespace']}/{job['name']}", Memory(context)
        if observation.phase is Phase.LOST and (told := memory.result(job["uid"])) is not None:
            return told
        snapshot, alive = None, False
        try:
            backend = self._hook_of(job).connect()
            snapshot = backend.read(job["name"], job["namespace"])
            if snapshot is not None and snapshot.uid != job["uid"]:
                snapshot = None
            if observation.phase is Phase.LOST:
                # A time to live may have removed it before anybody looked: its events may still tell the end.
                observation = last_observation(backend, job["namespace"], job["uid"])
            elif observation.phase is not Phase.SUCCEEDED:
                tail = tail or last_lines(backend, snapshot, observation.pod)
                alive = snapshot is not None and not ends_by_itself(backend, snapshot)
        except JobError as error:
            self.log.warning("%s: its last words cannot be read: %s", name, error)
        if observation.phase is not Phase.SUCCEEDED:
            # Survivors would hold their GPUs until the collective's own timeout, pods that wait for an image for ever.
            if alive or self.on_finish == "delete" or (observation.pods_running and not self.keep_failed):
                self._delete(job)
            text = outcome.failure_text(name, job["gang"], observation, tail)
            raise retries.failure(text, self, observation, job)
        found = outcome.result(observation, job, outcome.last_words(snapshot))
        # The job may be removed, by us or by its time to live, before the result is told.
        memory.keep_result(job["uid"], found)
        self.log.info("%s succeeded", name)
        if self.on_finish != "keep":
            self._delete(job)
        return found

    def _delete(self, job: Mapping[str, Any]) -> bool:
        where = f"job {job['namespace']}/{job['name']}"
        try:
            backend = self._hook_of(job).connect()
            backend.delete(job["name"], job["namespace"], uid=job["uid"])
            self.log.info("%s is deleted", where)
            return True
        except JobError as error:
            self.log.error("%s could not be deleted and may still run: %s", where, error)
            return False

    @staticmethod
    def _event_job(job: Identity) -> dict[str, Any]:
        values = job.to_dict()
        return {key: values.get(key) for key in ("name", "namespace", "uid", "gang", "kind", "backend", "created")}

    def _hook_of(self, job: Mapping[str, Any]) -> PyTorchJobHook:
        """Where that job is: the task may have become another kind, or moved, while it was deferred."""
        return self.hook(str(job.get("kind") or "PyTorchJob"), job.get("backend"))


def _owner(context: Context) -> Owner:
    ti = context["ti"]
    index = ti.map_index if ti.map_index is not None else -1
    return Owner(ti.dag_id, ti.run_id, ti.task_id, index)
