"""A drop: one upload under `drops/FAMILY/DROP/`, complete when its `_SUCCESS` object exists.

The identity is a function of the bytes: the same files again, under whatever name, are the same drop.
Bucket, prefix, version ids and times are provenance.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dropforge import layout
from dropforge.errors import DataError
from dropforge.json_objects import brackets
from dropforge.store import ObjectInfo, Store, TooLargeError, check_not_archived, read_bounded, written_by_others
from dropforge.validation_errors import cause

_ID: Final = re.compile(r"[0-9a-f]{32}")
MAX_FILES: Final = 100_000
"""Files that one drop may have; each is asked for by itself."""
MAX_KEYS: Final = 2 * MAX_FILES
"""Keys below one drop: consoles make one that ends with `/` for each folder."""
_SUCCESS_BYTES: Final = 32 << 20  # enough for as many files with long names
_ENTRY_KEYS: Final = 10  # more than an entry has


class UnfinishedError(DataError):
    """The drop has no `_SUCCESS`: not yet, or not any more."""


class IncompleteError(DataError):
    """Files that `_SUCCESS` lists are not there, or not there yet."""


class DropFile(BaseModel):
    """One file of a drop. `content` names the bytes: `sha256:HEX`, or `etag:TAG` where no checksum is known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    size: int
    content: str
    etag: str
    version_id: str | None = None


class SuccessEntry(BaseModel):
    """One line of a `_SUCCESS` that lists the drop's files."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str
    size: int = Field(ge=0)
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")


class SparkSuccess(NamedTuple):
    """The `_SUCCESS` of Spark's S3A committers. They name the first hundred files alone, so it is no list of all.

    :param paths: as they stand there: from the bucket's root, or with scheme and bucket in front.
    """

    paths: tuple[str, ...]


_SPARK: Final = "org.apache.hadoop.fs.s3a.commit.files.SuccessData/"
_AT_ONCE = 8  # files that are asked for at a time; fewer than a client has connections
_QUEUED = 1000
_NAMED = 5  # of files that are missing
_SHOWN = 200  # characters of a path
_FAULTS = 1000  # wrong entries that are counted
_FAMILIES = 1000  # among which a name is looked for


class Part(BaseModel):
    """One of several drops that a run reads as one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drop: str
    id: str


class Drop(BaseModel):
    """A complete drop, as the ledger keeps it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: str
    drop: str
    id: str
    bucket: str
    files: tuple[DropFile, ...]
    root: str | None = None
    """Where the files lie if they were not uploaded as a drop but named by a recipe (`dropforge.sources`), or uploaded
    to another bucket than that of the ledger."""
    parts: tuple[Part, ...] = ()
    """The uploads that it is made of, if a recipe or a family's window named several."""
    completed: float = 0.0
    """When its `_SUCCESS` was written, as the store tells it (Unix time), see `dropforge.ledger.in_order`; 0 where
    nobody noted it."""
    again: float = 0.0
    """When the same bytes were last uploaded there after others had been, likewise; 0 if they never were."""

    @property
    def prefix(self) -> str:
        return layout.drop_prefix(self.family, self.drop) if self.root is None else self.root

    @property
    def uploaded(self) -> bool:
        """Whether somebody uploaded it as a drop."""
        return self.root in {None, elsewhere(self.bucket, self.family, self.drop)}

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def data_files(self) -> tuple[DropFile, ...]:
        """The files that hold rows."""
        return tuple(file for file in self.files if file.key != layout.RECIPE)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        return cls.model_validate_json(data)

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=1).encode()


def elsewhere(bucket: str, family: str, drop: str) -> str:
    """The address of a drop in another bucket than that of the ledger."""
    return f"s3://{bucket}/{layout.drop_prefix(family, drop)}"


def is_id(text: str) -> bool:
    """Whether this is written as an `identity`."""
    return _ID.fullmatch(text) is not None


def identity(files: Iterable[DropFile]) -> str:
    """The drop's identity: 32 hexadecimal digits over the sorted (relative key, size, content)."""
    lines = sorted((file.key, file.size, file.content) for file in files)
    return hashlib.sha256(json.dumps(lines, ensure_ascii=False).encode()).hexdigest()[:32]


def identity_of_objects(drop: Drop) -> str:
    """The identity of a drop by its very objects: where another one has its `identity`, and not its bytes."""
    objects = [drop.id, *sorted((file.key, file.etag) for file in drop.files)]
    return hashlib.sha256(json.dumps(objects, ensure_ascii=False).encode()).hexdigest()[:32]


