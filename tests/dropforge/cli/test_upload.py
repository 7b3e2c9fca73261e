"""Uploading a drop: files first, `_SUCCESS` last, nothing hidden, nothing overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dropforge.cli.upload import default_name, find_files, upload
from dropforge.drop import read_drop
from dropforge.errors import DataError
from dropforge.layout import check_drop
from dropforge.store import S3Store, Store


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "sub" / ".git").mkdir(parents=True)
    (folder / "a.jsonl").write_text('{"text": "one"}\n')
    (folder / "sub" / "b c+ü.csv").write_text("text\ntwo\n")
    (folder / ".hidden").write_text("no")
    (folder / "sub" / ".git" / "x").write_text("no")
    (folder / "_SUCCESS").write_text("stale")
    return folder


def test_an_upload_is_a_complete_drop(store: Store, data: Path) -> None:
    sent: list[int] = []
    upload(store, "fam", "d", find_files([data]), sent.append)
    drop = read_drop(store, "fam", "d")
    assert [file.key for file in drop.files] == ["a.jsonl", "sub/b c+ü.csv"]
    assert all(file.content.startswith("sha256:") for file in drop.files)
    assert sum(sent) == drop.total_bytes
    assert json.loads(store.get("drops/fam/d/_SUCCESS"))[0]["size"] == 16


def test_success_is_written_last(s3_store: S3Store, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, key: str) -> None:
        if key.endswith(".csv"):
            raise OSError("the network is gone")

    monkeypatch.setattr(s3_store, "upload", fail)
    with pytest.raises(OSError, match="gone"):
        upload(s3_store, "fam", "d", find_files([data]))
    assert s3_store.stat("drops/fam/d/_SUCCESS") is None


def test_a_complete_drop_is_not_written_over(store: Store, data: Path) -> None:
    upload(store, "fam", "d", find_files([data]))
    with pytest.raises(DataError, match="complete already"):
        upload(store, "fam", "d", find_files([data]))


def test_paths_that_cannot_be_a_drop(tmp_path: Path, data: Path) -> None:
    with pytest.raises(DataError, match="neither a file nor a folder"):
        find_files([tmp_path / "nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no data file"):
        find_files([tmp_path / "empty"])
    with pytest.raises(DataError, match="comes from both"):
        find_files([data, data / "a.jsonl"])


def test_the_default_name_is_valid() -> None:
    check_drop(default_name())
