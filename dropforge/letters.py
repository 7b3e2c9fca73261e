"""Dead letters: what arrived and led to no run, with its reason; each can be sent once more.

They lie in four places: in the dead-letter queue; where there is none, or a message is too long for it, under
`ledger/messages/`; finished drops that cannot be used under `ledger/refused/FAMILY/`; and those that a newer
one superseded under `ledger/superseded/`, which are listed apart.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from dropforge import inbox, intake_ledger, layout
from dropforge.errors import DataError
from dropforge.settings import split
from dropforge.store import MissingObjectError, ObjectInfo, S3Store, TooLargeError, read_bounded
from dropforge.text import shorten

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

REASON: Final = "dropforge.reason"
"""The attribute of a dead message that says why it is dead."""
_RECORD_BYTES: Final = 8 << 20  # a message of a mebibyte, spelled as JSON, with its reason
_SHOWN: Final = 4000  # characters of a reason
_UNREADABLE: Final = "its record cannot be read"
_HIDDEN: Final = 60  # seconds in which nobody else sees the messages that are looked at
_WITHOUT_REASON: Final = "it was received too often without being handled; the log of Airflow's triggerer shows why"


@dataclass(frozen=True)
class Letter:
    """One dead letter.

    :param id: how a person names it: FAMILY/DROP, or twelve hexadecimal digits.
    :param body: of a message; empty for a drop.
    :param at: when it died; None if that is not known.
    """

    id: str
    reason: str
    mend: str = ""
    body: str = ""
    at: datetime | None = None
    _send: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    _remove: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    def replay(self) -> None:
        """Send it once more; what is still wrong with it makes it a dead letter again.

        :raises DataError: if there is nothing left to send.
        """
        self._send()

    def discard(self) -> None:
        """Delete it for good. A drop's files stay."""
        self._remove()


def dead_letters_url(sqs: SQSClient, queue_url: str) -> str:
    """The dead-letter queue of a queue; empty if it has none."""
    answer = sqs.get_queue_attributes(QueueUrl=queue_url, AttributeNames=["RedrivePolicy"])
    policy = json.loads(answer.get("Attributes", {}).get("RedrivePolicy") or "{}")
    arn = policy.get("deadLetterTargetArn")
    if not arn:
        return ""
    account, name = arn.split(":")[-2:]
    return str(sqs.get_queue_url(QueueName=name, QueueOwnerAWSAccountId=account)["QueueUrl"])


@contextmanager
def letters(
    store: S3Store, sqs: SQSClient | None, queue_url: str, limit: int = 100, only: Collection[str] = ()
) -> Iterator[list[Letter]]:
    """The dead letters of all places, the oldest first. Those of the queue are nobody else's while this is open.

    :param sqs: None where there is no queue. :param queue_url: several have spaces or commas between them.
    :param limit: of drops, and of messages. :param only: names of letters; the others need not be there.
    """
    homes = split(queue_url) if sqs is not None else ()

    def choose(prefix: str, name_of: Callable[[str], str]) -> list[ObjectInfo]:
        infos = (info for info in store.list(prefix) if not only or name_of(info.key) in only)
        return list(islice(infos, None if only else limit))

    found = [_refused(store, info) for info in choose(layout.REFUSED, _drop_name)]
    kept = choose(layout.MESSAGES, _short)
    found += [_kept(store, sqs, homes[0] if homes else "", info) for info in kept]
    queues: dict[str, _DeadQueue] = {}
    for home in homes:
        assert sqs is not None
        dead = dead_letters_url(sqs, home)
        if dead and dead not in queues:  # which several queues may share
            queues[dead] = _DeadQueue(sqs, dead, home)
    with ExitStack() as held:
        room = max(0, limit - len(kept))
        for queue in queues.values():
            held.callback(queue.put_back)
            read = queue.read(room)
            found += read
            room -= len(read)
        yield _sorted(found)


def superseded_letters(store: S3Store, limit: int = 100, only: Collection[str] = ()) -> list[Letter]:
    """Drops that get no run because of a newer one, the oldest first; one that is sent again waits as the newest.

    :param limit: of drops. :param only: names of letters, which are looked for among all; the others need not be there.
    """
    found = list(islice(intake_ledger.superseded(store), None if only else limit))
    names = Counter((one.family, one.drop) for one in found)
    return _sorted([_superseded(store, one, one.drop if names[one.family, one.drop] == 1 else one.id) for one in found])


def _superseded(store: S3Store, one: intake_ledger.Superseded, name: str) -> Letter:
    return Letter(
        f"{one.family}/{name}",
        one.reason,
        "Replay it if it must have a run",
        at=one.at,
        _send=lambda: intake_ledger.revive(store, one),
        _remove=lambda: intake_ledger.forget(store, one),
    )


