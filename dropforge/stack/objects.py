"""The embedded S3 and SQS: moto's server, and a layer around it that survives being killed.

`python -m dropforge.stack.objects --state FOLDER --port PORT` serves both on 127.0.0.1. moto answers one request at a
time; what a request changed is saved before the answer goes out, so what a 200 acknowledges is on the disk. Bytes on
their way in and out are not moto's business: they are read and sent outside of its turn, from and to files.
Requests must be signed with this stack's keys, so other pages and programs on the machine cannot walk in.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import signal
import sqlite3
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote_to_bytes
from xml.parsers.expat import ExpatError

# Before moto is imported: it reads these when it is.
os.environ["MOTO_DISABLE_GLOBAL_CORS"] = "true"
os.environ["S3_IGNORE_SUBDOMAIN_BUCKETNAME"] = "true"

from moto.moto_server.werkzeug_app import create_backend_app
from moto.utilities.utils import get_partition
from werkzeug.formparser import parse_form_data

from dropforge.errors import DropforgeError
from dropforge.stack import previous_store
from dropforge.stack.answers import Answer, Environ, ServiceError, text_answer
from dropforge.stack.bodies import WHOLE, Content, cut
from dropforge.stack.body import BodyError, read_body, wanted_digests
from dropforge.stack.connections import Handler, Server, ask_for_files
from dropforge.stack.documents import check_document, no_body, read_document, read_start
from dropforge.stack.moto_objects import ACCOUNT, REGION, Request, StoredObject, install, models
from dropforge.stack.moto_requests import ask, ask_s3
from dropforge.stack.persistence import Persistence, is_full, queue_models, s3, sqs_queues
from dropforge.stack.post_policy import check_form, fields_before_file
from dropforge.stack.queue_requests import (
    FREEING_ACTIONS,
    LONGEST,
    MESSAGE_ACTIONS,
    QueueRequest,
    has_messages,
    read_request,
)
from dropforge.stack.request_log import REQUESTS
from dropforge.stack.secrets import read_secrets
from dropforge.stack.signatures import ChunkSigner, SignatureError, Signed, check
from dropforge.stack.turn import Turn
from dropforge.stack.writes import (
    check_asked,
    check_conditions,
    check_owners,
    check_policy,
    check_source,
    read_source,
    sends_object,
)
from dropforge.standard_streams import hold_standard_streams

log = logging.getLogger("dropforge.objects")

BUCKET = "dropforge"
QUEUE = "dropforge-drops"
DEAD_QUEUE = "dropforge-drops-dead"
MAX_RECEIVES = 5
HEALTH = "/-/health"
KEY_VARIABLES = "DROPFORGE_S3_ACCESS_KEY", "DROPFORGE_S3_SECRET_KEY"

_RETENTION = 14 * 86400
_LONGEST_TURN = 60  # seconds; the longest that is known of takes a few
_DOCUMENT = 8 << 20
_FORM = 16 << 20
_FIELDS = 64 << 10
_LITTLE = 64 << 10  # bytes of a body that is always read before its signature is known
_AT_ONCE = 32  # larger ones, of which each may have `LONGEST`
_BUCKET_NAME = re.compile(r"[A-Za-z0-9._-]*")
_HOST = r"(127\.0\.0\.1|localhost{pods})(:\d+)?"
_FAILED = "500 Internal Server Error"
_STATUS = {
    "SignatureDoesNotMatch": "403 Forbidden",
    "MissingContentLength": "411 Length Required",
    "NotImplemented": "501 Not Implemented",
}
_READS = {"GET", "HEAD", "OPTIONS"}
StartResponse = Callable[..., Any]


class ObjectServer:
    """The WSGI application."""

    def __init__(self, state: Path, access_key: str, secret_key: str, pod_host: str | None = None) -> None:
        """:raises DropforgeError: if the folder is another server's, or cannot be read."""
        install()
        self._keys = access_key, secret_key
        # Any other name may be a page that a browser was lured to.
        self._host = re.compile(_HOST.format(pods=f"|{re.escape(pod_host)}" if pod_host else ""))
        self._turn = Turn()
        self._unsigned = threading.BoundedSemaphore(_AT_ONCE)
        self._s3 = create_backend_app("s3")
        self._sqs = create_backend_app("sqs")
        self._clock = time.time() - time.monotonic()
        self._folder = state / "objects"
        self._store = Persistence(self._folder)
        self.count = self._store.load()
        self._make_own()
        self.count += previous_store.take_over(state, self._store)
        if ended := self._store.end_old_uploads():
            log.info("ended %d multipart uploads that got no part for a week", ended)

    def _make_own(self) -> None:
        """Make the stack's bucket, its queues and the notification of new drops, where they are not there yet."""
        backend = queue_models.sqs_backends[ACCOUNT][REGION]
        own = s3().buckets.get(BUCKET)
        if {QUEUE, DEAD_QUEUE} <= backend.queues.keys() and own and own.notification_configuration is not None:
            return  # and nothing is written, so that a store on a full disk can be read
        if DEAD_QUEUE not in backend.queues:
            backend.create_queue(DEAD_QUEUE, MessageRetentionPeriod=_RETENTION)
        if QUEUE not in backend.queues:
            policy = {"deadLetterTargetArn": backend.queues[DEAD_QUEUE].queue_arn, "maxReceiveCount": MAX_RECEIVES}
            backend.create_queue(QUEUE, MessageRetentionPeriod=_RETENTION, RedrivePolicy=policy)
        own = own or s3().create_bucket(BUCKET, REGION)
        if own.notification_configuration is None:
            rules = [{"Name": "prefix", "Value": "drops/"}, {"Name": "suffix", "Value": "_SUCCESS"}]
            told = {
                "Id": QUEUE,
                "Queue": backend.queues[QUEUE].queue_arn,
                "Event": ["s3:ObjectCreated:*"],
                "Filter": {"S3Key": {"FilterRule": rules}},
            }
            own.notification_configuration = models.NotificationConfiguration(queue=[told])
        with self._store.commit():
            self._store.save_bucket(BUCKET)
            self._store.save_queues(attributes=True)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            status, headers, body = self._answer(environ)
        except Exception as error:
            refusal = self._refusal(error)
            if refusal.code == "InsufficientStorage":
                log.error("%s", refusal.message)
            elif refusal.status == _FAILED:
                REQUESTS.error("%s %.100s failed", environ["REQUEST_METHOD"], environ["PATH_INFO"], exc_info=True)
            status, headers, body = refusal.answer(json_protocol="HTTP_X_AMZ_TARGET" in environ)
        start_response(status, headers)
        return body

    def _refusal(self, error: Exception) -> ServiceError:
        """What a client is told of an error."""
        if isinstance(error, ServiceError):
            return error
        if isinstance(error, SignatureError):
            return ServiceError(error.status, error.code, error.message)
        if isinstance(error, BodyError):
            return ServiceError(_STATUS.get(error.code, "400 Bad Request"), error.code, error.message)
        if isinstance(error, ExpatError):
            return ServiceError("400 Bad Request", "MalformedXML", f"The document is no XML: {error}")
        if not isinstance(error, OSError | sqlite3.Error):
            return ServiceError(_FAILED, "InternalError", "The store failed; its log says why")
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        if is_full(error):
            message = f"There is no room for this in {self._folder} ({reason}); make room and try again"
            return ServiceError("507 Insufficient Storage", "InsufficientStorage", message)
        place = error.filename if isinstance(error, OSError) and error.filename else self._folder
        return ServiceError(_FAILED, "InternalError", f"{reason}: {place}")

    def _answer(self, environ: Environ) -> Answer:
        if not self._host.fullmatch(environ.get("HTTP_HOST", "")):
            raise ServiceError("403 Forbidden", "AccessDenied", "Ask 127.0.0.1 by that name")
        path = str(environ["RAW_URI"]).partition("?")[0]
        if path == HEALTH:
            return _health(self._turn.held())
        if not re.fullmatch("[0-9]{0,15}", environ.get("CONTENT_LENGTH", "")):
            raise ServiceError("400 Bad Request", "InvalidRequest", "Content-Length must be a number of bytes")
        bucket, _, raw_key = path.removeprefix("/").partition("/")
        signed = self._check_signature(environ, bucket, raw_key)
        environ.pop("HTTP_X_MOTO_ACCOUNT_ID", None)  # all is kept in one account
        if signed.service == "sqs":
            return self._queue_answer(environ)
        if signed.service != "s3":
            raise ServiceError("501 Not Implemented", "NotImplemented", f"The embedded stack has no {signed.service}")
        if not _BUCKET_NAME.fullmatch(bucket):
            raise ServiceError("400 Bad Request", "InvalidBucketName", "A bucket's name has letters, digits, . - and _")
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        check_owners(environ, query, ACCOUNT)
        if environ["REQUEST_METHOD"] in _READS:
            no_body(environ)
            # Browsers ask by OPTIONS without a signature: a line for each would be anybody's way to fill the disk.
            logged = _unlogged if environ["REQUEST_METHOD"] == "OPTIONS" else self._access_log
            with self._moto(), Request(self._store.bodies).running(), logged(bucket):
                return ask_s3(self._s3, environ)
        return self._write(environ, bucket, _key(raw_key), query, signed.chunk_signer)

    def _check_signature(self, environ: Environ, bucket: str, key: str) -> Signed:
        """What the request is signed for. :raises SignatureError:"""
        now = datetime.now(UTC)
        method, form = environ["REQUEST_METHOD"], environ.get("CONTENT_TYPE", "").startswith("multipart/form-data")
        if method == "OPTIONS" and bucket:
            return Signed("s3")  # a browser asks without keys what a page may ask; the bucket's CORS rules answer
        if method == "POST" and form and not key and "HTTP_AUTHORIZATION" not in environ:
            _check_form(environ, bucket, *self._keys, now)
            return Signed("s3")
        signed = check(environ, *self._keys, now, lambda: self._read_unsigned(environ))
        if get_partition(signed.region) != "aws":
            raise SignatureError(
                "AuthorizationHeaderMalformed", f"Sign for a region like {REGION}, not {signed.region}"
            )
        return signed

    def _read_unsigned(self, environ: Environ) -> bytes:
        """A body that is a part of what is signed. Who knows the access key's name alone may send one, and slowly."""
        if int(environ.get("CONTENT_LENGTH") or 0) <= _LITTLE:
            return read_document(environ, LONGEST)
        if not self._unsigned.acquire(blocking=False):
            message = f"{_AT_ONCE} requests of more than {_LITTLE} bytes are read now; try again"
            raise ServiceError("503 Slow Down", "SlowDown", message)
        try:
            return read_document(environ, LONGEST)
        finally:
            self._unsigned.release()

    @contextlib.contextmanager
    def _moto(self) -> Iterator[None]:
        """Moto's turn. What was learnt in it may be told when it is synced, which others need not wait for."""
        try:
            with self._turn:
                yield
        finally:
            with _or_end():
                self._store.sync(self._store.sequence)

    def _write(
        self, environ: Environ, bucket: str, key: str, query: dict[str, list[str]], chunk_signer: ChunkSigner | None
    ) -> Answer:
        body = None
        method, names = environ["REQUEST_METHOD"], query.keys()
        check_asked(method, key, names)
        check_conditions(environ, key, names)
        if sends_object(method, key, names) and "HTTP_X_AMZ_COPY_SOURCE" not in environ:
            body = self._store.bodies.spool(wanted_digests(environ))
        request = Request(self._store.bodies, body)
        with request.running():
            if body is not None:
                read_body(environ, body, chunk_signer)
            else:
                document = read_document(environ, _DOCUMENT if key or query else _FORM)
                check_document(environ, document, of_object="uploadId" in query)
                if method == "PUT" and not key and "policy" in query:
                    check_policy(document)
            self._hash_source(environ, request)
            with self._moto(), self._access_log(bucket):
                _check_on_objects(environ, bucket, key, query)
                return self._ask_and_save(environ, bucket, key, query)

    def _ask_and_save(self, environ: Environ, bucket: str, key: str, query: dict[str, list[str]]) -> Answer:
        uploads = set(query.get("uploadId", []))
        try:
            answer = ask_s3(self._s3, environ)
            if answer[0] >= "400":  # moto may have changed something before it refused
                raise _Refused(answer)
            _check_size(environ, bucket, key, query)
            if BUCKET not in s3().buckets:
                raise ServiceError("403 Forbidden", "AccessDenied", "The stack's own bucket stays")
            if "uploads" in query:
                uploads |= self._store.changed_uploads(bucket)
            if uploads and environ["REQUEST_METHOD"] == "POST":
                self._store.tell_once()
            told = self._store.queues_changed()

            def save() -> None:
                if key:
                    self._store.save_object(bucket, key)
                else:
                    self._store.save_bucket(bucket)
                for upload in uploads:
                    self._store.save_upload(bucket, upload)
                if told:
                    self._store.save_queues()

            self._store.save(save, frees=environ["REQUEST_METHOD"] == "DELETE" or "delete" in query)
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
            if isinstance(error, _Refused):
                return error.answer
            raise
        if told:
            self._turn.notify_all()
        return answer

    @contextlib.contextmanager
    def _access_log(self, name: str) -> Iterator[None]:
        """Save what moto writes to the bucket that this bucket's accesses are logged to; S3 does not promise it."""
        bucket = s3().buckets.get(name)
        target = str((bucket.logging or {}).get("TargetBucket")) if bucket is not None else ""
        try:
            yield
        finally:
            if target in s3().buckets:
                try:
                    with self._store.commit():
                        self._store.save_bucket(target)
                except (OSError, sqlite3.Error) as error:
                    log.error("accesses of %s are not logged: %s", name, error)
                    with _or_end():
                        self._store.reload_bucket(target)

    def _hash_source(self, environ: Environ, request: Request) -> None:
        """Compute the entity tag of what is to be copied before moto's turn: a large object takes seconds."""
        found = read_source(environ)
        if found is None or found.bucket not in s3().buckets:
            return
        with self._turn:
            source = s3().get_object(found.bucket, found.key, version_id=found.version)
            if not isinstance(source, StoredObject) or source.contentsize <= WHOLE:
                return
            pieces, tag = source.pieces, source.etag.strip('"')
            span = re.fullmatch(r"bytes=(\d{1,18})-(\d{1,18})", environ.get("HTTP_X_AMZ_COPY_SOURCE_RANGE", ""))
            part = cut(pieces, int(span[1]), int(span[2]) + 1) if span else pieces
            view = Content(request.bodies, part)
        # moto computes this checksum of bytes in memory only.
        environ.pop("HTTP_X_AMZ_CHECKSUM_ALGORITHM", None)
        with contextlib.closing(view):
            known = part == pieces and "-" not in tag
            request.md5s[part] = tag if known else self._store.bodies.digest("md5", part).hex()

    def _queue_answer(self, environ: Environ) -> Answer:
        request = read_request(environ, read_document(environ, LONGEST))
        name = (request.queue_url or environ["PATH_INFO"]).rpartition("/")[2]
        with self._moto():
            if request.action != "ReceiveMessage":
                return self._ask_queue(environ, request)
            found = [queue for queue in sqs_queues().values() if queue.name == name]
            until = time.monotonic() + request.wait(found[0].receive_message_wait_time_seconds if found else 0)
            request = request.without_wait()
            while True:
                answer = self._ask_queue(environ, request)
                left = until - time.monotonic()
                if left <= 0 or not answer[0].startswith("200") or has_messages(answer):
                    return answer
                # A message may also become visible again by itself, so look every second.
                self._turn.wait(min(left, 1))

    def _follow_clock(self) -> None:
        """Move the moments at which messages come back along with a clock that was set: none comes an hour late."""
        clock = time.time() - time.monotonic()
        if abs(moved := clock - self._clock) < 1:
            return
        self._clock = clock
        for queue in sqs_queues().values():
            for message in queue._messages:
                message.visible_at += moved * 1000
                message.delayed_until += moved * 1000

    def _ask_queue(self, environ: Environ, request: QueueRequest) -> Answer:
        action = request.action
        self._follow_clock()
        try:
            status, headers, parts = ask(self._sqs, request.environ(environ), "InvalidParameterValue")
            answer = status, headers, [b"".join(parts)]
            if status >= "400":
                raise _Refused(answer)
            if not {QUEUE, DEAD_QUEUE} <= queue_models.sqs_backends[ACCOUNT][REGION].queues.keys():
                raise ServiceError("403 Forbidden", "AccessDenied", "The stack's own queues stay")
            if action not in MESSAGE_ACTIONS or self._store.queues_changed():
                attributes = action not in MESSAGE_ACTIONS
                self._store.save(
                    lambda: self._store.save_queues(attributes=attributes), frees=action in FREEING_ACTIONS
                )
                self._turn.notify_all()
        except BaseException as error:
            with _or_end():
                if action not in MESSAGE_ACTIONS or self._store.queues_changed():
                    self._store.load_queues()
            if isinstance(error, _Refused):
                return error.answer
            raise
        return answer


