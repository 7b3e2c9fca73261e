"""Object storage behind one small interface: S3, or a folder that behaves like it.

The trainer must run from a local `run.json` without boto3, so boto3 is imported only for `s3://` addresses.
Credentials and the endpoint come from the environment (`AWS_*`, `AWS_ENDPOINT_URL`), never from arguments.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol, cast
from urllib.parse import urlsplit

from dropforge.errors import DataError, DropforgeError
from dropforge.memory_file import MemoryFile
from dropforge.whole_file import naming

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

log = logging.getLogger(__name__)

PATIENCE: Final = "DROPFORGE_S3_PATIENCE"  # environment variable, in seconds
_PATIENCE: Final = 600
_PAUSE: Final = 5.0  # seconds
_AWAY: Final = frozenset({502, 503, 504})  # answers of what stands before an S3 that is away
_S3: Final = "s3://"
_UNFINISHED: Final = ".tmp-"  # how the name of a file begins that is being written
#: What S3 says for good of a place, in its words and in those of answers without a body.
LASTING: Final = frozenset(
    {"403", "AccessDenied", "AllAccessDisabled", "Forbidden", "InvalidBucketName", "NoSuchBucket", "PermanentRedirect"}
)
#: What it says of who asks, when or how often, whatever the object is; see also `why_unreadable`.
_OF_THE_ASKER: Final = frozenset(
    {
        "AccountProblem",
        "AllAccessDisabled",
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidBucketName",
        "InvalidSecurity",
        "InvalidToken",
        "KMS.ThrottlingException",
        "NoSuchBucket",
        "NotSignedUp",
        "PermanentRedirect",
        "RequestExpired",
        "RequestLimitExceeded",
        "RequestTimeTooSkewed",
        "RequestTimeout",
        "SignatureDoesNotMatch",
        "SlowDown",
        "TemporaryRedirect",
        "Throttling",
        "ThrottlingException",
        "TokenRefreshRequired",
        "TooManyRequests",
        "UnrecognizedClientException",
    }
)
_ARCHIVES: Final = frozenset({"GLACIER", "DEEP_ARCHIVE"})  # storage classes whose objects are not given at once
_ARCHIVED: Final = (
    "it is archived (storage class GLACIER, for example), from which S3 gives nothing at once",
    "Upload it again with storage class STANDARD, or restore it first",
)


class MissingObjectError(DropforgeError, KeyError):
    """The object is not there."""

    def __init__(self, uri: str) -> None:
        DropforgeError.__init__(self, uri, "there is no such object", "Check the address and the bucket")

    def __reduce__(self) -> Any:
        return type(self), (self.thing,)

    __str__ = Exception.__str__


class TooLargeError(DropforgeError):
    """The object is larger than anything of its kind may be."""


class ChangedObjectError(DropforgeError):
    """The object is another than it was when it was looked for."""


@dataclass(frozen=True)
class ObjectInfo:
    """An object's key (relative to the store), size in bytes and entity tag (no quotes).

    :param modified: when it was written, in seconds since 1970; 0 where nobody says.
    :param archived: whether `stat` found it where nobody can read it before it is restored.
    """

    key: str
    size: int
    etag: str
    version_id: str | None = None
    sha256: str | None = None
    modified: float = field(default=0.0, compare=False)
    archived: bool = field(default=False, compare=False)


class Store(Protocol):
    """Objects under one root; keys are relative and use `/`."""

    uri: str

    def get(self, key: str) -> bytes:
        """Read a whole object. :raises MissingObjectError: if it is not there."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object of any size, replacing what is there."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless the key is taken; False means that somebody else was first."""

    def put_if_match(self, key: str, data: bytes, etag: str) -> bool:
        """Replace the object whose tag is `etag`; False means that it has changed or is gone."""

    def stat(self, key: str) -> ObjectInfo | None:
        """What is known of an object without reading it; None if it is not there."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Objects whose keys start with `prefix`, in the order of their keys' UTF-8 bytes."""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Size in bytes of each object whose key starts with `prefix`; cheaper than `list`, which knows contents."""

    def times(self, prefix: str = "", most: int | None = None) -> dict[str, float]:
        """When each object whose key starts with `prefix` was written, in seconds since 1970; as cheap as `sizes`.

        :param most: how many keys are listed, the first in their order; None for all.
        """

    def folders(self, prefix: str = "", most: int | None = None) -> tuple[str, ...]:
        """Names of the folders right below a folder, its `/` included; what lies in them is not listed."""

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""

    def delete_all(self, prefix: str) -> None:
        """Remove every object whose key starts with `prefix`, a folder with its `/`, and what a killed write left."""

    def tidy(self, prefix: str) -> None:
        """Remove what killed writes left below a folder, its `/` included; only while nobody writes there."""

    def open(self, key: str, etag: str | None = None, version: str | None = None) -> BinaryIO:
        """Open an object as a stream of bytes; with `etag`, fail if it changed since it was listed.

        :param version: the id of the version that was listed, in a bucket that keeps old ones; it is read if the object
            was replaced or deleted since.
        :raises MissingObjectError: if it is not there. :raises ChangedObjectError: if its tag is another.
        """

    def upload(self, path: Path, key: str) -> None:
        """Copy a local file into the store."""

    def download(self, key: str, path: Path, etag: str | None = None) -> None:
        """Copy an object to a local file, which appears whole or not at all; with `etag`, fail if it is another now."""


def read_bounded(store: Store, key: str, most: int, etag: str | None = None) -> bytes:
    """Read an object that strangers may have written.

    :param most: bytes that are read of it. :param etag: as of `Store.open`.
    :raises TooLargeError: if it has more. :raises MissingObjectError: if it is not there.
    """
    with store.open(key, etag) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise TooLargeError(f"object {key}", f"it has more than {most:,} bytes", "Replace it by a smaller one")
    return data


def split_uri(uri: str) -> tuple[str, str]:
    """Split `s3://bucket/a/b/file` or `/a/b/file` into (store root, key of the last part)."""
    root, _, key = uri.rpartition("/")
    return root, key


def open_store(uri: str, *, hurried: bool = False) -> Store:
    """Open the store at `s3://bucket[/prefix]`, `file:///folder` or a plain path.

    :param hurried: give up soon; for those who try again themselves.
    """
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        return S3Store(parts.netloc, parts.path.strip("/"), s3_client(hurried=hurried))
    return FolderStore(Path(parts.path if parts.scheme == "file" else uri))


def s3_client(*, hurried: bool = False) -> S3Client:
    """A boto3 client for the endpoint of the environment, with bounded time-outs and retries; few if `hurried`."""
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=3 if hurried else 10,
        read_timeout=20 if hurried else 60,
        retries={"mode": "standard", "max_attempts": 1 if hurried else 6},
        # Path style: an own S3 on 127.0.0.1 has no bucket subdomains.
        s3={"addressing_style": "path"} if os.environ.get("AWS_ENDPOINT_URL") else {},
    )
    # Not the default session: that one keeps the credentials it saw first, whatever the environment says now.
    client = boto3.session.Session().client("s3", config=config)
    if not hurried and (seconds := float(os.environ.get(PATIENCE) or 0)) > 0:
        client.meta.events.register("needs-retry.s3", cast(Any, _Patience(seconds)))
    return client


def wait_for_s3() -> None:
    """Have this process, and those that it starts, wait for an S3 that is away for some minutes.

    For jobs, which would end and begin anew; a person at a terminal is told at once. The environment may say how long.
    """
    os.environ.setdefault(PATIENCE, str(_PATIENCE))


def wait_no_longer() -> None:
    """From now on give up on an S3 that is away as soon as botocore does: this process was asked to end."""
    _Patience.over = True


class _Patience:
    """A handler of botocore: repeats a request that nobody answers, or only what stands before S3 does. Its own
    retries are over after seconds."""

    over = False

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(
        self,
        request_dict: dict[str, Any],
        response: tuple[Any, Any] | None = None,
        caught_exception: Exception | None = None,
        **_: Any,
    ) -> float | None:
        """Seconds until the next try; None for no other one."""
        from botocore.exceptions import ConnectionError as Unreached
        from botocore.exceptions import HTTPClientError, SSLError

        status = None if response is None else response[0].status_code
        unreached = isinstance(caught_exception, Unreached | HTTPClientError)
        if status not in _AWAY and (not unreached or isinstance(caught_exception, SSLError)):
            return None
        now = time.monotonic()
        if "dropforge_away_since" not in request_dict["context"]:
            why = caught_exception or f"HTTP {status}"
            log.warning("S3 does not answer, it is waited for up to %.0f s: %s", self._seconds, why)
        began: float = request_dict["context"].setdefault("dropforge_away_since", now)
        return _PAUSE if now - began < self._seconds and not _Patience.over else None


#: What to do where something else answers in the place of S3.
NO_S3: Final = "Look what answers there: AWS_ENDPOINT_URL names it"
_LISTED: Final = {"Key", "Size", "ETag", "LastModified"}


class S3Store:
    """A bucket, or a prefix of one, through boto3. `open` and `stat` take addresses in other buckets too."""

    def __init__(self, bucket: str, prefix: str = "", client: S3Client | None = None) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self.client = client or s3_client()

    def get(self, key: str) -> bytes:
        with self.open(key) as stream:
            return stream.read()

    def put(self, key: str, data: bytes | memoryview) -> None:
        if isinstance(data, memoryview):
            # In parts, and without a copy: one request takes no more than 5 GB.
            self._upload(
                lambda: self.client.upload_fileobj(cast(BinaryIO, MemoryFile(data)), self.bucket, self.prefix + key)
            )
        else:
            self.client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._put_when(key, data, {"IfNoneMatch": "*"})

    def put_if_match(self, key: str, data: bytes, etag: str) -> bool:
        return self._put_when(key, data, {"IfMatch": etag})

    def _put_when(self, key: str, data: bytes, condition: dict[str, str]) -> bool:
        from botocore.exceptions import ClientError

        try:
            self.client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=data, **cast(Any, condition))
        except ClientError as error:
            if error_code(error) in {
                "PreconditionFailed",
                "ConditionalRequestConflict",
                "NoSuchKey",
                "412",
                "409",
                "404",
            }:
                # The answer to a first try may have been lost on the way, and then the retry meets our own object.
                again = error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0)
                return bool(again) and self._holds(key, data)
            raise
        return True

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key) == data
        except MissingObjectError:
            return False

    def stat(self, key: str) -> ObjectInfo | None:
        from botocore.exceptions import ClientError

        try:
            head = self.client.head_object(**self._at(key), ChecksumMode="ENABLED")
        except ClientError as error:
            if error_code(error) in {"404", "NoSuchKey", "NotFound"}:
                return None
            if error_code(error) in {"400", "403"}:
                # An answer to HEAD has no body that says why: of this object, or of who asks.
                self._opened(key, {"Range": "bytes=0-0"}).close()
            raise
        except ValueError as error:
            raise self._strange("object", error) from error
        try:
            return ObjectInfo(
                key,
                head["ContentLength"],
                head["ETag"].strip('"'),
                head.get("VersionId"),
                head.get("ChecksumSHA256"),
                head["LastModified"].timestamp(),
                _is_archived(head),
            )
        except KeyError as error:
            raise self._strange("object", error) from error

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for item in self._items(prefix):
            key, modified = item["Key"].removeprefix(self.prefix), item["LastModified"].timestamp()
            yield ObjectInfo(key, item["Size"], item["ETag"].strip('"'), modified=modified)

    def _items(self, prefix: str) -> Iterator[Any]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix + prefix)
        try:
            for page in pages:
                for item in page.get("Contents", []):
                    if not item.keys() >= _LISTED:
                        raise KeyError(*sorted(_LISTED - item.keys()))
                    yield item
        except (KeyError, ValueError) as error:
            raise self._strange("listing", error) from error

    def _strange(self, what: str, error: Exception) -> DropforgeError:
        return DropforgeError(f"bucket {self.bucket}", f"S3 answers no {what} ({error!r:.200})", NO_S3)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return {item.key: item.size for item in self.list(prefix)}

    def times(self, prefix: str = "", most: int | None = None) -> dict[str, float]:
        found = islice(self._items(prefix), most)
        return {item["Key"].removeprefix(self.prefix): item["LastModified"].timestamp() for item in found}

    def folders(self, prefix: str = "", most: int | None = None) -> tuple[str, ...]:
        start = self.prefix + prefix
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=start, Delimiter="/")
        found = (str(item["Prefix"]) for page in pages for item in page.get("CommonPrefixes", []))
        return tuple(name.removeprefix(start).rstrip("/") for name in islice(found, most))

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=self.prefix + key)

    def delete_all(self, prefix: str) -> None:
        for key in self.sizes(prefix):
            self.delete(key)

    def tidy(self, prefix: str) -> None:
        """An object appears whole or not at all; uploads in parts that never ended are the bucket's rules to remove."""

    def open(self, key: str, etag: str | None = None, version: str | None = None) -> BinaryIO:
        from botocore.exceptions import ClientError

        condition: dict[str, str] = {"IfMatch": etag} if etag else {}
        try:
            return self._opened(key, condition)
        except ClientError as error:
            absent = error_code(error) in {"404", "NoSuchKey", "NotFound"}
            if not absent and error_code(error) not in {"412", "PreconditionFailed"}:
                raise
        if version is not None:
            try:
                # Asked for only now, because it takes a right of its own (`s3:GetObjectVersion`).
                return self._opened(key, {**condition, "VersionId": version})
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500:
                    raise
        uri = key if key.startswith(_S3) else f"{self.uri}/{key}"
        raise MissingObjectError(uri) if absent else _changed(uri)

    def _at(self, key: str) -> Any:
        """The place of an object: of this store by its key, of any other by its address."""
        if not key.startswith(_S3):
            return {"Bucket": self.bucket, "Key": self.prefix + key}
        bucket, _, elsewhere = key.removeprefix(_S3).partition("/")
        return {"Bucket": bucket, "Key": elsewhere}

    def _opened(self, key: str, condition: dict[str, str]) -> BinaryIO:
        try:
            answer = self.client.get_object(**self._at(key), **cast(Any, condition))
        except ValueError as error:  # a header that botocore cannot read
            raise self._strange("object", error) from error
        return cast(BinaryIO, answer["Body"])

    def upload(self, path: Path, key: str) -> None:
        self._upload(lambda: self.client.upload_file(str(path), self.bucket, self.prefix + key))

    def _upload(self, send: Callable[[], None]) -> None:
        from boto3.exceptions import S3UploadFailedError
        from botocore.exceptions import ClientError

        try:
            send()
        except (S3UploadFailedError, ClientError) as error:
            # A store that was started again has forgotten the parts of an open upload: once more, from the beginning.
            if "NoSuchUpload" not in str(error):
                raise
            send()

    def download(self, key: str, path: Path, etag: str | None = None) -> None:
        _save(self.open(key, etag), path)


