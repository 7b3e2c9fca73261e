"""The headless Service that gives the pods of an indexed Job their names.

It is made before the Job, so that no gang is ever without it, and gets the Job as its owner after. One that an
interrupted create left behind is taken over by the next Job of that name, or goes with the Job when that is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from kubeflow_training.jobs.errors import JobError, JobExistsError, JobRefusedError
from kubeflow_training.jobs.kinds import INDEXED_JOB
from kubeflow_training.jobs.kubernetes.answers import TIMEOUT, NotFoundError, sorted_errors
from kubeflow_training.jobs.shapes import labels, mapping

_TRIES: Final = 5


def prepare(core: Any, manifest: Mapping[str, Any]) -> bool:
    """Make the Service that the manifest's pods need, without an owner yet.

    :returns: whether it was made now.
    :raises JobRefusedError: if there is another Service of that name.
    """
    service = INDEXED_JOB.service(manifest)
    if service is None:
        return False
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    try:
        with sorted_errors(f"service {namespace}/{name}"):
            core.create_namespaced_service(namespace, service, _request_timeout=TIMEOUT)
        return True
    except JobExistsError as error:
        if not _ours(_read(core, name, namespace), name):
            cause = "a Service of that name exists and does not lead to this job's pods"
            raise JobRefusedError(f"service {namespace}/{name}", cause, "Choose another name for the job") from error
        return False


def adopt(core: Any, job: Mapping[str, Any]) -> None:
    """Let the Job own its Service, so that it goes with the Job; makes it again if it went with an earlier one."""
    service = INDEXED_JOB.service(job)
    if service is None:
        return
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    owners = {"metadata": {"ownerReferences": service["metadata"]["ownerReferences"]}}
    for _ in range(_TRIES):
        try:
            with sorted_errors(f"service {namespace}/{name}"):
                core.patch_namespaced_service(name, namespace, owners, _request_timeout=TIMEOUT)
            return
        except NotFoundError:
            with suppress(JobExistsError), sorted_errors(f"service {namespace}/{name}"):
                core.create_namespaced_service(namespace, service, _request_timeout=TIMEOUT)
                return


def remove(core: Any, name: str, namespace: str, *, unowned: bool) -> None:
    """Delete the Service of that name if it is a job's and, with `unowned`, if no job owns it. Never raises."""
    with suppress(JobError, NotFoundError):
        found = _read(core, name, namespace)
        metadata = mapping(mapping(found).get("metadata"))
        if not _ours(found, name) or (unowned and metadata.get("ownerReferences")):
            return
        body = {"preconditions": {"uid": metadata.get("uid"), "resourceVersion": metadata.get("resourceVersion")}}
        with sorted_errors(f"service {namespace}/{name}"):
            core.delete_namespaced_service(name, namespace, body=body, _request_timeout=TIMEOUT)


def _read(core: Any, name: str, namespace: str) -> dict[str, Any] | None:
    try:
        with sorted_errors(f"service {namespace}/{name}"):
            found = core.read_namespaced_service(name, namespace, _request_timeout=TIMEOUT)
    except NotFoundError:
        return None
    return {**core.api_client.sanitize_for_serialization(found)}


def _ours(service: Mapping[str, Any] | None, name: str) -> bool:
    return service is None or labels(service).get(INDEXED_JOB.job_label) == name
