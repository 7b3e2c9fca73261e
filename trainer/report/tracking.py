"""Metrics and tags into the MLflow run that the DAG opened; the run itself is never started, ended or changed.

Over HTTP the trainer speaks MLflow's REST interface itself: importing mlflow costs three seconds of a core, and its
exit hook would mark a crashed run as finished. Other addresses go through `MlflowClient`, which has no such hook.
A thread sends batches. A server that is away costs nothing but delay; training never fails for its sake.
"""

from __future__ import annotations

import base64
import json
import math
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from dropforge.run import Tracking

_METRICS: Final = 900  # of one request; the server takes 1000
_TAGS: Final = 90
_PAUSE: Final = 1.0  # seconds between batches
_TIMEOUT: Final = 10.0


class RefusedError(Exception):
    """The server will not take this, now or later."""


class Sender(Protocol):
    """Writes one batch. :raises RefusedError: if trying again is of no use; any other error is temporary."""

    def send(self, metrics: list[dict[str, Any]], tags: list[dict[str, str]]) -> None: ...


class Tracker:
    """Collects metrics and tags; does nothing without an MLflow run.

    :param say: where a notice goes when the server is away.
    """

    def __init__(self, sender: Sender | None, say: Callable[[str], None]) -> None:
        self._sender = sender
        self._say = say
        self._metrics: list[dict[str, Any]] = []
        self._tags: dict[str, str] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._away = False
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        if sender is not None:
            self._thread.start()

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Add finite values at an optimizer step."""
        if self._sender is None:
            return
        now = int(time.time() * 1000)
        rows = [
            {"key": key, "value": float(value), "timestamp": now, "step": step}
            for key, value in values.items()
            if math.isfinite(value)
        ]
        with self._lock:
            self._metrics += rows

    def tags(self, values: Mapping[str, str]) -> None:
        """Set tags; a later value of the same tag wins."""
        if self._sender is not None:
            with self._lock:
                self._tags |= values

    def flush(self, seconds: float = 3.0) -> bool:
        """Have everything sent that was collected, before a checkpoint: a resumed run does not log it again.

        Waits no longer than `seconds`, and not at all for a server that is known to be away.
        """
        end = time.monotonic() + seconds
        self._wake.set()
        while self._sender is not None and not self._away and (self._metrics or self._tags):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return not (self._metrics or self._tags)

    def close(self, seconds: float = 20.0) -> list[dict[str, Any]]:
        """Send what is left and return the metrics that could not be sent in time."""
        if self._sender is None:
            return []
        self._closing = True
        self._wake.set()
        self._thread.join(seconds)
        with self._lock:
            return list(self._metrics)

    def _run(self) -> None:
        wait = _PAUSE
        while True:
            self._wake.wait(wait)
            self._wake.clear()
            wait = _PAUSE if self._flush() else min(15.0, 2 * wait) if not self._closing else 0.5
            if self._closing and not (self._metrics or self._tags):
                return

    def _flush(self) -> bool:
        assert self._sender is not None
        while self._metrics or self._tags:
            with self._lock:
                metrics = self._metrics[:_METRICS]
                tags = dict(list(self._tags.items())[:_TAGS])
            try:
                self._sender.send(metrics, [{"key": key, "value": value} for key, value in tags.items()])
            except RefusedError as error:
                self._say(f"MLflow refuses metrics ({error}); training goes on without them")
            except Exception as error:  # whatever it is, it must not end the training
                if not self._away:
                    self._say(f"MLflow is away ({error}); metrics are kept and sent later")
                self._away = True
                return False
            if self._away:
                self._say("MLflow is back")
            self._away = False
            with self._lock:
                del self._metrics[: len(metrics)]
                self._tags = {key: value for key, value in self._tags.items() if tags.get(key) != value}
        return True


class RestSender:
    """`runs/log-batch` of an MLflow server, with the credentials of MLflow's own variables."""

    def __init__(self, tracking: Tracking) -> None:
        self._url = f"{tracking.uri.rstrip('/')}/api/2.0/mlflow/runs/log-batch"
        self._run_id = tracking.run_id
        self._headers = {"Content-Type": "application/json"}
        token, user = os.environ.get("MLFLOW_TRACKING_TOKEN"), os.environ.get("MLFLOW_TRACKING_USERNAME")
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        elif user:
            pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        self._context = ssl.create_default_context(cafile=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"))

    def send(self, metrics: list[dict[str, Any]], tags: list[dict[str, str]]) -> None:
        body = json.dumps({"run_id": self._run_id, "metrics": metrics, "tags": tags}).encode()
        request = urllib.request.Request(self._url, body, self._headers)  # noqa: S310 - the scheme was checked
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT, context=self._context):  # noqa: S310
                return
        except urllib.error.HTTPError as error:
            if 400 <= error.code < 500 and error.code not in (408, 429):
                raise RefusedError(f"HTTP {error.code}: {error.read(200).decode(errors='replace')}") from None
            raise


class ClientSender:
    """Any other tracking address, through mlflow's client."""

    def __init__(self, tracking: Tracking) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking.uri)
        self._run_id = tracking.run_id

    def send(self, metrics: list[dict[str, Any]], tags: list[dict[str, str]]) -> None:
        from mlflow.entities import Metric, RunTag

        self._client.log_batch(self._run_id, [Metric(**row) for row in metrics], (), [RunTag(**tag) for tag in tags])


def make_tracker(tracking: Tracking | None, say: Callable[[str], None]) -> Tracker:
    """The tracker for rank 0; without an MLflow run it does nothing.

    `MLFLOW_TRACKING_URI` wins over the address in `run.json`: a pod may reach the server by another one than the DAG.
    """
    if tracking is None:
        return Tracker(None, say)
    tracking = replace(tracking, uri=os.environ.get("MLFLOW_TRACKING_URI") or tracking.uri)
    if tracking.uri.startswith(("http://", "https://")) and not os.environ.get("MLFLOW_TRACKING_AUTH"):
        return Tracker(RestSender(tracking), say)
    return Tracker(ClientSender(tracking), say)
