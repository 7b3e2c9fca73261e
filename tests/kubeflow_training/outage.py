"""An API server that goes away for one client only: a TCP proxy that can be cut."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

import yaml


class Proxy:
    """Forwards connections to the API server of KUBECONFIG until it is cut, and again when it is mended."""

    def __init__(self) -> None:
        known = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
        server = urlsplit(known["clusters"][0]["cluster"]["server"])
        self._target = (str(server.hostname), server.port or 443)
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        self._cut = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all connections, and refuse new ones."""
        with self._lock:
            self._cut = True
            for pair in self._pairs:
                self._break(pair)

    def mend(self) -> None:
        self._cut = False

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._cut:
                client.close()
                continue
            with contextlib.suppress(OSError):
                pair = (client, socket.create_connection(self._target))
                with self._lock:
                    self._pairs.add(pair)
                    if self._cut:  # since it was accepted
                        self._break(pair)
                threading.Thread(target=self._forward, args=[pair], daemon=True).start()

    def _forward(self, pair: tuple[socket.socket, socket.socket]) -> None:
        client, server = pair
        with contextlib.suppress(OSError, ValueError):
            while True:
                ready, _, _ = select.select(pair, (), ())
                for side in ready:
                    data = side.recv(1 << 16)
                    if not data:
                        raise OSError
                    (server if side is client else client).sendall(data)
        with self._lock:
            self._break(pair)
            self._pairs.discard(pair)

    @staticmethod
    def _break(pair: tuple[socket.socket, socket.socket]) -> None:
        for side in pair:
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()
