"""The bucket for pages: a client that gives up soon, made once in a while so that new credentials are taken up."""

from __future__ import annotations

import threading
import time
from typing import Final

from dropforge.store import S3Store
from dropforge_airflow import connection

_KEEP: Final = 300.0  # seconds

_lock = threading.Lock()
_kept: dict[str, tuple[float, S3Store]] = {}


def open_store(bucket: str) -> S3Store:
    """The bucket; its client is shared by threads, which boto3 allows."""
    with _lock:
        made, store = _kept.get(bucket, (0.0, None))
        if store is None or time.monotonic() - made > _KEEP:
            store = S3Store(bucket, client=connection.s3(hurried=True))
            _kept[bucket] = (time.monotonic(), store)
        return store
