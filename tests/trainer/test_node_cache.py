"""What a node keeps for the next pod: by its SHA-256, within its bound, and never given unchecked."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dropforge.run import RunSpec
from dropforge.store import FolderStore
from trainer.config import read_settings
from trainer.data.node_cache import NodeCache
from trainer.prepare import await_prepared, node_cache, prepare

from .toy import Toy


class Node:
    """A cache of 100 bytes, and what it said."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.folder, self.target = folder / "cache", folder / "taken"
        self.source = folder / "given"
        self.cache = NodeCache(self.folder, 100, self.said.append)

    def give(self, data: bytes, used: float = 0) -> str:
        """:param used: seconds ago."""
        self.source.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        self.cache.give(digest, self.source)
        entry = self.entry(digest)
        if entry.exists():
            os.utime(entry, (time.time() - used, time.time() - used))
        return digest

    def entry(self, digest: str) -> Path:
        return self.folder / digest[:2] / digest

    def take(self, digest: str) -> bytes | None:
        return self.target.read_bytes() if self.cache.take(digest, self.target) else None


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_what_was_not_used_for_the_longest_time_goes_first(node: Node) -> None:
    first, second = node.give(b"a" * 40, 300), node.give(b"b" * 40, 200)
    assert node.take(first) == b"a" * 40  # used now
    third = node.give(b"c" * 40)
    assert node.take(second) is None
    assert (node.take(first), node.take(third)) == (b"a" * 40, b"c" * 40)
    assert node.take(node.give(b"d" * 101)) is None  # it would never fit, and takes no other's place
    assert node.take(first) is not None
    assert not node.said


def test_changed_bytes_are_thrown_away_and_told(node: Node) -> None:
    digest = node.give(b"right")
    node.entry(digest).write_bytes(b"wrong")
    assert node.take(digest) is None
    assert "is not what was written" in node.said[0]
    assert not node.entry(digest).exists()
    assert node.take(node.give(b"right")) == b"right"


def test_what_others_put_there_is_neither_followed_nor_waited_for(node: Node, tmp_path: Path) -> None:
    digest = node.give(b"right")
    (tmp_path / "elsewhere").write_bytes(b"right")
    node.entry(digest).unlink()
    node.entry(digest).symlink_to(tmp_path / "elsewhere")
    assert node.take(digest) is None
    node.entry(digest).unlink()
    os.mkfifo(node.entry(digest))
    assert node.take(digest) is None


def test_a_turn_follows_no_link_and_waits_for_no_pipe(node: Node, tmp_path: Path) -> None:
    thesis = tmp_path / "home" / "thesis"
    thesis.mkdir(parents=True)
    name = "ab" + 62 * "0"
    (node.folder / "ab").mkdir(parents=True)
    (node.folder / "ab" / f"{name}.part").symlink_to(tmp_path / "home")
    with pytest.raises(OSError, match="Not a directory"), node.cache.turn(name, 1, _nothing, _nothing):
        pytest.fail("a turn in a folder that is elsewhere")
    assert thesis.is_dir()
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis"]

    other = node.folder / "cd" / f"cd{62 * '0'}.part"
    other.mkdir(parents=True)
    with (other / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the pod whose turn it is
        os.mkfifo(other / "room")
        assert node.take(node.give(b"one")) == b"one"
        node.cache.promise(7, other)
        assert (other / "room").read_text() == "7"
    assert not node.said


def _nothing() -> None:
    """Neither stop nor wait."""


def test_a_folder_that_cannot_be_used_ends_nothing(node: Node) -> None:
    node.folder.write_text("a file")
    digest = node.give(b"right")
    assert node.take(digest) is None
    assert "is not used" in node.said[0]


def test_what_a_killed_pod_left_goes_after_a_day(node: Node) -> None:
    entry = node.entry(node.give(b"right"))
    old, new = entry.parent / "dropforge-old.part", entry.parent / "dropforge-new.part"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 90_000,) * 2)
    node.give(b"another")
    assert (old.exists(), new.exists(), entry.exists()) == (False, True, True)


def test_what_is_not_the_caches_stays(node: Node, tmp_path: Path) -> None:
    first = node.give(b"a" * 60, 300)
    others = [
        node.folder / "en" / "corpus.jsonl",
        node.folder / "de" / "model.part",
        node.folder / "ab" / "notes.txt",
        tmp_path / "elsewhere" / first,
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 200)
        os.utime(path, (1, 1))
    (node.folder / first[:2] / "folder").mkdir()
    (node.folder / "fa").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "important").write_text("important")
    (node.folder / ".lock").unlink()
    (node.folder / ".lock").symlink_to(tmp_path / "important")
    node.give(b"b" * 60)
    assert "is not used" in node.said[0]  # with such a lock nothing is done
    (node.folder / ".lock").unlink()
    second = node.give(b"b" * 60)
    assert (node.take(first), node.take(second)) == (None, b"b" * 60)
    assert all(path.exists() for path in others)
    assert (tmp_path / "important").read_text() == "important"
    assert node.entry(second).stat().st_mode & 0o777 == 0o644


@pytest.fixture
def start(toy: Toy, tmp_path: Path) -> Callable[..., list[str]]:
    """Prepares one run on a node, with a scratch folder of the name, and tells the lines of its log."""
    asked = {"data_cache": str(tmp_path / "cache"), "data_cache_gb": 1}
    spec = RunSpec.from_json(Path(toy.run("stored", compute=asked)).read_bytes())
    settings = read_settings(spec.recipe)
    assert settings.data_cache_bytes == 10**9

    def start(name: str) -> list[str]:
        said: list[str] = []
        with node_cache(settings, said.append) as node:
            prepare(spec, settings, tmp_path / name, lambda: None, said.append, share=False, node=node)
        await_prepared(settings, spec, tmp_path / name, lambda: None)
        return said

    return start


def test_the_next_pod_of_a_node_fetches_nothing_of_the_plan_from_the_store(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("a")
    fetched: list[str] = []
    download = FolderStore.download

    def watched(self: FolderStore, key: str, path: Path) -> None:
        fetched.append(key)
        download(self, key, path)

    monkeypatch.setattr(FolderStore, "download", watched)
    assert any("tokens and plan are those of" in line for line in start("b"))
    assert not [key for key in fetched if key.startswith("plan/")]
    largest = max((tmp_path / "cache").glob("??/*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(b"harmed")
    assert any("is not what was written: it is fetched again" in line for line in start("c"))
    assert len([key for key in fetched if key.startswith("plan/")]) == 1
