"""A drop's identity is its bytes; it is complete when `_SUCCESS` says so truthfully."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier

import pytest

from dropforge import layout
from dropforge.drop import (
    MAX_FILES,
    Drop,
    IncompleteError,
    parse_partition_key,
    parse_success,
    partition_key,
    read_drop,
)
from dropforge.errors import DataError
from dropforge.store import FolderStore, ObjectInfo, S3Store, Store


def put(store: Store, name: str, files: dict[str, bytes], listed: bool = True, family: str = "fam") -> Drop:
    prefix = layout.drop_prefix(family, name)
    for key, data in files.items():
        store.put(prefix + key, data)
    entries = [
        {"key": key, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for key, data in files.items()
    ]
    store.put(prefix + layout.SUCCESS, json.dumps(entries).encode() if listed else b"")
    return read_drop(store, family, name, "bucket")


@pytest.mark.parametrize("listed", [True, False])
def test_the_same_bytes_under_another_name_are_the_same_drop(store: Store, listed: bool) -> None:
    one = put(store, "one", {"a.jsonl": b"1", "sub/b.csv": b"2"}, listed)
    two = put(store, "two", {"sub/b.csv": b"2", "a.jsonl": b"1"}, listed)
    assert one.id == two.id
    assert put(store, "three", {"a.jsonl": b"1", "sub/b.csv": b"3"}, listed).id != one.id
    assert put(store, "four", {"renamed.jsonl": b"1", "sub/b.csv": b"2"}, listed).id != one.id


def test_s3_s_own_checksum_is_identity(s3_store: S3Store) -> None:
    prefix = layout.drop_prefix("fam", "d")
    s3_store.client.put_object(Bucket=s3_store.bucket, Key=prefix + "a.jsonl", Body=b"1", ChecksumAlgorithm="SHA256")
    s3_store.put(prefix + layout.SUCCESS, b"")
    assert read_drop(s3_store, "fam", "d").files[0].content == "sha256:" + hashlib.sha256(b"1").hexdigest()


def test_a_drop_without_success_is_incomplete(store: Store) -> None:
    store.put(layout.drop_prefix("fam", "d") + "a.jsonl", b"1")
    with pytest.raises(DataError, match="there is no _SUCCESS yet"):
        read_drop(store, "fam", "d")


def test_files_are_asked_for_together_and_the_first_wrong_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, prefix = FolderStore(tmp_path), layout.drop_prefix("fam", "d")
    names = [f"{number}.jsonl" for number in range(8)]
    for name in names:
        store.put(prefix + name, b"1")
    store.put(prefix + layout.SUCCESS, b"")
    together, stat = Barrier(len(names), timeout=30), store.stat

    def meet(key: str) -> ObjectInfo | None:
        together.wait()  # for good, if they were asked for one after the other
        return stat(key)

    monkeypatch.setattr(store, "stat", meet)
    assert [file.key for file in read_drop(store, "fam", "d").files] == names
    store.put(prefix + layout.SUCCESS, json.dumps([{"key": name, "size": 9} for name in names]).encode())
    with pytest.raises(DataError, match=r"file '0.jsonl' of the drop: _SUCCESS promises 9 bytes"):
        read_drop(store, "fam", "d")


def test_a_listed_file_that_is_missing_is_named(store: Store) -> None:
    prefix = layout.drop_prefix("fam", "d")
    store.put(prefix + layout.SUCCESS, json.dumps([{"key": "late.jsonl", "size": 1}]).encode())
    with pytest.raises(DataError, match=r"lists 'late.jsonl', which is not there"):
        read_drop(store, "fam", "d")


def test_a_file_of_another_size_is_half_an_upload(store: Store) -> None:
    prefix = layout.drop_prefix("fam", "d")
    store.put(prefix + "a.jsonl", b"123")
    store.put(prefix + layout.SUCCESS, json.dumps([{"key": "a.jsonl", "size": 9}]).encode())
    with pytest.raises(DataError, match="promises 9 bytes"):
        read_drop(store, "fam", "d")


def test_a_drop_of_nothing_is_refused(store: Store) -> None:
    with pytest.raises(DataError, match="no file with rows"):
        put(store, "d", {"recipe.yaml": b"extends: tiny"})


@pytest.mark.parametrize("text", [b"{}", b"[1]", b"nope", b'[{"key": "a"}]', b'[{"key": "a", "size": -1}]', b"\xff"])
def test_a_broken_success_is_refused(text: bytes) -> None:
    with pytest.raises(DataError, match="neither empty nor a JSON list"):
        parse_success(text)


def test_a_success_of_a_million_wrong_entries_is_refused_in_a_few_words(store: Store) -> None:
    prefix = layout.drop_prefix("fam", "d")
    store.put(prefix + "a.jsonl", b"1")
    many = json.dumps([{"key": "a" * 1000}, *([1] * (MAX_FILES - 1))]).encode()
    for text, cause in {
        b"[" + b"1," * 1_000_000 + b"1]": r"lists 1,000,001 files, and a drop has at most 100,000",
        many: r"entry 1 of 100,000: size: it is missing; 1,000 or more are wrong",
        b'[{"key": "a.jsonl", "size": 1}, {"key": "a.jsonl", "size": 2}]': r"key 'a.jsonl' appears twice, with other",
        b"[" * 100_000: "neither empty nor a JSON list",
        b"[" + b'{"":1},' * 1_000_000 + b"1]": "more than 200,000 brackets, and a drop has at most 100,000",
        b"[{" + b",".join(b'"%d":1' % number for number in range(200_000)) + b"}]": "it has 200,000 keys",
        b'[{"' + b"k" * 100_000 + b'": 1, "key": "a", "size": 1}]': "it is unknown",
        b'[{"key": "a.jsonl", "size": 1' + b"0" * 5000 + b"}]": "neither empty nor a JSON list",
        b" " * (32 << 20) + b"[]": r"_SUCCESS of drop fam/d: it has more than 33,554,432 bytes",
    }.items():
        store.put(prefix + layout.SUCCESS, text)
        with pytest.raises(DataError, match=cause) as caught:
            read_drop(store, "fam", "d")
        assert len(str(caught.value)) < 1000


def test_a_drop_of_more_files_than_may_be_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropforge.drop.MAX_FILES", 2)
    assert len(put(store, "d", {"a.jsonl": b"1", "b.jsonl": b"2"}).files) == 2
    with pytest.raises(DataError, match="more files than that, and a drop has at most 2"):
        put(store, "d", {"c.jsonl": b"1"}, listed=False)
    with pytest.raises(DataError, match="more files than that"):  # of which `_SUCCESS` is not among the first
        put(store, "e", {f"{number}.jsonl": b"1" for number in range(8)}, listed=False)


def test_a_drop_s_folders_are_listed_to_a_bound(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropforge.drop.MAX_FILES", 2)
    monkeypatch.setattr("dropforge.drop.MAX_KEYS", 4)
    put(store, "d", {"a.jsonl": b"1", "b.jsonl": b"2"})
    files, folders, listed = list(store.list(layout.drop_prefix("fam", "d"))), 2, 0

    def keys(prefix: str) -> Iterator[ObjectInfo]:
        nonlocal listed
        for info in [*(ObjectInfo(f"{prefix}{number}/", 0, "e") for number in range(folders)), *files]:
            listed += 1
            yield info

    monkeypatch.setattr(store, "list", keys)
    assert len(read_drop(store, "fam", "d").files) == 2
    folders, listed = 100, 0
    with pytest.raises(DataError, match=r"fam/d: it has more than 4 keys, most of them of folders.*end with `/`"):
        read_drop(store, "fam", "d")
    assert listed == 6


def test_an_empty_success_lists_nothing() -> None:
    assert parse_success(b" \n") is None


def test_partition_keys_there_and_back(store: Store) -> None:
    drop = put(store, "d", {"a.jsonl": b"1"})
    key = partition_key("alias", drop)
    assert parse_partition_key(key) == {"bucket_alias": "alias", "family": "fam", "drop": "d", "id": drop.id}
    assert len(partition_key("b" * 63, drop.model_copy(update={"family": "f" * 40, "drop": "d" * 100}))) <= 250
    with pytest.raises(DataError):
        parse_partition_key("a/b")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("drops/f/d/a.jsonl", (("f", "d"), "a.jsonl")),
        ("drops/f/d/sub/a", (("f", "d"), "sub/a")),
        ("drops/f/d/", None),
        ("drops/f/a.jsonl", None),
        ("datasets/f/d/a", None),
        ("drops/../d/a", None),
        ("drops/F/d/a", None),
        ("", None),
    ],
)
def test_keys_are_taken_apart(key: str, expected: object) -> None:
    assert layout.parse_drop_key(key) == expected


@pytest.mark.parametrize("name", ["", "-a", "A", "a/b", "a" * 41, "ä", "a b", "a."])
def test_bad_family_names_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="family"):
        layout.check_family(name)


def spark(*names: object, **more: object) -> bytes:
    """What the S3A committers write."""
    values = {
        "name": "org.apache.hadoop.fs.s3a.commit.files.SuccessData/1",
        "timestamp": 1700000000000,
        "committer": "magic",
        "success": True,
        "metrics": {"stream_write_block_uploads": 0},
        "diagnostics": {"fs.s3a.committer.magic.enabled": "true"},
        "filenames": list(names),
    }
    return json.dumps(values | more).encode()


@pytest.mark.parametrize(
    "text",
    [
        spark("/drops/fam/d/a.jsonl"),
        spark("drops/fam/d/a.jsonl", "/drops/fam/d/day=2026-01-01/b%20c.jsonl"),
        spark("s3a://bucket/drops/fam/d/day%3D2026-01-01/b%2520c.jsonl"),
        spark(),
        spark(filenames=None),
        spark("/drops/fam/d/a.jsonl", success=True, jobId="1b2c", iostatistics={"counters": {}}),
        json.dumps({"name": "org.apache.hadoop.fs.s3a.commit.files.SuccessData/1"}).encode(),
    ],
)
def test_spark_s_success_is_an_end_mark_and_no_list_of_all(store: Store, text: bytes) -> None:
    prefix = layout.drop_prefix("fam", "d")
    for key in ("a.jsonl", "day=2026-01-01/b%20c.jsonl", "more.jsonl"):
        store.put(prefix + key, b"1")
    store.put(prefix + layout.SUCCESS, text)
    drop = read_drop(store, "fam", "d")
    assert [file.key for file in drop.files] == ["a.jsonl", "day=2026-01-01/b%20c.jsonl", "more.jsonl"]
    store.put(prefix + layout.SUCCESS, b"")
    assert read_drop(store, "fam", "d").id == drop.id


def test_spark_names_files_from_the_bucket_s_root(s3_store: S3Store) -> None:
    below = S3Store(s3_store.bucket, "team", s3_store.client)
    below.put(layout.drop_prefix("fam", "d") + "a.jsonl", b"1")
    below.put(layout.drop_prefix("fam", "d") + layout.SUCCESS, spark("/team/drops/fam/d/a.jsonl"))
    assert [file.key for file in read_drop(below, "fam", "d").files] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("text", "error", "cause"),
    [
        (spark("/drops/fam/d/late.jsonl"), IncompleteError, r"_SUCCESS lists 'late.jsonl', which is not there"),
        (spark("/drops/fam/d/"), DataError, r"names '/drops/fam/d/', which is not below drops/fam/d/"),
        (spark("/lake/part-0.jsonl"), DataError, r"names '/lake/part-0.jsonl', which is not .* empty where"),
        (spark("/drops/fam/d2/a.jsonl"), DataError, "is not below drops/fam/d/"),
        (spark("s3a://[/drops/fam/x/a.jsonl" + "y" * 10**6), DataError, "is not below drops/fam/d/"),
        (spark("/drops/fam/d/a.jsonl", success=False), DataError, "the job did not succeed.*Run the job again"),
        (spark(success="no"), DataError, "the job did not succeed"),
        (spark("/drops/fam/d/a.jsonl", 1), DataError, "`filenames` are no list of texts"),
        (spark(filenames={"a": 1}), DataError, "`filenames` are no list of texts"),
        (b'{"name": ' + b"1" * 4000 + b"}", DataError, "neither empty nor a JSON list"),
        (b'{"name": "org.apache.hadoop.fs.s3a.commit.files.PendingSet/1"}', DataError, "neither empty nor a JSON"),
    ],
)
def test_what_spark_says_is_held_to(store: Store, text: bytes, error: type[DataError], cause: str) -> None:
    prefix = layout.drop_prefix("fam", "d")
    store.put(prefix + "a.jsonl", b"1")
    store.put(prefix + layout.SUCCESS, text)
    with pytest.raises(error, match=cause) as caught:
        read_drop(store, "fam", "d")
    assert type(caught.value) is error
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("name", "cause"), [("x", "lists 1,000,000 files, and a drop"), (["x"], "more than 200,000 brackets, and a drop")]
)
def test_a_million_names_of_spark_are_refused_in_a_few_words(name: object, cause: str) -> None:
    with pytest.raises(DataError, match=cause) as caught:
        parse_success(spark(*[name] * 10**6))
    assert len(str(caught.value)) < 1000
