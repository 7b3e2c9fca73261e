"""A real object server in a process of its own, that tests start, kill and start again."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from dropforge.stack.secrets import read_secrets

pytest.register_assert_rewrite("tests.stack.clients")


class _Signer(S3SigV4Auth):
    """Signs what the headers say of the body, right or wrong."""

    def add_auth(self, request: AWSRequest) -> None:
        self._payload = request.headers["x-amz-content-sha256"]
        super().add_auth(request)

    def payload(self, _: AWSRequest) -> str:
        return self._payload


class Server:
    """`python -m dropforge.stack.objects` on a folder."""

    def __init__(self, state: Path, preexec: Callable[[], None] | None = None) -> None:
        self.state = state
        self.preexec = preexec
        self.arguments: list[str] = []
        self.access_key, self.secret_key = read_secrets(state).access_key, read_secrets(state).secret_key
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        command = [sys.executable, "-m", "dropforge.stack.objects", "--state", str(self.state)]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), *self.arguments],
            preexec_fn=self.preexec,
            stderr=(self.state / "objects.log").open("ab"),
        )
        deadline = time.monotonic() + 30
        while True:
            assert self.process.poll() is None, (self.state / "objects.log").read_text()
            try:
                with urllib.request.urlopen(f"{self.url}/-/health"):
                    return self
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL: nothing gets a chance to be written."""
        if self.process is not None:
            assert self.process.poll() is None, "the server ended by itself"
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self) -> Server:
        self.kill()
        return self.start()

    def client(self, service: str = "s3", access_key: str | None = None, secret_key: str | None = None) -> Any:
        signature = "s3v4" if service == "s3" else None
        config = Config(
            retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=60, signature_version=signature
        )
        return boto3.client(
            service,
            endpoint_url=self.url,
            aws_access_key_id=access_key or self.access_key,
            aws_secret_access_key=secret_key or self.secret_key,
            region_name="us-east-1",
            config=config,
        )

    def put(
        self, path: str, data: bytes, headers: dict[str, str] | None = None, method: str = "PUT"
    ) -> tuple[int, str]:
        """Send what no client would send, signed as it should be; the answer's status and text.

        What `x-amz-content-sha256` is to say of the body is taken from the headers.
        """
        headers = {"x-amz-content-sha256": "UNSIGNED-PAYLOAD", **(headers or {})}
        request = AWSRequest(method, f"{self.url}{path}", headers=headers)
        _Signer(Credentials(self.access_key, self.secret_key), "s3", "us-east-1").add_auth(request)
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(method, path, data, dict(request.headers.items()))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    @property
    def queue_url(self) -> str:
        return f"{self.url}/123456789012/dropforge-drops"


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("objects") / "state")
    yield found
    found.kill()


@pytest.fixture
def server(module_server: Server) -> Server:
    """A running server without objects; a start takes a second, so tests of a file share it."""
    if module_server.process is None:
        module_server.start()
    client = module_server.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket="dropforge"):
        for item in page.get("Contents", []):
            client.delete_object(Bucket="dropforge", Key=item["Key"])
    return module_server


@pytest.fixture(autouse=True)
def _no_ambient_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
