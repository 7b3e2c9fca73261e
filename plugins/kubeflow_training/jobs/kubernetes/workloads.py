"""Kueue's Workload of a job that is held back, with its position in the queue.

One list call per look, and only for a job that has a queue and is suspended; the position at most every ten seconds.
Where Kueue is absent, or the account may not ask, less is known about waiting and nothing fails.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Final

from kubeflow_training.jobs.errors import JobRefusedError
from kubeflow_training.jobs.kubernetes.answers import TIMEOUT, NotFoundError, sorted_errors
from kubeflow_training.jobs.observation import kueue
from kubeflow_training.jobs.shapes import items, mapping, name

_POSITION_SECONDS: Final = 10.0
_REFUSED_SECONDS: Final = 300.0


class Workloads:
    """:param api_client: a configured `kubernetes.client.ApiClient`."""

    def __init__(self, api_client: Any) -> None:
        self._api = api_client
        self._versions = {kueue.GROUP: 0, kueue.VISIBILITY_GROUP: 0}
        self._not_before: dict[str, float] = {}
        self._positions: dict[str, tuple[float, Mapping[str, Any] | None]] = {}

    def of(self, job: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The job's Workload, as one more of its events; none if it has no queue or is not held back."""
        if not kueue.worth_asking(job):
            return []
        namespace = str(mapping(job.get("metadata")).get("namespace"))
        answer = self._ask(kueue.GROUP, namespace, "workloads", label_selector=kueue.selector(job))
        workload = kueue.newest(answer)
        if workload is None:
            return []
        queue = str(mapping(workload.get("spec")).get("queueName") or "")
        told = self._position(namespace, queue, workload) if queue and kueue.pending(workload) else None
        return [kueue.with_position(workload, told)]

    def _position(self, namespace: str, queue: str, workload: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What the visibility API tells about the queue, kept for a moment."""
        key, now = f"{namespace}/{queue}", time.monotonic()
        at, answer = self._positions.get(key, (float("-inf"), None))
        known = any(name(item) == name(workload) for item in items(mapping(answer).get("items")))
        if now - at >= (_POSITION_SECONDS if known else 1.0):
            path = f"localqueues/{queue}/pendingworkloads"
            answer = self._ask(kueue.VISIBILITY_GROUP, namespace, path)
            self._positions[key] = (now, answer)
        return answer

    def _ask(self, group: str, namespace: str, what: str, **more: Any) -> Mapping[str, Any] | None:
        key = f"{group}/{namespace}"
        if time.monotonic() < self._not_before.get(key, 0):
            return None
        try:
            while True:
                version = kueue.VERSIONS[self._versions[group]]
                try:
                    with sorted_errors(f"{what} of {namespace}"):
                        return mapping(self._get(f"/apis/{group}/{version}/namespaces/{namespace}/{what}", more))
                except NotFoundError as error:
                    if not error.kind_unknown:
                        return None  # no such queue
                    if self._versions[group] + 1 == len(kueue.VERSIONS):
                        self._versions[group] = 0
                        raise
                    self._versions[group] += 1
        except (NotFoundError, JobRefusedError):
            self._not_before[key] = time.monotonic() + _REFUSED_SECONDS
            return None

    def _get(self, path: str, query: Mapping[str, Any]) -> Any:
        params = [("labelSelector", query["label_selector"])] if "label_selector" in query else []
        response = self._api.call_api(
            path,
            "GET",
            query_params=params,
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
            _request_timeout=TIMEOUT,
        )
        return json.loads(response.data)
