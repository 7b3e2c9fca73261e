"""The embedded store of earlier versions: its objects and messages are taken over once, at the first start.

There an object was a file of its own: its bytes, then JSON about it, the JSON's length and CRC-32, and a mark.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import shutil
import struct
import uuid
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from dropforge.stack.bodies import SMALL, Piece
from dropforge.stack.moto_objects import ACCOUNT, REGION, Request, StoredObject
from dropforge.stack.persistence import Persistence, queue_models, s3
from dropforge.store import sync_folder

log = logging.getLogger("dropforge.objects")

_TAIL = struct.Struct("<II8s")  # length of the JSON, its CRC-32, the mark
_MARK = b"DFOBJ\x00\x00\x01"
_BATCH = 1000


def take_over(state: Path, store: Persistence) -> int:
    """Move what the older store kept into this one; return the number of objects. A kill in between begins it anew."""
    buckets, queues = state / "objects" / "buckets", state / "queues"
    count = 0
    for folder in sorted(buckets.iterdir()) if buckets.is_dir() else ():
        count += _take_bucket(folder, store)
    for folder in sorted(queues.iterdir()) if queues.is_dir() else ():
        _take_queue(folder, store)
    for old in (buckets, queues, state / "objects" / "tmp"):
        taken = old.with_name(f"{old.name}.taken")
        shutil.rmtree(taken, ignore_errors=True)
        if old.is_dir():
            old.rename(taken)
            sync_folder(old.parent)
        shutil.rmtree(taken, ignore_errors=True)
    if count:
        log.info("took over %d objects of the older store", count)
    return count


def _take_bucket(folder: Path, store: Persistence) -> int:
    if folder.name not in s3().buckets:
        s3().create_bucket(folder.name, REGION)
    with store.commit():
        store.save_bucket(folder.name)  # first, for objects are loaded into it
    count, found = 0, _newest(folder)
    while batch := list(islice(found, _BATCH)):
        with Request(store.bodies).running():
            for path, record in batch:
                taken = _object(folder.name, path, record, store)
                store.bodies.hold(taken.pieces)  # until the database names them
                dict.__setitem__(s3().buckets[folder.name].keys, taken.name, [taken])
            sync_folder(store.bodies.folder)
            with store.commit():
                for _, record in batch:
                    store.save_object(folder.name, record["key"])
            for _, record in batch:
                store.bodies.release(s3().buckets[folder.name].keys[record["key"]].pieces)
        count += len(batch)
    return count


def _newest(bucket: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The newest whole file of every key; what is broken is put aside and told."""
    for shard in sorted(bucket.iterdir()):
        generations: dict[str, list[tuple[int, Path]]] = {}
        for path in shard.iterdir():
            digest, _, number = path.name.partition(".")
            if number.isdigit():
                generations.setdefault(digest, []).append((int(number), path))
        for files in generations.values():
            for _, path in sorted(files, reverse=True):
                record = _record(path)
                if record is not None:
                    yield path, record
                    break
                _put_aside(path, bucket.parent.parent, "object")


def _put_aside(path: Path, store: Path, kind: str) -> None:
    aside = store / "broken"
    aside.mkdir(exist_ok=True)
    log.error("%s is no complete %s; it is in %s now", path, kind, path.rename(aside / path.name))


def _record(path: Path) -> dict[str, Any] | None:
    """What stands behind the bytes; None if the file is not whole."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < _TAIL.size:
            return None
        length, checksum, mark = _TAIL.unpack(os.pread(stream.fileno(), _TAIL.size, size - _TAIL.size))
        start = size - _TAIL.size - length
        if mark != _MARK or start < 0:
            return None
        text = os.pread(stream.fileno(), length, start)
    if zlib.crc32(text) != checksum:
        return None
    record: dict[str, Any] = json.loads(text)
    return record if record["size"] == start else None


def _object(bucket: str, path: Path, record: dict[str, Any], store: Persistence) -> StoredObject:
    size = record["size"]
    name = uuid.uuid4().hex
    with path.open("rb") as stream:
        value = stream.read(size) if size <= SMALL else b""
    made = StoredObject(
        record["key"], value, ACCOUNT, REGION, etag=record["etag"], bucket_name=bucket, version_id="null"
    )
    if size > SMALL:
        os.link(path, store.bodies.folder / name)  # the JSON behind the bytes stays there, and is never read
        made.pieces, made.digests, made.contentsize = (Piece(name, 0, size),), {}, size
    made.last_modified = datetime.fromtimestamp(record["modified"], UTC).replace(tzinfo=None)
    made.set_storage_class(record["storage"])
    made.set_metadata(dict(record["metadata"]))
    made.checksum_algorithm, made.checksum_value = record["checksum_algorithm"], record["checksum_value"]
    return made


def _take_queue(folder: Path, store: Persistence) -> None:
    queue = queue_models.sqs_backends[ACCOUNT][REGION].queues.get(folder.name)
    if queue is None:
        return
    waiting = []
    for path in folder.glob("*.json"):
        try:
            values = json.loads(path.read_text(), object_hook=_decode)
            message = queue_models.Message(values["id"], values["body"], values["system_attributes"])
            message.sent_timestamp, message.delayed_until = values["sent"], values["delayed_until"]
            message.message_attributes = values["attributes"]
        except (ValueError, LookupError, TypeError):
            _put_aside(path, folder.parent.parent / "objects", "message")
            continue
        waiting.append(message)
    known = {message.id for message in queue._messages}
    waiting.sort(key=lambda message: message.sent_timestamp)
    queue._messages.extend(message for message in waiting if message.id not in known)
    with store.commit():
        store.save_queues()


def _decode(values: dict[str, Any]) -> Any:
    return base64.b64decode(values["$bytes"]) if set(values) == {"$bytes"} else values
