"""Holding a job back in its Kueue queue, or moving it there, by its Workload: with the right to patch workloads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kubeflow_training.jobs.errors import JobExistsError, JobRefusedError
from kubeflow_training.jobs.kubernetes.answers import TIMEOUT, NotFoundError, sorted_errors
from kubeflow_training.jobs.observation import kueue
from kubeflow_training.jobs.shapes import mapping, name

_TRIES: Final = 5  # Kueue writes into a Workload each time that it has looked at it


class Standings:
    """:param api_client: a configured `kubernetes.client.ApiClient`."""

    def __init__(self, api_client: Any) -> None:
        from kubernetes import client

        self._custom = client.CustomObjectsApi(api_client)

    def stand(self, job: Mapping[str, Any], *, held: bool | None = None, priority: int | None = None) -> None:
        """Take the job's Workload out of its queue, let it back in, or give it a priority.

        Only while it waits: what has been admitted since somebody has looked would be ended by that.

        :raises JobRefusedError: if no queue holds the job, it has been admitted, or the account may not.
        """
        metadata = mapping(job.get("metadata"))
        thing = f"job {metadata.get('namespace')}/{metadata.get('name')}"
        if not kueue.worth_asking(job):
            raise JobRefusedError(thing, "no queue holds it back", "Set `compute.queue` in the recipe of the next run")
        change: dict[str, Any] = {} if held is None else {"active": not held}
        change |= {} if priority is None else {"priority": priority}
        for version in kueue.VERSIONS:
            try:
                self._change(version, job, thing, change)
            except NotFoundError as error:
                if error.kind_unknown:
                    continue  # an older Kueue, or none
                raise JobRefusedError(thing, "it is gone", "See what there is with `dropforge queue`") from error
            else:
                return
        raise _unmanaged(thing)

    def _change(self, version: str, job: Mapping[str, Any], thing: str, change: Mapping[str, Any]) -> None:
        namespace = str(mapping(job.get("metadata")).get("namespace"))
        place, about = (kueue.GROUP, version, namespace, "workloads"), f"the Workload of {thing}"
        for tries_left in reversed(range(_TRIES)):
            with sorted_errors(about):
                answer = self._custom.list_namespaced_custom_object(
                    *place, label_selector=kueue.selector(job), _request_timeout=TIMEOUT
                )
            workload = kueue.newest(answer)
            if workload is None:
                raise _unmanaged(thing)
            if kueue.admitted(workload):
                raise JobRefusedError(thing, "its queue has just admitted it", "It no longer waits")
            # Of that very look: else it might be admitted between the two requests.
            seen = {"resourceVersion": mapping(workload.get("metadata")).get("resourceVersion")}
            try:
                with sorted_errors(about):
                    self._custom.patch_namespaced_custom_object(
                        *place, name(workload), {"metadata": seen, "spec": dict(change)}, _request_timeout=TIMEOUT
                    )
                return
            except JobExistsError:
                if not tries_left:
                    raise


def _unmanaged(thing: str) -> JobRefusedError:
    return JobRefusedError(thing, "Kueue has no Workload of it", "See whether Kueue runs and manages its kind")
