"""Starting and stopping a stack from the outside: what `dropforge up`, `down` and `demo` do."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dropforge.errors import DropforgeError
from dropforge.stack import databases, processes
from dropforge.stack.databases import Databases
from dropforge.stack.processes import Process, Traces
from dropforge.stack.secrets import read_secrets
from dropforge.stack.services import PORTS, source_root
from dropforge.stack.state import StackState, check_folder, full_disk, is_running, mark_path, read_state
from dropforge.stack.supervisor import GRACE, port_free

START_LIMIT = 240.0  # seconds that a whole stack may take to be ready


def start(
    folder: Path,
    ports: dict[str, int] | None = None,
    *,
    lifeline: int | None = None,
    pod_host: str | None = None,
) -> bool:
    """Start the stack in `folder`, unless it runs; False means that it runs already. Does not wait until it is ready.

    :param ports: ports that were asked for by name (objects, mlflow, airflow); others are remembered or free ones.
    :param lifeline: file descriptor whose other end holds the stack alive; without it, the stack stays by itself.
    :param pod_host: address of this machine on which S3 and MLflow listen too, for the pods of a cluster.
    :raises DropforgeError: if a port that was asked for is taken, or the folder or the database cannot be used.
    """
    folder = check_folder(folder)
    if pod_host is not None:
        _check_address(pod_host)
    if is_running(folder):
        return False
    source_root()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        if full := full_disk(folder):
            raise OSError(full)
        read_secrets(folder)
        (folder / "logs").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise DropforgeError(
            f"state folder {folder}", error.strerror or str(error), "Choose another with `--state`"
        ) from None
    wanted = Databases.of(folder)
    databases.check(folder, wanted)
    before = read_state(folder)
    _end_leftovers(traces_of(folder, before))
    if not wanted.embedded:
        databases.provide(wanted)
    databases.remember(folder, wanted)
    # libpq's variables are for a server of the user's own.
    env = {name: value for name, value in os.environ.items() if not (wanted.embedded and name.startswith("PG"))}
    chosen = choose_ports(ports or {}, before.ports if before is not None else {})
    command = [sys.executable, "-m", "dropforge.stack.supervisor", "--state", str(folder)]
    for name, port in chosen.items():
        command += [f"--{name}-port", str(port)]
    if pod_host is not None:
        command += ["--pod-host", pod_host]
    if lifeline is not None:
        command += ["--lifeline", str(lifeline)]
    with open(folder / "logs" / "supervisor.log", "ab", opener=_private) as output:
        supervisor = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=() if lifeline is None else (lifeline,),
        )
    _wait(lambda: supervisor.poll() is not None or _belongs_to(folder, supervisor.pid), 30.0)
    if supervisor.poll() is not None and not is_running(folder):
        raise DropforgeError("the supervisor", "it ended at once", f"Read {folder}/logs/supervisor.log")
    return True


def wait_ready(folder: Path, watch: Callable[[StackState], None] | None = None) -> StackState:
    """Wait until every service is ready; `watch` is told of the state again and again.

    :raises DropforgeError: if a service cannot be started, or the stack ends meanwhile.
    """
    deadline = time.monotonic() + START_LIMIT
    while True:
        state = read_state(folder)
        if state is not None:
            if watch is not None:
                watch(state)
            if state.phase == "ready":
                return state
            for name, service in state.services.items():
                if service.status == "failed":
                    raise DropforgeError(
                        f"service {name}", service.message, f"{_tail(folder, name)}Mend it, then `dropforge up` again"
                    )
        if not is_running(folder.absolute()):
            raise DropforgeError(
                "the stack", "its supervisor ended while it started", f"Read {folder}/logs/supervisor.log"
            )
        if time.monotonic() > deadline:
            waiting = [name for name, service in state.services.items() if service.status != "healthy"] if state else []
            raise DropforgeError(
                "the stack",
                f"{', '.join(waiting)} did not get ready in {START_LIMIT:.0f} s",
                f"Read the logs in {folder}/logs",
            )
        time.sleep(0.1)


def stop(folder: Path) -> bool:
    """End the stack and everything that it started; False if nothing was running. Safe to repeat."""
    folder = folder.absolute()
    state = read_state(folder)
    traces = traces_of(folder, state)
    stopped = is_running(folder)
    if stopped and traces.boot == processes.boot_id():
        roots = _roots(traces) if state is None else [Process(*state.supervisor)]
        for supervisor in roots:
            processes.send(supervisor, signal.SIGTERM)  # if it was killed, it ends already
        if not _wait(lambda: not is_running(folder), GRACE * 2 + 10):
            table = processes.table()
            alive = [one.pid for one in roots if processes.alive(one)]
            processes.end([*roots, *(table[pid] for pid in processes.descendants(alive, table))], grace=0.0)
    return _end_leftovers(traces_of(folder, read_state(folder) or state)) or stopped


def traces_of(folder: Path, state: StackState | None) -> Traces:
    """By what the processes of a stack are known; without a state, by the file that all hold open."""
    return state.traces if state is not None else Traces(processes.boot_id(), "", mark_path(folder), frozenset())


def _roots(traces: Traces) -> list[Process]:
    """Those processes of a stack that none of the others has started."""
    found = {process.pid: process for process in processes.leftovers(traces)}
    return [process for process in found.values() if process.parent not in found]


def choose_ports(asked: dict[str, int], remembered: dict[str, int]) -> dict[str, int]:
    """A port for each service: the one asked for, else the one of last time if it is free, else any free one.

    :raises DropforgeError: if a port that was asked for is taken.
    """
    chosen: dict[str, int] = {}
    for name, port in asked.items():
        if not port_free(port):
            raise DropforgeError(
                f"port {port} for {name}",
                "another program listens on it" if port else "it is no port",
                f"Stop that program, or choose another with `--{name}-port`, or leave the option out",
            )
        chosen[name] = port
    for name in PORTS:
        if name not in chosen:
            port = remembered.get(name, 0)
            usable = port and port not in chosen.values() and port_free(port)
            chosen[name] = port if usable else _free_port(set(chosen.values()))
    return chosen


def _free_port(taken: set[int]) -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port not in taken:
            return port


def _check_address(host: str) -> None:
    try:
        address = ipaddress.IPv4Address(host)
        with socket.socket() as probe:
            probe.bind((str(address), 0))
    except (ValueError, OSError) as error:
        raise DropforgeError(
            f"address {host}", f"it is no IPv4 address of this machine ({error})", "Choose one that `ip address` shows"
        ) from None


def _end_leftovers(traces: Traces) -> bool:
    """End what a killed supervisor left behind."""
    return processes.end_all(lambda: processes.leftovers(traces), grace=5.0)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _belongs_to(folder: Path, pid: int) -> bool:
    state = read_state(folder)
    return state is not None and state.supervisor[0] == pid


def _wait(condition: Callable[[], bool], limit: float) -> bool:
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _tail(folder: Path, service: str, lines: int = 5) -> str:
    """The last lines of a service's log, for an error message."""
    try:
        with (folder / "logs" / f"{service}.log").open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 4096))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    kept = [line for line in text.splitlines() if line.strip()][-lines:]
    return "Its log ends with:\n" + "\n".join(f"    {line}" for line in kept) + "\n" if kept else ""
