"""Which database a stack has: its own, or the one that DROPFORGE_DATABASE_URL names; what is refused, and how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from dropforge.errors import DropforgeError
from dropforge.stack import control, databases, doctor
from dropforge.stack.databases import VARIABLE, Databases

OWN = "postgresql://ann:p%40s%24s%2F@db.example:6543/team?sslmode=require"


def of(folder: Path, url: str | None = None) -> Databases:
    return Databases.of(folder, {VARIABLE: url} if url else {})


def test_each_service_has_its_own_on_the_socket_in_the_state_folder() -> None:
    found = of(Path("/state"))  # short enough for a socket's path, as a test's own folder may not be
    names = {service: make_url(found.address(service)).database for service in ("airflow", "mlflow")}
    assert names == {"airflow": "dropforge_airflow", "mlflow": "dropforge_mlflow"}
    url = make_url(found.address("airflow", driver="asyncpg"))
    assert (url.host, url.query["host"]) == (None, "/state/database")


def test_an_address_of_ones_own_keeps_its_password_and_encryption(tmp_path: Path) -> None:
    found = of(tmp_path, OWN)
    url = make_url(found.address("mlflow"))
    assert (url.username, url.password, url.host, url.port, url.database) == (
        *("ann", "p@s$s/", "db.example", 6543),
        "team_mlflow",
    )
    assert url.query["sslmode"] == "require"
    assert make_url(found.address("airflow", driver="asyncpg")).query == {"ssl": "require"}
    assert "$" not in found.address("airflow"), "Airflow would expand it"


def test_no_text_of_it_tells_the_password(tmp_path: Path) -> None:
    found = of(tmp_path, OWN)
    assert "p%40s" not in f"{found} {found!r}"
    databases.remember(tmp_path, found)
    assert "%24s" not in (tmp_path / "database.json").read_text()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("mysql://u:geheim@h/n", "it names no PostgreSQL"),
        ("postgresql://u:geheim@h", "it ends with no name"),
        ("postgresql://u:geheim@h/" + "é" * 28, "at most 55 bytes"),
        ("postgresql://u@/n", "it names no host"),
        ("postgresql://u:geheim@h,h2/n", "it names no host, or several"),
        ("postgresql://u:ge@heim@h/n", "it names no host"),
        ("postgresql://h/n", "it names no user"),
        ("postgresql://u:geheim@h:port/n", "it is no address"),
        ("geheim", "it is no address"),
        ("postgresql://u:geheim@h/n?target_session_attrs=any", "is none of host, sslmode"),
        ("postgresql://u:geheim@h/n?sslmode=prefer&sslmode=require", "is given twice"),
    ],
)
def test_an_address_of_no_use_is_refused_and_not_repeated(tmp_path: Path, url: str, told: str) -> None:
    with pytest.raises(DropforgeError, match=told) as error:
        of(tmp_path, url)
    assert "heim" not in str(error.value)
    assert VARIABLE in str(error.value)


@pytest.mark.parametrize("file", ["airflow/airflow.db", "mlflow/mlflow.db"])
def test_a_folder_with_sqlite_files_is_refused_and_stays_as_it_is(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_bytes(b"old")
    with pytest.raises(DropforgeError, match=r"SQLite .*Start over: move the folder away"):
        control.start(tmp_path)
    assert (tmp_path / file).read_bytes() == b"old"
    assert not (tmp_path / "database").exists()


def test_data_of_another_postgresql_are_refused(tmp_path: Path) -> None:
    (tmp_path / "database").mkdir()
    (tmp_path / "database" / "PG_VERSION").write_text("16\n")
    with pytest.raises(DropforgeError, match="made by PostgreSQL 16, and PostgreSQL 18 is installed"):
        databases.check(tmp_path, of(tmp_path))


@pytest.mark.parametrize("torn", [b"", b"\n", b"\xff\xfe", None])
def test_data_whose_version_cannot_be_read_are_left_alone(tmp_path: Path, torn: bytes | None) -> None:
    file = tmp_path / "database" / "PG_VERSION"
    file.parent.mkdir()
    file.mkdir() if torn is None else file.write_bytes(torn)
    with pytest.raises(DropforgeError, match=r"PG_VERSION.*cannot be read"):
        databases.check(tmp_path, of(tmp_path))


def test_a_stack_does_not_come_up_without_its_runs(tmp_path: Path) -> None:
    own, embedded = of(tmp_path, OWN), of(tmp_path)
    for none_yet in (own, embedded):
        databases.check(tmp_path, none_yet)
    databases.remember(tmp_path, own)
    same = of(tmp_path, "postgresql://bob:other@db.example:6543/team")
    databases.check(tmp_path, same)
    with pytest.raises(DropforgeError, match=f"are in db.example:6543/team, and {VARIABLE} is not set.* delete .*json"):
        databases.check(tmp_path, embedded)
    with pytest.raises(DropforgeError, match=r"names db\.example:6543/other"):
        databases.check(tmp_path, of(tmp_path, OWN.replace("team", "other")))


def test_a_stack_with_its_own_database_does_not_change_to_another(tmp_path: Path) -> None:
    databases.remember(tmp_path, of(tmp_path))
    databases.check(tmp_path, of(tmp_path, OWN))  # its start failed: there are no runs yet
    (tmp_path / "database").mkdir()
    databases.check(tmp_path, of(tmp_path))
    with pytest.raises(DropforgeError, match=f"a PostgreSQL of its own, and {VARIABLE} names .* Unset {VARIABLE}"):
        databases.check(tmp_path, of(tmp_path, OWN))


def test_commands_need_no_driver_of_it() -> None:
    script = "import sys; sys.modules['psycopg2'] = sys.modules['asyncpg'] = None; import dropforge.cli.app"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_doctor_tells_which_database_it_is_and_what_is_wrong_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    (sound,) = doctor.database(tmp_path)
    assert (sound.level, sound.found) == (doctor.Level.OK, "a PostgreSQL of its own")
    monkeypatch.setenv(VARIABLE, "postgresql://ann:geheim@127.0.0.1:1/team")
    (gone,) = doctor.database(tmp_path)
    assert gone.level is doctor.Level.FAIL
    assert "Connection refused" in gone.found
    assert "geheim" not in gone.found + gone.mend
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "mlflow.db").touch()
    (old,) = doctor.database(tmp_path)
    assert (old.level, "Start over" in old.mend) == (doctor.Level.FAIL, True)
