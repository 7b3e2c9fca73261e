"""Starting and stopping a stack from the outside: what `dropforge up`, `down` and `demo` do."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dropforge.errors import DropforgeError, file_error
from dropforge.settings import READABLE
from dropforge.source_root import source_root
from dropforge.stack import databases, processes
from dropforge.stack.databases import Databases
from dropforge.stack.log_files import open_log, read_end
from dropforge.stack.processes import Process, Traces
from dropforge.stack.secrets import read_secrets
from dropforge.stack.services import LOCAL, hosts
from dropforge.stack.state import (
    FIRST_ROOM,
    PORTS,
    ServiceState,
    StackState,
    check_folder,
    check_private,
    full_disk,
    is_running,
    mark_path,
    read_state,
    take_lock,
    write_state,
)
from dropforge.stack.supervisor import GRACE, REFUSED, port_trouble

START_LIMIT = 240.0  # seconds that a whole stack may take to be ready
_AGAIN = "Fix that, then `dropforge up` again"
SHOWN_LIMIT = 60.0  # seconds until the supervisor has to have written its state


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
        check_private(folder)
        folder.chmod(0o700)
        if full := full_disk(folder, FIRST_ROOM) if read_state(folder) is None else full_disk(folder):
            raise OSError(full)
        read_secrets(folder)
        (folder / "logs").mkdir(mode=0o700, exist_ok=True)
        lock = take_lock(folder)
    except OSError as error:
        if error.filename is not None and Path(error.filename).parent == folder:
            raise file_error(error) from None
        raise DropforgeError(
            f"state folder {folder}", error.strerror or str(error), "Choose another with `--state`"
        ) from None
    if lock is None:
        return False
    try:
        supervisor, log_path, before = _launch(folder, ports or {}, lock, lifeline, pod_host)
    finally:
        os.close(lock)  # the supervisor has it too
    try:
        _wait(lambda: supervisor.poll() is not None or _living(folder, supervisor.pid) is not None, SHOWN_LIMIT)
        if supervisor.poll() is not None:
            raise _ended_at_once(log_path, before)
        if _living(folder, supervisor.pid) is None:
            raise DropforgeError(
                "the supervisor",
                f"it did not write its state in {SHOWN_LIMIT:.0f} s, and was ended",
                f"Read {log_path}, and see that the machine is not overloaded; then `dropforge up` again",
            )
    except BaseException:
        _end_supervisor(supervisor)
        raise
    return True


def _launch(
    folder: Path, ports: dict[str, int], lock: int, lifeline: int | None, pod_host: str | None
) -> tuple[subprocess.Popen[bytes], Path, int]:
    """Start the supervisor, which keeps the lock, where nothing of an earlier one runs.

    :returns: its process, its log, and how much was in that before.
    """
    wanted = Databases.of(folder)
    databases.check(folder, wanted)
    before = read_state(folder)
    _check_own(folder, before)
    if before is not None:  # now that the lock is held, nobody shall take what a killed one wrote for its word
        try:
            write_state(replace(before, phase="stopped"))
        except OSError as error:
            raise file_error(error) from None
    _end_left(folder, before)
    if not wanted.embedded:
        databases.provide(wanted)
    databases.remember(folder, wanted)
    # libpq's variables are for a server of the user's own.
    env = {name: value for name, value in os.environ.items() if not (wanted.embedded and name.startswith("PG"))}
    if before is not None and before.readable is not None:
        env.setdefault(READABLE, before.readable)
    chosen = choose_ports(ports, before.ports if before is not None else {}, pod_host)
    # -P: `-m` looks for modules where a person stands first, and strangers' files may lie there.
    command = [sys.executable, "-P", "-m", "dropforge.stack.supervisor", "--state", str(folder), "--lock", str(lock)]
    for name, port in chosen.items():
        command += [f"--{name}-port", str(port)]
    if pod_host is not None:
        command += ["--pod-host", pod_host]
    if lifeline is not None:
        command += ["--lifeline", str(lifeline)]
    log_path = folder / "logs" / "supervisor.log"
    try:
        handle = open_log(log_path)
    except OSError as error:
        raise file_error(error) from None
    with os.fdopen(handle, "ab") as output:
        size = os.fstat(handle).st_size
        supervisor = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,) if lifeline is None else (lock, lifeline),
        )
    return supervisor, log_path, size


def _ended_at_once(log_path: Path, before: int) -> DropforgeError:
    """What the supervisor said last, if it said why. :param before: bytes of its log that are older."""
    with contextlib.suppress(OSError):
        said = read_end(log_path, max(0, log_path.stat().st_size - before))
        for line in reversed(said.splitlines()):
            if line.startswith(REFUSED):
                return DropforgeError("the supervisor", f"it ended at once: {line.removeprefix(REFUSED)}", _AGAIN)
    return DropforgeError("the supervisor", "it ended at once", f"Read {log_path}")


def _end_supervisor(supervisor: subprocess.Popen[bytes]) -> None:
    """End a supervisor that has not got as far as to name its processes in the state."""
    table = processes.table()
    if supervisor.poll() is not None or supervisor.pid not in table:
        return
    below = [table[pid] for pid in processes.descendants([supervisor.pid], table)]
    processes.end([table[supervisor.pid]], GRACE)
    supervisor.wait()
    processes.end(below, grace=0.0)


def wait_ready(folder: Path, watch: Callable[[StackState], None] | None = None) -> StackState:
    """Wait until every service is ready; `watch` is told of the state again and again.

    :raises DropforgeError: if a service cannot be started, or the stack ends meanwhile.
    """
    deadline = time.monotonic() + START_LIMIT
    while True:
        state = _living(folder)
        if state is not None:
            if watch is not None:
                watch(state)
            if state.phase == "ready":
                return state
            for name, service in state.services.items():
                if service.status == "failed":
                    raise DropforgeError(
                        f"service {name}", service.message, f"{_tail(folder, name)}Fix it, then `dropforge up` again"
                    )
        if not is_running(folder.absolute()):
            raise DropforgeError(
                "the stack", "its supervisor ended while it started", f"Read {folder}/logs/supervisor.log"
            )
        if time.monotonic() > deadline:
            names = state.services if state is not None else {"its supervisor": ServiceState("waiting")}
            waiting = [name for name, service in names.items() if service.status not in {"healthy", "done"}]
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
    stopped = is_running(folder)
    asked: dict[tuple[int, int], Process] = {}

    def ended() -> bool:
        for supervisor in _supervisors(folder):  # an `up` may have taken the lock whose supervisor comes only now
            if supervisor.identity not in asked:
                asked[supervisor.identity] = supervisor
                processes.send(supervisor, signal.SIGTERM)  # if it was killed, it ends already
        return not is_running(folder)

    if stopped and not _wait(ended, GRACE * 2 + 10):
        table = processes.table()
        alive = [one.pid for one in asked.values() if processes.alive(one)]
        processes.end([*asked.values(), *(table[pid] for pid in processes.descendants(alive, table))], grace=0.0)
    try:
        lock = take_lock(folder)  # what a supervisor that lives has started is not left over
    except OSError:  # then nobody can start one
        return _end_left(folder, read_state(folder) or state) or stopped
    if lock is None:
        raise DropforgeError(
            f"stack in {folder}",
            "it is being started again, or by a process that cannot be ended from here",
            "Wait for the `dropforge up` that starts it, or stop that; then `dropforge down` again",
        )
    try:
        return _end_left(folder, read_state(folder) or state) or stopped
    finally:
        os.close(lock)


def _supervisors(folder: Path) -> list[Process]:
    """The stack's supervisor as its state names it, or, without a state, what no other of its processes started."""
    state = read_state(folder)
    traces = traces_of(folder, state)
    if traces.boot != processes.boot_id():
        return []
    return _roots(traces) if state is None else [Process(*state.supervisor)]


