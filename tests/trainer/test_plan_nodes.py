"""Real nodes and real kills while tokens and plan are stored."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from .faults import fault
from .test_launch import ONE, finish, read
from .toy import Toy

pytestmark = [pytest.mark.dist, pytest.mark.exact]
SMALL = {"train": {"max_steps": 3}}
SLOW = """
upload = FolderStore.upload
def slow(self, path, key):
    if key.endswith("packs/documents.npy"):
        hold(%d)
    return upload(self, path, key)
FolderStore.upload = slow
"""


def stored(toy: Toy, name: str) -> Path:
    (found,) = (Path(toy.files(name).uri) / "plan").iterdir()
    return found


def test_two_nodes_train_on_what_the_first_one_prepared(toy: Toy, start: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    uri = toy.run("nodes", **SMALL)
    common = {"PET_NNODES": "2", "PET_MASTER_PORT": port, **ONE, **fault(tmp_path, "dropforge.store", SLOW % 3)}
    nodes = [start(uri, 1, PET_NODE_RANK=str(node), **common) for node in (0, 1)]
    texts = [finish(node) for node in nodes]
    assert "tokenising" in texts[0]
    report = json.loads(toy.files("nodes").get("report.json"))
    assert report["packing"]["proof"]["ranks"] == report["environment"]["ranks"] == 2
    assert sum("HOLD" in text for text in texts) == 1, "one node stores it"
    assert not list(stored(toy, "nodes").glob(".*"))


def test_a_kill_while_the_plan_is_stored_leaves_nothing_that_is_taken_for_one(
    toy: Toy, start: Any, tmp_path: Path
) -> None:
    uri = toy.run("killed", **SMALL)
    process = start(uri, 1, **ONE, **fault(tmp_path, "dropforge.store", SLOW % 300))
    read(process, r"HOLD \d")
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)
    folder = stored(toy, "killed")
    assert (folder / "train" / "ids.npy").exists() or (folder / "eval" / "ids.npy").exists()
    assert not (folder / "plan.json").exists()
    text = finish(start(uri, 1, **ONE))
    assert "tokens are those of" in text, "they were whole beside the dataset before the plan was"
    assert "tokenising" not in text
    assert (folder / "plan.json").exists()


def test_a_kill_while_tokens_are_stored_leaves_nothing_that_another_run_takes(
    toy: Toy, start: Any, tmp_path: Path
) -> None:
    within = SLOW.replace('key.endswith("packs/documents.npy")', 'key.startswith("tokens/") and "/sources." in key')
    process = start(toy.run("killed", **SMALL), 1, **ONE, **fault(tmp_path, "dropforge.store", within % 300))
    read(process, r"HOLD \d")
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)
    (folder,) = Path(toy.root).glob("datasets/toy/*/tokens/*")
    assert (folder / "eval" / "ids.npy").exists()
    assert not (folder / "plan.json").exists()
    text = finish(start(toy.run("second", **SMALL), 1, **ONE))
    assert "tokenising" in text
    assert (folder / "plan.json").exists()
    text = finish(start(toy.run("third", **SMALL), 1, **ONE))
    assert "tokens are those of" in text
    assert "tokenising" not in text
