"""`dropforge logs`: the whole log of a run's training, as the trainer keeps it in the run's folder."""

from __future__ import annotations

import heapq
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from dropforge import layout
from dropforge.cli.connect import StateOption
from dropforge.cli.named import RunArgument
from dropforge.cli.stop import state_of
from dropforge.client.connection import Connection, connect
from dropforge.client.named import find, find_name
from dropforge.client.patience import Patience
from dropforge.client.progress import ENDED
from dropforge.errors import DropforgeError
from dropforge.store import Store
from dropforge.text import escape
from dropforge.unpacked import LongTextError, NoTextError, lines

_STAMP = len("2026-11-21T10:00:00.123Z")
_RANK = re.compile(rb" \[rank (\d{1,9})\] (?P<progress>@progress \{)?")  # behind the time, as the launcher writes it
_COLOUR = re.compile(r"(\x1b\[[0-9;:]{0,64}m)")  # select graphic rendition (ECMA-48, 8.3.117)
_NUMBERED = re.compile(r"[34]8[;:](5[;:]\d+|2[;:]+\d+[;:]\d+[;:]\d+)")
_RESET = "\x1b[0m"
_LOOK = 2.0  # seconds
_PIECE = 64 << 20  # bytes of a piece's text that are printed; the trainer writes 4 MiB, or one longer line


def logs(
    run: RunArgument,
    pod: Annotated[str | None, typer.Option("--pod", "-p", help="Only this pod.", show_default="all")] = None,
    rank: Annotated[int | None, typer.Option("--rank", "-r", help="Only this rank.", min=0, show_default="all")] = None,
    tail: Annotated[int | None, typer.Option("--tail", "-n", help="Only this many of the last lines.", min=1)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Also the lines for programs (`@progress {...}`).")] = False,
    watch: Annotated[bool, typer.Option("--follow", help="Keep showing new lines until the run is over.")] = False,
    state: StateOption = None,
) -> None:
    """Print the complete log of a run's training, all attempts and pods in chronological order.

    The trainer stores it once a minute, at first more often; --follow prints it with the same delay. Airflow's log of
    the task `train` has it at once, up to its limit.
    """
    connection = connect(state)
    run = find_name(connection, run)
    wanted = Wanted(rank, raw)
    if watch:
        _follow(connection, run, pod, wanted, tail)
        return
    pieces = _pieces(connection.store, run, pod)
    count = _print(_lines(connection.store, pieces, wanted, tail))
    if rank is not None and not count:
        there = ", ".join(str(number) for number in sorted(wanted.seen)) or "none yet"
        raise DropforgeError(f"rank {rank}", f"the run's log has no line of it; ranks that wrote: {there}", "Name one")


@dataclass
class Wanted:
    """Which lines are printed.

    :ivar seen: the ranks that wrote any of those that were looked at.
    """

    rank: int | None = None
    raw: bool = False
    seen: set[int] = field(default_factory=set)

    def of(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            found = _RANK.match(line, _STAMP)
            if found is not None:
                self.seen.add(int(found[1]))
            if found is not None and found["progress"] and not self.raw:
                continue
            if self.rank is None or (found is not None and int(found[1]) == self.rank):
                yield line


def _print(lines: Iterable[bytes]) -> int:
    """Write lines, with their colours and nothing else that steers a terminal; how many."""
    count = 0
    for line in lines:
        sys.stdout.buffer.write(_harmless(line))
        count += 1
    sys.stdout.buffer.flush()
    return count


def _harmless(line: bytes) -> bytes:
    """A line in which all control sequences but those of colours are spelled out, and bytes that are no UTF-8."""
    text = line.decode(errors="backslashreplace").removesuffix("\n").removesuffix("\r")
    parts = _COLOUR.split(text)
    shown = "".join(part if number % 2 and not _hides(part) else escape(part) for number, part in enumerate(parts))
    return f"{shown}{_RESET if len(parts) > 1 else ''}\n".encode()


def _hides(sequence: str) -> bool:
    """Whether a sequence of colours also makes text invisible (8), which is no number of a colour in it."""
    return "8" in re.split("[;:]", _NUMBERED.sub("", sequence[2:-1]))


def _follow(connection: Connection, run: str, pod: str | None, wanted: Wanted, tail: int | None) -> None:
    """Print what there is, and each new piece, until the run is over and nothing new comes."""
    named, patience = find(connection, run), Patience(connection.stack, f"dropforge logs {run} --follow")
    done: set[str] = set()
    while True:
        try:
            over = state_of(connection, named) in ENDED  # before the look: what came in between is in it
            patience.answered()
        except DropforgeError as error:
            patience.check_stack()
            patience.bear(error)
            over = False
        found = _listed(connection.store, run)
        new = {name: [key for key in keys if key not in done] for name, keys in found.items() if pod in (None, name)}
        done.update(key for keys in new.values() for key in keys)
        _print(_lines(connection.store, new, wanted, tail))
        tail = None if done else tail
        if over:
            return
        time.sleep(_LOOK)


def _pieces(store: Store, run: str, pod: str | None) -> dict[str, list[str]]:
    """Keys of the log's pieces by pod, in order. :raises DropforgeError: if there is no such log or pod."""
    found = _listed(store, run)
    if not found:
        raise DropforgeError(
            f"run {run}", "it has no log yet", "The first lines come a minute after the ranks start: try again then"
        )
    if pod is None:
        return found
    if pod not in found:
        raise DropforgeError(f"pod {pod}", f"the run has no log of it, but of {', '.join(found)}", "Name one of those")
    return {pod: found[pod]}


def _listed(store: Store, run: str) -> dict[str, list[str]]:
    prefix = layout.logs_prefix(run)
    found: dict[str, list[str]] = {}
    for item in store.list(prefix):
        name, _, piece = item.key.removeprefix(prefix).partition("/")
        if piece.endswith(".log.gz"):
            found.setdefault(name, []).append(item.key)
    return found


def _lines(store: Store, pieces: dict[str, list[str]], wanted: Wanted, tail: int | None) -> Iterator[bytes]:
    if tail is None:
        return _merged([wanted.of(_read(store, keys)) for keys in pieces.values()])
    ends = [_last(store, keys, wanted, tail) for keys in pieces.values()]
    return iter(list(_merged([iter(lines) for lines in ends]))[-tail:])


def _merged(pods: Sequence[Iterator[bytes]]) -> Iterator[bytes]:
    return heapq.merge(*pods, key=lambda line: line[:_STAMP])


def _read(store: Store, keys: Sequence[str]) -> Iterator[bytes]:
    """Lines of a pod, a part of a piece in memory at a time; of a piece that is too long, no more than the trainer
    may have written."""
    for key in keys:
        uri = f"{store.uri}/{key}"
        try:
            with store.open(key) as stream:
                yield from (line + b"\n" for line in lines(stream, _PIECE))
        except NoTextError as error:
            raise DropforgeError(uri, f"it is no piece of a log ({error})", "Remove it, or name another pod") from None
        except LongTextError:
            sys.stdout.buffer.flush()
            typer.echo(f"{escape(uri)}: it is longer than {_PIECE >> 20} MiB; the rest is left out", err=True)


def _last(store: Store, keys: Sequence[str], wanted: Wanted, count: int) -> list[bytes]:
    """The last lines of a pod; older pieces are not fetched."""
    found: list[bytes] = []
    for key in reversed(keys):
        found = [*deque(wanted.of(_read(store, [key])), count), *found]
        if len(found) >= count:
            break
    return found[-count:]
