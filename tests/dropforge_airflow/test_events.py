"""Every shape of message that a queue behind a bucket may hold."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote_plus

import pytest
from dropforge_airflow.events import NotAnEventError, ObjectEvent, finished_drops, read_message

from dropforge import inbox

DONE = "drops/fam/d1/_SUCCESS"


def record(
    key: str = DONE, name: str = "ObjectCreated:Put", bucket: str = "b", source: str = "aws:s3"
) -> dict[str, Any]:
    return {
        "eventSource": source,
        "eventName": name,
        "s3": {"bucket": {"name": bucket}, "object": {"key": quote_plus(key)}},
    }


def s3(*records: dict[str, Any]) -> str:
    return json.dumps({"Records": list(records)})


def sns(body: str) -> str:
    return json.dumps({"Type": "Notification", "MessageId": "1", "TopicArn": "arn:aws:sns:x", "Message": body})


def bridge(key: str = DONE, kind: str = "Object Created", source: str = "aws.s3") -> str:
    detail = {"version": "0", "bucket": {"name": "b"}, "object": {"key": key, "size": 0}}
    return json.dumps({"version": "0", "detail-type": kind, "source": source, "detail": detail})


CREATED = (ObjectEvent("b", DONE, True),)

READABLE = [
    ("plain", s3(record()), CREATED),
    ("multipart upload", s3(record(name="ObjectCreated:CompleteMultipartUpload")), CREATED),
    ("copy", s3(record(name="ObjectCreated:Copy")), CREATED),
    ("minio", s3(record(name="s3:ObjectCreated:Put", source="minio:s3")), CREATED),
    ("removed", s3(record(name="ObjectRemoved:Delete")), (ObjectEvent("b", DONE, False),)),
    ("restored from an archive", s3(record(name="ObjectRestore:Completed")), (ObjectEvent("b", DONE, False),)),
    (
        "several records",
        s3(record(), record("drops/fam/d2/a b+c.jsonl")),
        (*CREATED, ObjectEvent("b", "drops/fam/d2/a b+c.jsonl", True)),
    ),
    ("encoded key", s3(record("drops/fam/d/ä +%.txt")), (ObjectEvent("b", "drops/fam/d/ä +%.txt", True),)),
    ("through SNS", sns(s3(record())), CREATED),
    ("EventBridge", bridge(), CREATED),
    (
        "EventBridge does not encode keys",
        bridge("drops/fam/d/a+b%20c"),
        (ObjectEvent("b", "drops/fam/d/a+b%20c", True),),
    ),
    ("EventBridge, deleted", bridge(kind="Object Deleted"), (ObjectEvent("b", DONE, False),)),
    ("EventBridge through SNS", sns(bridge()), CREATED),
    ("test event", json.dumps({"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "b"}), ()),
    ("test event through SNS", sns(json.dumps({"Event": "s3:TestEvent"})), ()),
]

UNREADABLE = [
    ("empty", "", "not JSON"),
    ("text", "hello", "not JSON"),
    ("cut off", s3(record())[:-5], "not JSON"),
    ("deep", "[" * 200_000, "not JSON"),
    ("huge number", "1" * 10_000, "not JSON"),
    ("list", "[1]", "no JSON object"),
    ("null", "null", "no JSON object"),
    ("other object", json.dumps({"hello": 1}), "no Records"),
    ("no records", s3(), "no list of events"),
    ("a flood", s3(*[record()] * 101), r"101 Records.*at most 100"),
    ("records of another kind", json.dumps({"Records": "x"}), "no list of events"),
    ("record is no object", json.dumps({"Records": [7]}), "not from S3"),
    ("another service", s3(record(source="aws:sqs")), "not from S3"),
    (
        "no key",
        json.dumps({"Records": [{"eventSource": "aws:s3", "eventName": "ObjectCreated:Put", "s3": {}}]}),
        "lacks",
    ),
    ("key is a number", s3({**record(), "s3": {"bucket": {"name": "b"}, "object": {"key": 7}}}), "lacks"),
    ("bucket is a list", s3({**record(), "s3": {"bucket": {"name": []}, "object": {"key": "x"}}}), "no text"),
    ("bytes that are no UTF-8", s3({**record(), "s3": {"bucket": {"name": "b"}, "object": {"key": "%ff"}}}), "lacks"),
    ("event name is a number", s3({**record(), "eventName": 7}), "lacks"),
    ("one bad record spoils the message", s3(record(), {"eventSource": "aws:s3"}), "lacks"),
    ("SNS around nothing", sns("hello"), "not JSON"),
    ("SNS around itself", sns(sns(sns(sns(s3(record()))))), "no Records"),
    ("EventBridge of another service", bridge(source="aws.ec2"), "not from S3"),
    (
        "EventBridge without a key",
        json.dumps({"detail-type": "Object Created", "source": "aws.s3", "detail": {}}),
        "lacks",
    ),
]


@pytest.mark.parametrize(("body", "wanted"), [case[1:] for case in READABLE], ids=[case[0] for case in READABLE])
def test_readable(body: str, wanted: tuple[ObjectEvent, ...]) -> None:
    assert read_message(body) == wanted


@pytest.mark.parametrize(("body", "reason"), [case[1:] for case in UNREADABLE], ids=[case[0] for case in UNREADABLE])
def test_unreadable(body: str, reason: str) -> None:
    with pytest.raises(NotAnEventError, match=reason) as caught:
        read_message(body)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ([DONE], [("fam", "d1")]),
        ([DONE, DONE], [("fam", "d1")]),
        (["drops/fam/d2/_SUCCESS", DONE], [("fam", "d2"), ("fam", "d1")]),
        (["drops/fam/d1/a.jsonl"], []),
        (["drops/fam/d1/sub/_SUCCESS"], []),
        (["drops/fam/_SUCCESS"], []),
        (["drops/fam/d1/_SUCCESS/"], []),
        (["drops/fam/d1/x_SUCCESS"], []),
        (["datasets/fam/d1/_SUCCESS"], []),
        (["drops/Fam/d1/_SUCCESS"], []),
        (["drops/../d1/_SUCCESS"], []),
        (["drops/fam/d 1/_SUCCESS"], []),
        (["drops/fam/../d1/_SUCCESS"], []),
        (["drops/fam/d1/../../../ledger/drops/fam/x.json"], []),
        (["drops/fam/d1/../_SUCCESS"], []),
        (["drops//fam/d1/_SUCCESS"], []),
        (["drops/fam//_SUCCESS"], []),
        (["/drops/fam/d1/_SUCCESS"], []),
        (["./drops/fam/d1/_SUCCESS"], []),
        (["drops/fam/d1%2F_SUCCESS"], []),  # encoded twice: S3 itself encodes once
        (["drops%2Ffam%2Fd1%2F_SUCCESS"], []),
        (["drops/fam/d1\\_SUCCESS"], []),
        (["drops/fam/d1/_SUCCESS\x00"], []),
        (["drops/fam/d1\n/_SUCCESS"], []),
        (["drops/fam/d1/_SUCCESS\n"], []),
        (["drops/fam\n/d1/_SUCCESS"], []),
        (["drops/fam/" + "d" * 101 + "/_SUCCESS"], []),
        (["drops/fаm/d1/_SUCCESS"], []),  # a Cyrillic letter
    ],
)
def test_only_a_success_object_ends_a_drop(keys: list[str], wanted: list[tuple[str, str]]) -> None:
    found = finished_drops(read_message(s3(*(record(key) for key in keys))), ["b"])
    assert [name for _, name in found] == wanted


def test_a_message_may_tell_of_several_objects() -> None:
    assert len(read_message(s3(*[record()] * 100))) == 100


def test_a_removed_success_object_starts_nothing() -> None:
    assert finished_drops(read_message(s3(record(name="ObjectRemoved:Delete"))), ["b"]) == ()


def test_another_bucket_is_refused_by_name() -> None:
    with pytest.raises(NotAnEventError, match=r"'b'.*'mine'"):
        finished_drops(read_message(s3(record())), ["mine"])


def test_what_polling_finds_reads_like_an_event() -> None:
    body = inbox.found_body("b", "drops/fam/d1/_SUCCESS", '"e"', "2026-11-21T00:00:00+00:00")
    assert finished_drops(read_message(body), ["b"]) == (("b", ("fam", "d1")),)
    later = inbox.found_body("b", "drops/fam/d1/_SUCCESS", '"e"', "2026-11-22T00:00:00+00:00")
    assert inbox.digest(body) != inbox.digest(later)  # an empty _SUCCESS always has the same tag
