"""A store keeps its promises, on S3 and in a folder."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ClientError, EndpointConnectionError
from botocore.httpsession import URLLib3Session

from dropforge import store as stores
from dropforge.errors import DataError, DropforgeError
from dropforge.store import (
    FolderStore,
    MissingObjectError,
    S3Store,
    Store,
    open_store,
    out_of_reach,
    s3_client,
    split_uri,
    written_by_others,
)
from trainer.state.stop import StopSignal


def answer_of(url: str, status: int) -> AWSResponse:
    """An answer without a body."""
    raw = io.BytesIO()
    raw.stream = lambda *_, **__: iter(())  # type: ignore[attr-defined]
    return AWSResponse(url, status, {}, raw)


def test_what_was_put_is_read_back(store: Store) -> None:
    store.put("a/b c+d%.bin", b"\0\1")
    assert store.get("a/b c+d%.bin") == b"\0\1"
    info = store.stat("a/b c+d%.bin")
    assert info is not None
    assert info.size == 2


class Answers:
    """Answers of an S3 in its own words, to GET with their body and to HEAD without it."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        self.status = status
        self.body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>" if code else ""

    def __call__(self, request: Any, **_: Any) -> AWSResponse:
        body, raw = b"" if request.method == "HEAD" else self.body.encode(), io.BytesIO()
        raw.stream = lambda *_, **__: iter([body])  # type: ignore[attr-defined]
        return AWSResponse(request.url, self.status, {"Content-Type": "application/xml"}, raw)


SSE_C = (
    "The object was stored using a form of Server Side Encryption. The correct parameters must be provided to retrieve "
    "the object."
)
UNREADABLE = [
    (403, "InvalidObjectState", "The operation is not valid for the object's storage class", "is archived"),
    (400, "InvalidRequest", SSE_C, "a key that this installation cannot use"),
    (400, "KMS.DisabledException", "arn:aws:kms:x is disabled.", "a key that this installation cannot use"),
    (403, "AccessDenied", "Access Denied", "may read neither it nor what its encryption key protects"),
    (400, "OneMore", "of tomorrow", r"S3 does not give it \(OneMore: of tomorrow\)"),
]


@pytest.mark.parametrize(("status", "code", "message", "told"), UNREADABLE)
def test_what_s3_will_never_give_is_the_error_of_who_wrote_it(
    s3_store: S3Store, status: int, code: str, message: str, told: str
) -> None:
    s3_store.client.meta.events.register("before-send.s3", Answers(status, code, message))
    for read in (s3_store.get, s3_store.stat):
        with pytest.raises(DataError, match=f"^file x: .*{told}"), written_by_others("file x"):
            read("k")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "ExpiredToken"),
        (403, "InvalidAccessKeyId"),
        (403, "SignatureDoesNotMatch"),
        (403, ""),
        (404, "NoSuchBucket"),
    ],
)
def test_what_s3_says_of_who_asks_is_no_error_of_an_object(s3_store: S3Store, status: int, code: str) -> None:
    s3_store.client.meta.events.register("before-send.s3", Answers(status, code))
    for read in (s3_store.get, s3_store.stat) if status != 404 else (s3_store.get,):
        with pytest.raises(ClientError, match=code or "403"), written_by_others("file x"):
            read("k")


def test_an_archived_object_is_known_by_a_look_and_a_restored_one_is_none(s3_store: S3Store) -> None:
    at: dict[str, Any] = {"Bucket": s3_store.bucket, "Key": "k"}
    for kind, archived in (("STANDARD", False), ("GLACIER_IR", False), ("GLACIER", True), ("DEEP_ARCHIVE", True)):
        s3_store.client.put_object(**at, Body=b"x", StorageClass=cast(Any, kind))
        info = s3_store.stat("k")
        assert info is not None
        assert info.archived == archived
    s3_store.client.restore_object(**at, RestoreRequest={"Days": 1})
    info = s3_store.stat("k")
    assert info is not None
    assert not info.archived
    assert s3_store.get("k") == b"x"


def test_a_missing_object_is_named(store: Store) -> None:
    assert store.stat("nothing") is None
    with pytest.raises(MissingObjectError, match="nothing"):
        store.get("nothing")
    store.delete("nothing")


def test_only_one_of_many_racers_writes(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: store.put_if_absent("claim", str(number).encode()), range(16)))
    assert won.count(True) == 1
    assert store.get("claim") == str(won.index(True)).encode()


