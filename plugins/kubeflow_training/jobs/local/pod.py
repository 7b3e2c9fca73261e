"""The keeper of one pod: `python -m kubeflow_training.jobs.local.pod FOLDER`.

It starts the container's command, writes its output with time stamps, passes on the order to end, and writes the exit
status itself: the supervisor may die and come back without losing anything. Nothing the command started outlives it.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from kubeflow_training.jobs.local import processes
from kubeflow_training.jobs.local.layout import read_json, timestamp, write_json

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_LINE_LIMIT: Final = 64 * 1024  # bytes; a longer line is cut in several
_MESSAGE_LIMIT: Final = 4096  # bytes, as the kubelet's
_LAST_LINES: Final = 2048  # bytes of log in place of a termination message


class Keeper:
    """
    :param folder: the pod's folder with `spec.json`: argv, env (added to our own), cwd, grace, uid.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec: dict[str, Any] = read_json(folder / "spec.json") or {}
        self.log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.rest = b""
        self.orders = 0  # SIGTERMs that came and were not yet acted upon
        self.kill_at: float | None = None
        self.killed_by_us = False
        self.status: dict[str, Any] = {}
        self.code: int | None = None
        self.child: subprocess.Popen[bytes] | None = None
        self.began = time.monotonic()

    def run(self) -> None:
        """Run the command to its end; returns when the exit status is on disk."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # A socket pair lets signals interrupt the wait without a race.
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        ours.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        kills_before = processes.oom_kills()
        started, self.began = timestamp(), time.monotonic()
        output, inlet = os.pipe()
        me = os.getpid()

        def before_exec() -> None:
            # If we are killed, so is the command; what it started itself is found by the supervisor.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != me:
                os._exit(1)

        try:
            self.child = subprocess.Popen(
                self.spec["argv"],
                stdin=subprocess.DEVNULL,
                stdout=inlet,
                stderr=inlet,
                cwd=self.spec["cwd"],
                env={**os.environ, **self.spec["env"]},
                start_new_session=True,
                preexec_fn=before_exec,
            )
        except (OSError, ValueError) as error:
            os.close(inlet)
            code = 127 if isinstance(error, FileNotFoundError) else 126
            self._finish(started, code, "StartError", f"the command cannot be started: {error}")
            return
        os.close(inlet)
        self.status = {
            "keeper": processes.identity(me),
            "session": self.child.pid,
            "state": {"running": {"startedAt": started}},
        }
        self._save()
        self._follow(output, ours)
        self._end_all()
        self._drain(output, everything=True)
        self._write_lines(b"", last=True)
        assert self.code is not None
        reason = "Completed" if self.code == 0 else "Error"
        if self.code == 137 and not self.killed_by_us and processes.oom_kills() > kills_before:
            reason = "OOMKilled"
        self._finish(started, self.code, reason, self._message(self.code))

    def _follow(self, output: int, signals: socket.socket) -> None:
        """Copy output and watch the clock until the command has ended."""
        selector = selectors.DefaultSelector()
        selector.register(output, selectors.EVENT_READ)
        selector.register(signals, selectors.EVENT_READ)
        os.set_blocking(output, False)
        while self.code is None:
            self._reap()
            if self.code is not None:
                break
            wait = None if self.kill_at is None else max(0.0, self.kill_at - time.monotonic())
            for key, _ in selector.select(wait):
                if key.fd == output:
                    if not self._drain(output):
                        selector.unregister(output)
                else:
                    signals.recv(4096)
            if self.orders:
                self.orders = 0
                self._stop()
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self.killed_by_us = True
                self._signal(signal.SIGKILL)
                self.kill_at = time.monotonic() + 1

    def _stop(self) -> None:
        order = read_json(self.folder / "stop.json") or {}
        grace = order.get("grace")
        grace = float(grace if isinstance(grace, int | float) else self.spec.get("grace", 30))
        kill_at = time.monotonic() + max(0.0, grace)
        if self.kill_at is None:
            self._signal(signal.SIGTERM)
        # A second order may only shorten the grace period.
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)

    def _signal(self, number: signal.Signals) -> None:
        assert self.child is not None
        try:
            os.killpg(self.child.pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            os.kill(self.child.pid, number)

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            self.orders += 1

    def _reap(self) -> None:
        """Collect every child that has ended; orphans of the command are ours, because we are their reaper."""
        assert self.child is not None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child.pid:
                code = os.waitstatus_to_exitcode(status)
                self.code = self.child.returncode = code if code >= 0 else 128 - code

    def _end_all(self) -> None:
        """As a container's end does: whatever the command left running is killed."""
        while True:
            self._reap()
            left = processes.children(os.getpid())
            if not left:
                return
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.005)

    def _drain(self, output: int, *, everything: bool = False) -> bool:
        """Copy what there is, but not for ever unless told so; False at the end of the output."""
        for _ in itertools.count() if everything else range(16):
            try:
                data = os.read(output, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._write_lines(data)
        return True

    def _write_lines(self, data: bytes, *, last: bool = False) -> None:
        self.rest += data
        *lines, self.rest = self.rest.split(b"\n")
        while len(self.rest) > _LINE_LIMIT or (last and self.rest):
            lines.append(self.rest[:_LINE_LIMIT])
            self.rest = self.rest[_LINE_LIMIT:]
        if not lines:
            return
        now = time.time_ns()
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 10**9))
        stamp = f"{seconds}.{now % 10**9:09d}Z ".encode()
        pieces = (line[at : at + _LINE_LIMIT] for line in lines for at in range(0, len(line) or 1, _LINE_LIMIT))
        block = b"".join(stamp + piece + b"\n" for piece in pieces)
        view = memoryview(block)
        while view:
            try:
                view = view[os.write(self.log, view) :]
            except OSError:
                return  # a full disk costs log lines, not the job

    def _message(self, code: int) -> str:
        """The termination message: what the command wrote, else the last lines of its log if it failed."""
        try:
            with (self.folder / "termination-log").open("rb") as file:
                if text := file.read(_MESSAGE_LIMIT).decode(errors="replace").strip():
                    return text
        except OSError:
            pass
        return "" if code == 0 else "\n".join(tail(self.folder / "log", 80))[-_LAST_LINES:]

    def _finish(self, started: str, code: int, reason: str, message: str) -> None:
        # So that it ran as long as it did, whatever the clock was set to meanwhile.
        finished = datetime.fromisoformat(started).timestamp() + time.monotonic() - self.began
        terminated = {
            "exitCode": code,
            "reason": reason,
            "startedAt": started,
            "finishedAt": timestamp(finished),
            "message": message,
        }
        self.status = {**self.status, "state": {"terminated": terminated}}
        self._save()

    def _save(self) -> None:
        while True:
            try:
                return write_json(self.folder / "status.json", self.status)
            except FileNotFoundError:
                return None  # the folder is gone, and with it whoever would read this
            except OSError as error:
                # A full disk must not lose how the pod ended.
                print(f"{timestamp()} cannot write the pod's status: {error}", file=sys.stderr, flush=True)
                time.sleep(1)


def tail(log: Path, lines: int, size: int = 64 * 1024) -> list[str]:
    """The last lines of a log, without their time stamps."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            found = file.read().split(b"\n")
    except OSError:
        return []
    if end > size:
        found = found[1:]
    return [untimed(line) for line in found if line][-lines:]


def untimed(line: bytes) -> str:
    """A log line without its time stamp."""
    return line.partition(b" ")[2].decode(errors="replace").rstrip("\r")


def main(folder: Path) -> None:
    """Keep the pod, unless another keeper does or did."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    os.set_inheritable(lock, False)
    if (folder / "status.json").exists():
        return
    try:
        Keeper(folder).run()
    except Exception as error:
        state = {"exitCode": 128, "reason": "StartError", "finishedAt": timestamp(), "message": f"keeper: {error!r}"}
        write_json(folder / "status.json", {"state": {"terminated": state}})
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
