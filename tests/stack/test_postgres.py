"""The embedded PostgreSQL for real: who reaches it, what SIGKILL leaves, a full disk; and a server of one's own."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import asyncpg
import psutil
import psycopg2
import pytest

from dropforge import tracking
from dropforge.errors import DropforgeError
from dropforge.stack import control, databases, postgres
from dropforge.stack.databases import VARIABLE, Databases, data_folder
from dropforge.stack.state import ServiceState, StackState, read_state
from tests.stack.databases import PASSWORD, QUOTED, Postgres, Team, team_server
from tests.stack.supervised import supervised
from tests.stack.test_supervisor import until


@contextmanager
def running(folder: Path) -> Iterator[Postgres]:
    server = Postgres(folder).start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Postgres]:
    with running(tmp_path / "a state") as server:
        yield server


def test_both_services_find_their_database_and_nobody_else_does(server: Postgres) -> None:
    server.ask("CREATE TABLE alembic_version (version text)")
    server.ask("CREATE TABLE alembic_version (version text)", service="mlflow")

    async def asynchronously() -> str:
        url = server.databases.address("airflow", driver="asyncpg").replace("+asyncpg", "")
        connection = await asyncpg.connect(url)
        try:
            return str(await connection.fetchval("SELECT current_database()"))
        finally:
            await connection.close()

    assert asyncio.run(asynchronously()) == "dropforge_airflow"
    assert server.process is not None
    listening = [one.laddr for one in psutil.Process(server.process.pid).net_connections("inet")]
    assert listening == []
    assert data_folder(server.folder).stat().st_mode & 0o777 == 0o700
    assert server.folder.stat().st_mode & 0o777 == 0o700
    assert server.ask("SELECT rolsuper FROM pg_roles WHERE rolname = current_user") == [(False,)]


def test_texts_are_unicode_on_every_machine(server: Postgres) -> None:
    assert server.ask("SELECT upper('äö'), 'Ä' ILIKE 'ä'") == [("ÄÖ", True)]


def lock_files(folder: Path) -> list[Path]:
    return [data_folder(folder) / "postmaster.pid", databases.socket_folder(folder) / ".s.PGSQL.5432.lock"]


@pytest.mark.smoke
def test_what_was_committed_survives_the_end_of_every_process(server: Postgres) -> None:
    server.ask("CREATE TABLE kept (number int)")
    # One that the server may send signals to: of its user, who for root is another.
    with subprocess.Popen(["sleep", "300"], user="nobody" if os.geteuid() == 0 else None) as other:
        try:
            for number in range(3):
                server.ask(f"INSERT INTO kept VALUES ({number})")
                server.kill()
                # By the next start the number of the dead server is another program's.
                for path in lock_files(server.folder):
                    path.write_text(f"{other.pid}\n{path.read_text().partition(chr(10))[2]}")
                server.start()
        finally:
            other.kill()
    assert server.ask("SELECT count(*) FROM kept") == [(3,)]


def test_the_number_of_a_dead_server_may_be_another_folders_server_or_missing(server: Postgres, tmp_path: Path) -> None:
    with running(tmp_path / "other") as other:
        server.kill()
        assert other.process is not None
        for path in lock_files(server.folder):
            path.write_text(f"{other.process.pid}\n{path.read_text().partition(chr(10))[2]}")
        server.start()
        server.kill()
        for path in lock_files(server.folder):
            path.write_text("")
        server.start()
        assert other.ask("SELECT 1") == server.ask("SELECT 1") == [(1,)]


def test_its_log_holds_nothing_that_people_wrote(server: Postgres) -> None:
    server.ask("CREATE TABLE strict (number int NOT NULL, text text UNIQUE)")
    server.ask("INSERT INTO strict VALUES (1, 'geheim')")
    for row in ("(NULL, 'geheim2')", "(2, 'geheim')", "('geheim', '')"):
        with pytest.raises(psycopg2.Error, match="geheim"):
            server.ask(f"INSERT INTO strict VALUES {row}")
    server.kill()
    server.start()
    assert "automatic recovery" in server.log()
    assert "geheim" not in server.log()


def test_libpqs_variables_lead_nowhere_else(server: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPORT", "6543")
    monkeypatch.setenv("PGHOST", "db.example")
    monkeypatch.setenv("PGDATABASE", "other")
    assert server.ask("SELECT 1") == [(1,)]


@pytest.mark.skipif(os.geteuid() != 0, reason="another user finds its own programs")
def test_root_needs_no_folder_that_others_may_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = postgres.find_programs().parents[1]
    packages = tmp_path / "packages"
    packages.mkdir(mode=0o700)
    for folder in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(folder, packages / folder.name, ignore=shutil.ignore_patterns("include", "pginstall"))
    monkeypatch.setenv("PYTHONPATH", str(packages))
    with running(tmp_path / "state") as server:
        assert server.process is not None
        assert Path(f"/proc/{server.process.pid}/exe").readlink().is_relative_to(packages)
        assert server.ask("SELECT 1") == [(1,)]
    assert packages.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="it is root that PostgreSQL refuses")
def test_a_root_without_rights_is_told_what_to_do(tmp_path: Path) -> None:
    few = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    command = [*few, sys.executable, "-m", "dropforge.stack.postgres", "--state", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"Run as an ordinary user, or name a database of your own in {VARIABLE}" in done.stderr
    assert not data_folder(tmp_path).exists()


def test_a_server_that_lives_is_not_disturbed_by_a_second(server: Postgres, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(server.folder)
    before = [path.read_text() for path in lock_files(server.folder)]
    for name in (server.folder, link):
        command = [sys.executable, "-m", "dropforge.stack.postgres", "--state", str(name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != 0
        assert "already exists" in done.stderr
    assert [path.read_text() for path in lock_files(server.folder)] == before
    assert server.ask("SELECT 1") == [(1,)]


def test_a_start_that_was_killed_leaves_nothing_half_made(tmp_path: Path) -> None:
    half = tmp_path / ".database.new"
    half.mkdir()
    (half / "PG_VERSION").write_text("18\n")
    with running(tmp_path) as server:
        assert server.ask("SELECT 1", service="mlflow") == [(1,)]
    assert not half.exists()


@pytest.mark.parametrize("name", ["long" * 30, "a,b"])
def test_a_path_that_no_socket_can_have(tmp_path: Path, name: str) -> None:
    with running(tmp_path / name) as server:
        assert server.ask("SELECT 1") == [(1,)]
        place = databases.socket_folder(server.folder)
        assert place.stat().st_mode & 0o777 == 0o700
        assert place.stat().st_uid == data_folder(server.folder).stat().st_uid
    place.chmod(0o755)
    try:
        with pytest.raises(DropforgeError, match="not this user's alone"):
            postgres.own_socket_folder(server.folder, None)
    finally:
        place.rmdir()


DATABASE = "[wanted['database']]"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A state folder on a disk of its own, which the database fills by half."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=160m,mode=700") != 0:
        pytest.skip("mounting needs root")
    try:
        with supervised(folder, DATABASE):
            yield folder
    finally:
        libc.umount2(os.fsencode(folder), 2)


def test_a_query_that_goes_on_after_its_server_was_killed_does_not_hold_up_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with supervised(folder, DATABASE), ThreadPoolExecutor(1) as pool:
        server = Postgres(folder)
        long = pool.submit(server.ask, "SELECT count(*) FROM generate_series(1, 1000000000000)")
        question = (
            "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%generate_series(1, 1%'"
        )
        until(lambda: server.ask(question) == [(2,)])  # it and this question
        before = read_state(folder)
        assert before is not None
        pid = before.services["database"].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(server.databases.answers, 60)
        with pytest.raises(psycopg2.OperationalError):
            long.result(30)


def heartbeats(server: Postgres) -> list[float]:
    return [beat for (beat,) in server.ask("SELECT extract(epoch FROM latest_heartbeat)::float FROM job ORDER BY id")]


@pytest.mark.parametrize("held", ["a lock", "a server that is stopped"])
def test_who_supervises_does_not_wait_for_airflow_s_database(
    server: Postgres, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "_STATEMENT", 1.0)
    monkeypatch.setattr(databases, "_CONNECT", 1.0)
    server.ask("CREATE TABLE job (id serial, job_type text, latest_heartbeat timestamptz)")
    server.ask("INSERT INTO job (job_type, latest_heartbeat) VALUES ('A', to_timestamp(2000)), ('A', to_timestamp(1))")
    assert server.process is not None
    with ThreadPoolExecutor(1) as pool, closing(server.databases.connect("dropforge_airflow")) as other:
        with other.cursor() as cursor:
            cursor.execute("LOCK TABLE job IN SHARE MODE")
        if held != "a lock":
            other.rollback()
            os.kill(server.process.pid, signal.SIGSTOP)
        tried = pool.submit(server.databases.end_future_heartbeats, "A", 1000.0)
        try:
            tried.result(5)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
            other.rollback()
    assert heartbeats(server) == [2000.0, 1.0]
    server.databases.end_future_heartbeats("A", 1000.0)
    assert heartbeats(server) == [1000.0, 1.0]


def fill(folder: Path, left: int) -> Path:
    """A file that leaves so many bytes of the folder's disk."""
    filler, size = folder / "filler", os.statvfs(folder)
    with filler.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, size.f_bavail * size.f_frsize - left)
    return filler


