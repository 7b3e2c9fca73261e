"""The trigger's dealings with the world: queue, dead letters, inbox. Blocking; called from threads."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from dropforge import inbox, intake_ledger, layout
from dropforge.errors import DropforgeError
from dropforge.letters import REASON, dead_letters_url
from dropforge.settings import from_env, split
from dropforge_airflow import connection, events
from dropforge_airflow.alerts import texts
from dropforge_airflow.alerts.telling import tell
from dropforge_airflow.triggers.queue_settings import queue_troubles

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

    from dropforge.store import S3Store

log = logging.getLogger(__name__)

_LETTER_BYTES = 200_000  # with its reason a message may have 256 KiB, however long it was when it came


@dataclass(frozen=True)
class Batch:
    """Receipts of messages that now lie in the inbox; `error` is what befell the others, which come again."""

    receipts: tuple[str, ...] = ()
    error: Exception | None = None


class Post:
    """One queue (or none), the bucket of the ledger, and the buckets that drops come from."""

    def __init__(self, queue_url: str, store: S3Store, client: SQSClient | None, buckets: Sequence[str] = ()) -> None:
        self.queue_url = queue_url
        self._store = store
        self._buckets = tuple(buckets) or (store.bucket,)
        self._client = client
        self._dead_letters: str | None = None
        self._seen: set[str] | None = None
        self._closed = False

    @classmethod
    def open(cls, queue_url: str | None, bucket: str | None, aws_conn_id: str) -> tuple[Post, ...]:
        """One for each queue, or one without a queue.

        :param bucket: where there is no other; None for those of the environment.
        :raises DropforgeError: if an address is neither given nor in the environment.
        """
        buckets = [bucket] if bucket else list(from_env().aliases)
        urls = split(from_env().queue_url if queue_url is None else queue_url)
        store = connection.open_store(buckets[0], aws_conn_id)
        client = connection.sqs(aws_conn_id) if urls else None
        return tuple(cls(url, store, client, buckets) for url in urls or ("",))

    def collect(self, wait: float) -> Batch:
        """Wait up to `wait` seconds for messages and sort them: inbox, dead letters, or of no use."""
        try:
            answer = self._sqs.receive_message(
                QueueUrl=self.queue_url, MaxNumberOfMessages=10, WaitTimeSeconds=round(wait)
            )
        except ClientError as error:
            raise self._explain(error) from None
        messages = answer.get("Messages", [])
        if self._closed:  # the trigger moved on during the long poll: whoever reads next shall have them at once
            for message in messages:
                self._sqs.change_message_visibility(
                    QueueUrl=self.queue_url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0
                )
            return Batch()
        receipts: list[str] = []
        useless: list[str] = []
        buried: list[tuple[str, str]] = []
        problem: Exception | None = None
        for message in messages:
            try:
                (receipts if self._sort(message, buried) else useless).append(message["ReceiptHandle"])
            except Exception as error:
                problem = error
        if useless:
            self.delete(useless)
        if buried:
            tell(texts.letters([reason for _, reason in buried], buried[0][0]))
        return Batch(tuple(receipts), problem)

    def _sort(self, message: Any, buried: list[tuple[str, str]]) -> bool:
        """Put a message where it belongs; True if it lies in the inbox now. Those put aside are added to `buried`."""
        body = message.get("Body", "")
        try:
            told = events.read_message(body)
            drops = events.finished_drops(told, self._buckets)
        except events.NotAnEventError as error:
            self._bury(message, str(error))
            buried.append((str(message.get("MessageId")), str(error)))
            return False
        for probe in events.probes(told, self._buckets):
            self._answer(probe)
        if drops:
            inbox.put(self._store, body)
        return bool(drops)

    def _answer(self, probe: str) -> None:
        """Tell the doctor who asks that finished drops are seen."""
        answer = {"at": datetime.now(UTC).isoformat(), "by": self.queue_url or "polling"}
        self._store.put_if_absent(layout.probe_answer_key(probe), json.dumps(answer).encode())

    def _bury(self, message: Any, reason: str) -> None:
        """Send a message to the dead-letter queue with its reason; into the bucket if there is none, or it is long."""
        body, number = message.get("Body") or " ", message.get("MessageId", "")
        if self._dead_letters is None:
            self._dead_letters = dead_letters_url(self._sqs, self.queue_url)
        if self._dead_letters and len(body.encode("utf-8", "surrogatepass")) <= _LETTER_BYTES:
            text = "".join(char if " " <= char <= "~" else "?" for char in reason)[:500]
            self._sqs.send_message(
                QueueUrl=self._dead_letters,
                MessageBody=body,
                MessageAttributes={REASON: {"DataType": "String", "StringValue": text}},
            )
            where = self._dead_letters
        else:
            key = f"{layout.MESSAGES}{inbox.digest(body)}.json"
            record = {"reason": reason, "message": number, "body": body, "at": datetime.now(UTC).isoformat()}
            self._store.put(key, json.dumps(record, indent=1).encode())
            where = f"{self._store.uri}/{key}"
        log.warning("Message %s of %s was set aside: %s. It is in %s", number, self.queue_url, reason, where)

    def check(self, acknowledge: float) -> None:
        """Say how the queue should be set up otherwise. :param acknowledge: Airflow's patience with an event, in s."""
        if not self.queue_url:
            return
        try:
            mend, know = queue_troubles(self._attributes(self.queue_url), self._of_dead_letters(), acknowledge)
        except ClientError as error:
            log.info("Queue %s: its settings cannot be read (%s)", self.queue_url, error)
            return
        for trouble in mend:
            log.warning("Queue %s: %s", self.queue_url, trouble)
        for note in know:
            log.info("Queue %s: %s", self.queue_url, note)

    def _attributes(self, url: str) -> dict[str, str]:
        names: list[Any] = ["VisibilityTimeout", "MessageRetentionPeriod", "RedrivePolicy"]
        answer: Any = self._sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)
        return dict(answer.get("Attributes", {}))

    def _of_dead_letters(self) -> dict[str, str] | None:
        self._dead_letters = dead_letters_url(self._sqs, self.queue_url)
        return self._attributes(self._dead_letters) if self._dead_letters else None

    def delete(self, receipts: Sequence[str]) -> None:
        """Delete messages. :raises DropforgeError: if some could not be deleted."""
        for start in range(0, len(receipts), 10):  # the service's limit for one call
            part = receipts[start : start + 10]
            answer = self._sqs.delete_message_batch(
                QueueUrl=self.queue_url,
                Entries=[{"Id": str(number), "ReceiptHandle": receipt} for number, receipt in enumerate(part)],
            )
            if failed := answer.get("Failed"):
                cause = f"{len(failed)} messages were not deleted ({failed[0].get('Message') or failed[0]['Code']})"
                raise DropforgeError(f"queue {self.queue_url}", cause, "Allow sqs:DeleteMessage on it")

    def waiting(self) -> list[str]:
        """Keys of what waits in the ledger: unread messages, and unclaimed drops unless their family's rules say that
        nothing can go on yet."""
        unread = [info.key for info in self._store.list(layout.INBOX)]
        unclaimed = [info.key for info in self._store.list(layout.PENDING)]
        asleep = intake_ledger.asleep(self._store, datetime.now(UTC)) if unclaimed else frozenset()
        return unread + [key for key in unclaimed if key.removeprefix(layout.PENDING).partition("/")[0] not in asleep]

    def in_flight(self) -> list[str]:
        """Keys of the drops that have a run in flight."""
        return [info.key for info in self._store.list(layout.IN_FLIGHT)]

    def look(self) -> int:
        """Look for `_SUCCESS` objects that were never seen and put them into the inbox; their number.

        Each one is remembered by a small object under `ledger/seen/`, so that a restart does not begin anew.
        """
        if self._seen is None:
            self._seen = {info.key.removeprefix(layout.SEEN) for info in self._store.list(layout.SEEN)}
        return sum(self._look(bucket, self._seen) for bucket in self._buckets)

    def _look(self, bucket: str, seen: set[str]) -> int:
        found = 0
        pages = self._store.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=layout.DROPS)
        for page in pages:
            now = _date(page)
            for item in page.get("Contents", []):
                if (probe := layout.parse_probe_key(item["Key"])) is not None and probe not in seen:
                    self._answer(probe)
                    seen.add(probe)
                parsed = layout.parse_drop_key(item["Key"])
                if parsed is None or parsed[1] != layout.SUCCESS:
                    continue
                # S3 tells times in whole seconds, and an empty object has always the same tag: within this second it
                # may still be replaced by one that looks the same. So it is looked at once more, when that is over.
                over = item["LastModified"].replace(microsecond=0) < now
                modified = item["LastModified"].isoformat() + ("" if over else " or later")
                body = inbox.found_body(bucket, item["Key"], item["ETag"], modified)
                name = inbox.digest(body)
                if name in seen:
                    continue
                inbox.put(self._store, body)  # first, so that a crash between the two repeats instead of forgetting
                self._store.put(layout.SEEN + name, item["Key"].encode())
                seen.add(name)
                found += 1
        return found

    def forget(self) -> None:
        """Drop what was learned about the queue; after a trouble it may be another one."""
        self._dead_letters = None

    def close(self) -> None:
        self._closed = True

    @property
    def _sqs(self) -> SQSClient:
        if self._client is None:
            raise DropforgeError("drop intake", "it has no queue", "Set DROPFORGE_QUEUE_URL")
        return self._client

    def _explain(self, error: ClientError) -> Exception:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in {"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"}:
            return DropforgeError(
                f"queue {self.queue_url}", "it does not exist", "Create it, or fix DROPFORGE_QUEUE_URL"
            )
        return error


def _date(page: Any) -> datetime:
    """When the store answered, by its own clock; where it does not say, long after everything."""
    try:
        return parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
    except (KeyError, ValueError, TypeError):
        return datetime.max.replace(tzinfo=UTC)
