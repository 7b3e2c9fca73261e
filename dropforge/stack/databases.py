"""The databases of Airflow and MLflow: in the embedded stack's own PostgreSQL, or in one that the user names.

Each has its own, as both keep the version of their schema in a table of the same name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import select
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from dropforge.errors import DropforgeError
from dropforge.stack.secrets import read_json, read_own, write_private

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection  # noqa: N812

log = logging.getLogger("dropforge.supervisor")

VARIABLE: Final = "DROPFORGE_DATABASE_URL"
EXAMPLE: Final = "postgresql://USER:PASSWORD@HOST:5432/NAME"
SERVICES: Final = ("airflow", "mlflow")
ROLE: Final = "dropforge"  # in the embedded server: owner of both databases, no superuser
MAJOR: Final = "18"
_EMBEDDED: Final = "a PostgreSQL of its own"
_OLDEST: Final = 13
_PORT: Final = 5432
_OPTIONS: Final = frozenset({"host", "sslmode"})  # of an address: those that every driver has
# When a host that is gone without a word is given up, as in dropforge_airflow.postgres, which says why.
_GONE: Final = {
    "connect_timeout": "30",
    "keepalives_idle": "20",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "50000",
}
_CONNECT: Final = 3.0  # seconds, as far as who supervises waits
_STATEMENT: Final = 3.0
_LONGEST_NAME: Final = 63 - len("_airflow")  # bytes
_LONGEST_SOCKET: Final = 107 - len("/.s.PGSQL.5432.lock")  # bytes of a path, unix(7)


@dataclass(frozen=True)
class Databases:
    """A PostgreSQL server, and where on it each service keeps what it knows.

    :param url: address whose database's name, with `_airflow` or `_mlflow` behind it, is each one's.
    :param embedded: whether it is the stack's own server.
    """

    url: URL = field(repr=False)
    embedded: bool

    @classmethod
    def of(cls, folder: Path, env: Mapping[str, str] | None = None) -> Databases:
        """Those of the stack in this folder. :raises DropforgeError: if `DROPFORGE_DATABASE_URL` is of no use."""
        if named := (os.environ if env is None else env).get(VARIABLE):
            return cls(_parse(named), embedded=False)
        socket = {"host": str(socket_folder(folder)), "port": str(_PORT)}
        return cls(URL.create("postgresql", username=ROLE, database="dropforge", query=socket), embedded=True)

    def name(self, service: str) -> str:
        """Name of a service's database."""
        return f"{self.url.database}_{service}"

    def address(self, service: str, driver: str = "psycopg2") -> str:
        """SQLAlchemy's address of a service's database, with the password if there is one."""
        url = self.url.set(drivername=f"postgresql+{driver}", database=self.name(service))
        if driver == "asyncpg" and "sslmode" in url.query:
            mode = url.query["sslmode"]
            url = url.difference_update_query(["sslmode"]).update_query_dict({"ssl": mode})
        if not self.embedded and service == "mlflow":  # Airflow's are in its configuration
            url = url.update_query_dict(_GONE)
        return url.render_as_string(hide_password=False)

    def connect(self, database: str, patience: int = 10) -> Connection:
        """A connection to a database on this server.

        :param patience: seconds.
        :raises ConnectionError: if there is none to be had.
        """
        import psycopg2  # the command line is used where there is none

        try:
            return psycopg2.connect(self._dsn(database, connect_timeout=patience))
        except psycopg2.OperationalError as error:
            raise ConnectionError(_line(error)) from None

    def _dsn(self, database: str, **more: int) -> str:
        from psycopg2.extensions import make_dsn

        url = self.url
        address: dict[str, Any] = {"host": url.host, "port": url.port, **url.query, **more}
        return make_dsn(user=url.username, password=url.password, dbname=database, **address)

    def answers(self) -> bool:
        """Whether the server takes connections."""
        try:
            self.connect(self.name(SERVICES[0]), patience=3).close()
        except ConnectionError:
            return False
        return True

    def end_future_heartbeats(self, job: str, now: float) -> None:
        """Have no process of Airflow that has ended count as alive until the clock has come to its last heartbeat.

        To Airflow, what it held would be another's until then: a day long where the clock was set back by a day.

        :param job: what kind of process. None of it runs here. :param now: Unix time.
        """
        import psycopg2

        moment = datetime.fromtimestamp(now, UTC)
        # What waits longer is given up here, and then by the server too, so that nothing is changed late.
        limit = f"SET LOCAL statement_timeout = '{_STATEMENT:.0f}s'"
        change = "UPDATE job SET latest_heartbeat = %s WHERE job_type = %s AND latest_heartbeat > %s"
        try:
            with contextlib.closing(psycopg2.connect(self._dsn(self.name("airflow")), async_=1)) as connection:
                _finish(connection, _CONNECT)
                cursor = connection.cursor()
                cursor.execute(f"{limit}; {change}", (moment, job, moment))
                _finish(connection, _STATEMENT)
        except (OSError, psycopg2.Error) as error:  # whoever starts will tell what is wrong with the database
            log.warning("heartbeats of %s cannot be looked at: %s", job, _line(error))

    def __str__(self) -> str:
        """The server and the name, without who logs in and how."""
        host = self.url.host or self.url.query.get("host")
        return _EMBEDDED if self.embedded else f"{host}:{self.url.port or _PORT}/{self.url.database}"


