"""Objects of a Kubernetes cluster by their paths, with the rights of the user's kubeconfig."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, Final

from dropforge.cli.gangs import api_client, asking_cluster
from dropforge.errors import DropforgeError
from dropforge.job import RUNTIME, Served

#: How the API server says that a right is missing; whoever refuses an object otherwise answers 403 too.
_NO_RIGHT: Final = re.compile(r'User "[^"]*" cannot \S+ (resource|path)')


class UnknownKindError(DropforgeError):
    """The cluster knows no such kind."""


class MissingError(DropforgeError):
    """What is to be changed is not there."""


class DeniedError(DropforgeError):
    """The account may not do this."""


class Cluster:
    """:raises DropforgeError: from all methods, if the cluster does not answer or refuses what it is asked."""

    def __init__(self) -> None:
        self._api = api_client()

    def get(self, path: str, **query: str) -> dict[str, Any] | None:
        """One object or list; None where there is none of this name.

        :raises UnknownKindError: if the cluster does not know the kind. :raises DeniedError: if one may not look.
        """
        return self._ask("GET", path, query)

    def try_out(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Have the cluster say what would become of a new object: checked, admitted, and not kept.

        :raises UnknownKindError, DeniedError: as `get`.
        """
        return self._ask("POST", path, {"dryRun": "All"}, body) or {}

    def knows(self, version: str, plural: str) -> bool:
        """Whether it serves a kind; every login may ask. :param version: as `kubeflow.org/v1`."""
        try:
            found = self._ask("GET", f"/apis/{version}", {})
        except UnknownKindError:
            return False
        return any(one.get("name") == plural for one in (found or {}).get("resources") or [])

    def trains_with(self, namespace: str) -> Served:
        """What it can train with in a namespace."""
        from kubeflow_training.jobs.kubernetes.discovery import served

        with asking_cluster():
            return served(self._api, namespace, RUNTIME)

    def may(self, verb: str, group: str, resource: str, namespace: str, account: str = "") -> bool:
        """Whether an account has a right; a subresource stands behind a slash.

        :param namespace: "" for what belongs to none.
        :param account: a service account as NAMESPACE:NAME, for which the user needs the right to ask; else the user's.
        """
        name, _, below = resource.partition("/")
        asked = {"namespace": namespace, "verb": verb, "group": group, "resource": name, "subresource": below}
        kind = "SelfSubjectAccessReview"
        spec: dict[str, Any] = {"resourceAttributes": asked}
        if account:
            groups = ["system:serviceaccounts", f"system:serviceaccounts:{account.partition(':')[0]}"]
            kind = "SubjectAccessReview"
            spec |= {"user": f"system:serviceaccount:{account}", "groups": [*groups, "system:authenticated"]}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
        found = self._ask("POST", f"/apis/authorization.k8s.io/v1/{kind.lower()}s", {}, body)
        return bool(found and found["status"].get("allowed"))

    def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make an object. :raises UnknownKindError, DeniedError: as `get`."""
        return self._ask("POST", path, {}, body) or {}

    def remove(self, path: str) -> None:
        """Delete an object at once; one that is not there is no error."""
        with suppress(MissingError):
            self._ask("DELETE", path, {"gracePeriodSeconds": "0"})

    def text(self, path: str) -> str:
        """What is no object, such as a log; empty where there is none."""
        found = self._send("GET", path, {})
        return "" if found is None else found.data.decode(errors="replace")

    def now(self) -> float | None:
        """The API server's clock as Unix time, to a second; None if the answer has none."""
        found = self._send("GET", "/version", {})
        told = parsedate_to_datetime(found.headers["Date"]) if found is not None and "Date" in found.headers else None
        return None if told is None else told.timestamp()

    def _ask(
        self, method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | None:
        answer = self._send(method, path, query, body)
        if answer is None:
            return None
        try:
            found: dict[str, Any] = json.loads(answer.data)
        except ValueError as error:  # of a proxy in between
            mend = "Look for a proxy before the API server"
            raise DropforgeError(f"cluster, {path}", "the answer is no JSON", mend) from error
        return found

    def _send(self, method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any] | None = None) -> Any:
        """The answer with its headers; None where a GET finds nothing."""
        from kubeflow_training.jobs.errors import BackendUnavailableError, JobError
        from kubeflow_training.jobs.kubernetes.answers import TIMEOUT, NotFoundError, sorted_errors

        thing = f"cluster, {path}"
        try:
            with sorted_errors(path):
                return self._api.call_api(
                    path,
                    method,
                    query_params=list(query.items()),
                    header_params={"Accept": "application/json", "Content-Type": "application/json"},
                    body=body,
                    auth_settings=["BearerToken"],
                    _preload_content=False,
                    _return_http_data_only=True,
                    _request_timeout=TIMEOUT,
                )
        except NotFoundError as error:
            if error.kind_unknown:
                raise UnknownKindError(thing, "it does not know that kind", "Install what brings it") from error
            if method == "GET":
                return None
            raise MissingError(thing, str(error), "Create what is missing") from error
        except BackendUnavailableError as error:
            raise DropforgeError(thing, error.cause, "Give the command again") from error
        except JobError as error:
            if _NO_RIGHT.search(error.cause):
                raise DeniedError(thing, error.cause, "Give the account the rights this needs") from error
            raise DropforgeError(thing, error.cause, "Fix what it names") from error
