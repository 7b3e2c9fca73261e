"""What a queue message says: a pure reading of S3 event notifications, however they were wrapped.

Understood are S3 events straight from the bucket, through an SNS topic, and through EventBridge (also by way of SNS).
Keys of S3 events are URL-encoded with `+` for a space; EventBridge sends them as they are.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_plus

from dropforge import layout
from dropforge.layout import DropName

_DEPTH = 3  # EventBridge in SNS is two hops deep
_RECORDS = 100  # of a message; S3 itself puts one into each
_REASON = 200  # characters


class NotAnEventError(Exception):
    """The message cannot be read as an S3 event; the text says why, in one line."""


@dataclass(frozen=True)
class ObjectEvent:
    """One object that came or went. `key` is decoded."""

    bucket: str
    key: str
    created: bool


def read_message(body: str) -> tuple[ObjectEvent, ...]:
    """The objects a message tells of; none for the test event that S3 sends to a new queue.

    :raises NotAnEventError: if the message is anything else.
    """
    value: Any = body
    for _ in range(_DEPTH):
        value = _mapping(value)
        if value.get("Event") == "s3:TestEvent":
            return ()
        if "Records" in value:
            return _records(value["Records"])
        if "detail-type" in value:
            return _bridge(value)
        if value.get("Type") != "Notification" or "Message" not in value:
            break
        value = value["Message"]
    raise NotAnEventError(f"it is no S3 event: it has no Records (keys {_show(sorted(map(str, value)))})")


def finished_drops(events: tuple[ObjectEvent, ...], buckets: Collection[str]) -> tuple[tuple[str, DropName], ...]:
    """Buckets and names of the drops whose `_SUCCESS` came, in the order of the message, each once.

    :param buckets: that drops come from. :raises NotAnEventError: if an event is about another bucket.
    """
    drops: dict[tuple[str, DropName], None] = {}
    for event in events:
        if event.bucket not in buckets:
            served = ", ".join(map(_show, buckets))
            raise NotAnEventError(f"it is about bucket {_show(event.bucket)}, and drops come from {served}")
        parsed = layout.parse_drop_key(event.key)
        if event.created and parsed is not None and parsed[1] == layout.SUCCESS:
            drops[event.bucket, parsed[0]] = None
    return tuple(drops)


def probes(events: tuple[ObjectEvent, ...], buckets: Collection[str]) -> tuple[str, ...]:
    """The doctors' questions whether finished drops are seen, of which a message tells."""
    found = (layout.parse_probe_key(event.key) for event in events if event.created and event.bucket in buckets)
    return tuple(dict.fromkeys(one for one in found if one is not None))


def _mapping(value: Any) -> dict[Any, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise NotAnEventError(f"it is not JSON: {_show(value)}") from None
    if not isinstance(value, dict):
        raise NotAnEventError(f"it is no JSON object: {_show(value)}")
    return value


def _records(records: Any) -> tuple[ObjectEvent, ...]:
    if not isinstance(records, list) or not records:
        raise NotAnEventError("its Records are no list of events")
    if len(records) > _RECORDS:
        raise NotAnEventError(f"it has {len(records):,} Records, and S3 puts one into a message (at most {_RECORDS})")
    return tuple(_record(record) for record in records)


def _record(record: Any) -> ObjectEvent:
    source = record.get("eventSource") if isinstance(record, dict) else None
    # Amazon writes aws:s3, other makes minio:s3, ceph:s3.
    if not isinstance(source, str) or not source.endswith(":s3"):
        raise NotAnEventError(f"a record comes from {_show(source)} and not from S3")
    try:
        name = record["eventName"].removeprefix("s3:")
        bucket, key = record["s3"]["bucket"]["name"], record["s3"]["object"]["key"]
        return _event(bucket, unquote_plus(key, errors="strict"), name.startswith("ObjectCreated:"))
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise NotAnEventError(f"a record lacks its bucket, key or event name ({error!r:.80})") from None


def _bridge(value: dict[Any, Any]) -> tuple[ObjectEvent, ...]:
    if value.get("source") != "aws.s3":
        raise NotAnEventError(f"the EventBridge event comes from {_show(value.get('source'))} and not from S3")
    try:
        detail = value["detail"]
        return (_event(detail["bucket"]["name"], detail["object"]["key"], value["detail-type"] == "Object Created"),)
    except (KeyError, TypeError) as error:
        raise NotAnEventError(f"the EventBridge event lacks its bucket or key ({error!r:.80})") from None


def _event(bucket: Any, key: Any, created: bool) -> ObjectEvent:
    if not isinstance(bucket, str) or not isinstance(key, str):
        raise NotAnEventError("a bucket or key is no text")
    return ObjectEvent(bucket, key, created)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _REASON else f"{text[:_REASON]}..."
