"""Jobs of one kind on a Kubernetes cluster.

Needs get, list, create and delete on the kind, get and list on pods, and get on pods/log; an indexed Job also needs
get, create, patch and delete on services. Without the right to list events, Kueue's workloads or its pending workloads,
or to get nodes, it works too and only knows less about waiting and failing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

from kubeflow_training.jobs.backend import LogChunk, Position, Snapshot
from kubeflow_training.jobs.errors import JobError, JobExistsError, JobRefusedError, ManifestError
from kubeflow_training.jobs.kinds import INDEXED_JOB, PYTORCH_JOB, Kind, kind_of
from kubeflow_training.jobs.kubernetes import services
from kubeflow_training.jobs.kubernetes.answers import TIMEOUT, NotFoundError, items_of, no_such_place, sorted_errors
from kubeflow_training.jobs.kubernetes.cursor import Batch, Cursor, Lines
from kubeflow_training.jobs.kubernetes.nodes import Nodes
from kubeflow_training.jobs.kubernetes.workloads import Workloads
from kubeflow_training.jobs.observation.disruptions import created_twice
from kubeflow_training.jobs.observation.reader import may_replace, nodes_to_ask
from kubeflow_training.jobs.shapes import born, last_seen, mapping


class KubernetesCluster:
    """Jobs on Kubernetes. See `jobs.backend.Backend` for the calls.

    :param api_client: a configured `kubernetes.client.ApiClient`; the current kubeconfig's unless given.
    :param kind: the kind of all jobs of this backend.
    """

    def __init__(self, api_client: Any = None, kind: Kind = PYTORCH_JOB) -> None:
        from kubernetes import client, config

        if api_client is None:
            api_client = config.new_client_from_config()
        self.kind, self._group = kind, (kind.group, kind.version)
        self._api = api_client
        self._core, self._custom = client.CoreV1Api(api_client), client.CustomObjectsApi(api_client)
        self._workloads, self._nodes = Workloads(api_client), Nodes(api_client)

    def create(self, manifest: Mapping[str, Any]) -> Snapshot:
        found = kind_of(manifest)
        if found is not self.kind:
            cause = f"it is a {found.name}, and this backend's jobs are of kind {self.kind.name}"
            raise ManifestError("manifest", cause, f'Give the operator kind="{found.name}"')
        self.kind.require_valid(manifest)
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        thing = f"job {namespace}/{name}"
        made = False
        try:
            if self.kind is INDEXED_JOB:
                made = services.prepare(self._core, manifest)
            with sorted_errors(thing):
                job = self._custom.create_namespaced_custom_object(
                    self.kind.group,
                    self.kind.version,
                    namespace,
                    self.kind.plural,
                    dict(manifest),
                    _request_timeout=TIMEOUT,
                )
        except NotFoundError as error:
            raise no_such_place(thing, error, self.kind, namespace) from error
        except JobRefusedError:
            if made:
                services.remove(self._core, name, namespace, unowned=True)
            raise
        if self.kind is INDEXED_JOB:
            # Without an owner it goes with `delete`.
            with suppress(JobError):
                services.adopt(self._core, job)
        return Snapshot(job)

    def read(self, name: str, namespace: str) -> Snapshot | None:
        """See `Backend.read`.

        :raises JobRefusedError: if the cluster does not know the kind, or the account may not read it.
        """
        try:
            with sorted_errors(f"job {namespace}/{name}"):
                job = self._custom.get_namespaced_custom_object(
                    *self._group, namespace, self.kind.plural, name, _request_timeout=TIMEOUT
                )
        except NotFoundError as error:
            if error.kind_unknown:
                raise no_such_place(f"job {namespace}/{name}", error, self.kind, namespace) from error
            return None
        job = self._named(job)
        with sorted_errors(f"pods of job {namespace}/{name}"):
            pods = items_of(
                self._core.list_namespaced_pod(
                    namespace,
                    label_selector=self.kind.selector(name),
                    _preload_content=False,
                    _request_timeout=TIMEOUT,
                )
            )
        # Pods of a job that had this name before may still be ending.
        pods = [pod for pod in pods if self.kind.owns(job, pod)]
        pods.sort(key=lambda pod: pod["metadata"]["name"])
        events = [*self._events(job, pods), *self._workloads.of(job)]
        return Snapshot(job, pods, [*events, *self._nodes.read(nodes_to_ask(job, pods, events))])

    def last_words(self, namespace: str, uid: str) -> list[Mapping[str, Any]]:
        """Events of a job that is gone, oldest first, for an hour: `observe(None, (), ...)` reads its end from them."""
        return self._list_events(namespace, f"involvedObject.uid={uid}")

    def jobs(self, namespace: str | None = None, *, labels: Mapping[str, str] | None = None) -> list[Snapshot]:
        """See `Backend.jobs`.

        :raises JobRefusedError: if the cluster does not know the kind, or the account may not list it.
        """
        only = {"label_selector": ",".join(f"{key}={value}" for key, value in labels.items())} if labels else {}
        try:
            with sorted_errors("the list of jobs"):
                if namespace is None:
                    found = self._custom.list_cluster_custom_object(
                        *self._group, self.kind.plural, **only, _request_timeout=TIMEOUT
                    )
                else:
                    found = self._custom.list_namespaced_custom_object(
                        *self._group, namespace, self.kind.plural, **only, _request_timeout=TIMEOUT
                    )
        except NotFoundError as error:
            raise no_such_place("the list of jobs", error, self.kind, namespace or "") from error
        return [Snapshot(self._named(job)) for job in found["items"] if not self.kind.part_of_another(job)]

    def delete(self, name: str, namespace: str, *, uid: str | None = None, grace_seconds: int | None = None) -> bool:
        # Foreground: the job stays visible until its last pod is gone, so that a new gang never meets the old one.
        body: dict[str, Any] = {"propagationPolicy": "Foreground"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        delete = partial(
            self._custom.delete_namespaced_custom_object,
            self.kind.group,
            self.kind.version,
            namespace,
            self.kind.plural,
            name,
            _request_timeout=TIMEOUT,
        )
        try:
            with sorted_errors(f"job {namespace}/{name}"):
                if grace_seconds:
                    # Before the job: a pod whose end has begun with a long grace is not killed any earlier.
                    delete(body={**body, "dryRun": ["All"]})  # is it this job that is meant?
                    self._end_pods(name, namespace, grace_seconds)
                delete(body=body)
                if grace_seconds == 0:
                    # After the job: these vanish at once, and new ones would be made.
                    self._end_pods(name, namespace, 0)
        except (NotFoundError, JobExistsError):
            return False  # gone, or the uid is another job's
        finally:
            if self.kind is INDEXED_JOB:
                services.remove(self._core, name, namespace, unowned=True)
        return True

    def say(self, job: Snapshot, reason: str, message: str) -> None:
        """Write an event about the job.

        :raises JobRefusedError: without the right to create events.
        """
        metadata = job.job["metadata"]
        name, namespace = metadata["name"], metadata["namespace"]
        now = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"apiVersion": self.kind.api_version, "kind": self.kind.name, "name": name, "namespace": namespace}
        event = {
            "metadata": {"generateName": f"{name[:200]}.", "namespace": namespace},
            "involvedObject": {**about, "uid": job.uid},
            "type": "Normal",
            "reason": reason,
            "message": message[:1024],
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": "kubeflow-training"},
            "reportingComponent": "kubeflow-training",
        }
        with sorted_errors(f"event about job {namespace}/{name}"):
            self._core.create_namespaced_event(namespace, event, _request_timeout=TIMEOUT)

    def _end_pods(self, name: str, namespace: str, grace_seconds: int) -> None:
        """Without the right to it the pods have their own grace."""
        with suppress(JobRefusedError), sorted_errors(f"pods of job {namespace}/{name}"):
            self._core.delete_collection_namespaced_pod(
                namespace,
                label_selector=self.kind.selector(name),
                grace_period_seconds=grace_seconds,
                _request_timeout=TIMEOUT,
            )

    def logs(self, pod: Mapping[str, Any], position: Position | None = None, limit: int = 2000) -> LogChunk:
        uid = pod["metadata"]["uid"]
        cursor = Cursor.of(position if position and position.get("uid") == uid else None)
        since = [("sinceTime", cursor.since)] if cursor.since else []
        lines: list[str] = []
        last: tuple[int, int] | None = None

        def take(batch: Batch) -> bool:
            """Whether there is room for more."""
            nonlocal last
            room = limit - len(lines)
            lines.extend(batch.lines[:room])
            last = batch.marks[:room][-1] if batch.marks[:room] else last
            return len(lines) < limit

        if all(take(cursor.take([raw])) for raw in self._log(pod, [("timestamps", "true"), *since])):
            take(cursor.end())
        return LogChunk(lines, {"uid": uid, "at": last[0], "seen": last[1]} if last else position)

    def tail(self, pod: Mapping[str, Any], lines: int = 20) -> list[str]:
        return list(self._log(pod, [("tailLines", str(lines)), ("limitBytes", str(1 << 18))]))

    def _log(self, pod: Mapping[str, Any], query: list[tuple[str, str]]) -> Iterator[str]:
        """The log's lines as they come; the generated client knows no sinceTime."""
        metadata = pod["metadata"]
        running = (pod.get("status") or {}).get("phase") == "Running"
        try:
            with sorted_errors(f"log of pod {metadata['name']}"):
                response = self._api.call_api(
                    "/api/v1/namespaces/{namespace}/pods/{name}/log",
                    "GET",
                    path_params={"namespace": metadata["namespace"], "name": metadata["name"]},
                    query_params=[("container", self.kind.training_container(pod)), *query],
                    header_params={"Accept": "*/*"},
                    auth_settings=["BearerToken"],
                    _preload_content=False,
                    _return_http_data_only=True,
                    _request_timeout=TIMEOUT,
                )
        except (NotFoundError, JobRefusedError):
            return  # the pod is gone, or its container has not begun
        lines = Lines(1 << 16)
        try:
            with sorted_errors(f"log of pod {metadata['name']}"):
                for block in response.stream(1 << 16):
                    yield from lines.take(block)
            if not running:
                yield from lines.rest()  # the last words of an ended container may lack their line's end
        finally:
            response.release_conn()
            response.close()

    def _events(self, job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Events about what waits or is missing; none while all pods run, or the job is held back, or has succeeded."""
        metadata = mapping(job.get("metadata"))
        namespace, since = str(metadata["namespace"]), born(job)
        if self.kind.failed(job) and not any(mapping(pod.get("status")).get("phase") == "Failed" for pod in pods):
            # What failed is gone: only events tell who took it away.
            about = self._list_events(namespace, "involvedObject.kind=Pod")
            mine = f"{metadata['name']}-"
            return [
                event
                for event in about
                if str(mapping(event.get("involvedObject")).get("name")).startswith(mine) and last_seen(event) >= since
            ]
        if self.kind.ended(job) or self.kind.suspended(job):
            return []
        waiting = {
            str(pod["metadata"]["uid"])
            for pod in pods
            if mapping(pod.get("status")).get("phase") == "Pending" and mapping(pod.get("spec")).get("nodeName")
        }
        missing = len(pods) < (self.kind.wanted(job) or 0)
        pending = any(mapping(pod.get("status")).get("phase") == "Pending" for pod in pods)
        found: list[Mapping[str, Any]] = []
        if missing or pending or may_replace(job, pods):
            found += self._list_events(namespace, f"involvedObject.name={self.kind.creator(str(metadata['name']))}")
            for pod in created_twice(job, pods, found):
                found += self._list_events(namespace, f"involvedObject.name={pod}")
        if waiting:
            warnings = self._list_events(namespace, "type=Warning,involvedObject.kind=Pod")
            found += [item for item in warnings if mapping(item.get("involvedObject")).get("uid") in waiting]
        # A job that had this name before may have left some.
        return sorted((item for item in found if last_seen(item) >= since), key=last_seen)

    def _list_events(self, namespace: str, selector: str) -> list[Mapping[str, Any]]:
        try:
            with sorted_errors(f"events of {namespace}"):
                response = self._core.list_namespaced_event(
                    namespace, field_selector=selector, _preload_content=False, _request_timeout=TIMEOUT
                )
        except (JobRefusedError, NotFoundError):
            return []
        return sorted(items_of(response), key=last_seen)

    def _named(self, job: dict[str, Any]) -> dict[str, Any]:
        """The job with its kind, which lists of built-in kinds leave out."""
        return {"apiVersion": self.kind.api_version, "kind": self.kind.name, **job}