@contextlib.contextmanager
def _unlogged(name: str) -> Iterator[None]:
    """Let moto log no access of a bucket; for who has its turn."""
    bucket = s3().buckets.get(name)
    if bucket is None:
        yield
        return
    kept, bucket.logging = bucket.logging, {}
    try:
        yield
    finally:
        bucket.logging = kept


class _Refused(Exception):  # noqa: N818 (an answer, of which moto's changes are taken back)
    """moto refused a request or failed at it, and may have changed something before it did."""

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


def _health(held: float) -> Answer:
    """Answer whether the store works, by the seconds for which one request has held moto's turn."""
    if held < _LONGEST_TURN:
        return text_answer("200 OK", "ok\n", "text/plain")
    text = f"one request has held the store for {held:.0f} s\n"
    return text_answer("503 Service Unavailable", text, "text/plain")


def _key(raw: str) -> str:
    try:
        key = unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise ServiceError("400 Bad Request", "InvalidURI", "The key is not UTF-8") from None
    _check_length(key)
    return key


def _check_length(key: str) -> None:
    if len(key.encode()) > 1024:
        raise ServiceError("400 Bad Request", "KeyTooLongError", "A key has at most 1,024 bytes")


def _check_form(environ: Environ, bucket: str, access_key: str, secret_key: str, now: datetime) -> None:
    """Check a browser's upload against the policy that somebody with the keys signed for it."""
    start = read_start(environ, _FIELDS, _FORM)
    given = fields_before_file(environ["CONTENT_TYPE"], start)
    if given is None:
        message = f"The form's fields are no more than {_FIELDS} bytes, and then comes the file"
        raise ServiceError("400 Bad Request", "MaxPostPreDataLengthExceeded", message)
    sizes = check_form(given, bucket, access_key, secret_key, now)
    read_document(environ, _FORM, start)
    _, fields, files = parse_form_data(environ)
    environ["wsgi.input"].seek(0)
    found = files.getlist("file")
    whole = list(fields.items(multi=True)) == given
    if environ.get("QUERY_STRING") or len(found) != 1 or len(files) != 1 or not whole:
        message = "A form has one file, named `file`, after its fields, and no query"
        raise ServiceError("400 Bad Request", "InvalidArgument", message)
    # As moto makes it of the name that the browser sends.
    key = fields["key"].replace("${filename}", (found[0].filename or "").rpartition("/")[2])
    _check_length(key)
    if not key:
        raise ServiceError("400 Bad Request", "InvalidArgument", "The form's key is empty")
    if len(found[0].read()) not in sizes:
        raise ServiceError("400 Bad Request", "EntityTooLarge", f"The policy allows a file of {sizes.start} bytes up")


