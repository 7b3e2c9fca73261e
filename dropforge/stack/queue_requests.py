"""Requests to SQS, in its JSON protocol or the older one of forms, and what they wait for.

moto is given what was read here and nothing else: where the two read differently, one would wait or save by the wrong
action. And moto's time grows with the square of the values, so their number is bounded before its turn.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

from dropforge.stack.answers import Answer, Environ, ServiceError

MESSAGE_ACTIONS = {
    "SendMessage", "SendMessageBatch", "ReceiveMessage", "DeleteMessage", "DeleteMessageBatch", "PurgeQueue",
    "ChangeMessageVisibility", "ChangeMessageVisibilityBatch", "GetQueueUrl", "GetQueueAttributes", "ListQueues",
    "ListQueueTags", "ListDeadLetterSourceQueues",
}  # fmt: skip
FREEING_ACTIONS = {"DeleteMessage", "DeleteMessageBatch", "PurgeQueue", "DeleteQueue"}
LONGEST = 4 << 20  # SQS takes 1 MiB, which a form's escapes make three times as long

_WAIT = "WaitTimeSeconds"
_LONGEST_WAIT = 20
_MOST = 600  # a batch of ten messages with ten attributes each has fewer
_BAD = "400 Bad Request"


@dataclass(frozen=True)
class QueueRequest:
    """Action and parameters, and whether they came as JSON."""

    action: str
    values: dict[str, Any]
    is_json: bool

    @property
    def queue_url(self) -> str:
        return str(self.values.get("QueueUrl", ""))

    def wait(self, default: Any) -> int:
        """Return the seconds that a receiver waits for messages; `default` is the queue's.

        :raises ServiceError: if they are no number from 0 to 20.
        """
        told = self.values.get(_WAIT)
        try:
            seconds = int(default if told is None else told)
        except (OverflowError, TypeError, ValueError):
            seconds = -1
        if not 0 <= seconds <= _LONGEST_WAIT:
            message = f"{_WAIT} must be a number from 0 to {_LONGEST_WAIT}, not {str(told)[:40]}"
            raise ServiceError(_BAD, "InvalidParameterValue", message)
        return seconds

    def without_wait(self) -> QueueRequest:
        """Return the same request that does not wait: the server waits, outside of moto's turn."""
        return replace(self, values=self.values | {_WAIT: 0 if self.is_json else "0"})

    def environ(self, environ: Environ) -> Environ:
        """Return the request as moto is to see it."""
        if self.is_json:
            # moto looks for a form in it first, and with `&` a message may look like one.
            body = json.dumps(self.values).replace("&", r"\u0026").encode()
            kind = "application/x-amz-json-1.0"
        else:
            body, kind = urlencode(self.values).encode(), "application/x-www-form-urlencoded"
        told = {"REQUEST_METHOD": "POST", "QUERY_STRING": "", "CONTENT_TYPE": kind, "CONTENT_LENGTH": str(len(body))}
        return environ | told | {"wsgi.input": io.BytesIO(body)}


def read_request(environ: Environ, body: bytes) -> QueueRequest:
    """Read action and parameters of a request to SQS, in its JSON protocol or the older one of forms.

    :raises ServiceError: if they cannot be read, are too many, or one of a form is there twice.
    """
    target = str(environ.get("HTTP_X_AMZ_TARGET", ""))
    if target:
        return QueueRequest(target.rpartition(".")[2], _read_json(body), is_json=True)
    if "multipart" in environ.get("CONTENT_TYPE", ""):
        raise ServiceError(_BAD, "InvalidRequest", "SQS takes JSON or an urlencoded form")
    text = "&".join(filter(None, [environ.get("QUERY_STRING", ""), body.decode(errors="replace")]))
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST)
    except ValueError:
        raise ServiceError(_BAD, "InvalidRequest", f"A form has at most {_MOST} parameters") from None
    name, count = max(Counter(name for name, _ in pairs).items(), key=lambda found: found[1], default=("", 0))
    if count > 1:
        raise ServiceError(_BAD, "InvalidParameterCombination", f"The parameter {name[:80]} is there twice")
    form = dict(pairs)
    return QueueRequest(form.get("Action", ""), dict(form), is_json=False)


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body or b"{}")
    except (RecursionError, ValueError):
        values = None
    if not isinstance(values, dict):
        raise ServiceError(_BAD, "SerializationException", "The body is no JSON object, or nested too deep")
    waiting: list[Any] = [values]
    count = 0
    while waiting:
        found = waiting.pop()
        waiting += found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
        count += 1
        if count > _MOST * 2 or len(waiting) > _MOST * 2:
            raise ServiceError(_BAD, "InvalidRequest", f"A request has at most {_MOST * 2} values")
    return values


def has_messages(answer: Answer) -> bool:
    text = b"".join(answer[2])
    return b'"Messages"' in text or b"<Message>" in text
