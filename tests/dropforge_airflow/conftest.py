"""A bucket with a queue and its dead letters on a real S3 and SQS interface, and Airflow in a folder of its own."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

import boto3
import pytest

from dropforge.store import S3Store, s3_client
from tests.dropforge.conftest import mlflow_server  # noqa: F401 - a fixture


@dataclass
class Yard:
    """Where drops come in: bucket, queue, dead letters."""

    store: S3Store
    sqs: Any
    queue_url: str
    dead_url: str

    @property
    def bucket(self) -> str:
        return self.store.bucket

    def upload(self, family: str, drop: str, text: str = '{"text": "a"}', recipe: str | None = None) -> None:
        """A complete drop, as a person uploads it; S3 itself sends the message."""
        self.store.put(f"drops/{family}/{drop}/a.jsonl", text.encode())
        if recipe is not None:
            self.store.put(f"drops/{family}/{drop}/recipe.yaml", recipe.encode())
        self.store.put(f"drops/{family}/{drop}/_SUCCESS", b"")

    def send(self, body: str) -> None:
        self.sqs.send_message(QueueUrl=self.queue_url, MessageBody=body)

    def left(self) -> int:
        """Messages in the queue, those in flight included."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.sqs.get_queue_attributes(QueueUrl=self.queue_url, AttributeNames=names)["Attributes"]
        return sum(int(number) for number in found.values())

    def dead(self) -> list[dict[str, Any]]:
        answer = self.sqs.receive_message(
            QueueUrl=self.dead_url, MaxNumberOfMessages=10, MessageAttributeNames=["All"], VisibilityTimeout=0
        )
        found: list[dict[str, Any]] = answer.get("Messages", [])
        return found


@pytest.fixture
def yard(aws: str, monkeypatch: pytest.MonkeyPatch) -> Yard:
    sqs = boto3.session.Session().client("sqs")
    name = f"test-{uuid.uuid4().hex[:12]}"

    def arn(url: str) -> str:
        found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]
        return str(found["QueueArn"])

    dead = sqs.create_queue(QueueName=f"{name}-dead")["QueueUrl"]
    redrive = json.dumps({"deadLetterTargetArn": arn(dead), "maxReceiveCount": 50})
    queue = sqs.create_queue(QueueName=name, Attributes={"RedrivePolicy": redrive, "VisibilityTimeout": "30"})[
        "QueueUrl"
    ]
    client = s3_client()
    client.create_bucket(Bucket=name)
    client.put_bucket_notification_configuration(
        Bucket=name,
        NotificationConfiguration={"QueueConfigurations": [{"QueueArn": arn(queue), "Events": ["s3:ObjectCreated:*"]}]},
    )
    sqs.purge_queue(QueueUrl=queue)  # the test event has tests of its own
    connection = {"conn_type": "aws", "login": "test", "password": "test"}
    connection["extra"] = {"endpoint_url": aws, "region_name": "us-east-1"}  # type: ignore[assignment]
    monkeypatch.setenv("AIRFLOW_CONN_DROPFORGE_S3", json.dumps(connection))
    monkeypatch.setenv("DROPFORGE_BUCKET", name)
    monkeypatch.setenv("DROPFORGE_QUEUE_URL", queue)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    return Yard(S3Store(name, client=client), sqs, queue, dead)
