"""The whole log of this pod as objects in the run's folder: what Airflow shows of it has a limit.

An object cannot grow, so the log is kept in pieces of a minute, or of 4 MiB of text where much is printed. The first
ones are shorter: a pod that is killed soon has left something. A piece is packed as the lines come: that makes it five
times smaller, and so much of it fits into memory while the store is away.
Nothing here may stop, slow or fail a run: a thread writes, and what is too much for memory is left out and said so.
"""

from __future__ import annotations

import re
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TextIO, cast

from dropforge import layout
from dropforge.store import Store, open_store
from trainer.report.console import warn

EVERY: Final = 60.0  # seconds from a line to its piece; what a killed pod may lose
_FIRST: Final = 2.0  # the same of the first piece; each next one may take twice as long
_PIECE: Final = 4 << 20  # bytes of text
_CHUNK: Final = 64 << 10  # bytes that are packed at once
_HELD: Final = 16 << 20  # packed bytes that wait while the store is away
_AGAIN: Final = 0.3  # seconds between attempts at the end
_SPARED: Final = 0.5  # seconds of the grace that are left to end in
_GZIP: Final = 31  # zlib's number for gzip's format
_CODE: Final = re.compile(r"\w{1,60}")


@dataclass(frozen=True)
class Piece:
    """A part of the log.

    :param lines: how many it holds, or says are left out. :param since: the time of the first.
    """

    key: str
    data: bytes
    lines: int
    since: str


class Archive:
    """Collects the lines of one pod; without `open` it keeps nothing.

    :param pod: the pod's name. :param every: seconds from a line to its piece. :param held: packed bytes that may wait.
    """

    def __init__(self, pod: str, every: float = EVERY, held: int = _HELD) -> None:
        self._pod, self._every, self._held = pod, every, held
        self._root = ""
        self._began = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        self._number = 0
        self._waiting: deque[Piece] = deque()
        # A signal's exception may leave the lock with its owner, who must not wait for himself then.
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._closing = False
        self._store: Store | None = None
        self._away = False
        self._thread: threading.Thread | None = None
        self._streams: tuple[TextIO, TextIO] | None = None
        self._fresh()

    @property
    def folder(self) -> str:
        """Where in the run's folder the traces of this pod's failure go."""
        return f"{layout.FAILURES}{layout.pod_folder(self._pod)}/{self._began}/"

    def open(self, root: str) -> None:
        """Begin to keep lines in the run's folder, and with them what this process itself prints."""
        self._root = root
        self._streams = sys.stdout, sys.stderr
        own = f"[pod {layout.pod_folder(self._pod)}]"
        sys.stdout, sys.stderr = (
            cast(TextIO, Heard(stream, lambda line: self.keep(f"{own} {line}"))) for stream in self._streams
        )
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)
        self._thread.start()

    def keep(self, line: str) -> None:
        """Add a line under the present time; never fails and never waits for the store."""
        if self._thread is None or self._closing:
            return
        with suppress(Exception), self._lock:  # an error here would end the thread that empties a rank's pipe
            self._add(line)

    def close(self, seconds: float, left: Callable[[], float] = lambda: float("inf")) -> None:
        """Have everything written that was kept, and wait for it no longer than `seconds`.

        :param left: seconds until this pod is killed.
        """
        if self._thread is None or self._streams is None:
            return
        sys.stdout, sys.stderr = self._streams
        self._closing = True
        self._wake.set()
        end = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < end and left() > _SPARED:
            self._thread.join(0.05)
        if self._thread.is_alive():
            lines = self._lines + sum(piece.lines for piece in list(self._waiting))
            warn(f"{lines} lines of the log are not at {self._root}/{layout.LOGS}: the store did not take them in time")

    def _fresh(self) -> None:
        self._zipper = zlib.compressobj(1, wbits=_GZIP)
        self._packed = bytearray()
        self._raw = bytearray()
        self._size = self._lines = 0
        self._since, self._due = "", 0.0

    def _add(self, line: str) -> None:
        stamp = _stamp()
        if not self._lines:
            self._since, self._due = stamp, time.monotonic() + self._span()
        data = f"{stamp} {line}\n".encode(errors="replace")
        self._raw += data
        self._size += len(data)
        self._lines += 1
        if len(self._raw) >= _CHUNK:
            self._pack()
        if self._size >= _PIECE:
            self._cut()
            self._wake.set()

    def _span(self) -> float:
        """Seconds from a line to its piece; the exponent stays small in a long run."""
        return min(self._every, _FIRST * (1 << min(self._number, 10)))

    def _pack(self) -> None:
        self._packed += self._zipper.compress(self._raw)
        self._raw.clear()

    def _cut(self) -> None:
        """End the piece; the next line begins another."""
        if not self._lines:
            return
        self._pack()
        data = bytes(self._packed) + self._zipper.flush()
        self._number += 1
        key = layout.log_key(self._pod, self._began, self._number)
        self._waiting.append(Piece(key, data, self._lines, self._since))
        self._fresh()
        # The oldest go first: Airflow has shown those, and the last ones say how the run ended.
        while len(self._waiting) > 1 and sum(len(piece.data) for piece in self._waiting) > self._held:
            first, second = self._waiting.popleft(), self._waiting.popleft()
            self._waiting.appendleft(_gap(first, first.lines + second.lines))

    def _run(self) -> None:
        while True:
            closing = self._closing
            with self._lock:
                if closing or (self._lines and time.monotonic() >= self._due):
                    self._cut()
                pause = max(0.0, self._due - time.monotonic()) if self._lines else self._span()
            sent = self._send()
            if closing and sent:
                return
            if closing:
                time.sleep(_AGAIN)
            else:
                self._wake.wait(pause)
                self._wake.clear()

    def _send(self) -> bool:
        """Write the pieces that wait, in their order; False if the store does not take one."""
        while True:
            with self._lock:
                if not self._waiting:
                    return True
                piece = self._waiting[0]
            try:
                self._store = self._store or open_store(self._root, hurried=True)
                self._store.put(piece.key, piece.data)  # again after a lost answer: the same key, the same bytes
            except Exception as error:
                self._store = None
                self._note(away=True, why=_kind(error))
                return False
            with self._lock:
                if self._waiting and self._waiting[0] is piece:  # it may be a gap meanwhile, which is written over it
                    self._waiting.popleft()
            self._note(away=False)

    def _note(self, *, away: bool, why: str = "") -> None:
        if away == self._away or self._closing:
            return
        self._away = away
        if away:
            warn(f"the store does not take the log ({why}); training continues, and the log is tried again and again")
        else:
            warn("the store takes the log again")


class Heard:
    """A stream of this process whose lines are also given to `hear`."""

    def __init__(self, stream: TextIO, hear: Callable[[str], None]) -> None:
        self._stream, self._hear = stream, hear
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                self._hear(line)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _stamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _gap(first: Piece, lines: int) -> Piece:
    text = f"{first.since} -- {lines} lines left out: the store did not take them --\n"
    return Piece(first.key, zlib.compress(text.encode(), wbits=_GZIP), lines, first.since)


def _kind(error: Exception) -> str:
    """What went wrong in one word: the text of an error may hold an address with a password."""
    response = getattr(error, "response", None)
    code = str((response.get("Error") or {}).get("Code", "")) if isinstance(response, dict) else ""
    return code if _CODE.fullmatch(code) else type(error).__name__