def test_replace_needs_the_current_tag(store: Store) -> None:
    store.put("k", b"one")
    info = store.stat("k")
    assert info is not None
    assert store.put_if_match("k", b"two", info.etag)
    assert not store.put_if_match("k", b"three", info.etag)
    assert store.get("k") == b"two"
    assert not store.put_if_match("absent", b"x", info.etag)


def test_listing_is_by_prefix_and_in_order(store: Store) -> None:
    for key in ("d/b", "d/a", "d/c/x", "e", "dd"):
        store.put(key, b"")
    assert [info.key for info in store.list("d/")] == ["d/a", "d/b", "d/c/x"]


def test_sizes_are_known_without_reading(store: Store) -> None:
    store.put("d/b", b"12")
    store.put("d/a", b"")
    store.put("dd", b"123")
    assert list(store.sizes("d/").items()) == [("d/a", 0), ("d/b", 2)]
    times = store.times("d/")
    assert list(times) == ["d/a", "d/b"]
    assert all(abs(when - time.time()) < 60 for when in times.values())


def test_all_below_a_folder_goes_and_nothing_beside_it(store: Store) -> None:
    for key in ("d/b", "d/c/x", "d2", "e"):
        store.put(key, b"")
    store.delete_all("d/")
    store.delete_all("nothing/")
    assert list(store.sizes()) == ["d2", "e"]


def test_what_a_killed_write_left_goes_with_its_folder(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("d/a", b"")
    (tmp_path / "d" / ".tmp123").write_bytes(b"half")
    store.delete_all("d/")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_write_left_can_be_taken_away_alone(tmp_path: Path) -> None:
    """Killed for real, in the middle of a write and of an upload."""
    store = FolderStore(tmp_path)
    store.put("model/deep/a", b"whole")
    (tmp_path / "model" / ".lock").touch()
    store.put("other/b", b"whole")
    program = (
        "import os, signal, sys; from pathlib import Path; from dropforge.store import FolderStore\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "store = FolderStore(Path(sys.argv[1]))\n"
        "store.put('model/deep/c', b'half') if sys.argv[2] == 'put' else store.upload(Path(sys.argv[0]), 'model/c')\n"
    )
    (tmp_path / "program.py").write_text(program)
    for how in ("put", "upload"):
        done = subprocess.run([sys.executable, str(tmp_path / "program.py"), str(tmp_path), how], check=False)
        assert done.returncode == -signal.SIGKILL
    assert len([path for path in (tmp_path / "model").rglob("*") if path.is_file()]) == 4
    store.tidy("nothing/")
    store.tidy("model/")
    left = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "model").rglob("*") if path.is_file()}
    assert left == {"model/deep/a", "model/.lock"}


