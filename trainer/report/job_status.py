"""How far a training is, told to Kubeflow Trainer, which shows it in the status of the TrainJob.

Trainer 2.3 gives pods address, certificate and token of its server where its feature gate `TrainJobStatus` is on.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

URL: Final = "KUBEFLOW_TRAINER_SERVER_URL"
TOKEN: Final = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105 - names the variable of a file's path
CA: Final = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
_EVERY: Final = 5.0  # seconds between two answers, as Trainer asks of its clients
_PATIENCE: Final = 5.0
_LONGEST: Final = 64  # characters of a metric's name
_LARGEST: Final = 2**31 - 1
_BEARER: Final = re.compile(r"[\w.~+/=-]+", re.ASCII)


class JobStatus:
    """Posts the newest figures by a thread of its own: a server that is slow or away costs the training nothing.

    :param url: of the job's status, by https. :param token, ca: files, which the cluster renews.
    :param say: is told once that it does not work.
    """

    def __init__(self, url: str, token: str, ca: str, say: Callable[[str], object]) -> None:
        self._url, self._token, self._ca, self._say = url, Path(token), ca, say
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._newest: dict[str, Any] | None = None
        self._thread: threading.Thread | None = None
        self._told_of = False

    @classmethod
    def from_env(cls, env: Mapping[str, str], say: Callable[[str], object]) -> JobStatus | None:
        """One if the pod was given a server; nobody is told anything otherwise."""
        if not all(env.get(name) for name in (URL, TOKEN, CA)):
            return None
        return cls(env[URL], env[TOKEN], env[CA], say)

    def tell(self, step: int, steps: int, left: float, metrics: Mapping[str, float]) -> None:
        """Post this soon, unless something newer comes before.

        :param left: seconds that the training will still take.
        """
        body = status(step, steps, left, metrics, datetime.now(UTC))
        with self._lock:
            self._newest = body
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="job-status", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Post what has not been posted, and wait a little for that."""
        self._ending.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(_PATIENCE)

    def _work(self) -> None:
        while (body := self._taken()) is not None:
            try:
                self._post(body)
            except (OSError, http.client.HTTPException, ValueError) as error:
                if not self._told_of:
                    self._told_of = True
                    self._say(
                        f"the TrainJob's status does not show this training's progress ({type(error).__name__}: "
                        f"{error}); it is tried on, and not said again"
                    )
            self._ending.wait(_EVERY)

    def _taken(self) -> dict[str, Any] | None:
        with self._lock:
            body, self._newest = self._newest, None
            if body is None:
                self._thread = None
            return body

    def _post(self, body: Mapping[str, Any]) -> None:
        address = urlsplit(self._url)
        if address.scheme != "https" or not address.hostname:
            raise ValueError(f"{URL} is no https address")
        token = self._token.read_text().strip()
        if not _BEARER.fullmatch(token):  # else the error of the client would show it
            raise ValueError(f"the file that {TOKEN} names holds no token")
        context = ssl.create_default_context(cafile=self._ca)
        # Neither proxies nor redirects: the token is for this server alone.
        server = http.client.HTTPSConnection(address.hostname, address.port, timeout=_PATIENCE, context=context)
        try:
            headers = {
                "Authorization": f"Bearer {token}",
                "Content-Type": "application/json",
            }
            server.request("POST", address.path, json.dumps(body), headers)
            answer = server.getresponse()
            if answer.status >= 300:
                raise ValueError(f"the server answered {answer.status}")
        finally:
            server.close()


def status(step: int, steps: int, left: float, metrics: Mapping[str, float], now: datetime) -> dict[str, Any]:
    """What Trainer's server takes (`trainer.kubeflow.org/v1alpha1`, UpdateTrainJobStatusRequest). Pure."""
    found: dict[str, Any] = {
        "progressPercentage": max(0, min(100, 100 * step // max(1, steps))),
        "metrics": [{"name": name[:_LONGEST], "value": f"{value:.6g}"} for name, value in metrics.items()],
        "lastUpdatedTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if 0 <= left <= _LARGEST:
        found["estimatedRemainingSeconds"] = round(left)
    return {"trainerStatus": found}
