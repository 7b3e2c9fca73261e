"""moto's S3 with our files under it: what moto keeps in memory is only what is known of an object, never its bytes.

A request that changes something runs inside a `Change`: moto sees its own change at once, other requests see it only
after `Change.commit` has made it durable. If anything fails before that, nothing has happened.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import moto.core.common_models
import moto.s3.models
import moto.s3.notifications
import moto.s3.utils
from moto.s3.exceptions import EntityTooSmall, InvalidPart, MalformedXML, NoSuchUpload

from dropforge.stack.content import Checksum, Content, ObjectFolder, Record, Spool, Stored
from dropforge.stack.queues import ACCOUNT, REGION, StoredQueue, queue_of

# Typed, but not to be put other classes in.
models: Any = moto.s3.models
notifications: Any = moto.s3.notifications

_PART_MINIMUM = 5 << 20
_CHECKSUMS = {"CRC32": "crc32", "SHA1": "sha1", "SHA256": "sha256"}


class Change:
    """What one request is about to do to the store."""

    _running = threading.local()

    def __init__(self, folder: ObjectFolder, body: Spool | None = None) -> None:
        self.folder, self.body = folder, body
        self.puts: dict[tuple[KeyStore, str], StoredKey] = {}
        self.deletes: dict[tuple[KeyStore, str], StoredKey] = {}
        self.events: dict[tuple[str, str], str] = {}
        self._spools: list[Spool] = [body] if body else []

    @classmethod
    def current(cls) -> Change | None:
        return getattr(cls._running, "change", None)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The calling thread works on this change; what it leaves uncommitted is thrown away."""
        Change._running.change = self
        try:
            yield
        finally:
            Change._running.change = None
            for spool in self._spools:
                spool.discard()

    def spool(self, *, digests: tuple[str, ...] = ("md5",)) -> Spool:
        spool = self.folder.spool(digests)
        self._spools.append(spool)
        return spool

    def take_body(self) -> Spool:
        """The request's bytes, which were read before moto was asked."""
        if self.body is None:
            return self.spool()
        body, self.body = self.body, None
        return body

    def keep(self, spool: Spool) -> None:
        """The spool belongs to an upload's part now and outlives this request."""
        self._spools.remove(spool)

    def commit(self) -> None:
        """Make it durable, then visible, then known. :raises OSError: and nothing has happened, save whole deletes."""
        for key in self.puts.values():
            key.spool.seal(key.record())
        messages = []
        committed: list[StoredKey] = []
        try:
            # The message first: one that speaks of an object that never came is harmless, the reverse loses a drop.
            for (queue_name, _), body in self.events.items():
                queue = queue_of(queue_name)
                if queue is not None:
                    messages.append((queue, queue.store_body(body)))
            for key in self.puts.values():
                key.stored = self.folder.commit(key.bucket_name, key.spool, key.record())
                committed.append(key)
            for (store, name), key in self.deletes.items():
                if key.stored is not None:
                    self.folder.remove(key.stored, durable=True)
                store.drop(name)
        except BaseException:
            for queue, message in messages:
                queue.forget(message)
            for key in committed:
                assert key.stored is not None
                self.folder.remove(key.stored, durable=False)
            raise
        for (store, name), key in self.puts.items():
            old = store.place(name, key)
            if old is not None and old.stored is not None:
                self.folder.remove(old.stored, durable=False)
        for queue, message in messages:
            queue.publish(message)