class FolderStore:
    """A folder with the same promises, for runs without S3 and for tests."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.uri = str(self.root)

    def _path(self, key: str) -> Path:
        path = self.root / key
        if ".." in Path(key).parts or Path(key).is_absolute():
            raise DropforgeError(f"key {key!r}", "it leaves the store's folder", "Use a relative key without `..`")
        self._check_inside(path if path == self.root else path.parent)
        return path

    def _check_inside(self, path: Path) -> None:
        """:raises DataError: if a path is a link out of the folder, or goes through one."""
        root, real = os.path.realpath(self.root), os.path.realpath(path)
        if real != root and not real.startswith(f"{root.rstrip('/')}/"):
            kind = "file" if path.is_file() else "folder"
            raise DataError(f"{kind} {str(path)!r}", f"it is a link out of {self.root}", f"Put the {kind} itself there")

    def get(self, key: str) -> bytes:
        with self.open(key) as stream:
            return stream.read()

    def put(self, key: str, data: bytes | memoryview) -> None:
        path = self._path(key)
        temporary = _temporary(path, data)
        temporary.replace(path)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        temporary = _temporary(path, data)
        try:
            os.link(temporary, path)  # atomic, and fails if the name is taken
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        sync_folder(path.parent)  # a manifest must not outlive a power cut that its files' names did not
        return True

    def put_if_match(self, key: str, data: bytes, etag: str) -> bool:
        import fcntl

        path = self._path(key)
        if not path.is_file():
            return False
        # Not through a link, which somebody else may have put there.
        handle = os.open(path.parent / ".lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with os.fdopen(handle, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _etag(path) != etag:
                return False
            _temporary(path, data).replace(path)
        return True

    def stat(self, key: str) -> ObjectInfo | None:
        path = self._path(key)
        if path.is_symlink():
            self._check_inside(path)
        return _info(key, path) if path.is_file() else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for key in self._keys(prefix):
            yield _info(key, self.root / key)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return {key: (self.root / key).stat().st_size for key in self._keys(prefix)}

    def times(self, prefix: str = "", most: int | None = None) -> dict[str, float]:
        return {key: (self.root / key).stat().st_mtime for key in self._keys(prefix)[:most]}

    def folders(self, prefix: str = "", most: int | None = None) -> tuple[str, ...]:
        names = {key.removeprefix(prefix).partition("/")[0] for key in self._keys(prefix) if "/" in key[len(prefix) :]}
        return tuple(sorted(names, key=str.encode))[:most]

    def _keys(self, prefix: str) -> tuple[str, ...]:
        base = self._path(prefix.rpartition("/")[0])
        self._check_inside(base)
        keys = (
            path.relative_to(self.root).as_posix()
            for path in base.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        )
        return tuple(sorted((key for key in keys if key.startswith(prefix)), key=str.encode))

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def delete_all(self, prefix: str) -> None:
        for key in self._keys(prefix):
            self.delete(key)
        if prefix.endswith("/"):
            shutil.rmtree(self._path(prefix), ignore_errors=True)

    def tidy(self, prefix: str) -> None:
        base = self._path(prefix)
        self._check_inside(base)
        for path in base.rglob(f"{_UNFINISHED}*"):
            path.unlink(missing_ok=True)

    def open(self, key: str, etag: str | None = None, version: str | None = None) -> BinaryIO:  # noqa: ARG002
        path = self._path(key)
        if not path.is_file():
            raise MissingObjectError(f"{self.uri}/{key}")
        if path.is_symlink():
            self._check_inside(path)
        if etag and _etag(path) != etag:
            raise _changed(f"{self.uri}/{key}")
        return path.open("rb")

    def upload(self, path: Path, key: str) -> None:
        target = self._path(key)
        with path.open("rb") as stream, naming(target):
            _save(stream, target)

    def download(self, key: str, path: Path, etag: str | None = None) -> None:
        _save(self.open(key, etag), path)


def out_of_reach(error: BaseException) -> bool:
    """Whether an error of a store means that it could not be read or written now: nothing is known of the object."""
    if isinstance(error, OSError):
        return not isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
    return of_client(error)


def of_client(error: BaseException) -> bool:
    """Whether an error is one of S3's client, and so of no disk here; its time-outs are `OSError`s too."""
    return type(error).__module__.partition(".")[0] in ("botocore", "boto3", "s3transfer", "urllib3")


