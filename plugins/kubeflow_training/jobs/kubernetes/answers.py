"""What the answers of the synchronous `kubernetes` client mean."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kubeflow_training.jobs.errors import (
    BackendUnauthorizedError,
    BackendUnavailableError,
    JobExistsError,
    JobForbiddenError,
    JobRefusedError,
)
from kubeflow_training.jobs.kinds import Kind
from kubeflow_training.jobs.shapes import mapping

TIMEOUT: Final = (5, 30)
"""Seconds to connect and to wait for bytes."""
_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_NOT_ADMITTED: Final = re.compile("admission|exceeded quota|violates|denied (the )?request|being terminated", re.I)
"""Words of those who answer 403 as well although no right is missing."""


class NotFoundError(Exception):
    """The API answered 404.

    :param missing: "namespaces", the plural of the object, or "" where the API does not know the kind itself.
    """

    def __init__(self, message: str, missing: str) -> None:
        super().__init__(message)
        self.missing = missing

    @property
    def kind_unknown(self) -> bool:
        return not self.missing


@contextmanager
def sorted_errors(thing: str) -> Iterator[None]:
    """Sort the client's errors by what follows from them."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        status = _status(error)
        message = str(status.get("message") or error.reason)
        if error.status == 404:
            raise NotFoundError(message, str(mapping(status.get("details")).get("kind") or "")) from error
        if error.status == 401:
            raise BackendUnauthorizedError(thing, f"401: {message}", "Renew the cluster's credentials") from error
        if error.status == 409:
            raise JobExistsError(thing, message, "Delete it first, or choose another name") from error
        # A webhook that is away answers 500 in the API server's name: it comes back.
        if not error.status or error.status in _PASSING:
            raise BackendUnavailableError(thing, f"{error.status}: {message}", "It is tried again") from error
        raise refused(thing, error.status, message, "Correct the manifest") from error
    except (HTTPError, OSError) as error:
        raise BackendUnavailableError(thing, f"the cluster cannot be reached: {error}", "It is tried again") from error


def refused(thing: str, status: int, message: str, mend: str) -> JobRefusedError:
    """
    :param mend: what to do about it where no right is missing.
    """
    cause = f"the cluster refuses it ({status}): {message}"
    if status == 403 and not _NOT_ADMITTED.search(message):
        return JobForbiddenError(thing, cause, "Give the account the rights this needs")
    return JobRefusedError(thing, cause, mend)


def no_such_place(thing: str, error: NotFoundError, kind: Kind, namespace: str) -> JobRefusedError:
    """The refusal of a create call that met a 404."""
    if error.missing == "namespaces":
        cause, mend = f"there is no namespace {namespace}: {error}", "Create it, or name another one"
    elif error.kind_unknown:
        cause = f"the cluster knows no {kind.name} of {kind.api_version}"
        mend = f"Install {kind.controller}"
    else:
        cause, mend = f"something that it needs is not there: {error}", "Create it, or name another one"
    return JobRefusedError(thing, cause, mend)


def items_of(response: Any) -> list[dict[str, Any]]:
    """The items of a list that was asked for with `_preload_content=False`."""
    found: list[dict[str, Any]] = json.loads(response.data)["items"]
    return found


def _status(error: Any) -> dict[str, Any]:
    """The server's own words, which are the webhook's where it was one; empty where it has none."""
    try:
        found = json.loads(error.body)
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
