"""Airflow's StatsD metrics for Prometheus, named as the chart's StatsD exporter names them: each dot an underscore."""

from __future__ import annotations

import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.dropforge.watching.prometheus import page

# As StatsD has it: NAME:VALUE|TYPE, and the rate of a sample, which Airflow leaves at 1 for what is asked here.
_LINE = re.compile(r"(?P<name>[^:|]+):(?P<value>[-+]?[\d.]+)\|(?P<kind>c|g|ms)")


@dataclass(frozen=True)
class Statsd:
    """:param port: where Airflow sends to. :param address: what Prometheus scrapes."""

    port: int
    address: str


@contextmanager
def statsd() -> Iterator[Statsd]:
    told: dict[str, float] = {}

    class Datagram(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            for found in map(_LINE.match, self.request[0].decode().splitlines()):
                if found:
                    name = re.sub(r"\W", "_", found["name"])
                    added = found["kind"] == "c" or (found["kind"] == "g" and found["value"][0] in "+-")
                    told[name] = float(found["value"]) + (told.get(name, 0.0) if added else 0.0)

    def text() -> str:
        return "".join(f"{name} {value}\n" for name, value in sorted(told.copy().items()))

    with socketserver.UDPServer(("127.0.0.1", 0), Datagram) as receiver, page(text) as address:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        try:
            yield Statsd(receiver.server_address[1], address)
        finally:
            receiver.shutdown()