def error_code(error: Any) -> str:
    """What S3 calls an error of boto3's, as `NoSuchBucket`; empty if it does not say."""
    return str(error.response.get("Error", {}).get("Code", ""))


def why_unreadable(error: BaseException) -> tuple[str, str] | None:
    """Tell why S3 does not give an object, whoever tries again, and the mend; None for an error of another kind.

    Whoever writes an object decides about its storage class, its encryption and its rights.
    """
    answer = getattr(error, "response", None)
    if not isinstance(answer, dict) or not of_client(error):
        return None
    code, told = error_code(error), str(answer.get("Error", {}).get("Message", ""))
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    # A code in digits is an answer without a body, perhaps of something that stands before S3.
    if not 400 <= status < 500 or not code or code.isdecimal() or code in _OF_THE_ASKER:
        return None
    if code == "InvalidObjectState":
        return _ARCHIVED
    if code.startswith("KMS.") or (code == "InvalidRequest" and "ncrypt" in told):
        return (
            f"it is encrypted with a key that this installation cannot use ({code})",
            "Upload it again with the bucket's own encryption",
        )
    if code == "AccessDenied":
        return (
            "the credentials of this installation may read neither it nor what its encryption key protects"
            " (AccessDenied)",
            "Upload it again as the other objects of its bucket are, or give them the right",
        )
    return f"S3 does not give it ({code}: {told})", "Upload it again, without headers of its own"