@pytest.mark.parametrize("size", [0, 1, 9_000_000])  # the last one goes to S3 in parts
def test_memory_goes_up_without_a_copy(store: Store, size: int) -> None:
    data = bytearray(bytes(range(251)) * (size // 251 + 1))[:size]
    store.put("a", memoryview(data))
    assert store.get("a") == bytes(data)


@pytest.mark.parametrize("key", ["absent", "present"])
@pytest.mark.parametrize("theirs", [False, True])
def test_a_retry_that_meets_its_own_object_has_written_it(s3_store: S3Store, key: str, theirs: bool) -> None:
    """The answer to the first try is lost, and the second one is told that the key is taken, or changed."""
    s3_store.put("present", b"old")
    info = s3_store.stat("present")
    assert info is not None
    if theirs:
        s3_store.put(key, b"theirs")
    tries = []

    def lose_the_first(request: Any, **_: Any) -> AWSResponse | None:
        tries.append(request.method)
        if len(tries) > 1:
            return None
        if not theirs:
            assert URLLib3Session().send(request).status_code == 200
        return answer_of(request.url, 503)

    s3_store.client.meta.events.register("before-send.s3.PutObject", lose_the_first)
    if key == "absent":
        assert s3_store.put_if_absent(key, b"new") is not theirs
    else:
        assert s3_store.put_if_match(key, b"new", info.etag) is not theirs
    assert tries == ["PUT", "PUT"]


def test_what_cannot_be_reached_is_told_from_what_is_not_there(s3_store: S3Store, tmp_path: Path) -> None:
    with pytest.raises(MissingObjectError) as missing:
        s3_store.get("nothing")
    assert not out_of_reach(missing.value)
    s3_store.client.meta.events.register("before-send.s3.GetObject", lambda request, **_: _refuse())
    with pytest.raises(Exception, match="refused") as away:
        s3_store.get("nothing")
    assert out_of_reach(away.value)
    assert out_of_reach(OSError(errno.EIO, "Input/output error"))
    assert not out_of_reach(ValueError())


def _refuse() -> None:
    raise EndpointConnectionError(endpoint_url="refused")


def test_an_object_that_changed_is_not_read(store: Store) -> None:
    store.put("k", b"one")
    info = store.stat("k")
    assert info is not None
    store.open("k", info.etag).close()
    store.put("k", b"two")
    with pytest.raises(DropforgeError, match="changed"):
        store.open("k", info.etag)


def test_a_full_disk_keeps_no_half_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (FolderStore(tmp_path).put, FolderStore(tmp_path).put_if_absent):
        with pytest.raises(OSError, match="No space left"):
            write("a", b"x")
    assert list(tmp_path.iterdir()) == []


def test_files_go_up_and_come_down(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 100_000)
    store.upload(source, "up/load")
    store.download("up/load", tmp_path / "deep" / "target")
    assert (tmp_path / "deep" / "target").read_bytes() == source.read_bytes()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["target"]


@pytest.mark.parametrize("key", ["../out", "a/../../out", "/etc/out"])
def test_a_folder_store_keeps_to_its_folder(tmp_path: Path, key: str) -> None:
    with pytest.raises(DropforgeError, match="leaves"):
        FolderStore(tmp_path / "store").put(key, b"")


def test_addresses(aws: str, tmp_path: Path) -> None:
    assert open_store("s3://bucket/a/b").uri == "s3://bucket/a/b"
    assert open_store(str(tmp_path)).uri == str(tmp_path)
    assert split_uri("s3://b/runs/r/run.json") == ("s3://b/runs/r", "run.json")


def test_folders_are_named_without_what_lies_in_them(store: Store) -> None:
    for key in ("a/b/c", "a/b/d", "a/e", "f", "a-b/c"):
        store.put(key, b"")
    assert sorted(store.folders()) == ["a", "a-b"]
    assert store.folders("a/") == ("b",)
    assert store.folders("none/") == ()
    assert len(store.folders("", 1)) == 1
    assert store.times("a/", 1).keys() == {"a/b/c"}


def test_a_job_waits_for_an_s3_that_is_away_longer_than_botos_own_retries(
    aws: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_PAUSE", 0.01)
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)
    monkeypatch.setattr(stores, "_PATIENCE", 60)
    monkeypatch.setattr(stores._Patience, "over", False)
    monkeypatch.delenv(stores.PATIENCE, raising=False)

    def tries(first_good: int, status: int | None = None, **hurried: bool) -> int:
        """How many requests a client makes if the first ones are refused, or answered with a status."""
        client, count = s3_client(**hurried), 0

        def refuse(**_: Any) -> AWSResponse | None:
            nonlocal count
            count += 1
            if count < first_good and status is None:
                raise EndpointConnectionError(endpoint_url=aws)
            return answer_of(aws, status) if count < first_good and status else None

        client.meta.events.register("before-send.s3", refuse)
        client.list_buckets()
        return count

    with pytest.raises(EndpointConnectionError):
        tries(20)
    monkeypatch.setenv(stores.PATIENCE, "")
    monkeypatch.delenv(stores.PATIENCE)
    stores.wait_for_s3()
    assert tries(20) == 20
    assert [tries(20, status) for status in (502, 503, 504)] == [20, 20, 20]
    with pytest.raises(ClientError, match="403"):
        tries(20, 403)
    with pytest.raises(EndpointConnectionError):
        tries(20, hurried=True)
    StopSignal()._note(signal.SIGTERM, None)
    with pytest.raises(EndpointConnectionError):  # a pod that is asked to end has no ten minutes
        tries(20)
    monkeypatch.setattr(stores._Patience, "over", False)
    monkeypatch.setenv(stores.PATIENCE, "0.000001")
    with pytest.raises(EndpointConnectionError):
        tries(20)


def test_a_folder_that_is_a_link_out_is_not_tidied(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ".tmp-mine").write_text("somebody's")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(outside)
    with pytest.raises(DataError, match="is a link out of"):
        FolderStore(tmp_path / "run").tidy("model/")
    assert (outside / ".tmp-mine").exists()
