"""From arguments that may be stored to clients that hold credentials: synchronous, asynchronous, and for waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kubeflow_training.jobs.backend import Backend
from kubeflow_training.jobs.errors import JobError
from kubeflow_training.jobs.kinds import INDEXED_JOB, Kind, kind_named
from kubeflow_training.jobs.waiting.job import Waiting
from kubeflow_training.jobs.waiting.joblog import JobLog
from kubeflow_training.jobs.waiting.limits import Limits

if TYPE_CHECKING:
    from kubeflow_training.jobs.kubernetes.client import AsyncCluster
    from kubeflow_training.jobs.kubernetes.discovery import Served


class PyTorchJobHook:
    """Makes backends; keeps none, so that a new one has new credentials.

    :param backend: "local" or "kubernetes".
    :param kind: "PyTorchJob", "TrainJob", or "Job" for the plain indexed one.
    :param kubernetes_conn_id: Airflow connection of the cluster; its content never leaves this process.
    :param home: folder of the local cluster; `KUBEFLOW_TRAINING_HOME` unless given.
    """

    def __init__(
        self,
        backend: str = "kubernetes",
        *,
        kind: str = "PyTorchJob",
        kubernetes_conn_id: str = "kubernetes_default",
        home: str | None = None,
    ) -> None:
        self.backend, self.kind = backend, kind
        self.kubernetes_conn_id, self.home = kubernetes_conn_id, home

    def connect(self) -> Backend:
        """A backend.

        :raises JobError: if there is none of that name.
        """
        if self.backend == "local":
            from kubeflow_training.jobs.local import LocalCluster

            return LocalCluster(self.home)
        if self.backend == "kubernetes":
            from kubeflow_training.jobs.kubernetes import KubernetesCluster

            return KubernetesCluster(self._api_client(), kind_named(self.kind))
        raise JobError(f"backend {self.backend!r}", "there is none of that name", "Use `local` or `kubernetes`")

    def served(self, namespace: str, runtime: str) -> Served:
        """Which kinds of jobs the cluster can train with; see `jobs.kubernetes.discovery.served`.

        :raises JobError: if the cluster does not answer.
        """
        from kubeflow_training.jobs.kubernetes.discovery import served

        return served(self._api_client(), namespace, runtime)

    @asynccontextmanager
    async def waiting(
        self,
        name: str,
        namespace: str,
        log: JobLog,
        *,
        uid: str | None = None,
        ranks: str = "all",
        limits: Limits | None = None,
        must_exist: bool = True,
        poll_interval: float = 2.0,
    ) -> AsyncIterator[Waiting]:
        """Wait for a job, together with all who wait in this event loop for others.

        :param name, namespace, uid: the job; another job of that name counts as its loss.
        :param log: takes the lines of the ranks.
        :param ranks: whose lines: "all", "first" or "none".
        :param limits: of the waiting, as absolute times.
        :param must_exist: whether a job that was never seen is lost, or waited for.
        :param poll_interval: seconds between two looks where the backend cannot tell news.
        :raises JobError: if there is no such backend or kind.
        """
        job = f"{namespace}/{name}"
        more: dict[str, Any] = {"limits": limits, "must_exist": must_exist}
        if self.backend == "kubernetes":
            from kubeflow_training.jobs.kubernetes.logs import KubernetesLogs
            from kubeflow_training.jobs.kubernetes.watching.sharing import shared_feed

            kind = kind_named(self.kind)
            feed = shared_feed(self.kubernetes_conn_id, self.async_client, namespace, kind)
            news = feed.subscribe(name, uid)
            try:
                yield Waiting(job, uid, news, log, KubernetesLogs(feed.cluster, kind, log, ranks), **more)
            finally:
                await news.close()
        else:
            from kubeflow_training.jobs.waiting.polling import PolledLogs, shared_poll

            await asyncio.to_thread(self.connect)  # a backend that cannot be is told now
            look = shared_poll((self.backend, self.home), self.connect).subscribe(name, namespace, uid, poll_interval)
            try:
                yield Waiting(job, uid, look, log, PolledLogs(look, log, ranks, self.connect), **more)
            finally:
                await look.close()

    @asynccontextmanager
    async def async_client(self) -> AsyncIterator[Any]:
        """A `kubernetes_asyncio.client.ApiClient` of the connection, with the credentials of the moment."""
        hook, configuration = await asyncio.to_thread(self._async_parts)
        async with hook(client_configuration=configuration, conn_id=self.kubernetes_conn_id).get_conn() as client:
            yield client

    def _async_parts(self) -> tuple[Callable[..., Any], Any]:
        """Importing the client takes a second, for which an event loop must not stand still."""
        import aiohttp  # noqa: F401
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
        from kubernetes_asyncio.client import Configuration

        from kubeflow_training.jobs.kubernetes.client import CONNECTIONS

        configuration = Configuration()
        configuration.connection_pool_maxsize = CONNECTIONS
        return AsyncKubernetesHook, configuration

    def _api_client(self) -> Any:
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook

        return KubernetesHook(conn_id=self.kubernetes_conn_id).get_conn()


class AsyncPyTorchJobHook:
    """The calls for custom objects that `AsyncKubernetesHook` lacks; an asynchronous context manager.

    :param kind: "PyTorchJob", "TrainJob", or "Job" for the plain indexed one.
    :param kubernetes_conn_id: Airflow connection of the cluster.

    All calls raise `jobs.errors.JobError`, sorted by what follows from it.
    """

    def __init__(self, kind: str = "PyTorchJob", *, kubernetes_conn_id: str = "kubernetes_default") -> None:
        self._kind: Kind = kind_named(kind)
        self._hook = PyTorchJobHook(kind=kind, kubernetes_conn_id=kubernetes_conn_id)
        self._cluster: AsyncCluster | None = None

    async def __aenter__(self) -> AsyncPyTorchJobHook:
        from kubeflow_training.jobs.kubernetes.client import AsyncCluster

        self._cluster = AsyncCluster(self._hook.async_client)
        return self

    async def __aexit__(self, *_: object) -> None:
        cluster, self._cluster = self._open, None
        await cluster.close()

    async def get(self, name: str, namespace: str) -> dict[str, Any] | None:
        """The job; None if there is none.

        :param name, namespace: the job.
        """
        from kubeflow_training.jobs.kubernetes.client import NotThereError

        try:
            return await self._open.json("get", f"{self._path(namespace)}/{quote(name, safe='')}")
        except NotThereError:
            return None

    async def list(self, namespace: str, *, labels: Mapping[str, str] | None = None) -> AsyncIterator[dict[str, Any]]:
        """All jobs of a namespace, page by page.

        :param namespace: where to look.
        :param labels: that the jobs must have.
        """
        from kubeflow_training.jobs.kubernetes.watching.reflector import PAGE

        select = [("labelSelector", ",".join(f"{key}={value}" for key, value in labels.items()))] if labels else []
        more = ""
        while True:
            params = [("limit", str(PAGE)), *select, *([("continue", more)] if more else [])]
            page = await self._open.json("list", self._path(namespace), params)
            for item in page["items"]:
                yield {"apiVersion": self._kind.api_version, "kind": self._kind.name, **item}
            if not (more := page["metadata"].get("continue") or ""):
                return

    async def watch(self, name: str, namespace: str) -> AsyncIterator[dict[str, Any] | None]:
        """One job, now and after each change; None while there is none. Goes on through outages until it is closed.

        :param name, namespace: the job.
        """
        from kubeflow_training.jobs.kubernetes.watching.feed import Feed

        feed = Feed(self._open, namespace, self._kind)
        news = feed.subscribe(name)
        last: Any = self
        try:
            while True:
                look = news.look()
                job = look.snapshot.job if look.snapshot else None
                if look.known and job != last:
                    last = job
                    yield None if job is None else dict(job)
                await news.changed()
        finally:
            await news.close()

    async def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create a job as the manifest says.

        :param manifest: all of it, with name and namespace.
        :raises ManifestError, JobExistsError, JobRefusedError: see `jobs.backend.Backend.create`.
        """
        self._kind.require_valid(manifest)
        if self._kind is INDEXED_JOB:
            # Its Service comes before it and is owned by it after.
            made = await asyncio.to_thread(lambda: self._hook.connect().create(manifest))
            return dict(made.job)
        return await self._open.json(
            "create", self._path(manifest["metadata"]["namespace"]), method="POST", body=manifest
        )

    async def delete(self, name: str, namespace: str, *, uid: str | None = None) -> bool:
        """Ask for the job's end; whether there was such a job.

        :param name, namespace: the job.
        :param uid: delete only the job that has it.
        """
        from kubeflow_training.jobs.errors import JobExistsError
        from kubeflow_training.jobs.kubernetes.client import NotThereError

        body: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            path = f"{self._path(namespace)}/{quote(name, safe='')}"
            await self._open.json("delete", path, method="DELETE", body=body)
        except (NotThereError, JobExistsError):
            return False
        return True

    @property
    def _open(self) -> AsyncCluster:
        if self._cluster is None:
            raise JobError("AsyncPyTorchJobHook", "it is not open", "Use it in `async with`")
        return self._cluster

    def _path(self, namespace: str) -> str:
        return f"/apis/{self._kind.api_version}/namespaces/{quote(namespace, safe='')}/{self._kind.plural}"
