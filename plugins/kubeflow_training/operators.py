"""`PyTorchJobOperator`: runs a distributed training job, watches it to its end, and finds it again after a restart."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NoReturn, get_args

from airflow.sdk import BaseOperator, BaseOperatorLink

from kubeflow_training import retries
from kubeflow_training.asking.instance import this_instance
from kubeflow_training.connection import ClusterArguments
from kubeflow_training.ending import Ending
from kubeflow_training.exceptions import JobFailedForGood, JobNotReached
from kubeflow_training.gangs.attach import Gangs, cut_off
from kubeflow_training.gangs.memory import STATE_KEY, Memory
from kubeflow_training.gangs.reattach import Action, Identity
from kubeflow_training.jobs.avoid import away_from
from kubeflow_training.jobs.backend import Backend
from kubeflow_training.jobs.elastic import require_sizes, resized
from kubeflow_training.jobs.errors import JobError, JobRefusedError, ManifestError
from kubeflow_training.jobs.kinds import kind_of
from kubeflow_training.jobs.manifest.experiments import held
from kubeflow_training.jobs.manifest.ownership import Owner
from kubeflow_training.jobs.observation import Observation
from kubeflow_training.jobs.reaping.orphans import marked
from kubeflow_training.jobs.source import job_of
from kubeflow_training.jobs.spec import TrainingJobSpec
from kubeflow_training.jobs.waiting.job import End, run_blocking
from kubeflow_training.jobs.waiting.joblog import JobLog, LogLimit
from kubeflow_training.jobs.waiting.limits import Limits
from kubeflow_training.jobs.waiting.podlog import LogRanks
from kubeflow_training.links import MlflowRunLink, PodLogsLink, PyTorchJobLink
from kubeflow_training.published import JOB_KEY, publish, whereabouts
from kubeflow_training.state_mismatch import ResumableTask, first_event_at

if TYPE_CHECKING:
    import jinja2
    from airflow.sdk import Context

__all__ = ["JOB_KEY", "STATE_KEY", "PyTorchJobOperator"]

_TRIGGER_FAILURES: Final = 3
_TRIGGER_FAILED: Final = "__fail__"  # Airflow's own sign
_NAP: Final = 0.2  # seconds; how soon a kill is noticed

OnFinish = Literal["keep", "delete", "delete_succeeded"]


class PyTorchJobOperator(ClusterArguments, ResumableTask, BaseOperator):
    """Run a PyTorchJob (or TrainJob, or indexed Job) to its end.

    A retry finds the job that an earlier try started and continues it; a failed job is replaced by the next attempt.
    A cleared task or a changed spec starts a new job. Whether a failure is retried follows from its reason. The result
    is a dictionary: phase, name, namespace, uid, `gang` (the attempt), durations, message (rank 0's termination
    message), progress.

    :param manifest: the job: a mapping, YAML text, or the name of a template file (.yaml, .yml, .json); templated, may
        come from another task. Without a name it gets one of DAG, task and run.
    :param spec: the job in typed words instead, a `TrainingJobSpec` or a mapping of its fields; templated.
    :param kind: what a `spec` is compiled to: "PyTorchJob", "TrainJob" or "Job".
    :param backend, kubernetes_conn_id, home: see `connection.ClusterArguments`; templated.
    :param deferrable: wait in the triggerer instead of in a worker; everything else is the same.
    :param poll_interval: seconds between two looks at the job, where it cannot be watched.
    :param log_ranks: whose log lines come into the task's log: "all", "first" or "none".
    :param log_limit: how much of the log to show: a number of lines, or text like "20 MB"; None for all of it.
    :param queue_timeout: how long the job may wait before its first pod runs, in the queue and while it starts: from
        its creation, and again each time it is suspended or let go.
    :param min_nodes: with how few nodes it may run. A job of which so many pods have a node, but a pod has none for
        `queue_timeout`, is deleted, and the next starts with the nodes there are; the one after has all again.
    :param run_timeout: how long it may run; time in a queue or suspended does not count.
    :param number_gangs: later attempts have their number in the job's name, like `train-g2`; else all share one name.
    :param keep_failed: keep the ended pods of a failed attempt until the job's `ttl_seconds`, also beside the next one.
    :param on_finish: "keep" the finished job until its `ttl_seconds`, "delete" it, or "delete_succeeded".
    :param hold: start the pods idle, with their full environment, and print what starts the training in each pod.
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
    operator_extra_links: Collection[BaseOperatorLink] = (PyTorchJobLink(), PodLogsLink(), MlflowRunLink())
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
        # While the DAG is parsed, not when the job runs already.
        for name, value, known in (
            ("log_ranks", log_ranks, get_args(LogRanks)),
            ("on_finish", on_finish, get_args(OnFinish)),
        ):
            if value not in known:
                raise ValueError(f"task {self.task_id}: {name}={value!r}; give one of {', '.join(map(repr, known))}")
        try:
            LogLimit.of(log_limit)
        except JobError as error:
            raise ValueError(f"task {self.task_id}: {error}") from error
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
        self.explain_retry(context)
        try:
            manifest = self._manifest(context)
            gangs = self._gangs(context, manifest)
            decision = gangs.attach(held(manifest) if self.hold else manifest, retries.generation(context))
            job = decision.identity
            if decision.action is Action.TELL:
                return Memory(context).result(job.uid) or {}
            self._publish(context, manifest, job)
            limits = self._limits(context, job)
            # A job that is over would have the task resumed at once: a state mismatch.
            if self.deferrable and not decision.over:
                self._stop_if_killed(context, job)
                self.note_wait(context)
                self.defer(trigger=self._trigger(job, limits), method_name=self.resume.__name__)
            seen, tail = self._watch_here(context, job, limits)
            return Ending(self, context).ended(seen, whereabouts(job), tail)
        except AirflowTaskTimeout:
            if (job := job or cut_off(Memory(context).job, self._backend_of)) is not None:
                Ending(self, context).delete(whereabouts(job))
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
            return self._watch_anew(context, f"the trigger reported attempt {job['gang']}, not attempt {stored.gang}")
        known = whereabouts(stored) if stored is not None and stored.uid == job["uid"] else dict(job)
        if event["kind"] == "timeout":
            seen = Observation.from_dict(event["observation"]) if event.get("observation") else None
            self._too_long(context, known, seen, str(event.get("why") or "it took longer than it may"))
        if event["kind"] == "broken":
            return self._watch_anew(context, str(event.get("why") or ""))
        tails = event.get("tails") or {}
        seen = Observation.from_dict(event["observation"])
        found = Ending(self, context).ended(seen, known, tails.get(seen.replica) or [])
        # Killed in these last moments: success is told by the retry, which finds the job ended well.
        self._stop_if_killed(context, None)
        return found

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        # A trigger that broke says nothing about the job: find the job again and go on waiting, a few times.
        if next_method == _TRIGGER_FAILED and Memory(context).failures < _TRIGGER_FAILURES:
            with self.own_failures(context):
                return self._watch_anew(context, str((next_kwargs or {}).get("error") or "the trigger broke"))
        return super().resume_execution(next_method, next_kwargs, context)

    def on_kill(self) -> None:
        # A signal handler: it may run in the middle of anything, so it only leaves a note. `execute` then raises.
        self._killed = True

    def gang_ended(self, job: Mapping[str, Any], seen: Observation) -> None:
        """For subclasses: a gang's end was seen, also before a retry and more than once. It must not raise.

        :param job: as in the XCom `pytorch_job`.
        """

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
            replaced=lambda job, seen: self._replaced(context, job, seen),
            # After the fingerprint was taken: neither a node to avoid nor fewer nodes make another job of it.
            prepared=lambda made, job: marked(
                away_from(self._sized(context, made, job), [item.node for item in retries.avoided(context)]),
                this_instance(),
            ),
            numbered=self.number_gangs,
            keep_failed=self.keep_failed,
            place=self.place,
            elsewhere=self._backend_of,
        )

    def _replaced(self, context: Context, job: Identity, seen: Observation) -> bool:
        """Whether another gang follows this one, whose failure no earlier try lived to tell."""
        self.gang_ended(whereabouts(job), seen)
        return retries.replaced(self, context, seen, job.to_dict())

    def _backend_of(self, job: Identity) -> Backend:
        return self.hook(job.kind, job.backend).connect()

    def _sized(self, context: Context, manifest: dict[str, Any], job: Identity) -> dict[str, Any]:
        nodes = Memory(context).size(job)
        if nodes is None:
            return manifest
        self.log.info("job %s/%s: attempt %d starts with %d nodes", job.namespace, job.name, job.gang, nodes)
        return resized(manifest, nodes)

    def _publish(self, context: Context, manifest: Mapping[str, Any], job: Identity) -> None:
        publish(self, context, manifest, job)

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
            queued,
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
            queue_seconds=limits.queue_seconds,
            run_seconds=limits.run_seconds,
            min_nodes=limits.min_nodes,
            place_seconds=limits.place_seconds,
            not_before=first_event_at(),
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
            self._too_long(context, whereabouts(job), end.observation, end.why)
        assert end.observation is not None
        self._stop_if_killed(context, job)
        return end.observation, end.tails.get(end.observation.replica or "") or []

    def _watch_anew(self, context: Context, why: str) -> dict[str, Any]:
        count = Memory(context).count_failure()
        if count > _TRIGGER_FAILURES:
            raise JobNotReached(f"the trigger broke {count} times, the last time: {why}. The job is left as it is")
        self.log.warning("%s; the job is watched again (%d of %d)", why, count, _TRIGGER_FAILURES)
        return self.execute(context)

    def _stop_if_killed(self, context: Context, job: Identity | None) -> None:
        if self._killed:
            Ending(self, context).stopped(whereabouts(job) if job is not None else None)

    def _too_long(self, context: Context, job: Mapping[str, Any], seen: Observation | None, why: str) -> NoReturn:
        Ending(self, context).too_long(job, seen, why, lambda stored: self._limits(context, stored))


def _owner(context: Context) -> Owner:
    ti = context["ti"]
    index = ti.map_index if ti.map_index is not None else -1
    return Owner(ti.dag_id, ti.run_id, ti.task_id, index)
