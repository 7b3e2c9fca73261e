"""Tokens and packs in the run's folder: made once, and taken over by the other nodes and by later attempts.

::

    plan/IDENTITY/NAME.npy, NAME.json   tokens of both splits, row keys, packs
    plan/IDENTITY/plan.json             what they were made from, with each file's size and SHA-256; written last

The identity is a digest of everything they follow from: rows, tokenizer, settings, code. So whatever makes them anew
must make the same bytes, and files that do not fit their checksums are made anew, never used.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dropforge.errors import DropforgeError
from dropforge.json_objects import UNREADABLE, read_object
from dropforge.store import MissingObjectError, Store
from trainer.data.node_cache import NodeCache

SCHEMA: Final = 1
FOLDER: Final = "plan/"
MANIFEST: Final = "plan.json"
_NAME: Final = re.compile(r"[a-z_]+(/[a-z_]+)?\.(npy|json)")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

Files = dict[str, dict[str, Any]]


class UnusableError(Exception):
    """What is stored cannot be used; the text says why."""


@dataclass(frozen=True)
class PlanStore:
    """The stored files of one identity.

    :param store: the run's folder. :param parts: what the files follow from, as JSON values.
    :param folder: of all identities, a key that ends with a slash. :param cache: asked before the store.
    """

    store: Store
    parts: Mapping[str, Any]
    folder: str = FOLDER
    cache: NodeCache | None = None

    @property
    def prefix(self) -> str:
        """The folder of this identity, a key that ends with a slash."""
        return f"{self.folder}{hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()[:16]}/"

    @property
    def uri(self) -> str:
        return f"{self.store.uri}/{self.prefix}"

    def fetch(self, folder: Path, check: Callable[[], None] = lambda: None) -> bool:
        """Copy the files into a folder, which appears whole or not at all; False if nothing is stored.

        :param check: called between files; it may raise to stop.
        :raises UnusableError: if something is stored that is torn, of another run or changed.
        """
        files = self._files()
        if files is None:
            return False
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            for name, facts in files.items():
                check()
                self._fetch(name, facts, staging / name)
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier try in the same scratch folder
            staging.replace(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return True

    def _fetch(self, name: str, facts: Mapping[str, Any], target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if self.cache is not None and self.cache.take(facts["sha256"], target):
            return
        try:
            self.store.download(self.prefix + name, target)
        except MissingObjectError:
            raise UnusableError(f"{name} is missing") from None
        if _facts(target) != facts:
            raise UnusableError(f"{name} is not what was written: its size or SHA-256 is another")
        if self.cache is not None:
            self.cache.give(facts["sha256"], target)

    def keep(self, folder: Path) -> None:
        """Store a folder's files, unless they are there; the manifest comes last.

        :raises DropforgeError: if other files are stored for the same identity, so that two nodes or two attempts would
            train on different data.
        """
        files = {path.relative_to(folder).as_posix(): _facts(path) for path in sorted(folder.rglob("*.*"))}
        try:
            there = self._files()
        except UnusableError:
            there = None
            self.store.delete(self.prefix + MANIFEST)
        if there is not None:
            self._compare(files, there)
        for name, facts in files.items():
            self.store.upload(folder / name, self.prefix + name)
            if self.cache is not None:
                self.cache.give(facts["sha256"], folder / name)
        manifest = {"schema": SCHEMA, "parts": dict(self.parts), "files": files}
        if not self.store.put_if_absent(self.prefix + MANIFEST, json.dumps(manifest, indent=1).encode()):
            self._compare(files, self._files() or {})

    def _compare(self, made: Files, there: Files) -> None:
        other = sorted(name for name in {*made, *there} if made.get(name) != there.get(name))
        if other:
            raise DropforgeError(
                f"plan {self.uri}",
                f"made again from the same rows, {', '.join(other)} differ from what is stored",
                "Use the image and the machines that the run began with, or start a new run",
            )

    def _files(self) -> Files | None:
        """What the manifest lists. :raises UnusableError: if it is none, or of something else."""
        try:
            values = read_object(self.store, self.prefix + MANIFEST)
            schema, parts, files = values["schema"], values["parts"], values["files"]
            right = all(
                _NAME.fullmatch(name) and set(facts) == {"bytes", "sha256"} and _DIGEST.fullmatch(facts["sha256"])
                for name, facts in files.items()
            )
        except MissingObjectError:
            return None
        except UNREADABLE:
            raise UnusableError("its manifest is torn") from None
        if schema != SCHEMA or parts != json.loads(json.dumps(self.parts)):
            raise UnusableError("its manifest is that of other data")
        if not right or not files:
            raise UnusableError("its manifest is torn")
        return dict(files)


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
