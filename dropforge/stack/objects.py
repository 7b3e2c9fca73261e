"""The embedded S3 and SQS: moto's server, and a layer around it that survives being killed.

`python -m dropforge.stack.objects --state FOLDER --port PORT` serves both on 127.0.0.1. moto answers one request at a
time; what a request changed is saved before the answer goes out, so what a 200 acknowledges is on the disk. Bytes on
their way in and out are not moto's business: they are read and sent outside of its turn, from and to files.
Requests must name this stack's access key, so other pages and programs on the machine cannot walk in.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import io
import json
import logging
import os
import re
import signal
import sqlite3
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, unquote_to_bytes, urlencode, urlsplit
from xml.sax.saxutils import escape

# Before moto is imported: it reads these when it is.
os.environ["MOTO_DISABLE_GLOBAL_CORS"] = "true"
os.environ["S3_IGNORE_SUBDOMAIN_BUCKETNAME"] = "true"

from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from dropforge.errors import DropforgeError
from dropforge.stack import previous_store
from dropforge.stack.bodies import WHOLE, Content, cut
from dropforge.stack.body import BodyError, read_body, wanted_digests
from dropforge.stack.moto_objects import ACCOUNT, REGION, Request, StoredObject, install, models
from dropforge.stack.persistence import Persistence, queue_models, s3, sqs_queues
from dropforge.stack.secrets import read_secrets

log = logging.getLogger("dropforge.objects")

BUCKET = "dropforge"
QUEUE = "dropforge-drops"
DEAD_QUEUE = "dropforge-drops-dead"
MAX_RECEIVES = 5
HEALTH = "/-/health"
KEY_VARIABLE = "DROPFORGE_S3_ACCESS_KEY"

_RETENTION = 14 * 86400
_DOCUMENT = 8 << 20
_FORM = 64 << 20
_HOST = r"(127\.0\.0\.1|localhost{pods})(:\d+)?"
_CREDENTIAL = re.compile(r"Credential=([^/,\s]+)/[^/,\s]+/[^/,\s]+/([^/,\s]+)/aws4_request")
_READS = {"GET", "HEAD", "OPTIONS"}
_SUBRESOURCES = {"acl", "tagging", "retention", "legal-hold", "restore", "select", "torrent"}
_MESSAGE_ACTIONS = {
    "SendMessage", "SendMessageBatch", "ReceiveMessage", "DeleteMessage", "DeleteMessageBatch", "PurgeQueue",
    "ChangeMessageVisibility", "ChangeMessageVisibilityBatch", "GetQueueUrl", "GetQueueAttributes", "ListQueues",
    "ListQueueTags", "ListDeadLetterSourceQueues",
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


class ObjectServer:
    """The WSGI application."""

    def __init__(self, state: Path, access_key: str, pod_host: str | None = None) -> None:
        """:raises DropforgeError: if the folder is another server's, or cannot be read."""
        install()
        self._access_key = access_key
        # Any other name may be a page that a browser was lured to.
        self._host = re.compile(_HOST.format(pods=f"|{re.escape(pod_host)}" if pod_host else ""))
        # moto's turn: one request at a time is asked and saved; who waits for messages lends it to others meanwhile.
        self._turn = threading.Condition(threading.RLock())
        self._s3 = create_backend_app("s3")
        self._sqs = create_backend_app("sqs")
        self._folder = state / "objects"
        self._store = Persistence(self._folder)
        self.count = self._store.load()
        self._make_own()
        self.count += previous_store.take_over(state, self._store)

    def _make_own(self) -> None:
        """Make the stack's bucket, its queues and the notification of new drops, where they are not there yet."""
        backend = queue_models.sqs_backends[ACCOUNT][REGION]
        if DEAD_QUEUE not in backend.queues:
            backend.create_queue(DEAD_QUEUE, MessageRetentionPeriod=_RETENTION)
        if QUEUE not in backend.queues:
            policy = {"deadLetterTargetArn": backend.queues[DEAD_QUEUE].queue_arn, "maxReceiveCount": MAX_RECEIVES}
            backend.create_queue(QUEUE, MessageRetentionPeriod=_RETENTION, RedrivePolicy=policy)
        if BUCKET not in s3().buckets:
            s3().create_bucket(BUCKET, REGION)
        if s3().buckets[BUCKET].notification_configuration is None:
            rules = [{"Name": "prefix", "Value": "drops/"}, {"Name": "suffix", "Value": "_SUCCESS"}]
            told = {
                "Id": QUEUE,
                "Queue": backend.queues[QUEUE].queue_arn,
                "Event": ["s3:ObjectCreated:*"],
                "Filter": {"S3Key": {"FilterRule": rules}},
            }
            s3().buckets[BUCKET].notification_configuration = models.NotificationConfiguration(queue=[told])
        with self._store.commit():
            self._store.save_bucket(BUCKET)
            self._store.save_queues(attributes=True)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            status, headers, body = self._answer(environ)
        except ServiceError as error:
            status, headers, body = error.answer()
        except BodyError as error:
            status, headers, body = ServiceError("400 Bad Request", error.code, error.message).answer()
        except (OSError, sqlite3.Error) as error:
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
        if environ["REQUEST_METHOD"] in _READS:
            with self._moto(), Request(self._store.bodies).running():
                return self._ask_s3(environ, unquote(bucket))
        return self._write(environ, unquote(bucket), _key(raw_key), query)

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

    @contextlib.contextmanager
    def _moto(self) -> Iterator[None]:
        """Moto's turn. What was learnt in it may be told when it is synced, which others need not wait for."""
        try:
            with self._turn:
                yield
        finally:
            with _or_end():
                self._store.sync(self._store.sequence)

    def _write(self, environ: Environ, bucket: str, key: str, query: dict[str, list[str]]) -> Answer:
        method = environ["REQUEST_METHOD"]
        if bucket == BUCKET and not key and method == "DELETE" and not set(query) - {"x-id"}:
            raise ServiceError("403 Forbidden", "AccessDenied", "The stack's own bucket stays")
        body = None
        if method == "PUT" and key and "HTTP_X_AMZ_COPY_SOURCE" not in environ and not _SUBRESOURCES & set(query):
            body = self._store.bodies.spool(wanted_digests(environ))
        request = Request(self._store.bodies, body)
        with request.running():
            if body is not None:
                read_body(environ, body)
            else:
                _read_document(environ, _DOCUMENT if key or "delete" in query else _FORM)
            self._hash_source(environ, request)
            with self._moto():
                _check_conditions(environ, bucket, key, query)
                return self._ask_and_save(environ, bucket, key, query)

    def _ask_and_save(self, environ: Environ, bucket: str, key: str, query: dict[str, list[str]]) -> Answer:
        uploads = set(query.get("uploadId", []))
        try:
            answer = self._ask_s3(environ, bucket)
            if answer[0] >= "500":
                raise _MotoError(answer)
            if answer[0] >= "400":
                return answer
            if "uploads" in query:
                uploads |= self._store.new_uploads(bucket)
            self._store.tell_once()
            told = self._store.queues_changed()
            with self._store.commit():
                if key:
                    self._store.save_object(bucket, key)
                else:
                    self._store.save_bucket(bucket)
                for upload in uploads:
                    self._store.save_upload(bucket, upload)
                if told:
                    self._store.save_queues()
        except BaseException as error:
            with _or_end():
                if not key:
                    self._store.reload_bucket(bucket)
                else:
                    self._store.reload_object(bucket, key)
                    for upload in uploads:
                        self._store.reload_upload(bucket, upload)
                if self._store.queues_changed():
                    self._store.load_queues()
            if isinstance(error, _MotoError):
                return error.answer
            raise
        if told:
            self._turn.notify_all()
        return answer

    def _ask_s3(self, environ: Environ, name: str) -> Answer:
        """Ask moto, and save what it wrote to the bucket that this bucket's accesses are logged to."""
        bucket = s3().buckets.get(name)
        target = str((bucket.logging or {}).get("TargetBucket")) if bucket is not None else ""
        answer = _ask(self._s3, environ)
        if target in s3().buckets:
            with self._store.commit():
                self._store.save_bucket(target)
        return answer

    def _hash_source(self, environ: Environ, request: Request) -> None:
        """Compute the entity tag of what is to be copied before moto's turn: a large object takes seconds."""
        found = urlsplit(environ.get("HTTP_X_AMZ_COPY_SOURCE", ""))
        bucket, _, key = unquote(found.path).lstrip("/").partition("/")
        if not key or bucket not in s3().buckets:
            return
        with self._turn:
            source = s3().get_object(bucket, key, version_id=parse_qs(found.query).get("versionId", [None])[0])
            if not isinstance(source, StoredObject) or source.contentsize <= WHOLE:
                return
            pieces, tag = source.pieces, source.etag.strip('"')
            span = re.fullmatch(r"bytes=(\d{1,18})-(\d{1,18})", environ.get("HTTP_X_AMZ_COPY_SOURCE_RANGE", ""))
            part = cut(pieces, int(span[1]), int(span[2]) + 1) if span else pieces
            view = Content(request.bodies, part)
        # moto computes this checksum of bytes in memory only.
        environ.pop("HTTP_X_AMZ_CHECKSUM_ALGORITHM", None)
        with contextlib.closing(view):
            request.md5s[part] = tag if part == pieces and "-" not in tag else _md5(view)

    def _queue_answer(self, environ: Environ) -> Answer:
        _read_document(environ, _DOCUMENT)
        body = environ["wsgi.input"].getvalue()
        action, values = _queue_request(environ, body)
        queue = str(values.get("QueueUrl", environ["PATH_INFO"])).rpartition("/")[2]
        if action == "DeleteQueue" and queue in {QUEUE, DEAD_QUEUE}:
            raise ServiceError("403 Forbidden", "AccessDenied", "The stack's own queues stay")
        with self._moto():
            if action != "ReceiveMessage":
                return self._ask_queue(environ, body, action)
            until = time.monotonic() + self._wait(queue, values)
            body = _without_wait(environ, body)
            while True:
                answer = self._ask_queue(environ, body, action)
                left = until - time.monotonic()
                if left <= 0 or not answer[0].startswith("200") or _has_messages(answer):
                    return answer
                # A message may also become visible again by itself, so look every second.
                self._turn.wait(min(left, 1))

    def _wait(self, name: str, values: dict[str, Any]) -> float:
        """How many seconds a receiver waits for messages."""
        told = values.get("WaitTimeSeconds")
        if told is None:
            found = [queue for queue in sqs_queues().values() if queue.name == name]
            told = found[0].receive_message_wait_time_seconds if found else 0
        seconds = int(told) if re.fullmatch(r"\d{1,3}", str(told)) else 0
        return seconds if seconds <= 20 else 0

    def _ask_queue(self, environ: Environ, body: bytes, action: str) -> Answer:
        environ = environ | {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        try:
            status, headers, parts = _ask(self._sqs, environ)
            answer = status, headers, [b"".join(parts)]
            if status < "500" and (action not in _MESSAGE_ACTIONS or self._store.queues_changed()):
                with self._store.commit():
                    self._store.save_queues(attributes=action not in _MESSAGE_ACTIONS)
                self._turn.notify_all()
        except BaseException:
            with _or_end():
                self._store.load_queues()
            raise
        return answer

    def _disk_error(self, error: OSError | sqlite3.Error) -> ServiceError:
        log.error("cannot write: %s", error)
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        if _is_full(error):
            message = f"There is no room for this in {self._folder} ({reason}); make room and try again"
            return ServiceError("507 Insufficient Storage", "InsufficientStorage", message)
        return ServiceError("500 Internal Server Error", "InternalError", f"{reason}: {self._folder}")


class _MotoError(Exception):
    """moto failed at a request, and may have changed something before it did."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


@contextlib.contextmanager
def _or_end() -> Iterator[None]:
    """End the server if it cannot be known what the disk has: started again, it knows."""
    try:
        yield
    except BaseException:
        log.error("the disk failed; ending:\n%s", traceback.format_exc())
        os._exit(70)


def _is_full(error: OSError | sqlite3.Error) -> bool:
    """Whether there is no room: disk, quota or file size limit."""
    if isinstance(error, OSError):
        return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    return error.sqlite_errorname in {"SQLITE_FULL", "SQLITE_IOERR_WRITE"}


def _md5(view: Content) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for block in view:
        digest.update(block)
    return digest.hexdigest()


def _queue_request(environ: Environ, body: bytes) -> tuple[str, dict[str, Any]]:
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


def _without_wait(environ: Environ, body: bytes) -> bytes:
    """The body of a request that does not wait: the server waits, outside of moto's turn."""
    if "HTTP_X_AMZ_TARGET" in environ:
        values = _queue_request(environ, body)[1]
        return json.dumps(values | {"WaitTimeSeconds": 0}).encode() if values else body
    pairs = [(name, value) for name, value in parse_qsl(body.decode("latin-1")) if name != "WaitTimeSeconds"]
    return urlencode([*pairs, ("WaitTimeSeconds", "0")]).encode()


def _has_messages(answer: Answer) -> bool:
    text = b"".join(answer[2])
    return b'"Messages"' in text or b"<Message>" in text


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


def _read_document(environ: Environ, limit: int) -> None:
    """Read a body that moto is to see (a list of parts or keys, a form) before its turn."""
    length = int(environ.get("CONTENT_LENGTH") or 0)
    data = environ["wsgi.input"].read(limit + 1 if environ.get("wsgi.input_terminated") else min(length, limit + 1))
    if max(length, len(data)) > limit:
        raise ServiceError("400 Bad Request", "EntityTooLarge", f"The request's document is longer than {limit} bytes")
    if len(data) < length:
        raise BodyError("IncompleteBody", f"the upload ended {length - len(data)} bytes too early")
    environ["wsgi.input"], environ["CONTENT_LENGTH"] = io.BytesIO(data), str(len(data))
    environ.pop("wsgi.input_terminated", None)
    environ.pop("HTTP_TRANSFER_ENCODING", None)


def _check_conditions(environ: Environ, bucket: str, key: str, query: dict[str, list[str]]) -> None:
    """Check the conditions that moto leaves out: on a copy's target and on an upload's completion, and the upload."""
    found = s3().buckets.get(bucket)
    if not key or found is None:
        return
    upload = query.get("uploadId", [""])[0]
    if upload and upload not in found.multiparts:
        existing = found.keys.get(key)
        finished = getattr(getattr(existing, "multipart", None), "id", None)
        if not (environ["REQUEST_METHOD"] == "POST" and finished == upload):  # completing it again is no error
            raise ServiceError("404 Not Found", "NoSuchUpload", "The upload is unknown: it was completed or ended")
    copies = environ["REQUEST_METHOD"] == "PUT" and "HTTP_X_AMZ_COPY_SOURCE" in environ and not upload
    if not copies and not (environ["REQUEST_METHOD"] == "POST" and upload):
        return
    existing = s3().get_object(bucket, key)
    wanted, absent = environ.get("HTTP_IF_MATCH"), environ.get("HTTP_IF_NONE_MATCH") == "*"
    if wanted and existing is None:
        raise ServiceError("404 Not Found", "NoSuchKey", "The object to be replaced is not there")
    if (wanted and existing.etag.strip('"') != wanted.strip('"')) or (copies and absent and existing is not None):
        raise ServiceError("412 Precondition Failed", "PreconditionFailed", "The object is not as the request wants it")


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
    try:
        application = ObjectServer(state, access_key, options.pod_host)
    except DropforgeError as error:
        sys.exit(f"error: {error}")
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