def socket_folder(folder: Path) -> Path:
    """Where the embedded server's socket lies: with its data, or, where that path is of no use, in one for this user.

    A socket's path has at most 107 bytes, and PostgreSQL splits lists of them at commas.
    """
    data = data_folder(folder)
    if len(os.fsencode(data)) <= _LONGEST_SOCKET and "," not in str(data):
        return data
    digest = hashlib.sha256(os.fsencode(data)).hexdigest()[:16]
    return Path(f"/tmp/dropforge-{os.geteuid()}-{digest}")  # noqa: S108 - the server looks that it is its user's alone


def data_folder(folder: Path) -> Path:
    return folder.absolute() / "database"


def check(folder: Path, databases: Databases) -> None:
    """:raises DropforgeError: if the folder's stack keeps its data elsewhere, or in a way that is no longer read."""
    for file in ("airflow/airflow.db", "mlflow/mlflow.db"):
        if (folder / file).exists():
            away = shlex.join(["mv", str(folder), f"{folder}.old"])
            raise DropforgeError(
                f"state folder {folder}",
                f"its stack was made by a version that kept its runs in SQLite ({file}), which this one does not read",
                f"Start over: move the folder away (`{away}`), or choose another with `--state`. "
                "The version that made it still opens it, to fetch models from",
            )
    made_by = _made_by(data_folder(folder) / "PG_VERSION")
    if made_by is not None and made_by != MAJOR:
        raise DropforgeError(
            f"state folder {folder}",
            f"its database was made by PostgreSQL {made_by}, and PostgreSQL {MAJOR} is installed",
            "Install the version of Dropforge that made it, or start over in another folder with `--state`",
        )
    note = _note_path(folder)
    if data_folder(folder).exists():
        before, mend = _EMBEDDED, f"Unset {VARIABLE}"
    elif note.exists():
        before = _noted(note)
        mend = f"Set {VARIABLE} to that, or, where that server has moved, delete {note}"
    else:
        return
    if before != str(databases):
        now = f"{VARIABLE} is not set" if databases.embedded else f"{VARIABLE} names {databases}"
        raise DropforgeError(
            f"state folder {folder}",
            f"the runs of its stack are in {before}, and {now}",
            f"{mend}, or start over in another folder with `--state`",
        )


def remember(folder: Path, databases: Databases) -> None:
    """Note which server of the user's own the folder's stack has; a server in the folder needs no note."""
    if not databases.embedded:
        write_private(_note_path(folder), json.dumps({"database": str(databases)}))


def _made_by(file: Path) -> str | None:
    """The version of the server that made a folder of data; None where there is none yet."""
    try:
        version = read_own(file).strip()
        if not version:
            raise ValueError("it is empty")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DropforgeError(
            str(file),
            f"it cannot be read ({error})",
            "Put back a copy of the folder, or start over in another with `--state`",
        ) from None
    return version


