"""Worker processes: fresh interpreters that take one split at a time through a pipe.

Not `multiprocessing`: its children cannot be started from daemonic processes, such as Airflow's, and they import the
parent's main module. A worker that dies (out of memory, a kill) costs one more try of its split, then a clear error.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any

from curation.kernel import run
from curation.task import Report, Task
from dropforge.errors import DropforgeError
from dropforge.signals import signal_name

_TRIES = 2
_ENDED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
_LENGTH = struct.Struct(">Q")


def run_all(tasks: Sequence[Task], workers: int) -> Iterator[tuple[Task, Report]]:
    """Work on all tasks; results come as they are ready.

    :param workers: processes; with 1 everything happens in this one.
    :raises DropforgeError: if a worker dies twice over the same split.
    """
    if workers <= 1 or len(tasks) <= 1:
        for task in tasks:
            yield task, run(task)
        return
    crew = _Crew(tasks)
    threads = [threading.Thread(target=crew.serve, daemon=True) for _ in range(min(workers, len(tasks)))]
    for thread in threads:
        thread.start()
    try:
        for _ in tasks:
            finished, result = crew.done.get()
            if isinstance(result, BaseException):
                raise result
            assert finished is not None
            yield finished, result
    finally:
        crew.dismiss()
        for thread in threads:
            thread.join()


class _Crew:
    """What the threads share; each drives one worker process."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[tuple[Task | None, Report | BaseException]] = queue.SimpleQueue()
        self.workers: list[_Worker] = []
        self.stopped = False
        for task in tasks:
            self.waiting.put(task)

    def dismiss(self) -> None:
        """End all workers, in the middle of a split if need be: a split without its report never happened."""
        self.stopped = True
        for worker in list(self.workers):
            worker.process.kill()

    def serve(self) -> None:
        worker: _Worker | None = None
        try:
            while not self.stopped:
                try:
                    task = self.waiting.get_nowait()
                except queue.Empty:
                    return
                for attempt in range(1, _TRIES + 1):
                    try:
                        worker = worker or self._hire()
                        self.done.put((task, worker.ask(task)))
                        break
                    except (EOFError, OSError) as error:
                        code = worker.close() if worker else None
                        worker = None
                        if attempt == _TRIES or self.stopped:
                            cause = f"its worker died {attempt} times ({_how(code, error)})"
                            mend = (
                                "Give curation more memory, or fewer `curation.workers`"
                                if code in _ENDED_FROM_OUTSIDE
                                else "Look at this file, and remove it or write it again: reading it ends the process"
                            )
                            self.done.put((task, DropforgeError(f"a split of {task.name!r}", cause, mend)))
                            break
        except BaseException as error:  # The consumer must hear of it, or it waits for ever.
            self.done.put((None, error))
        finally:
            if worker:
                worker.close()

    def _hire(self) -> _Worker:
        worker = _Worker()
        self.workers.append(worker)
        return worker


def _how(code: int | None, error: BaseException) -> str:
    """How a worker ended."""
    if code is None or code >= 0:
        return f"exit code {code}, {error!r}"
    return signal_name(-code)


class _Worker:
    """One process and its two pipes."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        # -P: the folder where a person stands may hold strangers' files, and `-m` looks for modules there first.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "curation.pool"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )

    def ask(self, task: Task) -> Report | BaseException:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        send(self.process.stdin, task)
        return receive(self.process.stdout)  # type: ignore[no-any-return]

    def close(self) -> int:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            return self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def send(pipe: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    """:raises EOFError: if the other side is gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError("the pipe is closed")
    size = _LENGTH.unpack(head)[0]
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError("the pipe broke")
    return pickle.loads(data)  # noqa: S301 - written by our own process


def main() -> None:
    """A worker: answer each task with its report or its error, end when the parent is gone."""
    # Whatever prints goes to stderr; the pipe carries answers only.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            task = receive(sys.stdin.buffer)
        except EOFError:
            return
        answer: Report | BaseException
        try:
            answer = run(task)
        except Exception as error:
            answer = error
        try:
            send(answers, answer)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
