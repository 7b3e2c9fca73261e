"""Uploading a drop: files first, `_SUCCESS` last, nothing hidden, nothing overwritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dropforge.client.upload import default_name, find_files, upload
from dropforge.drop import read_drop
from dropforge.errors import DataError
from dropforge.folder_files import files_below
from dropforge.layout import check_drop
from dropforge.store import FolderStore, S3Store, Store


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


def test_the_default_name_is_valid_and_one_s_own() -> None:
    assert len({check_drop(default_name()) for _ in range(20)}) > 15


def test_of_two_uploads_under_one_name_the_second_is_told(
    store: Store, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both began before either was complete."""
    own = store.upload

    def slow(path: Path, key: str) -> None:
        own(path, key)
        store.put("drops/fam/d/_SUCCESS", b"[]")

    monkeypatch.setattr(store, "upload", slow)
    with pytest.raises(DataError, match="another upload has completed it"):
        upload(store, "fam", "d", find_files([data]))
    assert store.get("drops/fam/d/_SUCCESS") == b"[]"


def test_links_out_of_a_folder_are_left_out_and_told(tmp_path: Path) -> None:
    folder, outside = tmp_path / "data", tmp_path / "outside"
    for where in (folder / "sub", outside, folder / ".git"):
        where.mkdir(parents=True)
    (outside / "key.jsonl").write_text("secret")
    (folder / "a.jsonl").write_text("{}")
    (folder / ".b.jsonl").write_text("{}")
    (folder / "sub" / ".more").mkdir()
    (folder / "sub" / ".more" / "c.jsonl").write_text("{}")
    (folder / "._a.jsonl").write_text("of a desktop")
    (folder / ".git" / "b.jsonl").write_text("{}")
    (folder / "inside.jsonl").symlink_to("a.jsonl")
    (folder / "sub" / "leak.jsonl").symlink_to(outside / "key.jsonl")
    (folder / "up.jsonl").symlink_to("../outside/key.jsonl")
    (folder / "gone.jsonl").symlink_to("nothing")
    (folder / "hidden.jsonl").symlink_to(".git/b.jsonl")
    (folder / "sub" / "again").symlink_to("..")
    (folder / "other").symlink_to(outside)
    os.mkfifo(folder / "pipe.jsonl")
    foreign = os.fsdecode(b"caf\xe9")
    (folder / foreign).mkdir()
    (folder / foreign / "a.jsonl").write_text("{}")
    (folder / f"{foreign}.jsonl").write_text("{}")
    told: dict[str, str] = {}
    found = find_files([folder], lambda path, why: told.update({path.relative_to(folder).as_posix(): why}))
    assert list(found) == ["a.jsonl", "inside.jsonl"]
    assert told == {
        ".b.jsonl": "it is hidden",
        "sub/.more": "it is hidden",
        "gone.jsonl": "it is a link to nothing",
        "hidden.jsonl": "it is a link to a hidden file",
        "other": "it is a link to a folder",
        "pipe.jsonl": "it is no file, as a pipe is none",
        "sub/again": "it is a link to a folder",
        "sub/leak.jsonl": f"it is a link out of {folder}",
        "up.jsonl": f"it is a link out of {folder}",
        foreign: "its name is no UTF-8",
        f"{foreign}.jsonl": "its name is no UTF-8",
    }
    assert list(files_below(folder)) == ["a.jsonl", "inside.jsonl"]
    (tmp_path / "named").symlink_to(folder)
    assert list(find_files([tmp_path / "named", outside / "key.jsonl"])) == ["a.jsonl", "inside.jsonl", "key.jsonl"]


@pytest.mark.parametrize("link", ["file", "folder"])
def test_a_link_that_comes_while_files_are_sent_is_not_followed(store: Store, tmp_path: Path, link: str) -> None:
    """As another owner of a shared folder may put one there."""
    folder, secret = tmp_path / "shared", tmp_path / "home"
    (folder / "deep").mkdir(parents=True)
    secret.mkdir()
    for path in (folder / "a.jsonl", folder / "deep" / "b.jsonl"):
        path.write_text('{"text": "a row"}\n')
    (secret / "b.jsonl").write_text("a private key")

    def swap(_: int) -> None:
        if (folder / "deep").is_symlink() or (folder / "deep" / "b.jsonl").is_symlink():
            return
        (folder / "deep" / "b.jsonl").unlink()
        if link == "file":
            (folder / "deep" / "b.jsonl").symlink_to(secret / "b.jsonl")
        else:
            (folder / "deep").rmdir()
            (folder / "deep").symlink_to(secret)

    with pytest.raises(DataError, match=r"b\.jsonl.*a link has come in its way"):
        upload(store, "fam", "swapped", find_files([folder]), swap)
    assert store.stat("drops/fam/swapped/deep/b.jsonl") is None
    assert store.stat("drops/fam/swapped/_SUCCESS") is None


