"""What moto's S3 and SQS know, kept in a database file: saved after each successful request, loaded at start.

moto keeps everything in memory. The server asks it one request at a time and has what changed saved here. One commit
holds all that a request changed (the object, its upload's end, the message that tells of it), so a kill leaves all of
it or nothing. No answer goes out, a reader's neither, before the commits that it may tell of are synced to the disk;
requests that wait for that share one sync.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import json
import os
import pickle
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import moto.sqs.models

from dropforge.errors import FULL, DropforgeError
from dropforge.stack.bodies import Bodies, Piece
from dropforge.stack.moto_objects import ACCOUNT, Request, StoredObject, StoredUpload, models

FORMAT = 1
_SPARE = 1 << 20  # bytes
_MEND = "Put it and bodies/ back from a copy, or move the folder away to start empty"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS bodies (name TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS buckets (name TEXT PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS objects (bucket TEXT, key TEXT, state BLOB NOT NULL, PRIMARY KEY (bucket, key));
CREATE TABLE IF NOT EXISTS uploads (bucket TEXT, id TEXT, state BLOB NOT NULL, PRIMARY KEY (bucket, id));
CREATE TABLE IF NOT EXISTS parts (upload TEXT, number INTEGER, state BLOB NOT NULL, PRIMARY KEY (upload, number));
CREATE TABLE IF NOT EXISTS queues (arn TEXT PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS messages (
  place INTEGER PRIMARY KEY AUTOINCREMENT, queue TEXT, id TEXT, state BLOB NOT NULL, UNIQUE (queue, id)
);
"""
# What is saved apart from these, or not at all.
_BUCKET = {"keys", "multiparts"}
_UPLOAD = {"parts", "partlist"}
_QUEUE = {
    "_messages", "_pending_messages", "_messages_lock", "deleted_messages", "dead_letter_queue",
    "lambda_event_source_mappings",
}  # fmt: skip
_CLASSES = {
    ("builtins", "set"), ("builtins", "frozenset"), ("builtins", "bytearray"), ("builtins", "object"),
    ("collections", "OrderedDict"), ("collections", "defaultdict"), ("copyreg", "_reconstructor"),
    ("datetime", "date"), ("datetime", "datetime"), ("datetime", "timedelta"), ("datetime", "timezone"),
    ("requests.structures", "CaseInsensitiveDict"),
    ("dropforge.stack.bodies", "Piece"), ("dropforge.stack.moto_objects", "StoredObject"),
    ("dropforge.stack.moto_objects", "StoredUpload"),
}  # fmt: skip
queue_models: Any = moto.sqs.models

Held = dict[int, Any]


def s3() -> Any:
    """moto's S3."""
    return models.s3_backends[ACCOUNT]["aws"]


def is_full(error: OSError | sqlite3.Error) -> bool:
    """Whether there is no room: disk, quota or file size limit."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return error.sqlite_errorname in {"SQLITE_FULL", "SQLITE_IOERR_WRITE"}


def sqs_queues() -> dict[str, Any]:
    """All of moto's queues by ARN."""
    return {
        queue.queue_arn: queue
        for backend in list(queue_models.sqs_backends[ACCOUNT].values())
        for queue in list(backend.queues.values())
    }