class _DeadQueue:
    """The messages of a dead-letter queue, held while a person looks at them."""

    def __init__(self, sqs: SQSClient, url: str, home: str) -> None:
        self._sqs, self._url, self._home = sqs, url, home
        self._held: dict[str, str] = {}

    def read(self, limit: int) -> list[Letter]:
        found: list[Letter] = []
        while len(found) < limit:
            messages = self._sqs.receive_message(
                QueueUrl=self._url,
                MaxNumberOfMessages=min(10, limit - len(found)),
                VisibilityTimeout=_HIDDEN,
                WaitTimeSeconds=1,  # a short poll asks a part of the servers only
                AttributeNames=["SentTimestamp"],
                MessageAttributeNames=[REASON],
            ).get("Messages", [])
            # One that comes twice was held for too long; then the round is over.
            new = [message for message in messages if message["MessageId"] not in self._held]
            self._held |= {message["MessageId"]: message["ReceiptHandle"] for message in messages}
            found += [self._letter(message) for message in new]
            if not new:
                break
        return found

    def _letter(self, message: Any) -> Letter:
        reason = message.get("MessageAttributes", {}).get(REASON, {}).get("StringValue") or _WITHOUT_REASON
        sent = message.get("Attributes", {}).get("SentTimestamp")
        number, body = message["MessageId"], message.get("Body", "")

        def remove() -> None:
            self._sqs.delete_message(QueueUrl=self._url, ReceiptHandle=self._held.pop(number))

        def send() -> None:
            self._sqs.send_message(QueueUrl=self._home, MessageBody=body)
            remove()  # only now: twice is harmless, never is not

        at = datetime.fromtimestamp(int(sent) / 1000, UTC) if sent else None
        return Letter(_short(number), reason, body=body, at=at, _send=send, _remove=remove)

    def put_back(self) -> None:
        receipts = list(self._held.values())
        for start in range(0, len(receipts), 10):  # the service's limit for one call
            part = receipts[start : start + 10]
            self._sqs.change_message_visibility_batch(
                QueueUrl=self._url,
                Entries=[
                    {"Id": str(number), "ReceiptHandle": receipt, "VisibilityTimeout": 0}
                    for number, receipt in enumerate(part)
                ],
            )


def _kept(store: S3Store, sqs: SQSClient | None, queue_url: str, info: ObjectInfo) -> Letter:
    record = _record(store, info.key)
    body = str(record.get("body") or "")

    def send() -> None:
        if not body:
            raise DataError(f"message {_short(info.key)}", "its record holds no message", "Discard it")
        if sqs is None:
            inbox.put(store, body)
        else:
            sqs.send_message(QueueUrl=queue_url, MessageBody=body)
        store.delete(info.key)

    return Letter(
        _short(info.key),
        shorten(str(record.get("reason") or _UNREADABLE), _SHOWN),
        body=body,
        at=_time(record.get("at")),
        _send=send,
        _remove=lambda: store.delete(info.key),
    )


def _refused(store: S3Store, info: ObjectInfo) -> Letter:
    name = _drop_name(info.key)
    record = _record(store, info.key)

    def send() -> None:
        bucket = str(record.get("bucket") or store.bucket)
        key = f"{layout.DROPS}{name.partition('@')[0]}/{layout.SUCCESS}"
        found = store.stat(f"s3://{bucket}/{key}") if layout.parse_drop_key(key) else None
        if found is None:
            raise DataError(f"drop {name}", f"its {layout.SUCCESS} is gone", f"Upload it, with {layout.SUCCESS} last")
        inbox.put(store, inbox.found_body(bucket, key, found.etag, datetime.now(UTC).isoformat()))

    return Letter(
        name,
        shorten(str(record.get("cause") or record.get("reason") or _UNREADABLE), _SHOWN),
        shorten(str(record.get("mend") or ""), _SHOWN),
        at=_time(record.get("at")),
        _send=send,
        _remove=lambda: store.delete(info.key),
    )


def _record(store: S3Store, key: str) -> dict[str, Any]:
    try:
        values = json.loads(read_bounded(store, key, _RECORD_BYTES))
    except TooLargeError as error:
        return {"reason": f"{_UNREADABLE}: {error.cause}"}
    except (ValueError, RecursionError, MissingObjectError):
        return {}
    return values if isinstance(values, dict) else {}


def _drop_name(key: str) -> str:
    return key.removeprefix(layout.REFUSED).removesuffix(".json")


def _time(text: object) -> datetime | None:
    try:
        at = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _sorted(found: Sequence[Letter]) -> list[Letter]:
    return sorted(found, key=lambda letter: (letter.at or datetime.min.replace(tzinfo=UTC), letter.id))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