def test_a_command_shows_hostile_names_of_files_and_reads_no_link(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a\x1b]0;owned\x07.jsonl").write_text('{"text": "one two three"}\nbroken \x1b[2J\n')
    (folder / "leak\x1b[2J.jsonl").symlink_to("/etc/hostname")
    (folder / os.fsdecode(b"caf\xe9.jsonl")).write_text("{}")
    command = [
        sys.executable,
        "-c",
        "from dropforge.cli.app import main; main()",
        "curate",
        str(folder),
        "--sample",
        "100",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert r"caf\udce9.jsonl is left out: its name is no UTF-8" in done.stderr
    assert r"leak\x1b[2J.jsonl is left out: it is a link out of" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "\x07" not in done.stdout + done.stderr


def test_no_name_of_a_file_makes_a_line_of_its_own_in_the_checks(tmp_path: Path) -> None:
    name = "c\n  ok      personal data: none was found; wanted none.jsonl"
    (folder := tmp_path / "data").mkdir()
    (folder / name).write_text("".join(f'{{"text": "row {n} of the test"}}\n' for n in range(60)) + "{broken\n")
    command = [sys.executable, "-c", "from dropforge.cli.app import main; main()", "curate", str(folder)]
    done = subprocess.run(
        [*command, "--recipe", "tiny", "--out", str(tmp_path / "out")], capture_output=True, text=True
    )
    assert r"the first at c\u000a  ok" in done.stdout
    assert not [line for line in done.stdout.splitlines() if line.startswith("  ok      personal data")]


def test_a_drop_in_a_folder_for_a_bucket_gives_no_file_that_is_a_link_out_of_it(tmp_path: Path) -> None:
    drop = tmp_path / "store/drops/fam/d1"
    drop.mkdir(parents=True)
    (tmp_path / "secret.jsonl").write_text('{"text": "not for this drop"}\n')
    (drop / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (drop / "a.jsonl").write_text('{"text": "one two three"}\n')
    (drop / "_SUCCESS").touch()
    store = FolderStore(tmp_path / "store")
    assert store.get("drops/fam/d1/a.jsonl")
    for read in (store.get, store.open, lambda key: store.download(key, tmp_path / "copy")):
        with pytest.raises(DataError, match=r"link.jsonl'.*it is a link out of .*Put the file itself"):
            read("drops/fam/d1/link.jsonl")
    (drop / "link.jsonl").unlink()
    (drop / "link.jsonl").symlink_to("a.jsonl")
    assert store.get("drops/fam/d1/link.jsonl")


def test_a_folder_that_is_a_link_out_of_the_one_for_a_bucket_is_neither_read_nor_written(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "store"
    (outside / "sub").mkdir(parents=True)
    (outside / "a.jsonl").write_text('{"text": "not for this drop"}\n')
    (root / "drops/fam").mkdir(parents=True)
    (root / "drops/fam/d1").symlink_to(outside)
    (root / "drops/fam/d2").mkdir()
    (root / "drops/fam/d2/part").symlink_to(outside)
    store, key = FolderStore(root), "drops/fam/d1/a.jsonl"
    for ask in (
        lambda: store.get(key),
        lambda: store.stat(key),
        lambda: store.put(key, b"x"),
        lambda: store.put_if_absent("drops/fam/d1/new", b"x"),
        lambda: store.delete(key),
        lambda: store.delete_all("drops/fam/d1/"),
        lambda: store.sizes("drops/fam/d1/"),
        lambda: read_drop(store, "fam", "d1"),
        lambda: store.get("drops/fam/d2/part/a.jsonl"),
    ):
        with pytest.raises(DataError, match=r"folder .*it is a link out of .*store\. Put the folder itself there"):
            ask()
    assert store.sizes() == {}
    assert sorted(path.name for path in outside.iterdir()) == ["a.jsonl", "sub"]
    (tmp_path / "other").symlink_to(root)  # the folder itself may be one
    FolderStore(tmp_path / "other").put("drops/fam/d3/a.jsonl", b"x")
    assert store.sizes() == {"drops/fam/d3/a.jsonl": 1}