@contextmanager
def written_by_others(thing: str) -> Iterator[None]:
    """Hold what S3 says for good of an object against who wrote it; for reads of what uploaders and recipes name.

    Not of what the installation wrote: whether a checkpoint is broken hangs on the error's kind.

    :raises DataError: naming the thing, if it will never be given as it is.
    """
    try:
        yield
    except Exception as error:
        if (why := why_unreadable(error)) is None:
            raise
        raise DataError(thing, *why) from error


def check_not_archived(info: ObjectInfo, thing: str) -> None:
    """:raises DataError: naming the thing, if its object lies in an archive."""
    if info.archived:
        raise DataError(thing, *_ARCHIVED)


def _is_archived(head: Any) -> bool:
    archived = head.get("StorageClass") in _ARCHIVES or "ArchiveStatus" in head
    return archived and 'ongoing-request="false"' not in head.get("Restore", "")


def _changed(uri: str) -> ChangedObjectError:
    return ChangedObjectError(uri, "it changed while it was being read", "Upload changed data as a new drop")


def _info(key: str, path: Path) -> ObjectInfo:
    state = path.stat()
    return ObjectInfo(key, state.st_size, _etag(path), modified=state.st_mtime)


def _etag(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path, data: bytes | memoryview) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_UNFINISHED)
    try:
        with naming(path), os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        Path(name).unlink(missing_ok=True)  # a full disk must not be kept full
        raise
    return Path(name)


def _save(stream: BinaryIO, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as target:
            shutil.copyfileobj(stream, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        stream.close()
