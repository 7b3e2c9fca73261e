"""MLflow's REST interface, spoken by hand: importing mlflow costs three seconds of a core."""

from __future__ import annotations

import base64
import json
import math
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.client import HTTPException
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from dropforge import web
from dropforge.run import Tracking
from dropforge.settings import without_login

_TIMEOUT: Final = 10.0
_WHOLE: Final = 120.0  # seconds of one call
_LARGEST: Final = 128 << 20  # bytes of an answer: a thousand runs with all that they have
_LARGEST_FILE: Final = 32 << 20
_MOST_PAGES: Final = 1000
_CONTENT: Final = (400, 413, 422)  # the server takes other requests, but not what is in this one
_PASSING: Final = (408, 425, 429)
_NO_SUCH_CALL: Final = (404, 405, 501)


class RefusedError(Exception):
    """The server will not take this content, now or later."""


class DeniedError(Exception):
    """The server takes nothing from us as things are: no right to write, or no such run. A person may mend it."""


class AbsentError(DeniedError):
    """The server has no such call: it is older than the call."""


class MissingError(DeniedError):
    """There is no such run, model or tag."""


#: What asking ends with where no answer comes that can be used.
UNANSWERED: Final = (OSError, HTTPException, ValueError, RefusedError, DeniedError)
#: What reading an answer ends with that has not what MLflow's have, or has it of another kind.
STRANGE: Final = (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class Rest:
    """Calls below `/api/2.0/mlflow/`, with the credentials of MLflow's own variables."""

    def __init__(self, uri: str) -> None:
        """:raises DropforgeError: if the address carries a login."""
        self._server = without_login(uri).rstrip("/")
        self._base = f"{self._server}/api/2.0/mlflow/"
        self._headers = {"Content-Type": "application/json"}
        token, user = os.environ.get("MLFLOW_TRACKING_TOKEN"), os.environ.get("MLFLOW_TRACKING_USERNAME")
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        elif user:
            pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        self._context: ssl.SSLContext | None = None

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer's JSON.

        :param path: below `/api/2.0/mlflow/`, with its query; from the server's root on if it begins with `/`.
        :raises RefusedError, DeniedError, AbsentError, MissingError: as they say.
        :raises OSError, ValueError: for what may pass by itself.
        """
        address = (self._server if path.startswith("/") else self._base) + path
        data = self._ask(method, address, body, _LARGEST)
        try:
            found = json.loads(data or b"{}")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"{path} is answered by no JSON object")
        return found

    def pages(self, path: str, body: Mapping[str, Any], rows: str, method: str = "POST") -> Iterator[Mapping[str, Any]]:
        """The rows of a list that the server hands out in pages.

        :param body: without `page_token`. :param rows: name of the list in each answer. :param method: GET puts the
            body into the query. :raises Exception: as `call`; ValueError also for a list that does not end.
        """
        token, seen = "", set[str]()
        for _ in range(_MOST_PAGES):
            asked = {**body, **({"page_token": token} if token else {})}
            content = asked if method == "POST" else None
            found = self.call(method, path if content is not None else f"{path}?{urlencode(asked)}", content)
            page = found.get(rows) or []
            if not isinstance(page, list) or not all(isinstance(row, dict) for row in page):
                raise ValueError(f"{path} is answered by no list of {rows}")
            yield from page
            token = str(found.get("next_page_token") or "")
            if not token:
                return
            if token in seen or not page:
                raise ValueError(f"{path} is answered by pages that do not end")
            seen.add(token)
        raise ValueError(f"{path} is answered by more than {_MOST_PAGES} pages")

    def artifact(self, run_id: str, root: str, path: str, most: int = _LARGEST_FILE) -> bytes:
        """A file of a run, by way of the server, which reaches every place where artifacts may be.

        :param root: the run's `artifact_uri`. :param most: bytes. :raises Exception: as `call`.
        """
        parts = urlsplit(root)
        if parts.scheme == "mlflow-artifacts" and not parts.netloc:  # the server need not look for the run first
            below = quote(f"{parts.path.strip('/')}/{path}")
            return self._ask("GET", f"{self._server}/api/2.0/mlflow-artifacts/artifacts/{below}", None, most)
        query = urlencode({"run_id": run_id, "path": path})
        return self._ask("GET", f"{self._server}/get-artifact?{query}", None, most)

    def _ask(self, method: str, address: str, body: Mapping[str, Any] | None, most: int) -> bytes:
        if self._context is None:  # here, because a path that is wrong must not end a training at its start
            self._context = ssl.create_default_context(cafile=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"))
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address, data, self._headers, method=method)  # noqa: S310 - http(s)
        try:
            return web.read(request, self._context, silence=_TIMEOUT, seconds=_WHOLE, most=most)
        except web.ElsewhereError as error:
            raise DeniedError(f"{error}; if that is MLflow, set MLFLOW_TRACKING_URI to it") from None
        except urllib.error.HTTPError as error:
            with error:
                raise _meaning(error.code, error.read(2000)) from None


def _meaning(status: int, text: bytes) -> Exception:
    try:
        told = json.loads(text)
        code, message = str(told["error_code"]), str(told.get("message", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        code, message = "", text.decode(errors="replace")
    said = f"HTTP {status}: {' '.join(message.split())[:200]}"
    if status in _CONTENT:
        return RefusedError(said)
    if status in _NO_SUCH_CALL and code in ("", "ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED"):
        return AbsentError(said)
    if status == 404:
        return MissingError(said)
    if 400 <= status < 500 and status not in _PASSING:
        return DeniedError(said)
    return OSError(said)


def reached(tracking: Tracking) -> Tracking:
    """The run at the address that this process has: `MLFLOW_TRACKING_URI` wins over the one in `run.json`.

    A pod may reach the server by another address than the DAG.

    :raises DropforgeError: if it carries a login.
    """
    return replace(tracking, uri=without_login(os.environ.get("MLFLOW_TRACKING_URI") or tracking.uri))


def real(value: Any) -> float:
    """A metric's value: MLflow's databases keep the largest number in the place of an infinite one."""
    number = float(value)
    return math.copysign(math.inf, number) if abs(number) >= sys.float_info.max else number


def speaks_rest(uri: str) -> bool:
    """Whether `Rest` can reach the address; others, and logins of MLflow's plugins, need MLflow's own client."""
    return uri.startswith(("http://", "https://")) and not os.environ.get("MLFLOW_TRACKING_AUTH")
