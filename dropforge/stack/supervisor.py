"""The one process that owns the stack: it starts the services, watches them, restarts them, and ends all of them.

`python -m dropforge.stack.supervisor --state FOLDER` runs until it gets SIGTERM, or until the other end of
`--lifeline FD` is closed, which ties a stack to a terminal. It writes `stack.json` whenever something changes.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from dropforge.errors import DropforgeError, file_error
from dropforge.settings import READABLE
from dropforge.stack import processes
from dropforge.stack.log_files import open_log
from dropforge.stack.nursery import Nursery
from dropforge.stack.processes import Traces
from dropforge.stack.respawn import respawn
from dropforge.stack.secrets import read_secrets, write_private
from dropforge.stack.service_logs import cut_log
from dropforge.stack.services import Service, note_migrated, prepare, services
from dropforge.stack.state import (
    PORTS,
    ServiceState,
    StackState,
    full_disk,
    has_folder,
    mark_path,
    state_path,
    take_lock,
    write_state,
)
from dropforge.standard_streams import hold_standard_streams

log = logging.getLogger("dropforge.supervisor")

GRACE = 12.0  # seconds that a service has to end by itself
REFUSED = "error: "  # begins the line that says why it ended before it supervised
_LOG_LIMIT = 16 << 20
_CHECK_STARTING = 0.3
_MAX_FAILED_CHECKS = 6
_BACKOFF = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
_FIRST_TRIES = 3  # for a service that has never been healthy: it hardly will be
_SPARE = 64 << 10  # bytes
_STABLE = 60.0  # seconds of health after which earlier failures are forgotten


class Watched:
    """A service and what has become of it. Its times are of the monotonic clock: nobody can set that."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.state = ServiceState("waiting", service.port)
        self.started = 0.0
        self.next_check = 0.0
        self.failed_checks = 0
        self.failures = 0
        self.was_healthy = False
        self.restart_at = 0.0

    @property
    def settled(self) -> bool:
        return self.state.status in {"healthy", "done"}

    def set(self, status: str, message: str = "", pid: int | None = None) -> None:
        self.state = replace(self.state, status=status, message=message, pid=pid)
        log.info("%s: %s%s", self.service.name, status, f" ({message})" if message else "")


