"""The notification by which a bucket tells a queue of finished drops. Pure.

S3 keeps one configuration for a bucket and replaces it as a whole, so ours is added to what is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from dropforge.errors import DropforgeError
from dropforge.layout import DROPS, SUCCESS

ID: Final = "dropforge-drops"
_QUEUE_ARN: Final = re.compile(r"arn:aws[a-z-]*:sqs:[a-z0-9-]+:[0-9]{12}:[A-Za-z0-9_-]{1,80}")
_DESTINATIONS: Final = ("QueueConfigurations", "TopicConfigurations", "LambdaFunctionConfigurations")


def wanted(queue_arn: str) -> dict[str, Any]:
    """Our part: each finished drop is told to the queue, and no other object."""
    rules = [{"Name": "prefix", "Value": DROPS}, {"Name": "suffix", "Value": SUCCESS}]
    return {
        "Id": ID,
        "QueueArn": queue_arn,
        "Events": ["s3:ObjectCreated:*"],
        "Filter": {"Key": {"FilterRules": rules}},
    }


def merged(bucket: str, there: Mapping[str, Any], queue_arn: str) -> dict[str, Any]:
    """The bucket's whole configuration with our part in it.

    :param there: what S3 tells of it now.
    :raises DropforgeError: if this is no queue's ARN, or another is told of the same objects, which S3 refuses.
    """
    if not _QUEUE_ARN.fullmatch(queue_arn):
        mend = "Give arn:aws:sqs:REGION:ACCOUNT:QUEUE: output QueueArn of the stack of `dropforge install --aws`"
        raise DropforgeError(f"queue {queue_arn!r}", "it is no ARN of an SQS queue", mend)
    kept = {name: value for name, value in there.items() if name != "ResponseMetadata"}
    ours = wanted(queue_arn)
    queues = [one for one in kept.get("QueueConfigurations", []) if one.get("Id") != ID]
    for name in _DESTINATIONS:
        for other in queues if name == "QueueConfigurations" else kept.get(name, []):
            if other.get("QueueArn") == queue_arn and _same(other, ours):
                return kept
            if _overlaps(other):
                where = next((str(value) for key, value in other.items() if key.endswith("Arn")), "another receiver")
                raise DropforgeError(
                    f"bucket {bucket}",
                    f"it notifies {where} of new objects under {DROPS} already (notification {other.get('Id')}), and "
                    "S3 notifies one receiver only",
                    "Let that one notify the queue (SNS, EventBridge), or remove it, and run the command again",
                )
    return {**kept, "QueueConfigurations": [*queues, ours]}


def tells(there: Mapping[str, Any], queue: str) -> bool:
    """Whether a bucket may tell the queue of finished drops: directly, or by somebody who passes it on.

    :param there: the bucket's configuration. :param queue: name of the queue.
    """
    others = [one for name in _DESTINATIONS[1:] for one in there.get(name, [])]
    direct = [
        one for one in there.get("QueueConfigurations", []) if str(one.get("QueueArn", "")).rpartition(":")[2] == queue
    ]
    return "EventBridgeConfiguration" in there or any(_overlaps(one) for one in [*direct, *others])


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.get("Events") == other["Events"] and _rules(one) == _rules(other)


def _overlaps(other: Mapping[str, Any]) -> bool:
    """Whether an object may be new and finish a drop for the other one, too."""
    if not any(str(event).startswith("s3:ObjectCreated:") for event in other.get("Events", [])):
        return False
    rules = _rules(other)
    prefix, suffix = rules.get("prefix", ""), rules.get("suffix", "")
    return (prefix.startswith(DROPS) or DROPS.startswith(prefix)) and (
        suffix.endswith(SUCCESS) or SUCCESS.endswith(suffix)
    )


def _rules(one: Mapping[str, Any]) -> dict[str, str]:
    found = one.get("Filter", {}).get("Key", {}).get("FilterRules", [])
    return {str(rule.get("Name", "")).lower(): str(rule.get("Value", "")) for rule in found}
