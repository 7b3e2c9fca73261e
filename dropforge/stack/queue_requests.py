"""Requests to SQS, in its JSON protocol or the older one of forms, and what they wait for."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl, urlencode

from dropforge.stack.answers import Answer, Environ

MESSAGE_ACTIONS = {
    "SendMessage", "SendMessageBatch", "ReceiveMessage", "DeleteMessage", "DeleteMessageBatch", "PurgeQueue",
    "ChangeMessageVisibility", "ChangeMessageVisibilityBatch", "GetQueueUrl", "GetQueueAttributes", "ListQueues",
    "ListQueueTags", "ListDeadLetterSourceQueues",
}  # fmt: skip


def read_action(environ: Environ, body: bytes) -> tuple[str, dict[str, Any]]:
    """Action and parameters of a request to SQS, in its JSON protocol or the older one of forms."""
    action = str(environ.get("HTTP_X_AMZ_TARGET", "")).rpartition(".")[2]
    if action:
        try:
            values = json.loads(body or b"{}")
        except ValueError:
            values = None
        return action, values if isinstance(values, dict) else {}
    form = dict(parse_qsl(f"{environ.get('QUERY_STRING', '')}&{body.decode('latin-1')}"))
    return form.get("Action", ""), dict(form)


def without_wait(environ: Environ, body: bytes) -> bytes:
    """The body of a request that does not wait: the server waits, outside of moto's turn."""
    if "HTTP_X_AMZ_TARGET" in environ:
        values = read_action(environ, body)[1]
        return json.dumps(values | {"WaitTimeSeconds": 0}).encode() if values else body
    pairs = [(name, value) for name, value in parse_qsl(body.decode("latin-1")) if name != "WaitTimeSeconds"]
    return urlencode([*pairs, ("WaitTimeSeconds", "0")]).encode()


def has_messages(answer: Answer) -> bool:
    text = b"".join(answer[2])
    return b'"Messages"' in text or b"<Message>" in text