class KeyStore(moto.s3.utils._VersionedKeyStore):
    """A bucket's keys without versions. Inside a change, writes go to the change and its own reads see them."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def _look(self, key: str) -> list[StoredKey] | None:
        change = Change.current()
        if change is not None:
            if (self, key) in change.puts:
                return [change.puts[self, key]]
            if (self, key) in change.deletes:
                return None
        found: list[StoredKey] | None = dict.get(self, key)
        return found

    def __contains__(self, key: object) -> bool:
        return self._look(str(key)) is not None

    def __getitem__(self, key: str) -> StoredKey:
        found = self._look(key)
        if found is None:
            raise KeyError(key)
        return found[-1]

    def __setitem__(self, key: str, value: Any) -> None:
        raise NotImplementedError("the embedded store keeps no versions")

    def get(self, key: str, default: Any = None) -> Any:
        found = self._look(key)
        return default if found is None else found[-1]

    def getlist(self, key: str, default: Any = None) -> Any:
        found = self._look(key)
        return default if found is None else found

    def setlist(self, key: str, list_: Any) -> None:
        change = Change.current()
        assert change is not None, "objects change only inside a request"
        change.deletes.pop((self, key), None)
        change.puts[self, key] = list_[-1]

    def pop(self, key: str) -> None:  # type: ignore[override]
        change = Change.current()
        assert change is not None, "objects change only inside a request"
        if (self, key) not in change.puts:
            change.deletes[self, key] = self[key]
        change.puts.pop((self, key), None)

    def place(self, key: str, value: StoredKey) -> StoredKey | None:
        """Make an object visible; return the one that it replaces."""
        old: list[StoredKey] | None = dict.get(self, key)
        dict.__setitem__(self, key, [value])
        return old[-1] if old else None

    def drop(self, key: str) -> None:
        dict.pop(self, key, None)

    def items(self) -> Iterator[tuple[str, StoredKey]]:  # type: ignore[override]
        # A snapshot: a key that is deleted during a listing must not break the listing.
        for key, versions in dict(self).items():
            yield key, versions[-1]

    def values(self) -> Iterator[StoredKey]:  # type: ignore[override]
        for _, key in self.items():
            yield key

    iteritems, itervalues = items, values


class StoredKey(models.FakeKey):  # type: ignore[misc]
    """An object, or a part of an upload (then `name` is its number), whose bytes lie in a file."""

    spool: Spool
    stored: Stored | None = None
    contentsize: int
    _etag: str | None

    @property
    def value(self) -> Content:
        if self.stored is not None:
            return Content.open(self.stored.path, self.contentsize)
        return Content.open(self.spool.path, self.contentsize)

    @value.setter
    def value(self, value: object) -> None:
        self._value_buffer.close()
        change = Change.current()
        if change is None:  # while a bucket is read at start
            self.contentsize = 0
            return
        if isinstance(value, Spool):
            spool = value
        elif isinstance(value, Content):
            spool = change.spool()
            for block in value:
                spool.write(block)
            value.close()
        else:
            spool = change.take_body()
            if isinstance(value, bytes) and value:
                spool.write(value)
        spool.finish()
        self.spool, self.contentsize = spool, spool.size
        if isinstance(self.name, int):
            change.keep(spool)

    @property
    def etag(self) -> str:
        if self._etag is None:
            self._etag = self.spool.digest("md5").hex()
        return f'"{self._etag}"'

    def record(self) -> Record:
        return Record(
            key=self.name,
            size=self.contentsize,
            etag=self.etag.strip('"'),
            modified=self.last_modified.replace(tzinfo=UTC).timestamp(),
            metadata={str(name): str(value) for name, value in self.metadata.items()},
            storage=self.storage_class or "STANDARD",
            checksum_algorithm=self.checksum_algorithm,
            checksum_value=self.checksum_value,
            upload=self.multipart.id if self.multipart else None,
        )

    def dispose(self, garbage: bool = False) -> None:
        # Parts are thrown away with their upload; an object's file goes when its key is replaced or deleted.
        if not garbage and isinstance(self.name, int):
            self.spool.discard()
        self.disposed = True

    @classmethod
    def restore(cls, bucket: str, stored: Stored) -> StoredKey:
        """The key of an object that was found on the disk."""
        record = stored.record
        key = cls(record.key, b"", account_id=ACCOUNT, region_name=REGION, bucket_name=bucket, version_id="null")
        key.stored, key.contentsize, key._etag = stored, record.size, record.etag
        key.last_modified = datetime.fromtimestamp(record.modified, UTC).replace(tzinfo=None)
        key.set_storage_class(record.storage)
        key.set_metadata(dict(record.metadata))
        key.checksum_algorithm, key.checksum_value = record.checksum_algorithm, record.checksum_value
        key.multipart = FinishedUpload(record.upload) if record.upload else None
        return key


class FinishedUpload:
    """What is left of a multipart upload: its id, so that completing it again is no error."""

    def __init__(self, upload_id: str) -> None:
        self.id = upload_id
        self.partlist: list[int] = []
        self.parts: dict[int, StoredKey] = {}


class StoredUpload(models.FakeMultipart):  # type: ignore[misc]
    """A multipart upload whose parts are put together on the disk, not in memory."""

    def complete(self, body: Iterator[tuple[int, str]]) -> tuple[Spool, str, None]:
        change = Change.current()
        assert change is not None
        whole = change.spool(digests=())
        tags, last = b"", None
        algorithm = _CHECKSUMS.get(self.metadata.get("x-amz-checksum-algorithm") or "")
        composite = Checksum(algorithm) if algorithm else None
        count = 0
        for number, tag in body:
            part: StoredKey | None = self.parts.get(number)
            if part is None or part.etag.strip('"') != tag.strip('"'):
                raise InvalidPart
            if last is not None and last.contentsize < _PART_MINIMUM:
                raise EntityTooSmall
            whole.append_file(part.spool.path, part.contentsize)
            tags += bytes.fromhex(part.etag.strip('"'))
            if composite is not None and algorithm is not None:
                running = Checksum(algorithm)
                for block in part.value:
                    running.update(block)
                composite.update(running.digest())
            last, count = part, count + 1
        if not count:
            raise MalformedXML
        self.composite = f"{base64.b64encode(composite.digest()).decode()}-{count}" if composite else None
        of_tags = Checksum("md5")
        of_tags.update(tags)
        return whole, f"{of_tags.digest().hex()}-{count}", None


class StoredBackend(models.S3Backend):  # type: ignore[misc]
    """moto's S3 with corrections for multipart uploads; those that were open when the server died are gone."""

    def upload_part(self, bucket_name: str, multipart_id: str, *rest: Any) -> StoredKey:
        self._open_upload(bucket_name, multipart_id)
        part: StoredKey = super().upload_part(bucket_name, multipart_id, *rest)
        return part

    def upload_part_copy(self, dest_bucket_name: str, multipart_id: str, *rest: Any) -> StoredKey:
        self._open_upload(dest_bucket_name, multipart_id)
        part: StoredKey = super().upload_part_copy(dest_bucket_name, multipart_id, *rest)
        return part

    def complete_multipart_upload(self, bucket_name: str, multipart_id: str, body: Any) -> StoredKey:
        upload = self._open_upload(bucket_name, multipart_id)
        key: StoredKey = super().complete_multipart_upload(bucket_name, multipart_id, body)
        # A checksum of checksums ends in the number of parts; of those that we cannot compute, none is shown.
        key.checksum_value = upload.composite
        key.checksum_algorithm = upload.metadata.get("x-amz-checksum-algorithm") if upload.composite else None
        key.multipart = FinishedUpload(multipart_id)
        return key

    def _open_upload(self, bucket_name: str, multipart_id: str) -> StoredUpload:
        """:raises NoSuchUpload: S3's own answer, at which a client starts anew; moto fails with a KeyError."""
        upload: StoredUpload | None = self.get_bucket(bucket_name).multiparts.get(multipart_id)
        if upload is None:
            raise NoSuchUpload(upload_id=multipart_id)
        return upload


