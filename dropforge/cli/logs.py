"""`dropforge logs`: the whole log of a run's training, as the trainer keeps it in the run's folder."""

from __future__ import annotations

import gzip
import heapq
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from dropforge import layout
from dropforge.cli.connect import StateOption, connect
from dropforge.errors import DropforgeError
from dropforge.store import Store

_STAMP = len("2026-11-21T10:00:00.123Z")


def logs(
    run: Annotated[str, typer.Argument(help="A run, as `dropforge runs` names it.")],
    pod: Annotated[str | None, typer.Option("--pod", "-p", help="Only this pod.", show_default="all")] = None,
    tail: Annotated[int | None, typer.Option("--tail", "-n", help="Only the last so many lines.", min=1)] = None,
    state: StateOption = None,
) -> None:
    """Print the whole log of a run's training, all tries and pods in the order of time."""
    connection = connect(state)
    pieces = _pieces(connection.store, run, pod)
    for line in _lines(connection.store, pieces, tail):
        sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _pieces(store: Store, run: str, pod: str | None) -> dict[str, list[str]]:
    """Keys of the log's pieces by pod, in order. :raises DropforgeError: if there is no such run, log or pod."""
    if "/" in run or store.stat(layout.run_key(run)) is None:
        raise DropforgeError(f"run {run}", "there is no such run", "List them with `dropforge runs`")
    prefix = layout.logs_prefix(run)
    found: dict[str, list[str]] = {}
    for item in store.list(prefix):
        name, _, piece = item.key.removeprefix(prefix).partition("/")
        if piece.endswith(".log.gz"):
            found.setdefault(name, []).append(item.key)
    if not found:
        raise DropforgeError(
            f"run {run}", "it has no log yet", "The first lines come a minute after the ranks start: try again then"
        )
    if pod is None:
        return found
    if pod not in found:
        raise DropforgeError(f"pod {pod}", f"the run has no log of it, but of {', '.join(found)}", "Name one of those")
    return {pod: found[pod]}


def _lines(store: Store, pieces: dict[str, list[str]], tail: int | None) -> Iterator[bytes]:
    if tail is None:
        return _merged([_read(store, keys) for keys in pieces.values()])
    ends = [_last(store, keys, tail) for keys in pieces.values()]
    return iter(list(_merged([iter(lines) for lines in ends]))[-tail:])


def _merged(pods: Sequence[Iterator[bytes]]) -> Iterator[bytes]:
    return heapq.merge(*pods, key=lambda line: line[:_STAMP])


def _read(store: Store, keys: Sequence[str]) -> Iterator[bytes]:
    """Lines of a pod, one piece in memory at a time."""
    for key in keys:
        data = store.get(key)
        try:
            text = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            uri = f"{store.uri}/{key}"
            raise DropforgeError(uri, f"it is no piece of a log ({error})", "Remove it, or name another pod") from None
        yield from (line + b"\n" for line in text.removesuffix(b"\n").split(b"\n"))


def _last(store: Store, keys: Sequence[str], count: int) -> list[bytes]:
    """The last lines of a pod; older pieces are not fetched."""
    found: list[bytes] = []
    for key in reversed(keys):
        found = [*_read(store, [key]), *found]
        if len(found) >= count:
            break
    return found[-count:]