def parse_success(data: bytes) -> dict[str, SuccessEntry] | SparkSuccess | None:
    """Read a `_SUCCESS` object: None when it is empty, else its files by relative key, or what Spark wrote.

    :raises DataError: if it is none of these, or Spark says that its job failed.
    """
    if not data.strip():
        return None
    if brackets(data) > 2 * MAX_FILES:  # before they take memory
        raise too_many(layout.SUCCESS, f"it has more than {2 * MAX_FILES:,} brackets")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _no_list(str(error)) from None
    if isinstance(values, dict) and isinstance(name := values.get("name"), str) and name.startswith(_SPARK):
        return _of_spark(values)
    if not isinstance(values, list):
        raise _no_list(f"it is of type {type(values).__name__}")
    if len(values) > MAX_FILES:
        raise too_many(layout.SUCCESS, f"it lists {len(values):,} files")
    entries: dict[str, SuccessEntry] = {}
    first, faults = "", 0
    for number, value in enumerate(values, 1):
        try:
            if isinstance(value, dict) and len(value) > _ENTRY_KEYS:
                raise ValueError(f"it has {len(value):,} keys")
            entry = SuccessEntry.model_validate(value)
            if entries.setdefault(entry.key, entry) != entry:
                raise ValueError(f"key {entry.key!r} appears twice, with other bytes")
        except ValueError as error:
            faults += 1
            first = first or f"entry {number} of {len(values):,}: {fault(error)}"
            if faults == _FAULTS:
                break
    if faults:
        count = f"{_FAULTS:,} or more are wrong" if faults == _FAULTS else f"{faults:,} wrong in total"
        raise _no_list(first if faults == 1 else f"{first}; {count}")
    return entries


def _of_spark(values: dict[str, Any]) -> SparkSuccess:
    """:raises DataError: if the job failed, or its files are no list of texts, or too many."""
    again = f"Run the job again, or write {layout.SUCCESS} empty where all files are there"
    if values.get("success", True) is not True:
        raise DataError(f"{layout.SUCCESS} of Spark", "it says that the job did not succeed", again)
    names = values.get("filenames")
    names = [] if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{layout.SUCCESS} of Spark", "its `filenames` are no list of texts", again)
    if len(names) > MAX_FILES:
        raise too_many(layout.SUCCESS, f"it lists {len(names):,} files")
    return SparkSuccess(tuple(names))


def _keys_of_spark(listed: SparkSuccess, prefix: str, root: str) -> list[str]:
    """Keys of the files that Spark names, relative to the drop.

    :param prefix: of the drop, in the store. :param root: of the store, in its bucket.
    :raises DataError: if one lies elsewhere.
    """
    base = urlsplit(root).path.strip("/") if root.startswith("s3://") else ""
    below = f"{base}/{prefix}".lstrip("/")
    keys: set[str] = set()
    for path in listed.paths:
        _, scheme, address = path.partition("://")
        key = unquote(address.partition("/")[2]) if scheme else path.removeprefix("/")
        if not key.startswith(below) or key == below:
            raise DataError(
                f"{layout.SUCCESS} of Spark",
                f"it names {path[:_SHOWN]!r}, which is not below {below}",
                f"Let the job write there, or write {layout.SUCCESS} empty where its files were copied",
            )
        keys.add(key.removeprefix(below))
    return sorted(keys)


def fault(error: ValueError) -> str:
    """The first fault of an entry, or of an item of `_SUCCESS`, without all of what was given."""
    if not isinstance(error, ValidationError):
        return str(error)
    one = error.errors(include_url=False, include_context=False)[0]
    return f"{'.'.join(map(str, one['loc']))[:80] or 'it'}: {cause(one)}"


def _no_list(why: str) -> DataError:
    return DataError(
        layout.SUCCESS,
        f"it is neither empty nor a JSON list of files with key, size and sha256 ({why})",
        'Write it empty, or as [{"key": "a.jsonl", "size": 12, "sha256": "..."}]',
    )


def too_many(thing: str, cause: str) -> DataError:
    """The error of more files than a drop may have."""
    return DataError(thing, f"{cause}, and a drop has at most {MAX_FILES:,}", "Put the rows into fewer, larger files")