def traces_of(folder: Path, state: StackState | None) -> Traces:
    """By what the processes of a stack are known; without a state, by the file that all hold open."""
    return state.traces if state is not None else Traces(processes.boot_id(), "", mark_path(folder), frozenset())


def _roots(traces: Traces) -> list[Process]:
    """Those processes of a stack that none of the others has started."""
    found = {process.pid: process for process in processes.leftovers(traces)}
    return [process for process in found.values() if process.parent not in found]


def choose_ports(asked: dict[str, int], remembered: dict[str, int], pod_host: str | None = None) -> dict[str, int]:
    """A port for each service: the one asked for, else the one of last time if it is free, else any free one.

    :param pod_host: the address on which those that pods ask listen too.
    :raises DropforgeError: if a port that was asked for is taken.
    """
    chosen: dict[str, int] = {}
    for name, port in asked.items():
        if trouble := port_trouble(port, hosts(name, pod_host)):
            raise DropforgeError(
                f"port {port} for {name}",
                trouble,
                f"Stop that program, or choose another with `--{name}-port`, or leave the option out",
            )
        chosen[name] = port
    for name in PORTS:
        if name not in chosen:
            port = remembered.get(name, 0)
            usable = port and port not in chosen.values() and not port_trouble(port, hosts(name, pod_host))
            chosen[name] = port if usable else _free_port(hosts(name, pod_host), set(chosen.values()))
    return chosen


