"""PyTorchJobs on a Kubernetes cluster with the Kubeflow training operator.

Needs get, list, create and delete on pytorchjobs, get and list on pods, and get on pods/log. Without the right to list
events it works too and only knows less about waiting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final

from kubeflow_training.jobs.backend import LogChunk, Position, Snapshot
from kubeflow_training.jobs.checks import require_valid
from kubeflow_training.jobs.errors import (
    BackendUnauthorizedError,
    BackendUnavailableError,
    JobExistsError,
    JobRefusedError,
)
from kubeflow_training.jobs.manifest import CONTAINER, JOB_NAME_LABEL

_GROUP: Final = "kubeflow.org"
_VERSION: Final = "v1"
_PLURAL: Final = "pytorchjobs"
_TIMEOUT: Final = (5, 30)  # seconds to connect and to wait for bytes
_STAMP: Final = re.compile(r"([\dT:-]{19})(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")
_PASSING: Final = frozenset({408, 429, 500, 502, 503, 504})


class KubernetesCluster:
    """Jobs on Kubernetes. See `jobs.backend.Backend` for the calls.

    :param api_client: a configured `kubernetes.client.ApiClient`; the current kubeconfig's unless given.
    """

    def __init__(self, api_client: Any = None) -> None:
        from kubernetes import client, config

        if api_client is None:
            api_client = config.new_client_from_config()
        self._api = api_client
        self._core, self._custom = client.CoreV1Api(api_client), client.CustomObjectsApi(api_client)

    def create(self, manifest: Mapping[str, Any]) -> Snapshot:
        require_valid(manifest)
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        try:
            with _errors(f"job {namespace}/{name}"):
                job = self._custom.create_namespaced_custom_object(
                    _GROUP, _VERSION, namespace, _PLURAL, dict(manifest), _request_timeout=_TIMEOUT
                )
        except _NotFoundError as error:
            raise JobRefusedError(
                f"job {namespace}/{name}",
                f"the cluster knows no such namespace or no PyTorchJobs: {error}",
                "Create the namespace, or install the Kubeflow training operator",
            ) from error
        return Snapshot(job)

    def read(self, name: str, namespace: str) -> Snapshot | None:
        try:
            with _errors(f"job {namespace}/{name}"):
                job = self._custom.get_namespaced_custom_object(
                    _GROUP, _VERSION, namespace, _PLURAL, name, _request_timeout=_TIMEOUT
                )
        except _NotFoundError:
            return None
        with _errors(f"pods of job {namespace}/{name}"):
            pods = _items(
                self._core.list_namespaced_pod(
                    namespace,
                    label_selector=f"{JOB_NAME_LABEL}={name}",
                    _preload_content=False,
                    _request_timeout=_TIMEOUT,
                )
            )
        uid = job["metadata"]["uid"]
        # Pods of a job that had this name before may still be ending.
        pods = [
            pod for pod in pods if uid in {owner.get("uid") for owner in pod["metadata"].get("ownerReferences", [])}
        ]
        pods.sort(key=lambda pod: pod["metadata"]["name"])
        ended = "completionTime" in (job.get("status") or {})
        return Snapshot(job, pods, [] if ended else self._events(namespace, uid, pods))

    def jobs(self, namespace: str | None = None, *, labels: Mapping[str, str] | None = None) -> list[Snapshot]:
        only = {"label_selector": ",".join(f"{key}={value}" for key, value in labels.items())} if labels else {}
        with _errors("the list of jobs"):
            if namespace is None:
                found = self._custom.list_cluster_custom_object(
                    _GROUP, _VERSION, _PLURAL, **only, _request_timeout=_TIMEOUT
                )
            else:
                found = self._custom.list_namespaced_custom_object(
                    _GROUP, _VERSION, namespace, _PLURAL, **only, _request_timeout=_TIMEOUT
                )
        return [Snapshot(job) for job in found["items"]]

    def delete(self, name: str, namespace: str, *, uid: str | None = None, grace_seconds: int | None = None) -> bool:
        # Foreground: the job stays visible until its last pod is gone, so that a new gang never meets the old one.
        body: dict[str, Any] = {"propagationPolicy": "Foreground"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            with _errors(f"job {namespace}/{name}"):
                self._custom.delete_namespaced_custom_object(
                    _GROUP, _VERSION, namespace, _PLURAL, name, body=body, _request_timeout=_TIMEOUT
                )
                if grace_seconds is not None:
                    self._core.delete_collection_namespaced_pod(
                        namespace,
                        label_selector=f"{JOB_NAME_LABEL}={name}",
                        grace_period_seconds=grace_seconds,
                        _request_timeout=_TIMEOUT,
                    )
        except (_NotFoundError, JobExistsError):
            return False  # gone, or the uid is another job's
        return True

    def logs(self, pod: Mapping[str, Any], position: Position | None = None, limit: int = 2000) -> LogChunk:
        uid = pod["metadata"]["uid"]
        known = position if position and position.get("uid") == uid else None
        at, seen = (int(known["at"]), int(known["seen"])) if known else (0, 0)
        # The API takes whole seconds only: what was read of that second is dropped again here.
        since = [("sinceTime", datetime.fromtimestamp(at // 10**9).astimezone().isoformat())] if known else []
        lines: list[str] = []
        repeated = 0
        for raw in self._log(pod, [("timestamps", "true"), *since]):
            stamp, _, text = raw.partition(" ")
            when = nanoseconds(stamp)
            if when is None or when < at:
                continue
            if when == at:
                repeated += 1
                if repeated <= seen:
                    continue
                seen += 1
            else:
                at, seen, repeated = when, 1, 1
            lines.append(text)
            if len(lines) >= limit:
                break
        return LogChunk(lines, {"uid": uid, "at": at, "seen": seen} if at else position)

    def tail(self, pod: Mapping[str, Any], lines: int = 20) -> list[str]:
        return list(self._log(pod, [("tailLines", str(lines))]))

    def _log(self, pod: Mapping[str, Any], query: list[tuple[str, str]]) -> Iterator[str]:
        """The log's lines as they come; the generated client knows no sinceTime."""
        metadata = pod["metadata"]
        running = (pod.get("status") or {}).get("phase") == "Running"
        try:
            with _errors(f"log of pod {metadata['name']}"):
                response = self._api.call_api(
                    "/api/v1/namespaces/{namespace}/pods/{name}/log",
                    "GET",
                    path_params={"namespace": metadata["namespace"], "name": metadata["name"]},
                    query_params=[("container", CONTAINER), *query],
                    header_params={"Accept": "*/*"},
                    auth_settings=["BearerToken"],
                    _preload_content=False,
                    _return_http_data_only=True,
                    _request_timeout=_TIMEOUT,
                )
        except (_NotFoundError, JobRefusedError):
            return  # the pod is gone, or its container has not begun
        rest = b""
        try:
            with _errors(f"log of pod {metadata['name']}"):
                for block in response.stream(1 << 16):
                    *whole, rest = (rest + block).split(b"\n")
                    for line in whole:
                        yield line.decode(errors="replace")
            if rest and not running:
                yield rest.decode(errors="replace")  # the last words of an ended container may lack their line's end
        finally:
            response.release_conn()
            response.close()

    def _events(self, namespace: str, uid: str, pods: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        names = {pod["metadata"]["uid"] for pod in pods}
        try:
            with _errors(f"events of {namespace}"):
                found = _items(
                    self._core.list_namespaced_event(namespace, _preload_content=False, _request_timeout=_TIMEOUT)
                )
        except (JobRefusedError, _NotFoundError):
            return []
        mine = [item for item in found if (item.get("involvedObject") or {}).get("uid") in {uid, *names}]
        return sorted(mine, key=lambda item: str(item.get("lastTimestamp") or item.get("eventTime") or ""))


class _NotFoundError(Exception):
    """The API answered 404."""


@contextmanager
def _errors(thing: str) -> Iterator[None]:
    """Sort the client's errors by what follows from them."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        message = _message(error)
        if error.status == 404:
            raise _NotFoundError(message) from error
        if error.status == 401:
            raise BackendUnauthorizedError(thing, f"401: {message}", "Renew the cluster's credentials") from error
        if error.status == 409:
            raise JobExistsError(thing, message, "Delete it first, or choose another name") from error
        if not error.status or error.status in _PASSING:
            raise BackendUnavailableError(thing, f"{error.status}: {message}", "It is tried again") from error
        mend = "Give the account the rights this needs" if error.status == 403 else "Correct the manifest"
        raise JobRefusedError(thing, f"the cluster refuses it ({error.status}): {message}", mend) from error
    except (HTTPError, OSError) as error:
        raise BackendUnavailableError(thing, f"the cluster cannot be reached: {error}", "It is tried again") from error


def nanoseconds(stamp: str) -> int | None:
    """An RFC 3339 time stamp with up to nine digits of fraction as nanoseconds since 1970; None if it is none."""
    match = _STAMP.fullmatch(stamp)
    if match is None:
        return None
    try:
        seconds = datetime.fromisoformat(match[1] + match[3])
    except ValueError:
        return None
    return int(seconds.timestamp()) * 10**9 + int((match[2] or "0").ljust(9, "0"))


def _message(error: Any) -> str:
    """The server's own words, which are the webhook's where it was one."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)


def _items(response: Any) -> list[Any]:
    found: list[Any] = json.loads(response.data)["items"]
    return found
