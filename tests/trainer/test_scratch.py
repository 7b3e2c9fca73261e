"""The scratch folder of a node: gone with its launcher, however that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trainer.node.scratch import scratch

_HOLDER = """
import tempfile, time, sys
tempfile.tempdir = sys.argv[1]
from trainer.node.scratch import scratch
with scratch() as folder:
    (folder / "train").mkdir()
    (folder / "train" / "ids.npy").write_bytes(b"x" * 100)
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_launcher_goes_with_the_next_one_and_that_of_a_living_one_stays(place: Path) -> None:
    (place / "dropforge-scratch-new").mkdir()  # it is just being made
    holders = [
        subprocess.Popen([sys.executable, "-c", _HOLDER, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    folders = []
    for holder in holders:
        assert holder.stdout is not None
        folders.append(Path(holder.stdout.readline().decode().strip()))
    holders[0].send_signal(signal.SIGKILL)
    holders[0].wait(20)
    assert all(folder.exists() for folder in folders)
    with scratch() as own:
        assert own.exists()
        assert [folder.exists() for folder in folders] == [False, True]
        assert (folders[1] / "train" / "ids.npy").exists()
    assert not own.exists()
    holders[1].communicate(b"", timeout=20)
    assert [path.name for path in place.iterdir()] == ["dropforge-scratch-new"]


def test_what_another_user_made_is_not_touched(place: Path) -> None:
    """In a place for temporary files that all share, it may be anything: endless, a link, or a pipe as its lock."""
    theirs = place / "dropforge-scratch-theirs"
    (theirs / "d").mkdir(parents=True)
    (theirs / "lock").touch()
    mine = place / "kept"
    mine.mkdir()
    (mine / "lock").touch()
    (place / "dropforge-scratch-link").symlink_to(mine)
    (place / "dropforge-scratch-file").touch()
    if os.geteuid() == 0:
        os.chown(theirs, 12345, 12345)
    with scratch():
        pass
    assert (mine / "lock").exists()
    assert (theirs / "d").exists() == (os.geteuid() == 0)