def _free_port(on: tuple[str, ...], taken: set[int]) -> int:
    while True:
        with socket.socket() as probe:
            probe.bind((on[0], 0))
            port: int = probe.getsockname()[1]
        if port not in taken and not port_trouble(port, on[1:]):
            return port


def _check_address(host: str) -> None:
    thing, mend = f"address {host}", "Choose one that `ip address` shows"
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError as error:
        raise DropforgeError(thing, f"it is no IPv4 address of this machine ({error})", mend) from None
    kinds = {
        "it is no address of one machine, but of all of this one's": address.is_unspecified,
        "it is a group's": address.is_multicast,
        "it is a whole network's, or no machine's": address.is_reserved or _is_broadcast(host),
        "it is the one on which the stack listens anyway, and no pod reaches it": host == LOCAL,
    }
    for cause in (cause for cause, is_so in kinds.items() if is_so):
        raise DropforgeError(thing, cause, mend)
    if trouble := port_trouble(0, (host,)):
        raise DropforgeError(thing, f"it is no IPv4 address of this machine ({trouble})", mend)


def _is_broadcast(host: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
        except PermissionError:  # unless one says that it is meant
            return True
        except OSError:
            return False
    return False


def _end_left(folder: Path, state: StackState | None) -> bool:
    """End what a killed supervisor left behind. :raises DropforgeError: see `_check_own`."""
    _check_own(folder, state)
    traces = traces_of(folder, state)
    return processes.end_all(lambda: processes.leftovers(traces), grace=5.0)


def _check_own(folder: Path, state: StackState | None) -> None:
    """:raises DropforgeError: if a folder is a copy of one whose stack runs: its state names that one's processes."""
    if state is None or state.traces.boot != processes.boot_id():
        return
    supervisor = Process(*state.supervisor)
    if processes.alive(supervisor) and not processes.holds(supervisor, mark_path(folder)):
        raise DropforgeError(
            f"stack in {folder}",
            f"the folder was copied from that of a stack that runs (its supervisor is process {supervisor.pid})",
            "Stop that one by its own folder first; a copy of a stack is whole only if it is made while that is down",
        )


def _living(folder: Path, pid: int | None = None) -> StackState | None:
    """The state that a living supervisor wrote, which holds the lock; of a killed one, it means nothing.

    :param pid: the process that it has to be, where it is known.
    """
    state = read_state(folder)
    if state is None or pid not in {None, state.supervisor[0]} or not processes.alive(Process(*state.supervisor)):
        return None
    return state


def _wait(condition: Callable[[], bool], limit: float) -> bool:
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _tail(folder: Path, service: str, lines: int = 5) -> str:
    """The last lines of a service's log, for an error message."""
    text = read_end(folder / "logs" / f"{service}.log", 4096)
    kept = [line for line in text.splitlines() if line.strip()][-lines:]
    return "Its log ends with:\n" + "\n".join(f"    {line}" for line in kept) + "\n" if kept else ""
