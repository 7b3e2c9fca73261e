"""A small Hugging Face hub on 127.0.0.1: commits, digests, ranges, gates, and connections that are cut."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

_LFS = (".safetensors", ".parquet")


@lru_cache(maxsize=64)
def digest_of(name: str, data: bytes) -> str:
    """What the hub calls a file by: SHA-256 of a large one, git's SHA-1 of the others."""
    if name.endswith(_LFS):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _paths(files: Iterable[str]) -> set[str]:
    """Files and the folders that they lie in."""
    return {str(above) for file in files for above in (file, *PurePosixPath(file).parents)} - {"."}


@dataclass
class Repository:
    """A model of the hub.

    :param commits: files by name of each commit. :param refs: branches and tags.
    :param gate: who may have its files: everybody, or who sends this token. :param hidden: whether others may see it.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gate: str | None = None
    hidden: bool = False

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Put a commit on a branch; its hash."""
        made = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[made] = files
        self.refs[ref] = made
        return made


@dataclass
class Hub:
    """The server. :param asked: method and path of each request, in order. :param cuts: connections to break, by file.

    :param spoilt: answers with other bytes to give, by file. :param status: what everything is answered with, if any.
    :param resets: the same, by force, in the middle of a file. :param hold: called before a file is sent.
    :param headers: of each file's answer, over the right ones.
    :param instead: what answers a GET in the hub's place, by how its path ends.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    cuts: dict[str, int] = field(default_factory=dict)
    spoilt: dict[str, int] = field(default_factory=dict)
    resets: dict[str, int] = field(default_factory=dict)
    status: int | None = None
    hold: Callable[[str], None] = lambda name: None
    headers: dict[str, str] = field(default_factory=dict)
    instead: dict[str, Callable[[BaseHTTPRequestHandler], None]] = field(default_factory=dict)

    def model(self, name: str, files: dict[str, bytes]) -> Repository:
        """A model with a first commit."""
        found = self.repositories.setdefault(name, Repository())
        found.commit(files)
        return found

    def data_set(self, name: str, files: dict[str, bytes]) -> Repository:
        """A data set with a first commit."""
        return self.model(f"datasets/{name}", files)

    def gets(self, name: str) -> int:
        """How often a file was asked for."""
        return sum(method == "GET" and path.endswith(f"/{name}") for method, path in self.asked)


def serve(hub: Hub) -> ThreadingHTTPServer:
    """Start the server; its address is the hub's `url` from then on."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            body = parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path))
            match = re.fullmatch(r"/api/(datasets/.+?)/paths-info/([^/]+)", path)
            if hub.status is not None or match is None:
                self._send(hub.status or 404, b"{}")
            elif found := self._repository(match[1], match[2]):
                self._entries(found, set(body.get("paths", [])))

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path))
            if self.headers.get("Authorization"):
                hub.tokens.add(self.headers["Authorization"].removeprefix("Bearer "))
            other = next((answer for end, answer in hub.instead.items() if path.endswith(end)), None)
            if other is not None and self.command == "GET":
                self.close_connection = True
                other(self)
            elif hub.status is not None:
                self._send(hub.status, b"{}")
            elif match := re.fullmatch(r"/api/models/(.+?)(?:/revision/(.+))?", path):
                self._api(match[1], match[2])
            elif match := re.fullmatch(r"/api/(datasets/.+?)/tree/([^/]+)(?:/(.+))?", path):
                self._tree(match[1], match[2], match[3], "recursive=true" in self.path.lower())
            elif match := re.fullmatch(r"/api/(datasets/.+?)(?:/revision/(.+))?", path):
                self._api(match[1], match[2])
            elif match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
                self._file(match[1], match[2], match[3])
            else:
                self._send(404, b"{}")

        def _repository(self, name: str, revision: str | None) -> tuple[Repository, str] | None:
            """The repository and the commit; None if that was answered already."""
            found = hub.repositories.get(name)
            if found is None or (found.hidden and not self._allowed(found)):
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                return None
            commit = found.refs.get(revision or "main", revision or "")
            if commit not in found.commits:
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return None
            return found, commit

        def _allowed(self, found: Repository) -> bool:
            return found.gate is None or self.headers.get("Authorization") == f"Bearer {found.gate}"

        def _api(self, name: str, revision: str | None) -> None:
            found = self._repository(name, revision)
            if found is None:
                return
            siblings = []
            for file, data in found[0].commits[found[1]].items():
                item: dict[str, Any] = {"rfilename": file, "size": len(data), "blobId": digest_of("", data)}
                if file.endswith(_LFS):
                    item["lfs"] = {"size": len(data), "sha256": digest_of(file, data), "pointerSize": 130}
                siblings.append(item)
            told = {"id": name, "modelId": name, "sha": found[1], "siblings": siblings, "private": found[0].hidden}
            self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

        def _tree(self, name: str, revision: str, folder: str | None, recursive: bool) -> None:
            if found := self._repository(name, revision):
                under = f"{folder}/" if folder else ""
                below = {path for path in _paths(found[0].commits[found[1]]) if path.startswith(under)}
                self._entries(found, {path for path in below if recursive or "/" not in path.removeprefix(under)})

        def _entries(self, found: tuple[Repository, str], wanted: set[str]) -> None:
            """What the hub tells of files and folders."""
            files = found[0].commits[found[1]]
            told: list[dict[str, Any]] = [
                {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0}
                for folder in sorted(wanted & (_paths(files) - set(files)))
            ]
            for file in sorted(wanted & set(files)):
                data = files[file]
                item = {"type": "file", "path": file, "oid": digest_of("", data), "size": len(data)}
                if file.endswith(_LFS):
                    item["lfs"] = {"oid": digest_of(file, data), "size": len(data), "pointerSize": 130}
                told.append(item)
            self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

        def _file(self, name: str, revision: str, file: str) -> None:
            found = self._repository(name, revision)
            if found is None:
                return
            if not self._allowed(found[0]):
                self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
                return
            data = found[0].commits[found[1]].get(file)
            if data is None:
                self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
            headers = {"X-Repo-Commit": found[1], "ETag": f'"{digest_of(file, data)}"', "Accept-Ranges": "bytes"}
            headers |= hub.headers
            if self.command == "HEAD":
                self._send(200, data, headers)
                return
            hub.hold(file)
            if hub.spoilt.get(file, 0) > 0:
                hub.spoilt[file] -= 1
                data = bytes(len(data))
            status, start = 200, 0
            if wanted := self.headers.get("Range"):
                hub.ranges.append(wanted)
                start = int(wanted.removeprefix("bytes=").partition("-")[0])
                status, headers["Content-Range"] = 206, f"bytes {start}-{len(data) - 1}/{len(data)}"
            rest = data[start:]
            if hub.resets.get(file, 0) > 0:
                hub.resets[file] -= 1
                self._send(status, rest, headers, rest[: len(rest) // 2])
                linger = struct.pack("ii", 1, 0)  # a close that throws away what waits is a reset
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()
                return
            cut = hub.cuts.get(file, 0) > 0
            if cut:
                hub.cuts[file] -= 1
            self._send(status, rest, headers, rest[: len(rest) // 2] if cut else None)

        def _send(
            self, status: int, body: bytes, headers: dict[str, str] | None = None, part: bytes | None = None
        ) -> None:
            """:param part: what is sent of the body before the connection is closed."""
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body if part is None else part)
            if part is not None:
                self.wfile.flush()
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that hung up, or was hung up on

    server = Server(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


@contextmanager
def open_hub(hub: Hub, cache: Path, patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub is served until the block ends, and this process's client asks it. :param cache: of the client."""
    server = serve(hub)
    point_to(hub, cache, patch)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def point_to(hub: Hub, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """What `HF_ENDPOINT` and `HF_HOME` do in a fresh process: the client read its environment when it was imported."""
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    patch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    patch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        patch.delenv(name, raising=False)
    patch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(cache / "no-token"))