class Persistence:
    """The database file and the bodies beside it. One thread at a time may use it."""

    def __init__(self, folder: Path) -> None:
        """:raises DropforgeError: if another server has the file, or it is not ours to read."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "objects.db"
        self._spare = folder / "spare"
        if not os.access(folder, os.W_OK):
            mend = "Make it writable, or name another"
            raise DropforgeError(f"The store's folder {folder}", "it cannot be written to", mend)
        new = self._open()
        bodies = folder / "bodies"
        if new and bodies.is_dir() and any(bodies.iterdir()):
            cause = "it is missing or empty, and bodies/ beside it is not"
            mend = "Put it back from where it is now, or move bodies/ away too to start empty"
            raise DropforgeError(f"The store's file {self.path}", cause, mend)
        if new:  # else nothing is written, so that a store on a full disk can be read
            self._database.executescript(f"BEGIN EXCLUSIVE; {_SCHEMA} PRAGMA user_version={FORMAT}; COMMIT")
        self.bodies = Bodies(bodies, self._read_small)
        self._log: int | None = None
        # What the file has, by bucket and key or upload: versions in their order, parts by number.
        self._objects: dict[tuple[str, str], Held] = {}
        self._uploads: dict[tuple[str, str], Held] = {}
        self._messages: dict[str, dict[str, Any]] = {}
        self._learnt: list[Callable[[], None]] | None = None
        self.sequence = 0  # of the newest commit
        self._synced = 0
        self._syncing = threading.Lock()

    def _open(self) -> bool:
        """Open the file; whether there is nothing in it yet."""
        try:
            self._database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=5)
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL", "temp_store=MEMORY"):
                self._database.execute(f"PRAGMA {pragma}")
            found = int(self._database.execute("PRAGMA user_version").fetchone()[0])
        except sqlite3.DatabaseError as error:
            other = "End the other server that uses this folder, or name another folder"
            mend = other if "locked" in str(error) else f"Check the disk. {_MEND}"
            raise DropforgeError(f"The store's file {self.path} cannot be opened", str(error), mend) from error
        if found > FORMAT:
            cause = f"a newer Dropforge wrote it (format {found}; this one reads {FORMAT})"
            raise DropforgeError(f"The store's file {self.path} cannot be read", cause, "Use that Dropforge")
        return found == 0

    def _read_small(self, name: str) -> bytes:
        found: bytes = self._database.execute("SELECT data FROM bodies WHERE name = ?", (name,)).fetchone()[0]
        return found

    @contextlib.contextmanager
    def commit(self) -> Iterator[None]:
        """Make everything that is saved inside durable together. :raises sqlite3.Error: and nothing of it is."""
        dead = self.bodies.take_dead()
        learnt: list[Callable[[], None]] = []
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self._learnt = learnt
            self._database.executemany("DELETE FROM bodies WHERE name = ?", [(name,) for name in dead])
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            self.bodies.put_back_dead(dead)
            raise
        finally:
            self._learnt = None
        for learn in learnt:
            learn()
        self.sequence += 1

    def save(self, write: Callable[[], None], *, frees: bool) -> None:
        """Make everything that `write` saves durable together. :raises sqlite3.Error: and nothing of it is.

        :param frees: whether it makes room: on a full disk it gets what is kept for that, as its log grows first.
        """
        try:
            with self.commit():
                write()
        except (OSError, sqlite3.Error) as error:
            if not (frees and is_full(error)):
                raise
            self._spare.unlink(missing_ok=True)
            with contextlib.suppress(sqlite3.Error):  # the log may begin anew where it was written back
                self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            with self.commit():
                write()

    def _keep_spare(self) -> None:
        """Keep room for what makes room, where there is that much."""
        with contextlib.suppress(OSError):  # another took it meanwhile, or the room
            found = os.statvfs(self._spare.parent)
            if self._spare.exists() or found.f_bavail * found.f_frsize < _SPARE:
                return
            handle = os.open(self._spare, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(handle, 0, _SPARE)
            except OSError:
                self._spare.unlink()
                raise
            finally:
                os.close(handle)

    def sync(self, sequence: int) -> None:
        """Wait until the commits up to this one outlive the machine. :raises OSError: if it is not known whether."""
        if self._synced >= sequence:
            return
        with self._syncing:
            if self._synced >= sequence:
                return
            reached, unnamed = self.sequence, self.bodies.take_unnamed()
            if self._log is None:  # and kept open, for when there are too many open files
                self._log = os.open(f"{self.path}-wal", os.O_RDONLY)
            os.fsync(self._log)  # SQLite itself syncs it only before it writes it back
            self._synced = reached
        self.bodies.remove(unnamed)
        self._keep_spare()

    def _learn(self, known: dict[tuple[str, str], Held], bucket: str, name: str, held: Held | None) -> None:
        """Note what the file has of a key or an upload, once it has it; what it no longer has may go then."""

        def learn() -> None:
            old = known.pop((bucket, name), {})
            if held is not None:
                known[bucket, name] = held
                self.bodies.hold(_pieces(held))
            self.bodies.release(_pieces(old))

        if self._learnt is None:
            learn()
        else:
            self._learnt.append(learn)

    # Loading

    def load(self) -> int:
        """Make everything in the file known to moto; return the number of objects.

        :raises DropforgeError: if the file is damaged.
        """
        try:
            return self._load()
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise DropforgeError(f"The store's file {self.path} is damaged", cause, _MEND) from error

    def _load(self) -> int:
        with Request(self.bodies).running():
            for name, state in self._database.execute("SELECT name, state FROM buckets").fetchall():
                self._load_bucket(name, state)
            for bucket, key, state in self._database.execute("SELECT bucket, key, state FROM objects"):
                self._load_object(bucket, key, state)
            for bucket, upload, state in self._database.execute("SELECT bucket, id, state FROM uploads").fetchall():
                self._load_upload(bucket, upload, state)
            self.load_queues()
        named = {piece.body for held in (*self._objects.values(), *self._uploads.values()) for piece in _pieces(held)}
        rows = self._database.execute("SELECT name FROM bodies").fetchall()
        if orphans := [name for (name,) in rows if name not in named]:
            self.bodies.put_back_dead(orphans)  # the next commit deletes them
        self.bodies.forget_orphans()
        self._keep_spare()
        return len(self._objects)

    def _load_bucket(self, name: str, state: bytes) -> None:
        values, tags = _unpickle(state)
        if name not in s3().buckets:
            s3().buckets[name] = models.FakeBucket(name, account_id=ACCOUNT, region_name=values["region_name"])
        bucket = s3().buckets[name]
        bucket.__dict__.update(values)
        s3().tagger.tags.pop(bucket.arn, None)
        s3().tagger.tags.update(tags)

    def _load_object(self, bucket: str, key: str, state: bytes) -> None:
        versions, tags = _unpickle(state)
        dict.__setitem__(s3().buckets[bucket].keys, key, versions)
        s3().tagger.tags.update(tags)
        self._learn(self._objects, bucket, key, dict(enumerate(versions)))

    def _load_upload(self, bucket: str, upload_id: str, state: bytes) -> None:
        upload = StoredUpload("", {}, account_id=ACCOUNT, region_name="")
        upload.__dict__.update(_unpickle(state))
        query = "SELECT number, state FROM parts WHERE upload = ? ORDER BY number"
        upload.parts = {number: _unpickle(part) for number, part in self._database.execute(query, (upload_id,))}
        upload.partlist = list(upload.parts)
        dict.__setitem__(s3().buckets[bucket].multiparts, upload_id, upload)
        self._learn(self._uploads, bucket, upload_id, dict(upload.parts))

    def reload_object(self, bucket: str, key: str) -> None:
        """Let moto know of a key what the file has, and nothing else."""
        found = s3().buckets.get(bucket)
        for version in found.keys.getlist(key, []) if found else ():
            if isinstance(version, StoredObject):
                s3().tagger.tags.pop(version.arn, None)
        query = "SELECT state FROM objects WHERE bucket = ? AND key = ?"
        row = self._database.execute(query, (bucket, key)).fetchone()
        if row:
            self._load_object(bucket, key, row[0])
        elif found:
            dict.pop(found.keys, key, None)

    def reload_upload(self, bucket: str, upload_id: str) -> None:
        """Let moto know of an upload what the file has, and nothing else."""
        query = "SELECT state FROM uploads WHERE bucket = ? AND id = ?"
        row = self._database.execute(query, (bucket, upload_id)).fetchone()
        found = s3().buckets.get(bucket)
        if row:
            self._load_upload(bucket, upload_id, row[0])
        elif found:
            dict.pop(found.multiparts, upload_id, None)

    def reload_bucket(self, name: str) -> None:
        """Let moto know of a bucket and all that is in it what the file has, and nothing else."""
        row = self._database.execute("SELECT state FROM buckets WHERE name = ?", (name,)).fetchone()
        if not row:
            s3().buckets.pop(name, None)
            models.s3_backends.bucket_accounts.pop(name, None)
            return
        self._load_bucket(name, row[0])
        for key in self._changed(name):
            self.reload_object(name, key)
        for upload in self.changed_uploads(name):
            self.reload_upload(name, upload)

    def _changed(self, name: str) -> list[str]:
        """Keys of a bucket of which moto knows other versions than the file."""
        bucket = s3().buckets.get(name)
        now: dict[str, list[Any]] = dict(bucket.keys.lists()) if bucket else {}
        changed = []
        for key in {key for owner, key in self._objects if owner == name} | set(now):
            old, new = self._objects.get((name, key), {}), now.get(key, [])
            if len(old) != len(new) or any(old[place] is not version for place, version in enumerate(new)):
                changed.append(key)
        return changed

    def changed_uploads(self, name: str) -> set[str]:
        """Uploads of a bucket that either moto or the file has, and not both."""
        bucket = s3().buckets.get(name)
        return {upload for owner, upload in self._uploads if owner == name} ^ set(bucket.multiparts if bucket else ())

    def load_queues(self) -> None:
        """Let moto know of queues and messages what the file has, and nothing else. What is in flight stays so."""
        queues = sqs_queues()
        backends = queue_models.sqs_backends[ACCOUNT]
        for arn, state in self._database.execute("SELECT arn, state FROM queues").fetchall():
            values = _unpickle(state)
            queue = queues.pop(arn, None) or queue_models.Queue(values["_name"], values["region"], ACCOUNT)
            queue.__dict__.update(values)
            backends[queue.region].queues[queue.name] = queue
            if arn not in self._messages:
                query = "SELECT id, state FROM messages WHERE queue = ? ORDER BY place"
                self._messages[arn] = {id_: _unpickle(text) for id_, text in self._database.execute(query, (arn,))}
            queue._messages[:] = self._messages[arn].values()
        for unknown in queues.values():
            del backends[unknown.region].queues[unknown.name]
        queues = sqs_queues()
        for queue in queues.values():
            if queue.redrive_policy:
                queue.dead_letter_queue = queues.get(queue.redrive_policy["deadLetterTargetArn"])

    # Saving

    def save_object(self, bucket: str, key: str) -> None:
        """Save all versions of a key as moto has them now."""
        found = s3().buckets.get(bucket)
        versions = list(found.keys.getlist(key, []) if found else ())
        if not versions:
            self._database.execute("DELETE FROM objects WHERE bucket = ? AND key = ?", (bucket, key))
            self._learn(self._objects, bucket, key, None)
            return
        held = dict(enumerate(versions))
        self._save_bodies(held)
        tags = _tags(version.arn for version in versions if isinstance(version, StoredObject))
        self._put("objects", bucket=bucket, key=key, state=_pickle((versions, tags)))
        self._learn(self._objects, bucket, key, held)

    def save_upload(self, bucket: str, upload_id: str) -> None:
        """Save an upload and those of its parts that are new."""
        found = s3().buckets.get(bucket)
        upload = found.multiparts.get(upload_id) if found else None
        if upload is None:
            self._database.execute("DELETE FROM uploads WHERE bucket = ? AND id = ?", (bucket, upload_id))
            self._database.execute("DELETE FROM parts WHERE upload = ?", (upload_id,))
            self._learn(self._uploads, bucket, upload_id, None)
            return
        known = self._uploads.get((bucket, upload_id))
        if known is None:
            self._put("uploads", bucket=bucket, id=upload_id, state=_pickle(_state(upload, _UPLOAD)))
        new = {number: part for number, part in upload.parts.items() if (known or {}).get(number) is not part}
        self._save_bodies(new)
        for number, part in new.items():
            self._put("parts", upload=upload_id, number=number, state=_pickle(part))
        self._learn(self._uploads, bucket, upload_id, dict(upload.parts))

    def save_bucket(self, name: str) -> None:
        """Save a bucket, and of all that is in it what changed."""
        bucket = s3().buckets.get(name)
        if bucket is None:
            self._database.execute("DELETE FROM buckets WHERE name = ?", (name,))
        else:
            self._put("buckets", name=name, state=_pickle((_state(bucket, _BUCKET), _tags([bucket.arn]))))
        for key in self._changed(name):
            self.save_object(name, key)
        for upload in self.changed_uploads(name):
            self.save_upload(name, upload)

    def save_queues(self, *, attributes: bool = False) -> None:
        """Save which messages wait in which queue; with `attributes`, the queues themselves too."""
        now = sqs_queues()
        messages = {arn: {message.id: message for message in queue._messages} for arn, queue in now.items()}
        for arn in self._messages.keys() - now.keys():
            self._database.execute("DELETE FROM queues WHERE arn = ?", (arn,))
            self._database.execute("DELETE FROM messages WHERE queue = ?", (arn,))
        for arn, queue in now.items():
            if attributes or arn not in self._messages:
                self._put("queues", arn=arn, state=_pickle(_state(queue, _QUEUE)))
            known = self._messages.get(arn, {})
            for id_ in known.keys() - messages[arn].keys():
                self._database.execute("DELETE FROM messages WHERE queue = ? AND id = ?", (arn, id_))
            for id_, message in messages[arn].items():
                if id_ not in known:
                    self._put("messages", queue=arn, id=id_, state=_pickle(message))
        assert self._learnt is not None, "queues are saved inside a commit"
        self._learnt.append(lambda: setattr(self, "_messages", messages))

    def end_old_uploads(self) -> int:
        """End the uploads in parts that nobody went on with for a week, for their bytes lie here; return how many."""
        oldest = datetime.now(UTC).replace(tzinfo=None) - timedelta(days=7)
        old = [
            name
            for name, parts in self._uploads.items()
            if parts and max(part.last_modified for part in parts.values()) < oldest
        ]
        if old:
            with self.commit():
                for bucket, upload in old:
                    del s3().buckets[bucket].multiparts[upload]
                    self.save_upload(bucket, upload)
        return len(old)

    def queues_changed(self) -> bool:
        """Whether other messages wait, or other queues exist, than the file has."""
        now = sqs_queues()
        return now.keys() != self._messages.keys() or any(
            {message.id for message in queue._messages} != self._messages[arn].keys() for arn, queue in now.items()
        )

    def tell_once(self) -> None:
        """Drop the new messages about a put where an upload was completed: moto tells of that too, and S3 does not."""
        for arn, queue in sqs_queues().items():
            for message in [one for one in queue._messages if one.id not in self._messages.get(arn, {})]:
                with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
                    if json.loads(message.body)["Records"][0]["eventName"] == "ObjectCreated:Put":
                        queue._messages.remove(message)

    def _put(self, table: str, **values: Any) -> None:
        names, marks = ", ".join(values), ", ".join("?" for _ in values)
        text = f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})"  # noqa: S608 (our own names)
        self._database.execute(text, tuple(values.values()))

    def _save_bodies(self, held: Held) -> None:
        for name in {piece.body for piece in _pieces(held)}:
            data = self.bodies.small(name)
            if data is not None:
                self._put("bodies", name=name, data=data)


def _pieces(held: Held) -> tuple[Piece, ...]:
    return tuple(piece for one in held.values() if isinstance(one, StoredObject) for piece in one.pieces)


def _tags(arns: Iterable[str]) -> dict[str, Any]:
    tags = s3().tagger.tags
    return {arn: tags[arn] for arn in arns if arn in tags}


def _state(thing: object, apart: set[str]) -> dict[str, Any]:
    return {name: value for name, value in vars(thing).items() if name not in apart}


class _Pickler(pickle.Pickler):
    """Refuses what could not be read again, so that a request fails and not the next start."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is models.FakeDeleteMarker:
            # It holds the version before it, and so on: whether that is a marker too is all that moto asks.
            before = object.__new__(type(value)) if type(vars(value).get("key")) is type(value) else None
            return copyreg.__newobj__, (type(value),), vars(value) | {"key": before}  # type: ignore[attr-defined]
        kind = value if isinstance(value, type) else type(value)
        if not _may_load(kind.__module__, kind.__qualname__):
            raise pickle.PicklingError(f"{kind.__module__}.{kind.__qualname__} cannot be saved")
        return NotImplemented


def _pickle(value: object) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


class _Unpickler(pickle.Unpickler):
    """Reads what was saved: moto's classes and ours, and nothing that could do something."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if _may_load(module, name) else None
        if not isinstance(found, type) and (module, name) != ("copyreg", "_reconstructor"):
            raise pickle.UnpicklingError(f"{module}.{name} is not among what is saved")
        return found


def _may_load(module: str, name: str) -> bool:
    return (module, name) in _CLASSES or module.split(".")[0] == "moto"


def _unpickle(state: bytes) -> Any:
    return _Unpickler(io.BytesIO(state)).load()
