"""`dropforge metrics`: what Prometheus scrapes."""

from __future__ import annotations

import logging
import re
import signal
import socket
import threading
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from dropforge.cli.connect import StateOption
from dropforge.client.airflow import FINETUNE, INTAKE
from dropforge.client.connection import connect
from dropforge.errors import DropforgeError
from dropforge.install.exporter import PORT
from dropforge.rest import Rest
from dropforge.terminal import Console


def metrics(
    host: Annotated[str, typer.Option(help="Address to listen on; `::` for all of IPv4 and IPv6.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.", min=0, max=65535)] = PORT,
    every: Annotated[float, typer.Option(help="Seconds between two reads of ledger, MLflow and Airflow.", min=1)] = 30,
    once: Annotated[bool, typer.Option("--once", help="Read once, print the metrics and end.")] = False,
    state: StateOption = None,
) -> None:
    """Serve the metrics of drops, runs and trainings for Prometheus, at /metrics."""
    from prometheus_client import generate_latest, start_http_server

    from dropforge.watching.exporter import Exporter, Watch, registry
    from dropforge.watching.runs import Runs

    connection = connect(state)
    airflow = connection.airflow if connection.airflow.url and connection.airflow.user else None
    runs = Runs(Rest(connection.settings.tracking_uri))
    exporter = Exporter(Watch(connection.store, runs, airflow, (INTAKE, FINETUNE)), every)
    if once:
        exporter.look()
        typer.echo(generate_latest(registry(exporter)).decode(), nl=False)
        return
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # noqa: S104 - as was asked, where the machine has IPv4 alone
    try:
        server, _ = start_http_server(port, host, registry(exporter))
    except OSError as error:
        mend = "Give another --port, or --host"
        raise DropforgeError(f"address {host}:{port}", f"it cannot be listened on ({error})", mend) from None
    if host in {"127.0.0.1", "localhost", "::1"}:
        server.set_app(_asked_by_name(server.get_app()))
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    exporter.start()
    place = f"[{host}]" if ":" in host else host
    Console().print(f"Metrics at http://{place}:{server.server_port}/metrics", soft_wrap=True, highlight=False)
    over.wait()
    server.shutdown()


#: Any other name may be a page that a browser was lured to.
_HERE: Final = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d+)?")


def _asked_by_name(answer: Any) -> Callable[[Any, Any], Any]:
    """Answer those alone who ask this machine by a name of its own."""

    def asked(environ: Any, start_response: Any) -> Any:
        if _HERE.fullmatch(environ.get("HTTP_HOST", "")):
            return answer(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"Ask 127.0.0.1 by that name, or give `dropforge metrics` a --host\n"]

    return asked
