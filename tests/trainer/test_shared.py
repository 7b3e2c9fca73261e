"""Nodes that write to folders of their own are refused before the first step."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dropforge.errors import RecipeError
from dropforge.store import FolderStore
from trainer.gang import Gang
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


def test_one_node_is_not_asked(tmp_path: Path) -> None:
    check_shared(FolderStore(tmp_path / "none"), Gang(0, 4, 0, 4))
    assert not (tmp_path / "none").exists()
