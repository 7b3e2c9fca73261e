"""What surrounds a run and is taken away from it: room on a disk, and an MLflow server."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import threading
from collections.abc import Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

_FILLER: Final = ".filler"
_SMALL: Final = 64  # bytes of a file that still can be written where disks cannot be mounted
_PIECE: Final = 4096


class Room:
    """A folder on a small disk of its own; without the right to mount one, files of processes are kept tiny instead.

    :param megabytes: its size.
    """

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        libc = ctypes.CDLL(None, use_errno=True)
        options = f"size={megabytes}m".encode()
        self.mounted = libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options) == 0

    def fill(self, processes: Iterable[int]) -> None:
        if not self.mounted:
            self._limit(processes, _SMALL)
            return
        with (self.folder / _FILLER).open("wb", buffering=0) as stream:
            for size in (1 << 20, _PIECE, 1):
                try:
                    while stream.write(b"x" * size):
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self, processes: Iterable[int]) -> None:
        if self.mounted:
            (self.folder / _FILLER).unlink(missing_ok=True)
        else:
            self._limit(processes, resource.RLIM_INFINITY)

    @staticmethod
    def _limit(processes: Iterable[int], size: int) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                hard = resource.prlimit(process, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(process, resource.RLIMIT_FSIZE, (size, hard))

    def close(self) -> None:
        if self.mounted:
            ctypes.CDLL(None).umount2(os.fsencode(self.folder), 2)


class Mlflow:
    """As much of MLflow's REST interface as trainers speak, and ways to be away.

    :ivar metrics: what was taken, as (key, step, value).
    """

    def __init__(self) -> None:
        self.metrics: list[tuple[str, int, float]] = []
        self.models: dict[str, Any] = {}
        self.mode = "ok"
        self._gate = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        self._open()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _open(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805
                self._answer(handler)

            do_GET = do_PATCH = do_POST  # noqa: N815

            def log_message(handler, *arguments: Any) -> None:  # noqa: N805
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(server, *arguments: Any) -> None:  # noqa: N805
                return  # the client went away

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        if self.mode == "hang":
            self._gate.wait()
            return
        if self.mode == "fail":
            handler.send_error(500)
            return
        values = json.loads(body or b"{}")
        found = values.get("metrics", [])
        if handler.path.endswith("runs/log-metric"):
            found = [values]
        self.metrics += [(item["key"], int(item.get("step") or 0), float(item["value"])) for item in found]
        answer = json.dumps(self._told(handler.path, values)).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        handler.wfile.write(answer)

    def _told(self, path: str, values: dict[str, Any]) -> dict[str, Any]:
        """One answer for all questions but those for logged models: each client looks for its own part of it."""
        if path.endswith(("log-batch", "logged-models/search")):
            return {}
        _, logged, rest = path.partition("/logged-models")
        if logged:
            name = rest.strip("/").partition("/")[0] or f"m-{len(self.models)}"
            model = self.models.setdefault(name, {"info": {"model_id": name, "tags": []}, "data": {}})
            model["info"]["tags"] += values.get("tags", [])
            return {"model": model}
        place = "file:///nowhere"
        info = {"run_id": "r1", "run_uuid": "r1", "experiment_id": "1", "status": "RUNNING", "run_name": "r"}
        info |= {"user_id": "u", "start_time": "1", "lifecycle_stage": "active", "artifact_uri": place}
        experiment = {"experiment_id": "1", "name": "e", "lifecycle_stage": "active", "artifact_location": place}
        run = {"info": info, "data": {}, "inputs": {}}
        return {"experiment": experiment, "experiment_id": "1", "run": run, "run_info": info}

    def away(self, mode: str) -> None:
        """:param mode: `refuse` and `back` close the port, `hang` never answers, `fail` answers 500."""
        self.mode = mode
        if mode in ("refuse", "back") and self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def back(self) -> None:
        self.mode = "ok"
        if self._server is None:
            self._open()

    def close(self) -> None:
        self._gate.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
