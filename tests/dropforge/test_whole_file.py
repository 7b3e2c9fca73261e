"""Files of a person that are written whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dropforge import whole_file
from dropforge.errors import file_error
from dropforge.whole_file import write_new, write_whole


def test_nothing_is_written_through_a_link_that_somebody_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, page = tmp_path / "victim", tmp_path / "card.html"
    victim.write_text("mine")
    page.symlink_to(victim)
    write_whole(page, b"card")
    assert (victim.read_text(), page.read_text(), page.is_symlink()) == ("mine", "card", False)
    monkeypatch.setattr(whole_file.secrets, "token_hex", lambda _: "known")
    (tmp_path / ".known.part").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_whole(page, b"other")
    assert (victim.read_text(), page.read_text()) == ("mine", "card")


def test_what_cannot_be_written_whole_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").touch()
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "folder", b"page")
    assert {path.name for path in tmp_path.iterdir()} == {"folder"}


@pytest.mark.parametrize("write", [write_whole, write_new])
def test_a_full_disk_is_told_by_the_file_of_which_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None]
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        write(tmp_path / "recipe.yaml", b"extends: sample")
    told = file_error(raised.value)
    assert (told.thing, told.mend) == (f"file {tmp_path}/recipe.yaml", "Make room on its disk")
    assert not list(tmp_path.iterdir())
