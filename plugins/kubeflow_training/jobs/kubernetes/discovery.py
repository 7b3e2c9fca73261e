"""Which kinds of jobs a cluster can train with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kubeflow_training.jobs.errors import JobForbiddenError
from kubeflow_training.jobs.kinds import INDEXED_JOB, PYTORCH_JOB, TRAIN_JOB, Kind
from kubeflow_training.jobs.kubernetes.answers import TIMEOUT, NotFoundError, sorted_errors

_PATCHES: Final = b'"runtimePatches"'
"""In the description of a TrainJob from Kubeflow Trainer 2.2 on; `compiled` makes none without."""
_QUEUES: Final = "/openapi/v3/apis/kueue.x-k8s.io/v1beta2"
_SINCE_PATCHES: Final = b'"preemptionGates"'
"""In the description of a Workload from Kueue 0.17 on, which knows Trainer's `runtimePatches` too."""


@dataclass(frozen=True)
class Served:
    """What a cluster can train with.

    :param kinds: names of those that it serves, the preferred ones first.
    :param runtime: whether the runtime of TrainJobs that was asked for is there; None if the account may not look.
    :param queued: whether its queues start TrainJobs as they are: Kueue before 0.17 takes `runtimePatches` away.
    """

    kinds: tuple[str, ...]
    runtime: bool | None
    queued: bool = False


def served(api_client: Any, namespace: str, runtime: str) -> Served:
    """Ask a cluster what it can train with.

    :param api_client: a configured `kubernetes.client.ApiClient`.
    :param namespace, runtime: name the TrainingRuntime that TrainJobs would have.
    :raises JobError: if the cluster does not answer.
    """
    kinds = known_kinds(api_client)
    there: bool | None = False
    queued = False
    if TRAIN_JOB in kinds:
        queued = _SINCE_PATCHES in _asked(api_client, _QUEUES)
        try:
            path = f"/apis/{TRAIN_JOB.api_version}/namespaces/{namespace}/trainingruntimes/{runtime}"
            there = bool(_asked(api_client, path))
        except JobForbiddenError:
            there = None
    return Served(tuple(kind.name for kind in kinds), there, queued)


def known_kinds(api_client: Any) -> tuple[Kind, ...]:
    """The kinds that the cluster serves, the preferred ones first. Every account may ask this (`system:discovery`).

    :raises JobError: if the cluster does not answer.
    """
    kinds: list[Kind] = []
    if _PATCHES in _asked(api_client, f"/openapi/v3/apis/{TRAIN_JOB.api_version}"):
        kinds.append(TRAIN_JOB)
    if f'"{PYTORCH_JOB.plural}"'.encode() in _asked(api_client, f"/apis/{PYTORCH_JOB.api_version}"):
        kinds.append(PYTORCH_JOB)
    return (*kinds, INDEXED_JOB)


def _asked(api_client: Any, path: str) -> bytes:
    """What the server answers; empty if there is no such thing."""
    try:
        with sorted_errors(f"the cluster's {path}"):
            answer = api_client.call_api(
                path,
                "GET",
                header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=TIMEOUT,
            )
            return bytes(answer.data)
    except NotFoundError:
        return b""
