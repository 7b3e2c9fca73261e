"""The inbox in S3: messages that tell of finished drops, from the queue to the ledger.

A message has one name, so it may come twice. An entry stays until intake is done with it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote_plus

from dropforge import layout
from dropforge.json_objects import parse_object
from dropforge.store import Store


@dataclass(frozen=True)
class Entry:
    """A message, and when it came."""

    body: str
    at: datetime


def put(store: Store, body: str) -> None:
    """Put a message into the inbox, unless it lies there."""
    entry = {"body": body, "at": datetime.now(UTC).isoformat()}
    store.put_if_absent(layout.inbox_key(digest(body)), json.dumps(entry).encode())


def read(data: bytes) -> Entry:
    """:raises ValueError: if this is no entry."""
    values = parse_object(data, "an entry of the inbox")
    if not isinstance(values.get("body"), str):
        raise ValueError("it holds no message")
    at = datetime.fromisoformat(values["at"]) if isinstance(values.get("at"), str) else datetime.min
    return Entry(values["body"], at if at.tzinfo else at.replace(tzinfo=UTC))


def digest(body: str) -> str:
    """The name of a message in the inbox: a message that comes twice has one name."""
    return hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def found_body(bucket: str, key: str, etag: str, modified: str) -> str:
    """The message that S3 would have sent for an object which somebody found."""
    record = {
        "eventSource": "dropforge:s3",
        "eventName": "ObjectCreated:Found",
        "eventTime": modified,
        "s3": {"bucket": {"name": bucket}, "object": {"key": quote_plus(key), "eTag": etag}},
    }
    return json.dumps({"Records": [record]}, sort_keys=True)
