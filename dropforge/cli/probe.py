"""`dropforge doctor --watcher`: an object is sent as a drop's last one is, and followed to Airflow's watcher.

It names no family, so it never becomes a drop; what it leaves is removed.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from dropforge import layout
from dropforge.client.airflow import INTAKE
from dropforge.client.connection import Connection
from dropforge.errors import DropforgeError
from dropforge.install.notifying import tells
from dropforge.stack.doctor import Finding, Level
from dropforge.store import MissingObjectError, S3Store

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

PATIENCE: Final = 60.0  # seconds; a watcher that polls looks every half a minute
_PAUSE: Final = 0.2


def follow(connection: Connection, patience: float = PATIENCE) -> Iterator[Finding]:
    """One finding for each bucket that drops come from; where nothing came, what was found on the way."""
    for bucket in connection.settings.aliases:
        yield _follow(connection, bucket, patience)


def _follow(connection: Connection, bucket: str, patience: float) -> Finding:
    probe, check = secrets.token_hex(16), f"watcher, {bucket}"
    ledger, key = connection.store, layout.probe_key(probe)
    drops = S3Store(bucket)
    try:
        drops.put(key, b"")
    except (ClientError, BotoCoreError, DropforgeError) as error:
        return Finding(check, Level.FAIL, f"nothing can be written to {key} ({error})", "Allow s3:PutObject on drops/")
    began = time.monotonic()
    try:
        while time.monotonic() - began < patience:
            with contextlib.suppress(MissingObjectError):
                answer = json.loads(ledger.get(layout.probe_answer_key(probe)))
                seconds = time.monotonic() - began
                return Finding(check, Level.OK, f"it had the test object after {seconds:.1f} s, from {answer['by']}")
            time.sleep(_PAUSE)
        return _lost(connection, bucket, check, patience)
    except (ClientError, BotoCoreError) as error:
        mend = "Allow s3:GetObject on ledger/ and s3:ListBucket"
        return Finding(check, Level.FAIL, f"the answer to the test object cannot be read ({error})", mend)
    finally:
        for store, left in ((drops, key), (ledger, layout.probe_answer_key(probe))):
            with contextlib.suppress(ClientError, BotoCoreError, DropforgeError):  # it is empty, and no drop
                store.delete(left)


def _lost(connection: Connection, bucket: str, check: str, patience: float) -> Finding:
    """Why the watcher did not have it, as far as can be seen from here."""
    found = f"it has not had the test object within {patience:g} s"
    queues = connection.settings.queue_urls
    if queues:
        told = _told(bucket)
        if told is not None and not any(tells(told, url.rpartition("/")[2]) for url in queues):
            mend = f"dropforge install --notify QUEUE_ARN --bucket {bucket} --apply"
            return Finding(check, Level.FAIL, f"{found}: the bucket notifies none of the queues", mend)
    try:
        paused = connection.airflow.is_paused(INTAKE)
    except DropforgeError as error:
        return Finding(check, Level.FAIL, f"{found}, and Airflow cannot be asked ({error.cause})", error.mend)
    if paused:
        return Finding(check, Level.FAIL, f"{found}: the DAG {INTAKE} is paused", f"Unpause {INTAKE}")
    waiting = sum(_waiting(url) for url in queues)
    if waiting:
        mend = "See that a triggerer runs, and its log"
        return Finding(check, Level.FAIL, f"{found}: {waiting} messages wait, and nothing takes them", mend)
    mend = "See the triggerer's log, and whether another reader takes the queue's messages"
    return Finding(check, Level.FAIL, found, mend)


def _told(bucket: str) -> dict[str, Any] | None:
    """The bucket's notifications; None where nobody may ask, or the service knows none."""
    import boto3

    client: S3Client = boto3.client("s3")
    with contextlib.suppress(ClientError, BotoCoreError):
        return dict(client.get_bucket_notification_configuration(Bucket=bucket))
    return None


def _waiting(url: str) -> int:
    import boto3

    with contextlib.suppress(ClientError, BotoCoreError, KeyError, ValueError):
        answer = boto3.client("sqs").get_queue_attributes(QueueUrl=url, AttributeNames=["ApproximateNumberOfMessages"])
        return int(answer["Attributes"]["ApproximateNumberOfMessages"])
    return 0
