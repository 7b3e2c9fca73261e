"""Queues of teams on a test cluster: made from their file, looked at through Workloads, and taken away again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kubernetes import client

from dropforge.placement.queues import path_of, render
from dropforge.placement.teams_file import parse_teams
from tests.e2e.harness import wait
from tests.kubeflow_training.kueue_situations import GROUP, VERSION
from tests.kubeflow_training.rights import admin


def call(method: str, path: str, body: Any = None, **query: str) -> Any:
    """One call of the API server with the administrator's rights. :raises ApiException: if it refuses."""
    content = "application/apply-patch+yaml" if method == "PATCH" else "application/json"
    answer = admin().call_api(
        path,
        method,
        query_params=list(query.items()),
        header_params={"Content-Type": content, "Accept": "application/json"},
        body=body,
        auth_settings=["BearerToken"],
        _preload_content=False,
        _return_http_data_only=True,
    )
    return json.loads(answer.data)


def apply(made: dict[str, Any], **query: str) -> Any:
    """What `kubectl apply --server-side` does."""
    return call("PATCH", path_of(made), made, fieldManager="dropforge", force="true", **query)


@contextmanager
def queues(file: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """What is rendered of a file of teams, on the cluster until the block ends."""
    objects = render(parse_teams(json.dumps(file)))
    made = []
    try:
        for one in objects:
            apply(one)
            made.append(one)
        wait("queues that admit", lambda: all(active(one) for one in objects if one["kind"] == "LocalQueue"), 60)
        yield objects
    finally:
        for one in reversed(made):
            with suppress(client.ApiException):
                call("DELETE", path_of(one))


def active(queue: dict[str, Any]) -> bool:
    found = call("GET", path_of(queue)).get("status", {}).get("conditions", [])
    return any(one["type"] == "Active" and one["status"] == "True" for one in found)


class Looks:
    """Kueue's Workloads and the pods of a namespace's jobs."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._core, self._custom = client.CoreV1Api(admin()), client.CustomObjectsApi(admin())

    def conditions(self) -> dict[str, dict[str, str]]:
        """By job, the conditions that hold with their reasons."""
        found = self._custom.list_namespaced_custom_object(GROUP, VERSION, self.namespace, "workloads")["items"]
        return {
            one["metadata"]["ownerReferences"][0]["name"]: {
                condition["type"]: condition["reason"]
                for condition in one.get("status", {}).get("conditions", [])
                if condition["status"] == "True"
            }
            for one in found
        }

    def admitted(self) -> set[str]:
        return {job for job, true in self.conditions().items() if "Admitted" in true}

    def preempted(self, *reasons: str) -> set[str]:
        """Jobs that wait because others took their place, for one of these reasons."""
        found = self.conditions().items()
        return {job for job, true in found if true.get("Preempted") in reasons and "Admitted" not in true}

    def pods(self) -> Counter[str]:
        """How many pods each job has that are not about to go."""
        found = self._core.list_namespaced_pod(self.namespace).items
        kept = [one for one in found if one.metadata.deletion_timestamp is None]
        return Counter(one.metadata.labels["training.kubeflow.org/job-name"] for one in kept)
