"""The nodes of a gang that failed without saying why. Where they may not be read, the pods' words have to do."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kubeflow_training.jobs.errors import JobRefusedError
from kubeflow_training.jobs.kubernetes.answers import TIMEOUT, NotFoundError, sorted_errors
from kubeflow_training.jobs.observation import nodes

REFUSED: Final = "whether a broken node explains a failure is not known, as nodes may not be read (rbac-nodes.yaml): %s"
_REFUSED_SECONDS: Final = 300.0

log = logging.getLogger(__name__)


class Nodes:
    """:param api_client: a configured `kubernetes.client.ApiClient`."""

    def __init__(self, api_client: Any) -> None:
        from kubernetes import client

        self._core = client.CoreV1Api(api_client)
        self._not_before = 0.0

    def read(self, names: Sequence[str]) -> list[Mapping[str, Any]]:
        """These nodes, fit to travel among events; without those that are gone."""
        found: list[Mapping[str, Any]] = []
        for name in names if time.monotonic() >= self._not_before else ():
            try:
                with sorted_errors(f"node {name}"):
                    answer = self._core.read_node(name, _preload_content=False, _request_timeout=TIMEOUT)
                found.append(nodes.told(json.loads(answer.data)))
            except NotFoundError:
                continue
            except JobRefusedError as error:
                self._not_before = time.monotonic() + _REFUSED_SECONDS
                log.info(REFUSED, error)
                break
        return found
