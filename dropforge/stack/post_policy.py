"""Uploads by a browser's form: the policy is signed, and says what the form may hold."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from botocore.auth import HmacV1Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from dropforge.stack.signatures import SignatureError, open_scope, parse_date, same

_MOST = 5 << 30
_STATUSES = {"200", "201", "204"}
_FREE = {"policy", "signature", "x-amz-signature", "awsaccesskeyid", "file"}


def fields_before_file(content_type: str, start: bytes) -> list[tuple[str, str]] | None:
    """The fields of a form before its first file; None if the form's start does not reach there."""
    fields, name, value = [], "", b""
    try:
        decoder = MultipartDecoder(parse_options_header(content_type)[1].get("boundary", "").encode("ascii"))
        decoder.receive_data(start)
        while not isinstance(event := decoder.next_event(), File | NeedData | Epilogue):
            if isinstance(event, Field):
                name, value = event.name or "", b""
            elif isinstance(event, Data):
                value += event.data
                if not event.more_data:
                    fields.append((name, value.decode(errors="replace")))
    except ValueError:
        return None
    return fields if isinstance(event, File) else None


def check_form(
    fields: Iterable[tuple[str, str]], bucket: str, access_key: str, secret_key: str, now: datetime
) -> range:
    """Check a form's fields, and the bucket of its address, against their signed policy; the sizes a file may have.

    :raises SignatureError: if the policy is not signed, too old, or does not allow the fields, or one is there twice.
    """
    given: dict[str, str] = {}
    for spelling, text in fields:
        name = spelling.lower()
        # Of two, one would be checked and the other used.
        if name in given or name == "file" or (name == "key" and spelling != "key"):
            raise SignatureError(
                "InvalidArgument", f"A form has each field once, `key` and `file` as written here: {name}"
            )
        given[name] = text
    if "key" not in given:
        raise SignatureError("InvalidArgument", "The form has no field `key`")
    if given.get("success_action_status", "204") not in _STATUSES:
        raise SignatureError("InvalidArgument", f"success_action_status is one of {', '.join(sorted(_STATUSES))}")
    if given.setdefault("bucket", bucket) != bucket:
        raise SignatureError("AccessDenied", "Invalid according to Policy: Policy Condition failed: bucket")
    policy = given.get("policy")
    if policy is None:
        raise SignatureError("AccessDenied", "The form has no signed policy")
    _check_signature(given, policy, Credentials(access_key, secret_key))
    document = _parse(policy)
    try:
        expiration = datetime.fromisoformat(document["expiration"])
        conditions = [rule for found in document["conditions"] for rule in _rules(found)]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise SignatureError("InvalidPolicyDocument", "The policy needs an expiration and conditions") from None
    if (expiration if expiration.tzinfo else expiration.replace(tzinfo=UTC)) < now:
        raise SignatureError("AccessDenied", "Invalid according to Policy: Policy expired.")
    sizes, named = range(_MOST + 1), set()
    for operator, name, value in conditions:
        if operator == "content-length-range":
            sizes = range(max(sizes.start, name), min(sizes.stop, value + 1))
            continue
        named.add(name)
        found = given.get(name, "")
        if not (found == value if operator == "eq" else found.startswith(value)):
            raise SignatureError("AccessDenied", f"Invalid according to Policy: Policy Condition failed: {name}")
    extra = {name for name in given if name not in named | _FREE and not name.startswith("x-ignore-")}
    if extra:
        raise SignatureError("AccessDenied", f"Invalid according to Policy: Extra input fields: {min(extra)}")
    return sizes


def _check_signature(given: dict[str, str], policy: str, credentials: Credentials) -> None:
    if "x-amz-signature" in given:
        date = parse_date(given.get("x-amz-date", ""))
        if given.get("x-amz-algorithm") != "AWS4-HMAC-SHA256" or date is None:
            raise SignatureError("InvalidArgument", "The form needs a valid x-amz-algorithm and x-amz-date")
        request = AWSRequest()
        request.context["timestamp"] = given["x-amz-date"]
        credential = given.get("x-amz-credential", "")
        region, service = open_scope(credential, credentials.access_key, given["x-amz-date"], "InvalidArgument")
        signature = SigV4Auth(credentials, service, region).signature(policy, request)
        good = service == "s3" and same(signature, given["x-amz-signature"])
    elif "signature" in given:
        if given.get("awsaccesskeyid") != credentials.access_key:
            raise SignatureError("InvalidAccessKeyId", "The access key is not this stack's")
        good = same(HmacV1Auth(credentials).sign_string(policy), given["signature"])
    else:
        raise SignatureError("AccessDenied", "The form is not signed")
    if not good:
        raise SignatureError("SignatureDoesNotMatch", "The signature is not that of this policy with this stack's key")


def _parse(policy: str) -> dict[str, Any]:
    try:
        document = json.loads(base64.b64decode(policy))
    except (binascii.Error, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise SignatureError("InvalidPolicyDocument", "The policy must be JSON in base64")
    return document


def _rules(condition: Any) -> list[tuple[str, Any, Any]]:
    """A condition as operator, field and value; for a range of sizes the ends are in the last two.

    :raises ValueError: if it is none.
    """
    if isinstance(condition, dict):
        return [("eq", name.lower(), str(value)) for name, value in condition.items()]
    operator, name, value = condition
    operator = operator.lower()
    if operator == "content-length-range":
        return [(operator, int(name), int(value))]
    if operator not in {"eq", "starts-with"} or not name.startswith("$"):
        raise ValueError(operator)
    return [(operator, name[1:].lower(), str(value))]