def test_a_full_disk_is_named_to_who_writes(small_disk: Path) -> None:
    server = Postgres(small_disk)
    server.ask("CREATE TABLE kept AS SELECT 1")
    filler = fill(small_disk, left=0)
    with pytest.raises(psycopg2.errors.DiskFull, match="No space left on device"):
        server.ask("CREATE TABLE big AS SELECT repeat('x', 1000) FROM generate_series(1, 100000)")
    filler.unlink()
    assert server.ask("SELECT * FROM kept") == [(1,)]


def test_a_server_that_a_full_disk_ended_comes_back_when_there_is_room(small_disk: Path) -> None:
    server = Postgres(small_disk)
    server.ask("CREATE TABLE kept (number serial)")
    filler = fill(small_disk, left=8 << 20)  # less than a file of its log
    committed = 0
    files = psycopg2.connect(host=str(databases.socket_folder(small_disk)), user="postgres", dbname="postgres")
    files.autocommit = True
    with closing(files), suppress(psycopg2.OperationalError):
        while True:
            with suppress(psycopg2.errors.DiskFull):  # of the table, which ends no server
                server.ask("INSERT INTO kept DEFAULT VALUES")
                committed += 1
            # Its log alone: where that has no room the server ends.
            files.cursor().execute("SELECT pg_logical_emit_message(false, 'fill', repeat('x', 100000))")
            files.cursor().execute("SELECT pg_switch_wal()")
    small_file = small_disk / "small"
    with suppress(OSError), small_file.open("wb") as stream:
        while stream.write(b"x" * 4096):  # until nothing at all is left
            stream.flush()

    def database() -> ServiceState:
        found = read_state(small_disk)
        assert found is not None
        return found.services["database"]

    until(lambda: database().restarts > 2, 120)  # which is told although there is no room
    assert f"the disk of {small_disk} is full: make room there" in database().message
    filler.unlink()
    until(server.databases.answers, 60)
    ((kept,),) = server.ask("SELECT count(*) FROM kept")
    assert kept >= committed > 0
    until(lambda: database().status == "healthy")


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    with team_server(tmp_path / "team") as team:
        yield team