def _check_on_objects(environ: Environ, bucket: str, key: str, query: dict[str, list[str]]) -> None:
    """Check the conditions that moto leaves out: on a copy's source and target, on an upload's completion, the upload.

    :raises ServiceError: if one does not hold.
    """
    source = read_source(environ) if environ["REQUEST_METHOD"] == "PUT" else None
    if source is not None and source.bucket in s3().buckets:
        copied = s3().get_object(source.bucket, source.key, version_id=source.version)
        if isinstance(copied, StoredObject):
            check_source(environ, copied.etag, copied.last_modified)
    found = s3().buckets.get(bucket)
    if not key or found is None:
        return
    upload = query.get("uploadId", [""])[0]
    if upload and getattr(found.multiparts.get(upload), "key_name", None) != key:
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


def _check_size(environ: Environ, bucket: str, key: str, query: dict[str, list[str]]) -> None:
    """:raises ServiceError: if an upload was completed to another size than its client says."""
    told = environ.get("HTTP_X_AMZ_MP_OBJECT_SIZE")
    if told is None or "uploadId" not in query or environ["REQUEST_METHOD"] != "POST":
        return
    size = s3().get_object(bucket, key).contentsize
    if told != str(size):
        message = f"x-amz-mp-object-size is not {size}, which the upload's parts have together"
        raise ServiceError("400 Bad Request", "InvalidRequest", message)


