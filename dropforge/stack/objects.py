"""The embedded S3 and SQS: moto's server behind a layer that survives being killed.

`python -m dropforge.stack.objects --state FOLDER --port PORT` serves both on 127.0.0.1. What a 200 answer
acknowledges is on the disk. What moto could do but would forget on exit (versions, tags, policies, further queues) is
refused. Requests must name this stack's access key, so other pages and programs on the machine cannot walk in.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote_to_bytes
from xml.sax.saxutils import escape

# Before moto is imported: it reads these when it is.
os.environ["MOTO_DISABLE_GLOBAL_CORS"] = "true"
os.environ["S3_IGNORE_SUBDOMAIN_BUCKETNAME"] = "true"

from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from dropforge.stack import buckets, queues
from dropforge.stack.body import BodyError, read_body, wanted_digests
from dropforge.stack.buckets import Change
from dropforge.stack.content import ObjectFolder, is_full
from dropforge.stack.secrets import read_secrets

log = logging.getLogger("dropforge.objects")

BUCKET = "dropforge"
QUEUE = "dropforge-drops"
DEAD_QUEUE = "dropforge-drops-dead"
MAX_RECEIVES = 5
HEALTH = "/-/health"
KEY_VARIABLE = "DROPFORGE_S3_ACCESS_KEY"

_HOST = r"(127\.0\.0\.1|localhost{pods})(:\d+)?"
_CREDENTIAL = re.compile(r"Credential=([^/,\s]+)/[^/,\s]+/[^/,\s]+/([^/,\s]+)/aws4_request")
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SUBRESOURCES = {"acl", "tagging", "retention", "legal-hold", "restore", "select", "torrent", "versionId"}
_QUEUE_ACTIONS = {
    "SendMessage", "SendMessageBatch", "ReceiveMessage", "DeleteMessage", "DeleteMessageBatch",
    "ChangeMessageVisibility", "ChangeMessageVisibilityBatch", "GetQueueUrl", "GetQueueAttributes", "ListQueues",
    "ListQueueTags", "ListDeadLetterSourceQueues", "PurgeQueue",
}  # fmt: skip

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
Answer = tuple[str, list[tuple[str, str]], Iterable[bytes]]


class ServiceError(Exception):
    """An answer that S3 gives as an error: HTTP status, S3's code, a message for people."""

    def __init__(self, status: str, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message

    def answer(self) -> Answer:
        text = f"<Error><Code>{self.code}</Code><Message>{escape(self.message)}</Message></Error>"
        return _text(self.status, f'<?xml version="1.0" encoding="UTF-8"?>\n{text}', "application/xml")


class Locks:
    """A lock per key, out of a few; `all` holds every one of them."""

    def __init__(self, count: int = 64) -> None:
        self._locks = [threading.Lock() for _ in range(count)]

    @contextlib.contextmanager
    def one(self, bucket: str, key: str) -> Iterator[None]:
        with self._locks[hash((bucket, key)) % len(self._locks)]:
            yield

    @contextlib.contextmanager
    def all(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            yield


class ObjectServer:
    """The WSGI application."""

    def __init__(self, state: Path, access_key: str, pod_host: str | None = None) -> None:
        queues.install()
        buckets.install()
        self._access_key = access_key
        # Any other name may be a page that a browser was lured to.
        self._host = re.compile(_HOST.format(pods=f"|{re.escape(pod_host)}" if pod_host else ""))
        self._folder = ObjectFolder(state / "objects")
        self._locks = Locks()
        self._s3 = create_backend_app("s3")
        self._sqs = create_backend_app("sqs")
        queue = queues.open_queues(state / "queues", QUEUE, DEAD_QUEUE, MAX_RECEIVES)
        self.count = buckets.load(self._folder, log.error)
        if BUCKET not in buckets.backend().buckets:
            self._folder.create_bucket(BUCKET)
            buckets.backend().create_bucket(BUCKET, queues.REGION)
        buckets.notify(BUCKET, queue, prefix="drops/", suffix="_SUCCESS")

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            status, headers, body = self._answer(environ)
        except ServiceError as error:
            status, headers, body = error.answer()
        except BodyError as error:
            status, headers, body = ServiceError("400 Bad Request", error.code, error.message).answer()
        except OSError as error:
            status, headers, body = self._disk_error(error).answer()
        except Exception:
            log.error("%s %s failed:\n%s", environ["REQUEST_METHOD"], environ["PATH_INFO"], traceback.format_exc())
            message = "The store failed; its log says why"
            status, headers, body = ServiceError("500 Internal Server Error", "InternalError", message).answer()
        start_response(status, headers)
        return body

    def _answer(self, environ: Environ) -> Answer:
        if not self._host.fullmatch(environ.get("HTTP_HOST", "")):
            raise ServiceError("403 Forbidden", "AccessDenied", "Ask 127.0.0.1 by that name")
        path = str(environ["RAW_URI"]).partition("?")[0]
        if path == HEALTH:
            return _text("200 OK", "ok\n", "text/plain")
        service = self._service(environ)
        if service == "sqs":
            return self._queue_answer(environ)
        if service != "s3":
            raise ServiceError("501 Not Implemented", "NotImplemented", f"The embedded stack has no {service}")
        bucket, _, raw_key = path.removeprefix("/").partition("/")
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        if environ["REQUEST_METHOD"] in {"GET", "HEAD", "OPTIONS"}:
            return self._read(environ)
        return self._write(environ, bucket, _key(raw_key), query)

    def _service(self, environ: Environ) -> str:
        """The service that the request is signed for; its access key must be ours."""
        signature = environ.get("HTTP_AUTHORIZATION", "")
        if not signature:
            query = parse_qs(environ.get("QUERY_STRING", ""))
            if query.get("AWSAccessKeyId") == [self._access_key]:
                return "s3"  # an address that was signed the older way
            signature = f"Credential={query.get('X-Amz-Credential', [''])[0]}"
        match = _CREDENTIAL.search(signature)
        if match is None or match[1] != self._access_key:
            raise ServiceError("403 Forbidden", "InvalidAccessKeyId", "The access key is not this stack's")
        return match[2]

    def _queue_answer(self, environ: Environ) -> Answer:
        service, _, action = str(environ.get("HTTP_X_AMZ_TARGET", "")).partition(".")
        if service != "AmazonSQS" or action not in _QUEUE_ACTIONS:
            message = f"The embedded queue does not know {action or 'this protocol'}"
            text = f'{{"__type": "com.amazonaws.sqs#UnsupportedOperation", "message": "{message}"}}'
            return _text("400 Bad Request", text, "application/x-amz-json-1.0")
        return _ask(self._sqs, environ)

    def _read(self, environ: Environ) -> Answer:
        for _ in range(20):
            try:
                return _ask(self._s3, environ)
            except FileNotFoundError:
                continue  # the object was replaced or deleted between look-up and opening: look again
        raise ServiceError("503 Service Unavailable", "SlowDown", "The object changes faster than it can be read")

    def _write(self, environ: Environ, bucket: str, key: str, query: dict[str, list[str]]) -> Answer:
        method = environ["REQUEST_METHOD"]
        if not key:
            return self._write_bucket(environ, method, bucket, query)
        refused = _SUBRESOURCES & set(query)
        if refused or "HTTP_X_AMZ_TAGGING" in environ:
            raise _unsupported(f"object {min(refused, default='tagging')}")
        body = None
        if method == "PUT" and "HTTP_X_AMZ_COPY_SOURCE" not in environ:
            body = self._folder.spool(wanted_digests(environ))
        change = Change(self._folder, body)
        with change.running():
            if body is not None:
                read_body(environ, body)
            else:
                _read_small(environ)
            with self._locks.one(bucket, key):
                _check_copy_condition(environ, bucket, key)
                return self._ask_and_commit(environ, change)

    def _write_bucket(self, environ: Environ, method: str, bucket: str, query: dict[str, list[str]]) -> Answer:
        if method == "POST" and "delete" in query:
            change = Change(self._folder)
            _read_small(environ)
            with change.running(), self._locks.all():
                return self._ask_and_commit(environ, change)
        if set(query) - {"x-id"} or method not in {"PUT", "DELETE"} or not _BUCKET_NAME.fullmatch(bucket):
            raise _unsupported(f"bucket {min(query, default=method)}")
        if bucket == BUCKET and method == "DELETE":
            raise ServiceError("403 Forbidden", "AccessDenied", "The stack's own bucket stays")
        _read_small(environ)
        with self._locks.all():
            if method == "PUT":
                self._folder.create_bucket(bucket)
            answer = _ask(self._s3, environ)
            if method == "DELETE" and answer[0].startswith("2"):
                self._folder.delete_bucket(bucket)
            return answer

    def _ask_and_commit(self, environ: Environ, change: Change) -> Answer:
        answer = _ask(self._s3, environ)
        if answer[0].startswith("2"):
            change.commit()
        return answer

    def _disk_error(self, error: OSError) -> ServiceError:
        log.error("cannot write: %s", error)
        if is_full(error):
            message = f"There is no room for this in {self._folder.root} ({error.strerror}); make room and try again"
            return ServiceError("507 Insufficient Storage", "InsufficientStorage", message)
        return ServiceError("500 Internal Server Error", "InternalError", f"{error.strerror}: {self._folder.root}")


def _ask(application: Callable[..., Iterable[bytes]], environ: Environ) -> Answer:
    """Ask moto, without sending anything yet."""
    given: list[tuple[str, list[tuple[str, str]]]] = []
    body = application(dict(environ), lambda status, headers, _=None: given.append((status, headers)))
    (status, headers), *_ = given
    return status, headers, body


def _key(raw: str) -> str:
    try:
        key = unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise ServiceError("400 Bad Request", "InvalidURI", "The key is not UTF-8") from None
    if len(key.encode()) > 1024:
        raise ServiceError("400 Bad Request", "KeyTooLongError", "A key has at most 1,024 bytes")
    return key


def _read_small(environ: Environ) -> None:
    """Read a body that moto is to see (lists of parts or keys) before any lock is taken."""
    length = int(environ.get("CONTENT_LENGTH") or 0)
    if length > 8 << 20 or environ.get("wsgi.input_terminated"):
        raise ServiceError("400 Bad Request", "EntityTooLarge", "The request's document is too long")
    data = environ["wsgi.input"].read(length)
    if len(data) != length:
        raise BodyError("IncompleteBody", f"the upload ended {length - len(data)} bytes too early")
    environ["wsgi.input"] = io.BytesIO(data)


def _check_copy_condition(environ: Environ, bucket: str, key: str) -> None:
    """moto ignores conditions on the target of a copy and If-Match on a multipart upload's completion; S3 does not."""
    if environ["REQUEST_METHOD"] == "PUT" and "HTTP_X_AMZ_COPY_SOURCE" not in environ:
        return
    found = buckets.backend().buckets.get(bucket)
    existing: Any = found.keys.get(key) if found is not None else None
    wanted = environ.get("HTTP_IF_MATCH")
    if wanted and existing is None:
        raise ServiceError("404 Not Found", "NoSuchKey", "The object to be replaced is not there")
    if (wanted and existing.etag.strip('"') != wanted.strip('"')) or (
        environ.get("HTTP_IF_NONE_MATCH") == "*" and existing is not None and environ["REQUEST_METHOD"] == "PUT"
    ):
        raise ServiceError("412 Precondition Failed", "PreconditionFailed", "The object is not as the request wants it")


def _unsupported(what: str) -> ServiceError:
    message = f"The embedded store keeps objects only, not {what}; use a real S3 for that"
    return ServiceError("501 Not Implemented", "NotImplemented", message)


def _text(status: str, text: str, kind: str) -> Answer:
    body = text.encode()
    return status, [("Content-Type", kind), ("Content-Length", str(len(body)))], [body]


class _Handler(MotoRequestHandler):
    """Logs nothing but failures: a line per request would be most of what the stack writes."""

    def log_request(self, *_: object) -> None:
        pass

    def log(self, type: str, message: str, *args: object) -> None:
        if type == "error":
            log.error(message, *args)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="dropforge.stack.objects", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the stack's folder")
    parser.add_argument("--port", type=int, required=True, help="port of 127.0.0.1")
    parser.add_argument("--pod-host", help="one more address of this machine to listen on, for a cluster's pods")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, level=logging.INFO)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    state = options.state.absolute()
    # In a container the key is told; the embedded stack keeps its own beside the data.
    access_key = os.environ.get(KEY_VARIABLE) or read_secrets(state).access_key
    application = ObjectServer(state, access_key, options.pod_host)
    hosts = ["127.0.0.1", *([options.pod_host] if options.pod_host else [])]
    first, *more = [
        make_server(host, options.port, application, threaded=True, request_handler=_Handler) for host in hosts
    ]
    for server in more:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    log.info("%d objects, serving http://%s:%d", application.count, " and ".join(hosts), options.port)
    first.serve_forever()


if __name__ == "__main__":
    main()
