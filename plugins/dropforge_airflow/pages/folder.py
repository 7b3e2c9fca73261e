"""What a run's folder in the bucket tells: checkpoints, attempts, the measurement and the verdict on it, and logs."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from dropforge import aside, layout
from dropforge.json_objects import find_object
from dropforge.run import RunSpec
from dropforge.store import MissingObjectError, S3Store, Store
from dropforge.unpacked import LongTextError, NoTextError, lines

_CHECKPOINT: Final = re.compile(r"checkpoints/step-(\d{1,12})/")
_ATTEMPT: Final = re.compile(r"attempts/(\d{1,6})\.json")
_MOST_ATTEMPTS: Final = 20
_MOST_KEYS: Final = 20_000
_LARGEST: Final = 1 << 20  # bytes of a JSON file that is shown
_TEXT: Final = 8 << 20  # bytes of a piece's text that are read; the trainer writes 4 MiB
MOST_PODS: Final = 8


@dataclass(frozen=True)
class Saved:
    """A checkpoint in the run's folder.

    :param complete: whether its manifest is there. :param aside: whether a person has set it aside.
    """

    step: int
    bytes: int
    complete: bool
    aside: bool = False


@dataclass(frozen=True)
class Folder:
    """
    :param saved: by step; None where the recipe keeps them in a place of its own.
    :param attempts: the newest, by number. :param start: where its weights began, if not at the base.
    """

    root: str
    saved: tuple[Saved, ...] | None = ()
    attempts: tuple[Mapping[str, Any], ...] = ()
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    verdict: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    start: str = ""


def read(store: S3Store, run: str) -> Folder:
    """Read a run's folder. :raises Exception: if the store is away, or has no such run."""
    prefix = layout.run_prefix(run)
    folder = S3Store(store.bucket, prefix.rstrip("/"), store.client)
    spec = RunSpec.read(store, layout.run_key(run))
    own = spec.checkpoints_root == spec.root
    numbers = sorted(
        int(found[1]) for key in store.sizes(f"{prefix}attempts/") if (found := _ATTEMPT.fullmatch(key[len(prefix) :]))
    )
    return Folder(
        root=spec.root,
        saved=_saved(folder) if own else None,
        attempts=tuple(
            find_object(store, f"{prefix}attempts/{number}.json", most=_LARGEST) for number in numbers[-_MOST_ATTEMPTS:]
        ),
        evaluation=find_object(store, layout.evaluation_key(run), most=_LARGEST),
        verdict=find_object(store, layout.verdict_key(run), most=_LARGEST),
        report=find_object(store, layout.report_key(run), most=_LARGEST),
        start=str(spec.start or ""),
    )


def tails(store: Store, run: str, most: int = 200) -> dict[str, list[str]]:
    """The last lines that the trainer has kept, of the pods whose last pieces are the newest, by the pod's folder."""
    prefix = layout.logs_prefix(run)
    newest: dict[str, tuple[float, str]] = {}
    for number, (key, when) in enumerate(store.times(prefix).items()):
        name, _, piece = key.removeprefix(prefix).partition("/")
        if piece.endswith(".log.gz"):
            newest[name] = max(newest.get(name, (0.0, "")), (when, key), key=lambda item: item[1])
        if number >= _MOST_KEYS:
            break
    order = sorted(newest.items(), key=lambda item: item[1][0], reverse=True)[:MOST_PODS]
    return {name: list(deque(_text(store, key), most)) for name, (_, key) in sorted(order)}


def _saved(folder: Store) -> tuple[Saved, ...]:
    sizes: dict[int, int] = {}
    for key, size in folder.sizes("checkpoints/").items():
        if found := _CHECKPOINT.match(key):
            sizes[int(found[1])] = sizes.get(int(found[1]), 0) + size
    checks = {item.step: item.check for item in aside.sealed(folder)}
    out = aside.known(folder)
    return tuple(Saved(step, size, step in checks, checks.get(step) in out) for step, size in sorted(sizes.items()))


def _text(store: Store, key: str) -> Iterator[str]:
    """Lines of a piece; of one that is broken or was made to burst as far as it goes."""
    with suppress(MissingObjectError, NoTextError, LongTextError), store.open(key) as stream:
        for line in lines(stream, _TEXT):
            if line:
                yield line.decode(errors="replace")
