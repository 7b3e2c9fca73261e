"""What lies in the place of a log is told; nobody waits for the other end of a pipe."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dropforge.errors import DropforgeError
from dropforge.stack import control, processes
from dropforge.stack.log_files import open_log, read_end
from dropforge.stack.nursery import Nursery
from tests.stack.test_supervisor import until


@pytest.mark.parametrize("kind", ["pipe", "read pipe", "folder", "link", "device"])
def test_only_a_regular_file_is_a_log(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "web.log"
    reader = None
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "other")
    elif kind == "device":
        path = Path(os.devnull)
    else:
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if kind == "read pipe" else None
    with pytest.raises(OSError, match=path.name):
        open_log(path)
    assert read_end(path, 100) == ""
    assert not (tmp_path / "other").exists()
    if reader is not None:
        os.close(reader)


def test_a_log_is_private_grows_and_its_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "web.log"
    for text in (b"first ", b"second"):
        handle = open_log(path)
        os.write(handle, text)
        os.close(handle)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (read_end(path, 100), read_end(path, 4)) == ("first second", "cond")


def test_a_start_whose_log_is_a_pipe_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "state" / "logs" / "supervisor.log"
    log.parent.mkdir(parents=True)
    os.mkfifo(log)
    with pytest.raises(DropforgeError, match=r"supervisor\.log: it is no regular file"):
        control.start(tmp_path / "state")


def test_a_fork_whose_log_is_a_pipe_ends_and_the_nursery_goes_on(tmp_path: Path) -> None:
    pipe, own = tmp_path / "pipe.log", tmp_path / "nursery.log"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="no regular file"):
        Nursery(("json",), dict(os.environ), tmp_path, pipe, ())
    nursery = Nursery(("json",), dict(os.environ), tmp_path, own, ())
    try:
        until(lambda: nursery.ready() is not None)
        refused = nursery.spawn("this", (), pipe)
        assert refused is not None
        until(lambda: (found := processes.look(refused)) is None or found.zombie)
        assert nursery.spawn("this", (), tmp_path / "file.log")
        until(lambda: "Beautiful is better" in read_end(tmp_path / "file.log", 4096))
    finally:
        nursery.close()
    assert "this cannot be started: " in own.read_text()
