"""PostgreSQL servers of tests: the embedded one by itself, and one as a team has it, with users and passwords."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg2

from dropforge.stack import postgres
from dropforge.stack.databases import Databases, data_folder, socket_folder
from tests.stack.test_supervisor import until

PASSWORD = "p@ s+%/$"
QUOTED = "p%40%20s%2B%25%2F%24"


def _ask(connection: psycopg2.extensions.connection, question: str) -> list[tuple[Any, ...]]:
    """Rows of one statement on a connection of its own."""
    connection.autocommit = True
    with closing(connection), connection.cursor() as cursor:
        cursor.execute(question)
        return cursor.fetchall() if cursor.description else []


class Postgres:
    """The server of one state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.databases = Databases.of(folder, {})
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> Postgres:
        folder = self.folder
        folder.mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, "-m", "dropforge.stack.postgres", "--state", str(folder)]
        with (folder / "log").open("a") as log:
            self.process = process = subprocess.Popen(command, stderr=log, stdout=log, text=True, umask=0o077)
        until(lambda: process.poll() is not None or self.databases.answers())
        assert process.poll() is None, self.log()
        return self

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def kill(self) -> None:
        """End all its processes at once, as a machine without memory does."""
        assert self.process is not None
        found = psutil.Process(self.process.pid)
        for process in [found, *found.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):  # without its server it ends by itself
                process.kill()
        self.process.wait()

    def stop(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(30)

    def ask(self, question: str, service: str = "airflow") -> list[tuple[Any, ...]]:
        return _ask(self.databases.connect(self.databases.name(service)), question)


@dataclass(frozen=True)
class Team:
    """A server on a port of 127.0.0.1. Its user `ann` may make no database, `bob` may; both have PASSWORD."""

    folder: Path
    port: int

    def url(self, user: str, password: str = QUOTED, name: str = "team") -> str:
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{name}"

    def ask(self, question: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Rows, as the server's administrator gets them."""
        connection = psycopg2.connect(
            host=str(socket_folder(self.folder)), port=self.port, user="postgres", dbname=database
        )
        return _ask(connection, question)

    def answers(self) -> bool:
        try:
            return bool(self.ask("SELECT 1"))
        except psycopg2.OperationalError:
            return False


@contextmanager
def team_server(folder: Path) -> Iterator[Team]:
    """A running server in this new folder."""
    folder.mkdir()
    programs, (prefix, owner) = postgres.find_programs(), postgres.as_user(folder)
    postgres.make_data(folder, programs, prefix, owner)
    data, place = data_folder(folder), postgres.own_socket_folder(folder, owner)
    (data / "pg_hba.conf").write_text("host all all 127.0.0.1/32 scram-sha-256\nlocal all all trust\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        team = Team(folder, probe.getsockname()[1])
    command = [*prefix, str(programs / "postgres"), "-D", str(data), "-p", str(team.port), "-k", str(place)]
    server = subprocess.Popen([*command, "-c", "listen_addresses=127.0.0.1"], stderr=subprocess.DEVNULL)
    try:
        until(team.answers)
        team.ask(f"CREATE ROLE ann LOGIN PASSWORD '{PASSWORD}'")
        team.ask(f"CREATE ROLE bob LOGIN CREATEDB PASSWORD '{PASSWORD}'")
        yield team
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