def _noted(note: Path) -> str:
    try:
        return str(read_json(note)["database"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DropforgeError(
            str(note), f"it cannot be read ({error!r})", f"Delete it, if {VARIABLE} names the server that the stack had"
        ) from None


def _note_path(folder: Path) -> Path:
    return folder / "database.json"


def provide(databases: Databases, *, make: bool = True) -> None:
    """See to it that a server of the user's own has both databases, and that they are of use.

    :param make: whether those that are not there are made.
    :raises DropforgeError: if it does not answer, is too old, lets this user make no database or no tables, or holds no
        UTF-8.
    """
    for service in SERVICES:
        name = databases.name(service)
        try:
            connection = databases.connect(name)
        except ConnectionError as error:
            _create(databases, name, error, make)
            if not make:
                continue
            connection = databases.connect(name)
        try:
            _fit(databases, name, connection)
        finally:
            connection.close()


def _create(databases: Databases, name: str, refused: Exception, make: bool) -> None:
    """Make a database to which nobody could connect, if that is because it is not there."""
    import psycopg2

    made = f"CREATE DATABASE \"{name}\" ENCODING 'UTF8' TEMPLATE template0"
    owned = f'{made} OWNER "{databases.url.username}"'
    cannot = DropforgeError(
        f"database {name} at {databases}",
        str(refused),
        f"Start that server, or fix {VARIABLE} ({EXAMPLE}), or, if it lacks the database, have its administrator run: "
        f"{owned}",
    )
    try:
        connection = databases.connect("postgres")
    except ConnectionError:
        raise cannot from None
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,))
            if cursor.fetchone() is not None:
                raise cannot
            if make:
                cursor.execute(made)
    except psycopg2.Error as error:
        raise DropforgeError(
            f"database {name} at {databases}",
            f"it is not there and cannot be made ({_line(error)})",
            f"Have its administrator run: {owned}",
        ) from None
    finally:
        connection.close()


def _fit(databases: Databases, name: str, connection: Connection) -> None:
    """:raises DropforgeError: if a database is of no use to Airflow and MLflow."""
    thing, version = f"database {name} at {databases}", connection.server_version // 10_000
    encoding = connection.info.parameter_status("server_encoding")
    if version < _OLDEST:
        raise DropforgeError(thing, f"it is PostgreSQL {version}", f"Airflow needs {_OLDEST} or later")
    if encoding != "UTF8":
        raise DropforgeError(thing, f"its encoding is {encoding}", "Make it again with ENCODING 'UTF8'")
    with connection.cursor() as cursor:
        cursor.execute("SELECT has_schema_privilege(current_schema(), 'CREATE')")
        if cursor.fetchone() != (True,):
            user = databases.url.username
            raise DropforgeError(
                thing,
                f"user {user} may make no tables there",
                f'Have its administrator run: ALTER DATABASE "{name}" OWNER TO "{user}"',
            )


def _parse(text: str) -> URL:
    """An address as people write it. Errors repeat no part of it, as any may be of a password with odd characters."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise DropforgeError(VARIABLE, "it is no address of a database", f"Write {EXAMPLE}") from None
    host = url.host or url.query.get("host")
    wrong = {
        "it names no PostgreSQL": url.drivername.partition("+")[0] not in {"postgresql", "postgres"},
        "it names no user": not url.username,
        "it names no host, or several": not isinstance(host, str) or bool(set(",@") & set(host)),
        f"it has an option that is given twice, or is none of {', '.join(sorted(_OPTIONS))}": (
            not url.query.keys() <= _OPTIONS or not all(isinstance(value, str) for value in url.query.values())
        ),
        f"it ends with no name of at most {_LONGEST_NAME} bytes": (
            not url.database or len(url.database.encode()) > _LONGEST_NAME or '"' in url.database
        ),
    }
    for cause, is_so in wrong.items():
        if is_so:
            mend = f"Write {EXAMPLE}, and characters of a password that are no letters or digits as %40 (which is @)"
            raise DropforgeError(VARIABLE, cause, mend)
    return url.set(drivername="postgresql")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _finish(connection: Connection, patience: float) -> None:
    """Wait until an asynchronous connection has done what it does. :raises TimeoutError: if it takes too long.

    libpq itself waits without a bound: for a lock, for a server that is stopped, or for a host that is gone.
    """
    from psycopg2.extensions import POLL_OK, POLL_READ

    deadline = time.monotonic() + patience
    while (state := connection.poll()) != POLL_OK:
        read, write = ([connection], []) if state == POLL_READ else ([], [connection])
        if not any(select.select(read, write, [], max(0.0, deadline - time.monotonic()))):
            raise TimeoutError(f"the server took more than {patience:.0f} s")
