"""Files for people in the artifacts of the MLflow run, where the server or the run says that they go."""

from __future__ import annotations

import base64
import json
import os
import ssl
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

from dropforge import web
from dropforge.rest import reached, speaks_rest
from dropforge.run import Tracking
from dropforge.store import Store, open_store

_TIMEOUT: Final = 10.0  # seconds in which the server says nothing
_WHOLE: Final = 600.0  # seconds of one request
_LARGEST: Final = 16 << 20  # bytes of an answer
_PROXIED: Final = "mlflow-artifacts"


def put_artifacts(tracking: Tracking, files: Mapping[str, bytes]) -> None:
    """Write files among a run's artifacts.

    `mlflow-artifacts:` goes through the server, S3 and folders directly, anything else through mlflow's client.

    :param files: content by path. :raises Exception: of many kinds.
    """
    tracking = reached(tracking)
    by_hand = speaks_rest(tracking.uri)
    root = _root_by_hand(tracking) if by_hand else _root_by_client(tracking)
    parts = urlsplit(root)
    if parts.scheme == _PROXIED and by_hand:
        server = urlsplit(tracking.uri)
        base = f"{server.scheme}://{parts.netloc or server.netloc}{'' if parts.netloc else server.path.rstrip('/')}"
        for name, data in files.items():
            path = quote(f"{parts.path.strip('/')}/{name}")
            _ask(f"{base}/api/2.0/mlflow-artifacts/artifacts/{path}", data, "PUT", tracking.uri)
    elif parts.scheme in ("", "file", "s3"):
        store = open_store(parts.path if parts.scheme == "file" else root)
        for name, data in files.items():
            store.put(name, data)
    else:
        _by_client(tracking, files)


def keep_files(
    make: Callable[[], Mapping[str, bytes]],
    store: Store,
    tracking: Tracking | None,
    say: Callable[[str], None],
    what: str,
) -> threading.Thread:
    """Make files for people and put them into the run's folder and its MLflow artifacts, from a thread.

    Whatever goes wrong is said and ends nothing. :param make: content by path. :param what: their name in a notice.
    """

    def work() -> None:
        try:
            files = make()
        except Exception as error:
            say(f"{what} could not be made ({type(error).__name__}: {error})")
            return
        try:
            for name, data in files.items():
                store.put(name, data)
        except Exception as error:  # stores raise many kinds
            say(f"{what} could not be stored in {store.uri} ({type(error).__name__}: {error})")
        if tracking is not None:
            try:
                put_artifacts(tracking, files)
            except Exception as error:
                say(f"MLflow did not take {what} ({type(error).__name__}: {error})")

    thread = threading.Thread(target=work, name="artifacts", daemon=True)
    thread.start()
    return thread


def _root_by_hand(tracking: Tracking) -> str:
    answer = json.loads(
        _ask(
            f"{tracking.uri.rstrip('/')}/api/2.0/mlflow/runs/get?run_id={quote(tracking.run_id)}",
            None,
            "GET",
            tracking.uri,
        )
    )
    return str(answer["run"]["info"]["artifact_uri"])


def _root_by_client(tracking: Tracking) -> str:
    from mlflow import MlflowClient

    return str(MlflowClient(tracking.uri).get_run(tracking.run_id).info.artifact_uri)


def _by_client(tracking: Tracking, files: Mapping[str, bytes]) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking.uri)
    with tempfile.TemporaryDirectory(prefix="dropforge-") as folder:
        for name, data in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        client.log_artifacts(tracking.run_id, folder)


def _ask(url: str, data: bytes | None, method: str, server: str) -> bytes:
    """:param server: the address that the credentials are for; another host, which a run may name, gets none."""
    headers = {} if data is None else {"Content-Type": "application/octet-stream"}
    token, user = os.environ.get("MLFLOW_TRACKING_TOKEN"), os.environ.get("MLFLOW_TRACKING_USERNAME")
    ours = web.origin(url) == web.origin(server)
    if ours and token:
        headers["Authorization"] = f"Bearer {token}"
    elif ours and user:
        pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    context = ssl.create_default_context(cafile=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"))
    request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310 - the scheme was checked
    return web.read(request, context, silence=_TIMEOUT, seconds=_WHOLE, most=_LARGEST)
