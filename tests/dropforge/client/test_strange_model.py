"""A model whose MLflow answers like something else: an error for a person, and nothing outside the folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dropforge.client.model import find_model
from dropforge.errors import DropforgeError
from tests.strange_server import Server, told

Strange = Callable[..., str]


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Strange]:
    """Start a server that knows one version, of these files and from this source."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    servers: list[Server] = []

    def start(files: Any = (), source: str = "mlflow-artifacts:/x", version: str = "1") -> str:
        kept = {"name": "fam", "version": version, "source": source, "run_id": "r" * 32, "status": "READY"}
        found = {"model_version": {**kept, "creation_timestamp": 1}}
        known = {
            "alias": found,
            "get": found,
            "get-download-uri": {"artifact_uri": source},
            "artifacts": {"files": files},
        }

        def answer(handler: BaseHTTPRequestHandler) -> None:
            told(known.get(urlsplit(handler.path).path.rpartition("/")[2], b"evil"))(handler)

        servers.append(Server(answer))
        return servers[-1].url

    yield start
    for server in servers:
        server.stop()


@pytest.mark.parametrize(
    "answers",
    [
        {"files": [1, None]},
        {"files": "x"},
        {"files": [{"path": "../../evil", "is_dir": False, "file_size": 4}]},
        {"source": "http://127.0.0.1:1/x"},
        {"source": "ftp://127.0.0.1:1/x"},
        {"source": "nothing://x"},
    ],
)
def test_files_of_no_model_are_an_error_of_its_mlflow(mlflow: Strange, tmp_path: Path, answers: dict[str, Any]) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    with pytest.raises(
        DropforgeError, match=r"model fam/1: its files cannot be fetched .*See that MLflow at http://127"
    ):
        find_model(mlflow(**answers), "fam@champion").download(inner)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_version_without_a_number_is_none(mlflow: Strange) -> None:
    with pytest.raises(DropforgeError, match="it is 'abc', which is no version"):
        find_model(mlflow(version="abc"), "fam@champion")
