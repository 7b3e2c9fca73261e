"""Holds tasks and jobs of a running stack in the middle of their work, and takes a service away from them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from dropforge.drop import Drop, parse_partition_key
from dropforge.stack.state import read_state
from tests import local_settings
from tests.e2e.harness import Stack, see_back, services, wait

_COMMANDS: Final = {
    "tokenise": {"trainer.ahead"},
    "train": {"trainer.launch", "trainer.rank"},
    "evaluate": {"trainer.evaluate"},
}
BACK: Final = 240.0  # seconds that a service may take to be well again on a busy machine


def install(folder: Path) -> None:
    """Give a stack that has not started the policy."""
    (folder / "holds").mkdir(parents=True)
    local_settings.install(folder / "airflow", Path(__file__).with_name("hold_policy.py"))


class Hold:
    """A task that waits, once it has had its first answer of a service, until it is let go.

    :param match: text in the name of the run or the drop's partition key; none for all.
    """

    def __init__(self, folder: Path, match: str, task: str) -> None:
        self._path = folder / "holds" / f"{match}@{task}.hold"
        self._path.touch()

    def reached(self) -> bool:
        return self._path.with_suffix(".held").exists()

    def let_go(self) -> None:
        self._path.unlink()


class Pause:
    """A job of a family that is stopped as soon as it runs, a training once it has a checkpoint, until it is let go."""

    def __init__(self, stack: Stack, family: str, stage: str) -> None:
        self._stack, self._runs = stack, f"runs/{family}-"
        self._words = _COMMANDS[stage]
        self._needs_checkpoint = stage == "train"
        self._paused: list[psutil.Process] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def reached(self) -> bool:
        return bool(self._paused)

    def let_go(self) -> None:
        self._over.set()
        for process in self._paused:
            process.resume()

    def _watch(self) -> None:
        # Steps take milliseconds, so Airflow is not asked.
        while not self._over.wait(0.25):
            found = self._processes()
            if found and (not self._needs_checkpoint or self._has_checkpoint()):
                for process in found:
                    with suppress(psutil.NoSuchProcess):
                        process.suspend()
                self._paused = found
                return

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                mine = any(word in self._words for word in words) and f"/{self._runs}" in " ".join(words)
                if mine and process.environ().get("DROPFORGE_STATE") == str(self._stack.folder):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def _has_checkpoint(self) -> bool:
        keys = (info.key for info in self._stack.connection.store.list(self._runs))
        return any("/checkpoints/" in key and key.endswith("/manifest.json") for key in keys)


def runs_of(stack: Stack, drop: Drop) -> list[str]:
    """The fine-tune runs of a drop; other families may have the same bytes."""
    return [
        one["dag_run_id"]
        for one in stack.dag_runs(drop)
        if parse_partition_key(one["partition_key"])["family"] == drop.family
    ]


def supervisor(stack: Stack) -> psutil.Process:
    """The process that watches the services: the child of the one that would start another."""
    state = read_state(stack.folder)
    assert state is not None
    (found,) = psutil.Process(state.supervisor[0]).children()
    return found


@contextmanager
def away(stack: Stack, name: str, seconds: float) -> Iterator[None]:
    """Take a service away; the block begins when it is, and its end waits until the time is over and it is well again.

    Half of the time it accepts connections and answers nothing, then it refuses them. Nobody starts it again
    meanwhile, as its supervisor is stopped too.
    """
    watcher, before = supervisor(stack), services(stack)[name]
    assert before.pid is not None
    assert before.port is not None
    process = psutil.Process(before.pid)
    processes = [process, *process.children(recursive=True)]
    watcher.suspend()
    try:
        for one in processes:
            one.suspend()
        end = time.monotonic() + seconds
        assert _answer(before.port) == "none"
        yield
        wait("half of the time", lambda: time.monotonic() > end - seconds / 2, seconds)
        assert _answer(before.port) == "none"
        for one in processes:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        wait("the end of the service", lambda: _answer(before.port) == "refused", 30)
        wait("the other half", lambda: time.monotonic() > end, seconds)
        assert _answer(before.port) == "refused"
    finally:
        watcher.resume()
    see_back(stack, name, before.pid, BACK)


def _answer(port: int | None) -> str:
    """What a client sees: `refused`, `none` where nothing answers, or `some`."""
    assert port is not None
    with socket.socket() as client:
        client.settimeout(2)
        try:
            client.connect(("127.0.0.1", port))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            return "some" if client.recv(1) else "refused"
        except TimeoutError:
            return "none"
        except OSError:
            return "refused"