def read_drop(store: Store, family: str, name: str, bucket: str = "", *, suggest: bool = True) -> Drop:
    """Look at a drop in the store and check that it is complete.

    :param suggest: whether the error of one that is not there names the family that was probably meant, which takes
        longer the more families there are.
    :raises UnfinishedError: if there is no `_SUCCESS`. :raises IncompleteError: if listed files are missing.
    :raises DataError: if `_SUCCESS` is broken, a file cannot be read, a listed one has another size or
        checksum, or there is no file with rows.
    """
    prefix = layout.drop_prefix(family, name)
    infos = list(listed_keys(store, prefix))
    found = {info.key.removeprefix(prefix): info for info in infos if not info.key.endswith("/")}
    if len(found) - (layout.SUCCESS in found) > MAX_FILES:  # `_SUCCESS` need not be among so many
        raise too_many(f"drop {family}/{name}", "it has more files than that")
    if len(infos) > MAX_KEYS + 1:
        cause = f"it has more than {MAX_KEYS:,} keys, most of them of folders"
        raise DataError(f"drop {family}/{name}", cause, "Delete the keys that end with `/`, or upload it again")
    success = found.pop(layout.SUCCESS, None)
    if success is None:
        near = near_family(store, family) if suggest and not infos else ""
        raise UnfinishedError(
            f"drop {family}/{name}",
            f"there is no {layout.SUCCESS} yet",
            (f"Did you mean {near}/{name}? Else upload" if near else "Upload")
            + f" {layout.SUCCESS} as its last object",
        )
    thing = f"{layout.SUCCESS} of drop {family}/{name}"
    try:
        with written_by_others(thing):
            told = read_bounded(store, prefix + layout.SUCCESS, _SUCCESS_BYTES)
    except TooLargeError as error:
        raise DataError(thing, error.cause, "Write it empty, or list less") from None
    listed = parse_success(told)
    if isinstance(listed, SparkSuccess):
        entries: dict[str, SuccessEntry] = {}
        named = _keys_of_spark(listed, prefix, store.uri)
    else:
        entries, named = listed or {}, sorted(listed or ())
    if missing := [key for key in named if key not in found]:
        raise IncompleteError(
            f"drop {family}/{name}",
            f"{layout.SUCCESS} lists {_some(missing)}",
            f"Upload what is missing, then {layout.SUCCESS} again",
        )

    names = sorted(listed if isinstance(listed, dict) else found)

    def look(key: str) -> DropFile:
        return drop_file(store, prefix, found[key], key, entries.get(key))

    # One request each, which mostly waits: a listing tells neither checksums nor versions.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        starts = range(0, len(names), _QUEUED)
        files = tuple(file for start in starts for file in pool.map(look, names[start : start + _QUEUED]))
    drop = Drop(family=family, drop=name, id=identity(files), bucket=bucket, files=files, completed=success.modified)
    if not drop.data_files:
        raise DataError(
            f"drop {family}/{name}", "it holds no file with rows", f"Upload the data before {layout.SUCCESS}"
        )
    return drop


def near_family(store: Store, family: str) -> str:
    """The family with drops whose name is nearest to one that has none; empty if it has some, or no name is near."""
    with suppress(Exception):  # who may not list other families gets no hint
        if not store.folders(layout.family_prefix(family), 1):
            known = store.folders(layout.DROPS, _FAMILIES)
            return next(iter(difflib.get_close_matches(family, known, 1)), "")
    return ""


def listed_keys(store: Store, prefix: str) -> Iterator[ObjectInfo]:
    """Yield the keys below a drop's prefix, `_SUCCESS` among them, and one more than a drop may have at most."""
    return islice(store.list(prefix), MAX_KEYS + 2)


def drop_file(store: Store, prefix: str, info: ObjectInfo, key: str, entry: SuccessEntry | None) -> DropFile:
    """The object as it is now. :raises DataError: if it is not what `entry` promises, or cannot be read."""
    with written_by_others(f"file {key!r} of {prefix}"):
        head = store.stat(prefix + key) or info
    check_not_archived(head, f"file {key!r} of {prefix}")
    checksum = base64.b64decode(head.sha256).hex() if head.sha256 and "-" not in head.sha256 else None
    if entry is not None and (entry.size != head.size or (checksum and entry.sha256 not in {None, checksum})):
        raise DataError(
            f"file {key!r} of the drop",
            f"{layout.SUCCESS} promises {entry.size} bytes and {entry.sha256 or 'no checksum'},"
            f" the object has {head.size} and {checksum or 'no checksum'}",
            f"Upload the file again, then {layout.SUCCESS}",
        )
    known = (entry.sha256 if entry else None) or checksum
    content = f"sha256:{known}" if known else f"etag:{head.etag}"
    return DropFile(key=key, size=head.size, content=content, etag=head.etag, version_id=head.version_id)


def _some(missing: list[str]) -> str:
    if len(missing) == 1:
        return f"{missing[0]!r}, which is not there"
    named = ", ".join(map(repr, missing[:_NAMED]))
    return f"{len(missing)} files that are not there: {named}{', ...' if len(missing) > _NAMED else ''}"


def partition_key(bucket_alias: str, drop: Drop) -> str:
    """The key of the drop's partition event: `BUCKET_ALIAS/FAMILY/DROP/ID`."""
    return f"{bucket_alias}/{drop.family}/{drop.drop}/{drop.id}"


def parse_partition_key(key: str) -> Mapping[str, Any]:
    """:raises DataError: if `key` is not a drop's partition key."""
    parts = key.split("/")
    if len(parts) != 4:
        raise DataError(f"partition key {key!r}", "it is not BUCKET/FAMILY/DROP/ID", "Start the run from a drop")
    return {"bucket_alias": parts[0], "family": parts[1], "drop": parts[2], "id": parts[3]}
