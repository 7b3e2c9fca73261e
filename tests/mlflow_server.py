"""MLflow's server, as the embedded stack starts it, for tests that start, ask and end it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from dropforge.stack.secrets import Secrets, read_secrets


class MlflowServer:
    """`python -m dropforge.stack.tracking_server` on a folder, with a database of its own there."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.arguments = arguments
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def secrets(self) -> Secrets:
        return read_secrets(self.folder)

    def start(self) -> MlflowServer:
        command = [sys.executable, "-m", "dropforge.stack.tracking_server", "--state", str(self.folder)]
        # An address with a character that configuration files have a meaning of their own for.
        database = {"MLFLOW_BACKEND_STORE_URI": f"sqlite:///{self.folder}/50%25.db"}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), "--artifacts", str(self.folder / "artifacts"), *self.arguments],
                env={**os.environ, **database, "MLFLOW_DISABLE_TELEMETRY": "true"},
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 240
        while True:
            assert self.process.poll() is None, (self.folder / "log").read_text()
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=1).close()
                return self
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
