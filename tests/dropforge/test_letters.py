"""Dead letters on a real queue and bucket: listed with their reasons, seen by others after, sent once more."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

import boto3
import pytest

from dropforge import inbox, intake_ledger, layout, ledger
from dropforge.drop import Drop
from dropforge.errors import DataError
from dropforge.letters import REASON, dead_letters_url, letters, superseded_letters
from dropforge.store import S3Store


@dataclass
class Queues:
    """A queue and its dead letters."""

    sqs: Any
    home: str
    dead: str

    def kill(self, body: str, reason: str | None = "it is not JSON") -> None:
        attributes = {REASON: {"DataType": "String", "StringValue": reason}} if reason else {}
        self.sqs.send_message(QueueUrl=self.dead, MessageBody=body, MessageAttributes=attributes)

    def bodies(self, url: str) -> list[str]:
        answer = self.sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, VisibilityTimeout=0)
        return sorted(message["Body"] for message in answer.get("Messages", []))


@pytest.fixture
def queues(aws: str) -> Queues:
    sqs = boto3.session.Session().client("sqs")
    name = f"letters-{uuid.uuid4().hex[:12]}"
    dead = sqs.create_queue(QueueName=f"{name}-dead")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 50})
    return Queues(sqs, sqs.create_queue(QueueName=name, Attributes={"RedrivePolicy": policy})["QueueUrl"], dead)


def refuse(store: S3Store, family: str, drop: str) -> None:
    record = {"reason": "all of it", "cause": "it lists 'b'", "mend": "Upload it", "at": "2026-11-20T10:00:00+00:00"}
    store.put(layout.refused_key(family, drop), json.dumps(record).encode())


def test_letters_of_all_places_are_listed_with_their_reasons_and_stay(queues: Queues, s3_store: S3Store) -> None:
    assert dead_letters_url(queues.sqs, queues.home) == queues.dead
    for number in range(12):
        queues.kill(f"hello {number}")
    queues.kill("worn out", reason=None)
    refuse(s3_store, "fam", "d1")
    s3_store.put(f"{layout.MESSAGES}x.json", json.dumps({"reason": "too long", "body": "long"}).encode())
    s3_store.put(f"{layout.MESSAGES}torn.json", b"{")
    with letters(s3_store, queues.sqs, queues.home) as found:
        told = {letter.body or letter.id: letter.reason for letter in found}
        assert len(found) == len({letter.id for letter in found}) == 16
        assert queues.bodies(queues.dead) == []  # nobody else replays what a person looks at
    assert told["hello 11"] == "it is not JSON"
    assert "too often" in told["worn out"]
    assert told["fam/d1"] == "it lists 'b'"
    assert told["long"] == "too long"
    assert "its record cannot be read" in told.values()
    assert len(queues.bodies(queues.dead)) == 10  # as many as one call gives
    with letters(s3_store, queues.sqs, queues.home, limit=3) as found:
        assert len([letter for letter in found if letter.body.startswith(("hello", "worn"))]) <= 3


def test_a_record_without_end_and_very_many_are_listed_in_bounds(s3_store: S3Store) -> None:
    for number in range(5):
        refuse(s3_store, "fam", f"d{number}")
    s3_store.put(layout.refused_key("fam", "endless"), json.dumps({"cause": "x" * (9 << 20)}).encode())
    s3_store.put(layout.refused_key("fam", "long"), json.dumps({"cause": "x" * (1 << 20)}).encode())
    with letters(s3_store, None, "", limit=3) as found:
        assert [letter.id for letter in found] == ["fam/d0", "fam/d1", "fam/d2"]
    with letters(s3_store, None, "", limit=3, only=["fam/endless", "fam/long", "fam/d4"]) as found:
        reasons = {letter.id: letter.reason for letter in found}
    with letters(s3_store, None, "", limit=2, only=list(reasons)) as found:
        assert {letter.id for letter in found} == {"fam/d4", "fam/endless", "fam/long"}  # all that are named
    assert reasons["fam/d4"] == "it lists 'b'"
    assert reasons["fam/endless"] == "its record cannot be read: it has more than 8,388,608 bytes"
    assert len(reasons["fam/long"]) <= 4000


def test_a_replayed_message_is_in_the_queue_and_no_dead_letter_any_more(queues: Queues, s3_store: S3Store) -> None:
    queues.kill("one")
    queues.kill("two")
    s3_store.put(f"{layout.MESSAGES}x.json", json.dumps({"reason": "too long", "body": "three"}).encode())
    with letters(s3_store, queues.sqs, queues.home) as found:
        for letter in found:
            letter.discard() if letter.body == "two" else letter.replay()
    assert queues.bodies(queues.home) == ["one", "three"]
    assert queues.bodies(queues.dead) == []
    assert list(s3_store.list(layout.MESSAGES)) == []


def test_without_a_queue_a_replayed_message_goes_to_the_inbox(s3_store: S3Store) -> None:
    s3_store.put(f"{layout.MESSAGES}x.json", json.dumps({"reason": "odd", "body": "body"}).encode())
    with letters(s3_store, None, "") as found:
        found[0].replay()
    assert s3_store.stat(layout.inbox_key(inbox.digest("body"))) is not None


def test_a_replayed_drop_is_looked_at_again_and_one_that_is_gone_says_so(s3_store: S3Store) -> None:
    refuse(s3_store, "fam", "d1")
    refuse(s3_store, "fam", "gone")
    s3_store.put("drops/fam/d1/_SUCCESS", b"")
    with letters(s3_store, None, "") as found:
        known = {letter.id: letter for letter in found}
        known["fam/d1"].replay()
        with pytest.raises(DataError, match=r"drop fam/gone: its _SUCCESS is gone"):
            known["fam/gone"].replay()
    (entry,) = s3_store.list(layout.INBOX)
    body = json.loads(inbox.read(s3_store.get(entry.key)).body)
    assert body["Records"][0]["s3"] == {
        "bucket": {"name": s3_store.bucket},
        "object": {"key": "drops%2Ffam%2Fd1%2F_SUCCESS", "eTag": body["Records"][0]["s3"]["object"]["eTag"]},
    }
    assert s3_store.stat(layout.refused_key("fam", "d1")) is not None  # intake takes it away


def test_superseded_drops_are_listed_apart_and_sent_again_they_wait(s3_store: S3Store) -> None:
    names = {"1" * 32: "one", "2" * 32: "twice", "3" * 32: "twice"}
    for number, name in names.items():
        drop = Drop(family="fam", drop=name, id=number, bucket="b", files=())
        ledger.record(s3_store, drop)
        assert intake_ledger.supersede(s3_store, "fam", number, name, "superseded by drop [b]x[/b]")
    s3_store.put(f"{layout.SUPERSEDED}fam/torn.json", b"{")
    with letters(s3_store, None, "") as found:
        assert found == []
    known = {letter.id: letter for letter in superseded_letters(s3_store)}
    assert sorted(known) == ["fam/" + "2" * 32, "fam/" + "3" * 32, "fam/one"]
    assert known["fam/one"].reason == "superseded by drop [b]x[/b]"
    assert len(superseded_letters(s3_store, 2)) == 2
    assert len(superseded_letters(s3_store, 1, ["fam/one"])) == 3  # a name is looked for among all
    known["fam/one"].replay()
    known["fam/" + "2" * 32].discard()
    assert list(ledger.pending(s3_store)) == [("fam", "1" * 32)]
    assert [letter.id for letter in superseded_letters(s3_store)] == ["fam/twice"]
