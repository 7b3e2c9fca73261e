"""A real Prometheus for tests: it scrapes what it is told to, and is asked queries."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

MISSING = "Prometheus is not installed (Debian: apt install prometheus)"


def need() -> None:
    """Skip the test where there is no Prometheus."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip(MISSING)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def page(text: Callable[[], str]) -> Iterator[str]:
    """Host and port of something to scrape, which says what `text` does at that moment."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text().encode())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, expr: str, at: float | None = None) -> list[dict[str, Any]]:
        """The answer to an instant query; fails with what Prometheus says against it."""
        query = {"query": expr} | ({"time": str(at)} if at is not None else {})
        address = f"{self.url}/api/v1/query?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=20) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            pytest.fail(f"{expr}: {error.read().decode()}")
        data = found["data"]
        # A scalar is a vector of one.
        return [{"metric": {}, "value": data["result"]}] if data["resultType"] == "scalar" else list(data["result"])

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=20) as answer:
            return json.load(answer)["data"]


@contextmanager
def prometheus(
    folder: Path,
    targets: dict[str, str],
    rules: Path | None = None,
    logins: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> Iterator[Prometheus]:
    """A server that scrapes each second.

    :param targets: host and port by job. :param logins: user and password by job, of those that ask for them.
    """
    need()
    folder.mkdir(exist_ok=True)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [{"targets": [target]}],
                **({"basic_auth": {"username": logins[job][0], "password": logins[job][1]}} if job in logins else {}),
            }
            for job, target in targets.items()
        ],
        **({"rule_files": [str(rules)]} if rules else {}),
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 60
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < end, (folder / "log").read_text()
                time.sleep(0.05)
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()
