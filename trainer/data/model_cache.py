"""Base models in a node's cache: fetched once by one of its pods, read where they lie by all.

What a model is has a name that never means other bytes: a commit of the hub, or an address with each object's tag.
Under the name's SHA-256 a note lists the model's files, each with the SHA-256 that it lies under::

    {"schema": 1, "name": "some/model@8f3b...", "whole": true, "files": {"config.json": {"bytes": 2, "sha256": "44.."}}}

Files that a pod reads are held by a lock until its process ends, so that nobody removes them; each is read through and
held to its SHA-256 first. Pods that want the same model at once take turns: the first one fetches, the others find it.
What ends the one that fetches leaves the files that it had fetched whole, and the next one goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from dropforge.json_objects import UNREADABLE
from dropforge.store import of_client
from trainer.data.node_cache import NodeCache

SCHEMA: Final = 1
PATIENCE: Final = 3600.0  # seconds that a pod waits for another one which fetches the same
WEIGHTS: Final = ".safetensors"
_FILE: Final = re.compile(r"[^./\0][^/\0]{0,254}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_LARGEST_NOTE: Final = 4 << 20
_READERS: Final = 4


class Kept(NamedTuple):
    """A file of a model in the cache. :param sha256: what it lies under."""

    bytes: int
    sha256: str


class Wanted(NamedTuple):
    """A file of a model where it comes from. :param sha256: what it is there said to have; None if nothing is said."""

    file: str
    size: int
    sha256: str | None = None


Fetch = Callable[["Filling"], None]


def takes(name: str) -> bool:
    """Whether a name is that of a model's file: in its folder itself, and not hidden."""
    return _FILE.fullmatch(name) is not None


def fetch_through(
    node: NodeCache,
    name: str,
    folder: Path,
    fetch: Fetch,
    *,
    weights: bool = True,
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Fill a folder with links to a model's files in the cache, which holds them until it is released.

    :param name: of what never changes. :param fetch: adds each of the model's files; it is called if one is missing.
    :param weights: whether they are needed; without them nothing is fetched here.
    :param check: called while files are looked through or another pod fetches; it may raise to stop.
    :returns: False if the cache cannot be used for it, which is said: then the model has to come some other way.
    :raises Exception: what `fetch` raises, but errors of this machine's disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        if _placed(node, name, folder, weights, check):
            node.say(f"{name} is that of the node's cache, looked through in {time.monotonic() - began:.1f} s")
            return True
        if not weights:
            return False

        def wait() -> None:
            node.say(f"another pod of this node fetches {name}: its copy is waited for")

        with node.turn(_key(name), PATIENCE, check, wait) as work:
            if _placed(node, name, folder, weights, check):
                node.say(f"{name} is that of the node's cache, which another pod filled")
                return True
            filling = Filling(node, name, folder, work)
            fetch(filling)
            filling.end()
        node.say(f"{name} is kept in the node's cache, for its next pods")
        return True
    except OSError as error:
        if of_client(error):
            raise
        node.unused(error)
        for path in folder.iterdir():
            if path.is_symlink():
                path.unlink()
        return False


@dataclass
class Filling:
    """A model that is being fetched into the cache. :param folder: with links to what is there."""

    node: NodeCache
    name: str
    folder: Path
    work: Path
    files: dict[str, Kept] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = _read(self.node.note(_key(self.name)), self.name)[0]  # of one that was killed

    def add(self, wanted: Iterable[Wanted], bring: Callable[[str, Path], Path]) -> None:
        """Have files, from the cache those that are there under this or another model's name.

        :param bring: puts one into a folder and returns its path there; it holds it to the SHA-256 that is wanted.
        :raises OSError: if the disk does not take them.
        """
        missing = [one for one in wanted if not self._find(one)]
        left = sum(one.size for one in missing)
        self.node.make_room(left, self.work)
        for one in missing:
            path = bring(one.file, self.work)
            sha256 = one.sha256 or _sha256(path)
            _link(self.node.adopt(path, sha256), self.folder / one.file)
            left -= one.size
            self.node.promise(left, self.work.parent)
            self._note(one.file, sha256)

    def _find(self, one: Wanted) -> bool:
        known = self._known.get(one.file)
        sha256 = one.sha256 or (known.sha256 if known is not None and known.bytes == one.size else None)
        if sha256 is None or (entry := self.node.hold(sha256)) is None:
            return False
        _link(entry, self.folder / one.file)
        self._note(one.file, sha256)
        return True

    def _note(self, file: str, sha256: str) -> None:
        self.files[file] = Kept((self.folder / file).stat().st_size, sha256)
        self._write(whole=False)

    def end(self) -> None:
        """All files are there."""
        self._write(whole=True)

    def _write(self, *, whole: bool) -> None:
        note = self.node.note(_key(self.name))
        files = {**({} if whole else self._known), **self.files}
        told = {file: kept._asdict() for file, kept in files.items()}
        values = {"schema": SCHEMA, "name": self.name, "whole": whole, "files": told}
        with tempfile.NamedTemporaryFile("w", dir=self.work, delete=False) as stream:
            json.dump(values, stream, indent=1)
        Path(stream.name).chmod(0o644)
        Path(stream.name).replace(note)


def _placed(node: NodeCache, name: str, folder: Path, weights: bool, check: Callable[[], None]) -> bool:
    """Whether the cache holds a model whole; its files are linked then."""
    note = node.note(_key(name))
    files, whole = _read(note, name)
    if not whole:
        return False
    with suppress(OSError):
        os.utime(note)
    wanted = {file: kept for file, kept in files.items() if weights or not file.endswith(WEIGHTS)}
    if not all(node.has(kept.sha256, kept.bytes) for kept in wanted.values()):
        return False  # before gigabytes of the others are read

    def hold(sha256: str) -> bool:
        check()
        return node.hold(sha256) is not None

    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as readers:
        try:
            if not all(readers.map(hold, {kept.sha256 for kept in wanted.values()})):
                return False
        finally:
            readers.shutdown(cancel_futures=True)
    for file, kept in wanted.items():
        _link(node.entry(kept.sha256), folder / file)
    return True


def _link(entry: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    target.symlink_to(entry)


def _read(note: Path, name: str) -> tuple[dict[str, Kept], bool]:
    """The files of a note, and whether they are all; nothing of one that is missing, torn or about something else."""
    try:
        number = os.open(note, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return {}, False
    with os.fdopen(number, "rb") as stream:
        text = stream.read(_LARGEST_NOTE)
    try:
        values = json.loads(text)
        files = {str(file): _kept(facts) for file, facts in values["files"].items()}
        if values["schema"] != SCHEMA or values["name"] != name or not all(map(takes, files)):
            return {}, False
        return files, bool(files) and values["whole"] is True
    except UNREADABLE:
        return {}, False


def _kept(facts: Mapping[str, Any]) -> Kept:
    if not _DIGEST.fullmatch(facts["sha256"]):
        raise ValueError("it is no SHA-256")
    return Kept(int(facts["bytes"]), facts["sha256"])


def _key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