def _keys(state: Path) -> tuple[str, str]:
    """Access key and secret key: told in a container, else those that the embedded stack keeps beside the data."""
    access, secret = (os.environ.get(name, "") for name in KEY_VARIABLES)
    if bool(access) != bool(secret):
        missing = KEY_VARIABLES[1] if access else KEY_VARIABLES[0]
        raise DropforgeError(missing, "is not set, and the other key is", "Set both, or neither")
    if access:
        return access, secret
    own = read_secrets(state)
    return own.access_key, own.secret_key


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="dropforge.stack.objects", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the stack's folder")
    parser.add_argument("--port", type=int, required=True, help="port of 127.0.0.1")
    parser.add_argument("--pod-host", help="one more address of this machine to listen on, for a cluster's pods")
    options = parser.parse_args(arguments)
    hold_standard_streams()
    ask_for_files()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, level=logging.INFO)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    for number in (signal.SIGTERM, signal.SIGINT):
        # At once, as what was answered is on the disk: an exception would land where something else is done with it.
        signal.signal(number, lambda *_: os._exit(0))
    state = options.state.absolute()
    tempfile.tempdir = str(state / "objects")  # where a large form lies, and what is named when it is full
    try:
        application = ObjectServer(state, *_keys(state), options.pod_host)
    except DropforgeError as error:
        sys.exit(f"error: {error}")
    hosts = ["127.0.0.1", *([options.pod_host] if options.pod_host else [])]
    first, *more = [Server(host, options.port, application, Handler) for host in hosts]
    for server in more:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    log.info("%d objects, serving http://%s:%d", application.count, " and ".join(hosts), options.port)
    first.serve_forever()


if __name__ == "__main__":
    main()
