"""What the embedded S3 and SQS answer, as WSGI has it: a status, headers and bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from xml.sax.saxutils import escape

Environ = dict[str, Any]
Answer = tuple[str, list[tuple[str, str]], Iterable[bytes]]


class ServiceError(Exception):
    """An answer that S3 gives as an error: HTTP status, S3's code, a message for people."""

    def __init__(self, status: str, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message

    def answer(self, *, json_protocol: bool = False) -> Answer:
        if json_protocol:
            kind = "application/x-amz-json-1.0"
            return text_answer(self.status, json.dumps({"__type": self.code, "message": self.message}), kind)
        text = f"<Error><Code>{self.code}</Code><Message>{escape(self.message)}</Message></Error>"
        return text_answer(self.status, f'<?xml version="1.0" encoding="UTF-8"?>\n{text}', "application/xml")


def text_answer(status: str, text: str, kind: str) -> Answer:
    body = text.encode()
    return status, [("Content-Type", kind), ("Content-Length", str(len(body)))], [body]
