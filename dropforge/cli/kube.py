"""Objects of a Kubernetes cluster by their paths, with the rights of the user's kubeconfig."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from dropforge.cli.gangs import api_client
from dropforge.errors import DropforgeError

#: How the API server says that a right is missing; whoever refuses an object otherwise answers 403 too.
_NO_RIGHT: Final = re.compile(r'User "[^"]*" cannot \S+ (resource|path)')


class UnknownKindError(DropforgeError):
    """The cluster knows no such kind."""


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

    def _ask(
        self, method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | None:
        from kubeflow_training.jobs.errors import BackendUnavailableError, JobError
        from kubeflow_training.jobs.kubernetes.answers import TIMEOUT, NotFoundError, sorted_errors

        thing = f"cluster, {path}"
        try:
            with sorted_errors(path):
                answer = self._api.call_api(
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
            raise DropforgeError(thing, str(error), "Create what is missing") from error
        except BackendUnavailableError as error:
            raise DropforgeError(thing, error.cause, "Give the command again") from error
        except JobError as error:
            if _NO_RIGHT.search(error.cause):
                raise DeniedError(thing, error.cause, "Give the account the rights this needs") from error
            raise DropforgeError(thing, error.cause, "Fix what it names") from error
        try:
            found: dict[str, Any] = json.loads(answer.data)
        except ValueError as error:  # of a proxy in between
            raise DropforgeError(thing, "the answer is no JSON", "Look for a proxy before the API server") from error
        return found