def test_a_server_of_ones_own_gets_both_databases_or_says_what_is_missing(
    team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = Databases.of(tmp_path, {VARIABLE: team.url("ann")})
    with pytest.raises(DropforgeError, match=r'permission denied.*CREATE DATABASE "team_airflow" .* OWNER "ann"'):
        databases.provide(ann)
    bob = Databases.of(tmp_path, {VARIABLE: team.url("bob")})
    for _ in range(2):
        databases.provide(bob)
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    databases.provide(bob)
    made = team.ask("SELECT datname FROM pg_database WHERE datname LIKE 'team%' ORDER BY 1")
    assert made == [("team_airflow",), ("team_mlflow",)]
    with pytest.raises(DropforgeError, match=r'ann may make no tables.*ALTER DATABASE "team_airflow" OWNER TO "ann"'):
        databases.provide(ann)
    for name in ("team_airflow", "team_mlflow"):
        team.ask(f"ALTER DATABASE {name} OWNER TO ann")
    databases.provide(ann)
    new = Databases.of(tmp_path, {VARIABLE: team.url("bob", name="new")})
    databases.provide(new, make=False)
    assert team.ask("SELECT 1 FROM pg_database WHERE datname LIKE 'new%'") == []
    team.ask("CREATE DATABASE old_airflow ENCODING 'LATIN1' TEMPLATE template0 LOCALE_PROVIDER libc LOCALE 'C'")
    with pytest.raises(DropforgeError, match="its encoding is LATIN1"):
        databases.provide(Databases.of(tmp_path, {VARIABLE: team.url("bob", name="old")}))
    with pytest.raises(DropforgeError, match="password authentication failed") as error:
        databases.provide(Databases.of(tmp_path, {VARIABLE: team.url("ann", password="geheim")}))
    assert "geheim" not in str(error.value)
    gone = Databases.of(tmp_path, {VARIABLE: "postgresql://ann:geheim@127.0.0.1:1/team"})
    with pytest.raises(DropforgeError, match=f"Connection refused.* fix {VARIABLE}"):
        databases.provide(gone)


def test_a_whole_stack_on_a_server_of_ones_own(team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "state"
    env = {**os.environ, VARIABLE: team.url("bob", name="forge")}

    def command(*arguments: str, env: dict[str, str] = env) -> subprocess.CompletedProcess[str]:
        program = [str(Path(sys.executable).with_name("dropforge")), *arguments, "--state", str(folder)]
        return subprocess.run(program, env=env, capture_output=True, text=True, timeout=240, check=False)

    try:
        first = command("up", "--detach")
        assert first.returncode == 0, first.stdout + first.stderr
        found = read_state(folder)
        assert found is not None
        assert "database" not in found.services
        assert not data_folder(folder).exists()
        assert team.ask("SELECT count(*) > 0 FROM dag", "forge_airflow") == [(True,)]
        for name, value in found.env().items():
            monkeypatch.setenv(name, value)
        assert tracking.client(found.settings.tracking_uri).create_experiment("kept")
        told = [path.read_bytes() for path in (*folder.glob("*"), *(folder / "logs").iterdir()) if path.is_file()]
        told += [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in of_stack(found)]
        assert not [text for text in told if PASSWORD.encode() in text or QUOTED.encode() in text]
        assert command("down").returncode == 0
        without = command("up", "--detach", env={**os.environ})
        assert without.returncode == 2
        assert f"{VARIABLE} is not set" in " ".join(without.stderr.split())
        assert command("up", "--detach").returncode == 0
        assert tracking.client(found.settings.tracking_uri).get_experiment_by_name("kept")
    finally:
        control.stop(folder)


def of_stack(state: StackState) -> list[int]:
    root = psutil.Process(state.supervisor[0])
    return [root.pid, *(process.pid for process in root.children(recursive=True))]
