"""Logs of services that run for long stay bounded, and a service goes on writing to the same file."""

from __future__ import annotations

from pathlib import Path

from dropforge.stack.service_logs import cut_log


def test_a_running_log_is_cut_and_goes_on(tmp_path: Path) -> None:
    path, older = tmp_path / "a.log", tmp_path / "a.log.1"
    assert not cut_log(path, 10)
    with path.open("ab", buffering=0) as service:
        service.write(b"0123456789")
        assert not cut_log(path, 10)
        for number in range(3):
            service.write(b"%d" % number)
            assert cut_log(path, 10) == (number == 0)
        assert (older.read_bytes(), path.read_bytes()) == (b"01234567890", b"12")
        service.write(b"9876543210")
        assert cut_log(path, 10)
    assert (older.read_bytes(), path.read_bytes()) == (b"129876543210", b"")
    assert sorted(tmp_path.iterdir()) == [path, older]


def test_a_log_without_room_for_a_copy_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 11)
    (tmp_path / "a.log.1").mkdir()
    (tmp_path / "a.log.1" / "b").touch()  # nothing can take its place
    assert cut_log(path, 10)
    assert path.read_bytes() == b""
    assert not (tmp_path / "a.log.tmp").exists()
