"""SQS: queues, messages and what becomes of them."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from tests.stack.clients.place import Place, new_name, refused


def _receive(at: Place, queue: str, **more: Any) -> list[dict[str, Any]]:
    return list(at.sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10, **more).get("Messages", []))


def _attributes(at: Place, queue: str) -> dict[str, str]:
    return dict(at.sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])["Attributes"])


def a_queue_is_made_found_and_deleted(at: Place) -> None:
    name = new_name()
    queue = at.sqs.create_queue(QueueName=name)["QueueUrl"]
    assert at.sqs.get_queue_url(QueueName=name)["QueueUrl"] == queue
    assert at.sqs.list_queues(QueueNamePrefix=name)["QueueUrls"] == [queue]
    assert at.sqs.create_queue(QueueName=name)["QueueUrl"] == queue
    at.sqs.delete_queue(QueueUrl=queue)
    with refused("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"):
        at.sqs.get_queue_url(QueueName=name)
    with refused("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"):
        at.sqs.send_message(QueueUrl=queue, MessageBody="x")


def a_message_is_sent_received_and_deleted(at: Place) -> None:
    queue = at.new_queue()
    sent = at.sqs.send_message(QueueUrl=queue, MessageBody="one <&> ü 🦊")
    (message,) = _receive(at, queue)
    assert (message["Body"], message["MessageId"]) == ("one <&> ü 🦊", sent["MessageId"])
    assert message["MD5OfBody"] == sent["MD5OfMessageBody"]
    assert _receive(at, queue) == []  # it is in flight
    at.sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
    counts = _attributes(at, queue)
    assert counts["ApproximateNumberOfMessages"] == counts["ApproximateNumberOfMessagesNotVisible"] == "0"


def attributes_of_a_message(at: Place) -> None:
    queue = at.new_queue()
    told = {
        "text": {"DataType": "String", "StringValue": "ü"},
        "number": {"DataType": "Number", "StringValue": "7"},
        "bytes": {"DataType": "Binary", "BinaryValue": b"\0\xff"},
    }
    at.sqs.send_message(QueueUrl=queue, MessageBody="x", MessageAttributes=told)
    (message,) = _receive(at, queue, MessageAttributeNames=["All"], MessageSystemAttributeNames=["All"])
    assert message["MessageAttributes"] == told
    assert message["Attributes"]["ApproximateReceiveCount"] == "1"
    assert int(message["Attributes"]["SentTimestamp"]) > 0


def batches(at: Place) -> None:
    queue = at.new_queue()
    entries = [{"Id": str(number), "MessageBody": f"m{number}"} for number in range(10)]
    answer = at.sqs.send_message_batch(QueueUrl=queue, Entries=entries)
    assert [one["Id"] for one in answer["Successful"]] == [one["Id"] for one in entries]
    messages = _receive(at, queue)
    assert sorted(one["Body"] for one in messages) == [f"m{number}" for number in range(10)]
    wanted = [{"Id": str(number), "ReceiptHandle": one["ReceiptHandle"]} for number, one in enumerate(messages)]
    longer = [{**one, "VisibilityTimeout": 60} for one in wanted]
    assert len(at.sqs.change_message_visibility_batch(QueueUrl=queue, Entries=longer)["Successful"]) == 10
    assert len(at.sqs.delete_message_batch(QueueUrl=queue, Entries=wanted)["Successful"]) == 10


def batches_that_are_refused(at: Place) -> None:
    queue = at.new_queue()
    entries = [{"Id": str(number), "MessageBody": "x"} for number in range(11)]
    with refused("AWS.SimpleQueueService.TooManyEntriesInBatchRequest"):
        at.sqs.send_message_batch(QueueUrl=queue, Entries=entries)
    with refused("AWS.SimpleQueueService.BatchEntryIdsNotDistinct"):
        at.sqs.send_message_batch(QueueUrl=queue, Entries=[entries[0], entries[0]])
    with refused("AWS.SimpleQueueService.EmptyBatchRequest"):
        at.sqs.send_message_batch(QueueUrl=queue, Entries=[])


def a_message_comes_back_when_its_time_is_over(at: Place) -> None:
    queue = at.new_queue(VisibilityTimeout="2")
    at.sqs.send_message(QueueUrl=queue, MessageBody="x")
    assert len(_receive(at, queue)) == 1
    assert _receive(at, queue) == []
    (message,) = _receive(at, queue, WaitTimeSeconds=6, MessageSystemAttributeNames=["ApproximateReceiveCount"])
    assert message["Attributes"]["ApproximateReceiveCount"] == "2"


def a_message_is_given_back_at_once(at: Place) -> None:
    queue = at.new_queue()
    at.sqs.send_message(QueueUrl=queue, MessageBody="x")
    (message,) = _receive(at, queue)
    at.sqs.change_message_visibility(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0)
    assert len(_receive(at, queue)) == 1


def a_receiver_waits_for_a_message(at: Place) -> None:
    queue = at.new_queue()
    sender = threading.Timer(0.3, lambda: at.sqs.send_message(QueueUrl=queue, MessageBody="late"))
    sender.start()
    begun = time.monotonic()
    (message,) = _receive(at, queue, WaitTimeSeconds=10)
    assert message["Body"] == "late"
    assert time.monotonic() - begun < 9
    sender.join()


def a_message_with_a_delay(at: Place) -> None:
    queue = at.new_queue()
    at.sqs.send_message(QueueUrl=queue, MessageBody="x", DelaySeconds=2)
    assert _attributes(at, queue)["ApproximateNumberOfMessagesDelayed"] == "1"
    assert _receive(at, queue) == []
    assert len(_receive(at, queue, WaitTimeSeconds=6)) == 1


def dead_letters(at: Place) -> None:
    dead = at.new_queue()
    policy = {"deadLetterTargetArn": _attributes(at, dead)["QueueArn"], "maxReceiveCount": 2}
    queue = at.new_queue(RedrivePolicy=json.dumps(policy), VisibilityTimeout="0")
    assert at.sqs.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"] == [queue]
    at.sqs.send_message(QueueUrl=queue, MessageBody="poison")
    assert [len(_receive(at, queue)) for _ in range(3)] == [1, 1, 0]
    assert [message["Body"] for message in _receive(at, dead)] == ["poison"]


def a_fifo_queue_keeps_order(at: Place) -> None:
    queue = at.new_queue(".fifo", FifoQueue="true", ContentBasedDeduplication="true")
    assert queue.endswith(".fifo")
    for number in range(4):
        at.sqs.send_message(QueueUrl=queue, MessageBody=f"m{number}", MessageGroupId="g")
    at.sqs.send_message(QueueUrl=queue, MessageBody="m3", MessageGroupId="g")  # the same again
    messages = _receive(at, queue)
    assert [message["Body"] for message in messages] == ["m0", "m1", "m2", "m3"]
    at.sqs.send_message(QueueUrl=queue, MessageBody="m4", MessageGroupId="g")
    assert _receive(at, queue) == []  # while others of its group are in flight


def a_fifo_queue_drops_what_it_has(at: Place) -> None:
    queue = at.new_queue(".fifo", FifoQueue="true")
    for body in ("one", "two"):
        at.sqs.send_message(QueueUrl=queue, MessageBody=body, MessageGroupId="g", MessageDeduplicationId="same")
    assert [message["Body"] for message in _receive(at, queue)] == ["one"]
    with refused("MissingParameter"):
        at.sqs.send_message(QueueUrl=queue, MessageBody="x", MessageDeduplicationId="other")


def attributes_of_a_queue(at: Place) -> None:
    queue = at.new_queue(VisibilityTimeout="7", DelaySeconds="1", ReceiveMessageWaitTimeSeconds="2")
    found = _attributes(at, queue)
    assert (found["VisibilityTimeout"], found["DelaySeconds"]) == ("7", "1")
    assert found["QueueArn"].startswith("arn:aws:sqs:us-east-1:")
    at.sqs.set_queue_attributes(QueueUrl=queue, Attributes={"VisibilityTimeout": "9", "DelaySeconds": "0"})
    found = _attributes(at, queue)
    assert (found["VisibilityTimeout"], found["DelaySeconds"]) == ("9", "0")
    assert found["ReceiveMessageWaitTimeSeconds"] == "2"


def a_queue_of_other_attributes_is_another(at: Place) -> None:
    name = new_name()
    at.sqs.create_queue(QueueName=name, Attributes={"VisibilityTimeout": "7"})
    with refused("QueueAlreadyExists"):
        at.sqs.create_queue(QueueName=name, Attributes={"VisibilityTimeout": "8"})


def tags_of_a_queue(at: Place) -> None:
    queue = at.sqs.create_queue(QueueName=new_name(), tags={"a": "1"})["QueueUrl"]
    at.sqs.tag_queue(QueueUrl=queue, Tags={"b": "2 & 3"})
    assert at.sqs.list_queue_tags(QueueUrl=queue)["Tags"] == {"a": "1", "b": "2 & 3"}
    at.sqs.untag_queue(QueueUrl=queue, TagKeys=["a"])
    assert at.sqs.list_queue_tags(QueueUrl=queue)["Tags"] == {"b": "2 & 3"}


def a_queue_is_purged(at: Place) -> None:
    queue = at.new_queue()
    for _ in range(3):
        at.sqs.send_message(QueueUrl=queue, MessageBody="x")
    assert _attributes(at, queue)["ApproximateNumberOfMessages"] == "3"
    at.sqs.purge_queue(QueueUrl=queue)
    assert _receive(at, queue) == []


def a_message_that_is_too_long(at: Place) -> None:
    queue = at.new_queue(MaximumMessageSize="1024")
    with refused("InvalidParameterValue"):
        at.sqs.send_message(QueueUrl=queue, MessageBody="x" * 1025)
    at.sqs.send_message(QueueUrl=queue, MessageBody="x" * 1024)


def rights_to_a_queue(at: Place) -> None:
    queue = at.new_queue()
    at.sqs.add_permission(QueueUrl=queue, Label="all", AWSAccountIds=["123456789012"], Actions=["SendMessage"])
    assert json.loads(_attributes(at, queue)["Policy"])["Statement"][0]["Sid"] == "all"
    at.sqs.remove_permission(QueueUrl=queue, Label="all")
