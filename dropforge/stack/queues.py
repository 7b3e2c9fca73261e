"""moto's SQS with a file per message: what was sent and not deleted is there again after any kill.

A message is on the disk before its sender hears of it, and stays there until its deletion is asked for; one that was
in flight when the server died is visible again at once. How often a message was received is not kept, so a message
that cannot be handled gets its tries anew after a restart.
"""

from __future__ import annotations

import base64
import json
import os
import uuid
from pathlib import Path
from typing import Any

import moto.sqs.models
from moto.sqs import urls
from moto.sqs.exceptions import ReceiptHandleIsInvalid

from dropforge.stack.content import sync_folder

models: Any = moto.sqs.models  # typed, but not to be put other classes in

ACCOUNT = "123456789012"
REGION = "us-east-1"
_RETENTION = 14 * 86400


class StoredQueue(models.Queue):  # type: ignore[misc]
    """A queue whose messages lie in a folder, one JSON file each."""

    folder: Path

    def open(self, folder: Path) -> None:
        """Read the messages that wait in the folder and keep new ones there."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        messages = []
        for path in folder.iterdir():
            if path.suffix == ".json":
                messages.append(_from_json(path))
            elif path.suffix == ".new":
                path.unlink()  # half-written, so never acknowledged
        self._messages.extend(sorted(messages, key=lambda message: message.sent_timestamp))

    def store_body(self, body: str) -> Any:
        """Write a new message to the disk without showing it to anybody yet."""
        message = models.Message(str(uuid.uuid4()), body)
        message.mark_sent()
        self._store(message)
        return message

    def publish(self, message: Any) -> None:
        """Show a stored message to receivers."""
        with self._messages_lock:
            self._messages.append(message)
            self._messages_lock.notify_all()

    def forget(self, message: Any) -> None:
        """Take a message off the disk."""
        (self.folder / f"{message.id}.json").unlink(missing_ok=True)

    def add_message(self, message: Any) -> None:
        before: Path | None = getattr(message, "path", None)
        self._store(message)
        if before is not None and before != message.path:  # it moved here, to the dead letters
            before.unlink(missing_ok=True)
        self.publish(message)

    def delete_message(self, receipt_handle: str) -> None:
        if receipt_handle in self.deleted_messages:
            return
        message = next((item for item in list(self._messages) if item.had_receipt_handle(receipt_handle)), None)
        if message is None:
            raise ReceiptHandleIsInvalid
        self.forget(message)
        self.pending_messages.discard(message)
        self.deleted_messages.update(message.all_receipt_handles)
        # In place: moto builds a new list here and loses a message that arrives meanwhile.
        self._messages.remove(message)

    def _store(self, message: Any) -> None:
        path = self.folder / f"{message.id}.json"
        temporary = path.with_suffix(".new")
        try:
            with temporary.open("w") as stream:
                json.dump(_to_json(message), stream, default=_encode)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.rename(path)
            sync_folder(self.folder)
            message.path = path
        except BaseException:
            temporary.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise


class StoredBackend(models.SQSBackend):  # type: ignore[misc]
    """moto's SQS; purging a queue empties its folder too."""

    @property
    def _url_module(self) -> Any:
        return urls  # moto would look for it beside this module

    def purge_queue(self, queue_name: str) -> None:
        queue = self.get_queue(queue_name)
        messages = list(queue._messages)
        super().purge_queue(queue_name)  # refuses what comes too soon after the last
        for message in messages:
            queue.forget(message)


def install() -> None:
    """Put our classes where moto looks for its own."""
    models.Queue = StoredQueue
    models.sqs_backends.backend = StoredBackend


def open_queues(folder: Path, name: str, dead: str, tries: int) -> StoredQueue:
    """The queue and the one for what could not be handled `tries` times, with the messages that wait in them."""
    backend = models.sqs_backends[ACCOUNT][REGION]
    dead_queue: StoredQueue = backend.create_queue(dead, MessageRetentionPeriod=_RETENTION)
    dead_queue.open(folder / dead)
    policy = {"deadLetterTargetArn": dead_queue.queue_arn, "maxReceiveCount": tries}
    queue: StoredQueue = backend.create_queue(name, MessageRetentionPeriod=_RETENTION, RedrivePolicy=policy)
    queue.open(folder / name)
    return queue


def queue_of(name: str) -> StoredQueue | None:
    found: StoredQueue | None = models.sqs_backends[ACCOUNT][REGION].queues.get(name)
    return found


def _to_json(message: Any) -> dict[str, Any]:
    return {
        "id": message.id,
        "body": message.body,
        "sent": message.sent_timestamp,
        "delayed_until": message.delayed_until,
        "attributes": message.message_attributes,
        "system_attributes": message.system_attributes,
    }


def _from_json(path: Path) -> Any:
    values = json.loads(path.read_text(), object_hook=_decode)
    message = models.Message(values["id"], values["body"], values["system_attributes"])
    message.sent_timestamp = values["sent"]
    message.delayed_until = values["delayed_until"]
    message.message_attributes = values["attributes"]
    message.path = path
    return message


def _encode(value: object) -> Any:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} in a message")


def _decode(values: dict[str, Any]) -> Any:
    return base64.b64decode(values["$bytes"]) if set(values) == {"$bytes"} else values
