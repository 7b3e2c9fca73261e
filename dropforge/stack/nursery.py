"""Import once, fork often: the parts of Airflow share the modules that each would take seconds to import.

`python -m dropforge.stack.nursery MODULE...` imports the modules, then reads requests from its standard input, one JSON
object a line: `{"module": ..., "arguments": [...], "log": path}` is run as `python -m` would, in a session of its own,
and answered by its process number. The process is an orphan by design: the supervisor, which reaps orphans, becomes its
parent. Modules only; nothing may have been started in them, so a second thread ends the nursery at once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from dropforge.stack.log_files import open_log

READY = "ready"


class Nursery:
    """The supervisor's end."""

    def __init__(
        self, modules: Sequence[str], env: dict[str, str], folder: Path, log: Path, pass_fds: tuple[int, ...]
    ) -> None:
        with os.fdopen(open_log(log), "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dropforge.stack.nursery", *modules],
                env=env,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                pass_fds=pass_fds,
                text=True,
            )
        self.pid = self._process.pid
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
        """Start a process; its number, or None if the nursery is broken."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            request = {"module": module, "arguments": list(arguments), "log": str(log)}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline() if self._answers(5.0) else ""
        except OSError:
            return None
        return int(answer) if answer.strip() else None

    def close(self) -> None:
        """Let it end; what it started stays."""
        self._process.returncode = 0  # reaped by the supervisor
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

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
    while line := sys.stdin.readline():
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            grandchild = os.fork()
            if grandchild == 0:
                _become(request["module"], request["arguments"], request["log"])
            print(grandchild, flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def _become(module: str, arguments: list[str], log: str) -> None:
    """Turn this fork into `python -m module arguments`; never returns."""
    os.setsid()
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
    # The nursery's pipes are behind 0 and 1; what Python had read ahead is not ours.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
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