class Supervisor:
    """All of it happens in one thread; a signal only wakes it."""

    def __init__(
        self,
        folder: Path,
        ports: dict[str, int],
        wanted: list[Service],
        pod_host: str | None,
        parent: tuple[int, int],
        lock: int,
        mark: int,
    ) -> None:
        """
        :param parent: the process that passes signals on to this one, and outlives it if it is killed.
        :param lock: descriptor that has the folder's lock.
        :param mark: descriptor of the file that all processes of the stack hold open.
        """
        self.folder = folder
        self.watched = [Watched(service) for service in wanted]
        self._stopping = False
        self._lock = lock
        self._mark = mark
        self._state = StackState(
            folder=folder,
            phase="starting",
            ports=ports,
            services={},
            supervisor=parent,
            traces=Traces(processes.boot_id(), uuid.uuid4().hex, mark_path(folder), frozenset()),
            started=time.time(),
            secrets=read_secrets(folder),
            pod_host=pod_host,
            readable=os.environ.get(READABLE, ""),
        )
        self._written: StackState | None = None
        self._unwritten = ""  # why it is not
        self._nursery: Nursery | None = None

    def run(self, wake: int, lifeline: int | None) -> None:
        """Supervise until told to stop; on return no descendant lives."""
        sources = [wake] + ([lifeline] if lifeline is not None else [])
        try:
            self._open_nursery()
            while not self._stopping:
                if not has_folder(self.folder, self._lock):
                    log.error("%s was removed, or is another stack's by now: this one ends", self.folder)
                    break
                try:
                    self._round()
                except Exception:
                    log.exception("unexpected error; it continues")
                ready, _, _ = select.select(sources, [], [], self._pause())
                if wake in ready:
                    self._stopping = any(number != signal.SIGCHLD for number in os.read(wake, 1024))
                if lifeline in ready:
                    log.info("the terminal is gone")
                    self._stopping = True
        finally:
            self._stop()

    def _round(self) -> None:
        self._reap()
        for watched in self.watched:
            try:
                cut_log(self.folder / "logs" / f"{watched.service.name}.log", _LOG_LIMIT)
                self._advance(watched)
            except Exception:
                log.exception("%s: unexpected error; it continues", watched.service.name)
                watched.next_check = time.monotonic() + watched.service.check_every
        if all(watched.state.status != "waiting" for watched in self.watched):
            self._close_nursery()
        self._publish()

    def _pause(self) -> float:
        return 0.1 if any(not watched.settled for watched in self.watched) else 1.0

    def _advance(self, watched: Watched) -> None:
        """Do what is due for one service."""
        now = time.monotonic()
        status = watched.state.status
        if status == "waiting":
            if self._can_start(watched.service):
                self._start(watched)
        elif status == "restarting" and now >= watched.restart_at:
            self._start(watched)
        elif status in {"starting", "healthy", "failing"} and now >= watched.next_check and not watched.service.once:
            self._check(watched, now)

    def _start(self, watched: Watched) -> None:
        service = watched.service
        if service.port is not None and (trouble := port_trouble(service.port, service.hosts)):
            return self._failed(watched, trouble, begun=False)
        try:
            service.before()
            log_path = self._log_path(service.name)
            pid = self._fork(service, log_path) if service.preload else None
            if pid is None:
                pid = self._spawn(service, log_path)
        except OSError as error:
            return self._failed(watched, f"it cannot be started ({error})", begun=False)
        watched.started = time.monotonic()
        watched.next_check, watched.failed_checks = watched.started, 0
        watched.set("starting", pid=pid)
        return None

    def _log_path(self, name: str) -> Path:
        path = self.folder / "logs" / f"{name}.log"
        if path.exists() and path.stat().st_size > _LOG_LIMIT:
            path.replace(path.with_suffix(".log.1"))
        return path

    def _env(self, service: Service) -> dict[str, str]:
        return {**service.env, processes.ID_VARIABLE: self._state.traces.stack_id}

    def _spawn(self, service: Service, log_path: Path) -> int:
        with os.fdopen(open_log(log_path), "ab") as output:
            child = subprocess.Popen(
                service.command,
                env=self._env(service),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(self._mark,),
            )
        child.returncode = 0  # reaped by us, not by subprocess
        return child.pid

    def _fork(self, service: Service, log_path: Path) -> int | None:
        """Fork the service from the process that has its modules already; None if there is none any more."""
        if self._nursery is None:
            return None
        os.close(open_log(log_path))  # the fork could not tell us what is wrong with it
        pid = self._nursery.spawn(service.module, service.arguments, log_path)
        if pid is None:
            log.warning("the nursery is broken, services start by themselves; logs/nursery.log says why")
            self._close_nursery()
        return pid

    def _open_nursery(self) -> None:
        forked = [watched.service for watched in self.watched if watched.service.preload]
        if not forked:
            return
        first = forked[0]
        try:
            log_path = self._log_path("nursery")
            self._nursery = Nursery(first.preload, self._env(first), self.folder, log_path, (self._mark,))
        except OSError as error:
            log.warning("services start by themselves, without the nursery: %s", error)

    def _close_nursery(self) -> None:
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None

    def _can_start(self, service: Service) -> bool:
        """Whether what the service needs is there: the services before it, and its imported modules."""
        if not all(map(self._settled, service.after)):
            return False
        if not service.preload or self._nursery is None:
            return True
        ready = self._nursery.ready()
        if ready is False:
            log.warning("the nursery ended, services start by themselves; logs/nursery.log says why")
            self._close_nursery()
        return ready is not None

    def _settled(self, name: str) -> bool:
        """Whether a service is well or done; one that the stack does not have is not waited for."""
        return all(one.settled for one in self.watched if one.service.name == name)

    def _check(self, watched: Watched, now: float) -> None:
        status = watched.state.status
        if status != "starting" and not self._settled(watched.service.told_by):
            watched.next_check = now + watched.service.check_every / 2
            return
        try:
            # By the clock as it is now: it may have been set since the service started.
            ready = watched.service.ready(time.time() - (now - watched.started))
            trouble = "" if ready else "it does not report itself healthy"
        except Exception as error:  # it may answer what nobody expected
            ready, trouble = False, f"it does not answer ({error!r})"
        watched.next_check = now + (watched.service.check_every if ready else _CHECK_STARTING)
        if ready:
            watched.failed_checks, watched.was_healthy = 0, True
            if now - watched.started > _STABLE:
                watched.failures = 0
            if status != "healthy":
                watched.set("healthy", f"after {now - watched.started:.1f} s", watched.state.pid)
            return
        if status == "starting":
            if now - watched.started > watched.service.patience:
                self._kill(watched, f"not ready after {watched.service.patience:.0f} s: {trouble}")
            return
        watched.failed_checks += 1
        watched.next_check = now + watched.service.check_every / 2
        if status != "failing":
            watched.set("failing", trouble, watched.state.pid)
        if watched.failed_checks >= _MAX_FAILED_CHECKS:
            self._kill(watched, trouble)

    def _kill(self, watched: Watched, why: str) -> None:
        log.error("%s: %s; it is killed and started again", watched.service.name, why)
        process = processes.look(watched.state.pid or 0)
        if process is None:
            return self._failed(watched, f"{why}, and it is gone")
        processes.send(process, signal.SIGKILL)
        watched.failed_checks = 0
        watched.next_check = time.monotonic() + watched.service.check_every
        return None

    def _reap(self) -> None:
        """Take the exit of every child: services, and whatever orphans fell to us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for watched in self.watched:
                if watched.state.pid == pid:
                    self._ended(watched, pid, os.waitstatus_to_exitcode(status))

    def _ended(self, watched: Watched, pid: int, code: int) -> None:
        # What the service left behind would hold its port and its database.
        within = watched.service.within
        left = [
            process
            for process in processes.own_descendants()
            if process.session == pid or (within is not None and processes.works_in(process, within))
        ]
        processes.end(left, grace=2.0)
        if watched.service.once and code == 0:
            if watched.service.name == "airflow-db":
                with contextlib.suppress(OSError):  # it spares the next start a look
                    note_migrated(self.folder)
            watched.set("done", f"after {time.monotonic() - watched.started:.1f} s")
            return
        self._failed(watched, f"it ended with {processes.ending(code)}; logs/{watched.service.name}.log says why")

    def _failed(self, watched: Watched, why: str, *, begun: bool = True) -> None:
        """Have a service started again later, or give it up.

        :param begun: whether it ran. What keeps it from that is the machine's, not its own: a port, memory, a disk.
        """
        full = full_disk(self.folder)
        if full:
            why = f"{full}. {why[0].upper()}{why[1:]}"
        # Who makes room, or frees the port, shall not have to start the stack again.
        passing = bool(full) or not begun
        if not (passing and watched.was_healthy and watched.failures >= len(_BACKOFF)):
            watched.failures += 1
        if watched.failures > (len(_BACKOFF) if watched.was_healthy else _FIRST_TRIES):
            watched.set("failed", why)
            return
        pause = _BACKOFF[watched.failures - 1]
        watched.restart_at = time.monotonic() + pause
        watched.state = replace(watched.state, restarts=watched.state.restarts + 1)
        watched.set("restarting", why)

    def _publish(self) -> None:
        """Write down what changed."""
        phase = "stopping" if self._stopping else self._phase()
        services = {watched.service.name: watched.state for watched in self.watched}
        traces = replace(self._state.traces, processes=self._identities())
        state = replace(self._state, phase=phase, services=services, traces=traces)
        if state == self._written and state_path(self.folder).exists():
            return
        self._state = state
        if self._write(state):
            self._written = state

    def _write(self, state: StackState) -> bool:
        """Write `stack.json`, on a full disk into room that is kept for it. False if that was not enough.

        Nothing that the supervisor does depends on it. Where the folder is another's by now, nothing is written.
        """
        if not has_folder(self.folder, self._lock):
            return False
        spare = self.folder / "stack.spare"
        failed = _failure(state)
        if failed is not None and failed.errno in {errno.ENOSPC, errno.EDQUOT} and spare.exists():
            with contextlib.suppress(OSError):
                spare.unlink()
            failed = _failure(state)
        if failed is None and not spare.exists() and not full_disk(self.folder):
            with contextlib.suppress(OSError):
                write_private(spare, "-" * _SPARE)
        unwritten = "" if failed is None else str(failed)
        if unwritten not in {"", self._unwritten}:
            log.error("stack.json cannot be written, so what it says is old: %s", unwritten)
        self._unwritten = unwritten
        return failed is None

    def _phase(self) -> str:
        if all(watched.settled for watched in self.watched):
            return "ready"
        if any(watched.state.status == "failed" for watched in self.watched):
            return "failed" if self._state.phase in {"starting", "failed"} else "degraded"
        return "starting" if self._state.phase == "starting" else "degraded"

    def _identities(self) -> frozenset[tuple[int, int]]:
        """The leaders of all sessions in the stack: enough to find the rest without us."""
        # Those of a service that are found by their folder need no record: the database's come many times a minute.
        found_by_folder = {watched.state.pid for watched in self.watched if watched.service.within is not None}
        return frozenset(
            process.identity
            for process in processes.own_descendants()
            if process.session == process.pid and process.parent not in found_by_folder
        )

    def _stop(self) -> None:
        """End the services, those that serve the others last, then everything that still descends from us."""
        self._close_nursery()
        self._stopping = True
        self._publish()
        deadline = time.monotonic() + GRACE
        # A training process that is told to stop saves a checkpoint and its metrics first.
        for serves in sorted({watched.service.serves for watched in self.watched}):
            group = [watched for watched in reversed(self.watched) if watched.service.serves == serves]
            self._end_group(group, max(1.0, deadline - time.monotonic()))
        processes.end_all(processes.own_descendants, grace=0.0)
        processes.reap()
        for watched in self.watched:
            watched.state = replace(watched.state, status="stopped", pid=None, message="")
        self._state = replace(self._state, phase="stopped")
        services = {watched.service.name: watched.state for watched in self.watched}
        traces = replace(self._state.traces, processes=frozenset())
        self._write(replace(self._state, services=services, traces=traces))
        log.info("stopped")

    def _end_group(self, group: list[Watched], grace: float) -> None:
        asked = {watched.state.pid: watched.service.stop_signal for watched in group if watched.state.pid}
        pids = set(asked)
        leaders = [process for pid in pids if (process := processes.look(pid)) is not None]
        sessions = [process for process in processes.own_descendants() if process.session in pids]
        # The leader tells its children by itself; one that does not, leaves them to the sweep.
        processes.end(leaders, grace, asked)
        processes.reap()
        processes.end([process for process in sessions if process.pid not in pids], grace=1.0)
        processes.reap()


def _failure(state: StackState) -> OSError | None:
    try:
        write_state(state)
    except OSError as error:
        return error
    return None


def port_trouble(port: int, hosts: Iterable[str]) -> str:
    """Say why a service could not listen on this port of all these addresses; nothing if it could."""
    for host in hosts:
        with socket.socket() as probe:
            # As the services do: an address that only lingers after a close is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except (OSError, OverflowError, TypeError) as error:  # TypeError: no host has such a name
                taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
                return f"port {port} of {host} " + (
                    "is taken by another program" if taken else f"is of no use ({error})"
                )
    return ""


def main(arguments: list[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="dropforge.stack.supervisor", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the stack's folder")
    parser.add_argument("--lifeline", type=int, help="end when the other end of this file descriptor is closed")
    parser.add_argument("--lock", type=int, help="file descriptor that has the folder's lock")
    parser.add_argument("--pod-host", help="address of this machine that the pods of a cluster can reach")
    for name in PORTS:
        parser.add_argument(f"--{name}-port", type=int, required=True)
    options = parser.parse_args(arguments)
    hold_standard_streams()
    folder = options.state.absolute()
    ports = {name: getattr(options, f"{name}_port") for name in PORTS}
    try:
        try:
            secrets = read_secrets(folder)
            prepare(folder, secrets)
            wanted = services(folder, ports, secrets, options.pod_host)
            supervise(folder, ports, wanted, options.lifeline, options.pod_host, options.lock)
        except OSError as error:
            if error.filename is None:
                raise
            raise file_error(error) from error
    except DropforgeError as error:
        sys.exit(f"{REFUSED}{error}")


def supervise(
    folder: Path,
    ports: dict[str, int],
    wanted: list[Service],
    lifeline: int | None = None,
    pod_host: str | None = None,
    lock: int | None = None,
) -> NoReturn:
    """Own these services until told to stop. Exits with 3 if another supervisor has the folder.

    :param lock: descriptor that has the folder's lock already.
    :raises OSError: if the files by which others find the stack cannot be opened.
    """
    os.umask(0o077)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, level=logging.INFO)
    lock = take_lock(folder) if lock is None else lock
    if lock is None:
        log.error("another supervisor has %s", folder)
        sys.exit(3)
    os.set_inheritable(lock, False)  # a service that had it would keep the stack running for who looks
    mark = os.open(mark_path(folder), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    parent = processes.look(os.getpid())
    assert parent is not None

    def once() -> None:
        wake = _wake_on_signals()
        processes.become_subreaper()
        Supervisor(folder, ports, wanted, pod_host, parent.identity, lock, mark).run(wake, lifeline)

    sys.exit(respawn(once))


def _wake_on_signals() -> int:
    """A file descriptor from which the numbers of arriving signals can be read."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    return reader


if __name__ == "__main__":
    main()
