"""A bucket that there is tells the queue, and goes on telling whom it told before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from dropforge_airflow.events import read_message
from typer.testing import CliRunner

from dropforge.cli.app import app
from dropforge.errors import DropforgeError
from dropforge.install.notifying import merged, wanted
from tests.moto_server import moto_server

ARN = "arn:aws:sqs:us-east-1:123456789012:dropforge-drops"
BUCKET = "acme-uploads"
REPORTS = {
    "Id": "reports",
    "QueueArn": "arn:aws:sqs:us-east-1:123456789012:reports",
    "Events": ["s3:ObjectCreated:*"],
    "Filter": {"Key": {"FilterRules": [{"Name": "prefix", "Value": "reports/"}]}},
}


def test_what_the_bucket_tells_others_stays() -> None:
    there = {"QueueConfigurations": [REPORTS], "EventBridgeConfiguration": {}}
    whole = merged(BUCKET, there, ARN)
    assert whole == {"QueueConfigurations": [REPORTS, wanted(ARN)], "EventBridgeConfiguration": {}}
    assert merged(BUCKET, whole, ARN) == whole


def test_an_older_one_of_ours_is_replaced() -> None:
    old = {**wanted("arn:aws:sqs:us-east-1:123456789012:old"), "Events": ["s3:ObjectCreated:Put"]}
    assert merged(BUCKET, {"QueueConfigurations": [old]}, ARN) == {"QueueConfigurations": [wanted(ARN)]}


def test_one_under_another_name_suffices() -> None:
    there = {"QueueConfigurations": [{**wanted(ARN), "Id": "made-by-hand"}]}
    assert merged(BUCKET, there, ARN) == there


@pytest.mark.parametrize("name", ["QueueConfigurations", "TopicConfigurations", "LambdaFunctionConfigurations"])
@pytest.mark.parametrize("prefix", ["", "dr", "drops/", "drops/support/"])
def test_another_receiver_of_the_same_objects_is_named(name: str, prefix: str) -> None:
    rules = [{"Name": "Prefix", "Value": prefix}] if prefix else []
    other = {**REPORTS, "Id": "theirs", "Filter": {"Key": {"FilterRules": rules}}}
    with pytest.raises(DropforgeError, match="notification theirs") as refused:
        merged(BUCKET, {name: [other]}, ARN)
    assert "EventBridge" in refused.value.mend


def test_an_arn_of_something_else_is_refused() -> None:
    with pytest.raises(DropforgeError, match="no ARN of an SQS queue"):
        merged(BUCKET, {}, "https://sqs.us-east-1.amazonaws.com/123456789012/dropforge-drops")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    with moto_server() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield from _account()


def _account() -> Iterator[Any]:
    client: Any = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    for name in ("reports", "dropforge-drops"):
        boto3.client("sqs").create_queue(QueueName=name)
    client.put_bucket_notification_configuration(
        Bucket=BUCKET, NotificationConfiguration={"QueueConfigurations": [REPORTS]}
    )
    yield client
    for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=item["Key"])
    client.delete_bucket(Bucket=BUCKET)


def test_nothing_is_changed_without_apply_and_a_second_time_changes_nothing(s3: Any) -> None:
    command = ["install", "--notify", ARN, "--bucket", BUCKET]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "Nothing was changed" in shown.stderr
    assert {one["Id"] for one in json.loads(shown.stdout)["QueueConfigurations"]} == {"reports", "dropforge-drops"}
    assert len(s3.get_bucket_notification_configuration(Bucket=BUCKET)["QueueConfigurations"]) == 1

    done = CliRunner().invoke(app, [*command, "--apply"])
    assert done.exit_code == 0, done.output
    told = s3.get_bucket_notification_configuration(Bucket=BUCKET)["QueueConfigurations"]
    assert {one["Id"] for one in told} == {"reports", "dropforge-drops"}
    again = CliRunner().invoke(app, [*command, "--apply"])
    assert f"Bucket {BUCKET} already notifies the queue" in again.stderr


def test_a_finished_drop_is_told_to_the_queue_then(s3: Any) -> None:
    CliRunner().invoke(app, ["install", "--notify", ARN, "--bucket", BUCKET, "--apply"])
    sqs = boto3.client("sqs")
    url = sqs.get_queue_url(QueueName="dropforge-drops")["QueueUrl"]
    sqs.purge_queue(QueueUrl=url)  # S3's test event
    for key in ("drops/support/one/questions.jsonl", "drops/support/one/_SUCCESS"):
        s3.put_object(Bucket=BUCKET, Key=key, Body=b"")
    messages = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages", [])
    events = [event for one in messages for event in read_message(one["Body"])]
    assert [event.key for event in events] == ["drops/support/one/_SUCCESS"]
