"""Nodes that write to folders of their own are refused before the first step."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from dropforge.errors import RecipeError
from dropforge.store import FolderStore, Store
from trainer.gang import Gang
from trainer.state.checkpoint import StorageError
from trainer.state.shared import check_shared


class Ranks:
    """Ranks that are threads: they gather over a barrier."""

    def __init__(self, nodes: int, per_node: int) -> None:
        self.world, self.per_node = nodes * per_node, per_node
        self.barrier = threading.Barrier(self.world)
        self.values: list[Any] = [None] * self.world

    def rank(self, rank: int) -> Gang:
        ranks = self

        class One(Gang):
            def gather(self, value: Any) -> list[Any]:
                ranks.values[self.rank] = value
                ranks.barrier.wait(10)
                found = list(ranks.values)
                ranks.barrier.wait(10)
                return found

        return One(rank, self.world, rank % self.per_node, self.per_node)


def outcomes(folders: list[Path], per_node: int = 1, patience: float = 0.0) -> list[str]:
    ranks = Ranks(len(folders), per_node)

    def check(rank: int) -> str:
        try:
            check_shared(FolderStore(folders[rank // per_node]), ranks.rank(rank), patience)
        except RecipeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(ranks.world) as pool:
        return list(pool.map(check, range(ranks.world)))


def test_a_folder_of_each_nodes_own_is_refused_on_every_rank(tmp_path: Path) -> None:
    told = outcomes([tmp_path / "one", tmp_path / "two"], per_node=2)
    assert all("rank 0 does not see there what these nodes write" in text for text in told)


@pytest.mark.parametrize("per_node", [1, 2])
def test_one_folder_for_all_is_fine_and_stays_clean(tmp_path: Path, per_node: int) -> None:
    assert outcomes([tmp_path, tmp_path, tmp_path], per_node, patience=5.0) == [""] * 3 * per_node
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_node_that_cannot_write_is_named_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    told = outcomes([tmp_path, tmp_path / "file"])
    assert all("Not a directory" in text or "File exists" in text for text in told)


def failing(error: int) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return fail


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("tempfile.mkstemp", errno.EROFS),
        ("tempfile.mkstemp", errno.EACCES),
        ("os.link", errno.EPERM),  # a file system without hard links
        ("pathlib.Path.unlink", errno.EPERM),  # one that keeps what it has
    ],
)
def test_a_place_that_takes_no_checkpoint_is_refused_before_the_first_step_on_one_node_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: int
) -> None:
    monkeypatch.setattr(where, failing(error))
    with pytest.raises(RecipeError, match=os.strerror(error)):
        check_shared(FolderStore(tmp_path), Gang())
    ranks = Ranks(nodes=1, per_node=2)
    with ThreadPoolExecutor(2) as pool:  # on every rank, though rank 0 alone has tried
        for told in [pool.submit(check_shared, FolderStore(tmp_path), ranks.rank(rank)) for rank in range(2)]:
            assert isinstance(told.exception(10), RecipeError)


def test_a_store_without_conditional_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path)
    monkeypatch.setattr(store, "put_if_absent", lambda key, data: store.put(key, data) is None)
    with pytest.raises(RecipeError, match="conditional"):
        check_shared(store, Gang())


def test_a_place_that_is_away_now_is_tried_again_and_one_without_room_may_get_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(StorageError, match="Input/output"):
        check_shared(FolderStore(tmp_path), Gang())
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    check_shared(FolderStore(tmp_path), Gang())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("code", "refused"), [("AccessDenied", True), ("NoSuchBucket", True), ("SlowDown", False), ("InternalError", False)]
)
def test_what_s3_refuses_for_good_is_told_from_what_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, refused: bool
) -> None:
    def fail(*_: Any) -> None:
        raise ClientError({"Error": {"Code": code, "Message": "no"}}, "PutObject")

    store = FolderStore(tmp_path)
    monkeypatch.setattr(store, "put", fail)
    with pytest.raises(RecipeError if refused else StorageError, match=code):
        check_shared(store, Gang())


def test_a_place_that_is_fine_stays_clean_on_one_node(store: Store) -> None:
    check_shared(store, Gang())
    assert store.sizes() == {}
    if isinstance(store, FolderStore):
        assert not [path for path in store.root.rglob("*") if path.is_file()]