def install() -> None:
    """Put our classes where moto looks for its own."""
    # moto remembers every object it ever made, to warn about leaks in tests; that is a leak here.
    base: Any = moto.core.common_models.BaseModel
    base.__new__ = staticmethod(lambda cls, *_args, **_kwargs: object.__new__(cls))
    models.FakeKey = StoredKey
    models.FakeMultipart = StoredUpload
    models._VersionedKeyStore = KeyStore
    models.s3_backends.backend = StoredBackend
    notifications._send_sqs_message = _remember_event


def backend() -> StoredBackend:
    found: StoredBackend = models.s3_backends[ACCOUNT]["aws"]
    return found


def load(folder: ObjectFolder, report: Callable[[str], None]) -> int:
    """Make every object on the disk known to moto; returns how many there are."""
    count = 0
    for name in folder.buckets():
        bucket = backend().create_bucket(name, REGION)
        for stored in folder.load(name, report):
            bucket.keys.place(stored.record.key, StoredKey.restore(name, stored))
            count += 1
    return count


def notify(bucket: str, queue: StoredQueue, prefix: str, suffix: str) -> None:
    """Let the bucket send a message for every object that is created under `prefix` and ends in `suffix`."""
    rules = [{"Name": "prefix", "Value": prefix}, {"Name": "suffix", "Value": suffix}]
    backend().get_bucket(bucket).notification_configuration = models.NotificationConfiguration(
        queue=[
            {
                "Id": queue.name,
                "Queue": queue.queue_arn,
                "Event": ["s3:ObjectCreated:*"],
                "Filter": {"S3Key": {"FilterRule": rules}},
            }
        ]
    )


def _remember_event(_account: str, body: Any, queue_name: str, _region: str) -> None:
    change = Change.current()
    if change is not None and "Records" in body:
        # moto tells of a multipart upload twice; the last telling has the right name.
        change.events[queue_name, body["Records"][0]["s3"]["object"]["key"]] = json.dumps(body)
