"""Import once, fork often: the parts of Airflow share the modules that each would take seconds to import.

`python -m dropforge.stack.nursery MODULE...` imports the modules, then receives orders from the socket that is its
standard input: `{"module": ..., "arguments": [...], "log": path}` with the reading end of a pipe. It is run as
`python -m` would, in a session of its own, and answered by its process number. The process is an orphan by design: the
supervisor, which reaps orphans, is its parent when the answer comes. Modules only; nothing may have been started in
them, so a second thread ends the nursery at once.

A fork becomes its module when it is let go by a byte in the order's pipe, and ends when that is closed without one. So
whatever stalls or dies on the way to the answer, and whenever it goes on, an order that was given up is never run.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import mmap
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from dropforge.stack import processes
from dropforge.stack.log_files import open_log

READY = "ready"
_PATIENCE = 5.0  # seconds for an answer
_LARGEST = 64 << 10  # bytes of an order


class Nursery:
    """The supervisor's end."""

    def __init__(
        self, modules: Sequence[str], env: dict[str, str], folder: Path, log: Path, pass_fds: tuple[int, ...]
    ) -> None:
        with os.fdopen(open_log(log), "ab") as output:
            self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dropforge.stack.nursery", *modules],
                env=env,
                cwd=folder,
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                pass_fds=pass_fds,
                text=True,
            )
        theirs.close()
        self.pid = self._process.pid
        self._identity = processes.look(self.pid)
        self._ready = False

    def ready(self) -> bool | None:
        """Whether it can fork now; None while it imports. It cannot if it ended."""
        if not self._ready and self._answers(0.0):
            assert self._process.stdout is not None
            if self._process.stdout.readline().strip() != READY:
                return False
            self._ready = True
        return True if self._ready else None

    def spawn(self, module: str, arguments: Sequence[str], log: Path) -> int | None:
        """Start a process; its number, or None if the nursery is broken: it is killed then, and its fork never runs."""
        assert self._process.stdout is not None
        order = {"module": module, "arguments": list(arguments), "log": str(log)}
        let_go, ours = os.pipe()
        try:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [let_go])
            answer = self._process.stdout.readline() if self._answers(_PATIENCE) else ""
            if answer.strip():
                os.write(ours, b"\n")
                return int(answer)
        except OSError:
            pass
        finally:
            os.close(let_go)
            os.close(ours)
        if self._identity is not None:  # one that stalls would keep its memory
            processes.send(self._identity, signal.SIGKILL)
        return None

    def close(self) -> None:
        """Let it end; what it started stays."""
        self._process.returncode = 0  # reaped by the supervisor
        self._orders.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _answers(self, patience: float) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], patience)[0])


def main(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    if threading.active_count() > 1 or len(list(Path("/proc/self/task").iterdir())) > 1:
        sys.exit("a thread was started while modules were imported: forking would break it")
    # What is imported stays for ever; a collector that looked at it would unshare its memory.
    gc.collect()
    gc.freeze()
    print(READY, flush=True)
    orders = socket.socket(fileno=0)
    number = mmap.mmap(-1, 4)  # shared with forks
    while True:
        text, received, _, _ = socket.recv_fds(orders, _LARGEST, 1)
        if not text:
            return
        order, (let_go,) = json.loads(text), received
        number[:] = bytes(4)
        child = os.fork()
        if child == 0:
            grandchild = os.fork()
            if grandchild == 0:
                _become(order["module"], order["arguments"], order["log"], let_go)
            number[:] = grandchild.to_bytes(4)
            os._exit(0)
        os.close(let_go)
        os.waitpid(child, 0)
        print(int.from_bytes(number[:]) or "", flush=True)


def _become(module: str, arguments: list[str], log: str, let_go: int) -> None:
    """Turn this fork into `python -m module arguments` when it is let go; never returns."""
    os.setsid()
    if not os.read(let_go, 1):
        os._exit(1)
    os.close(let_go)
    try:
        output = open_log(Path(log))
    except OSError as error:
        print(f"{module} cannot be started: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(null)
    sys.argv = [module, *arguments]
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(" ".join(sys.argv))
    code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
