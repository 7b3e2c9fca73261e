"""What a Dropforge needs in an AWS account, as a CloudFormation template: bucket, queues, and a role per component.

Pure: names go in, a template comes out, which is read and applied by whoever may. No key of an access is made: pods
get their roles by EKS Pod Identity or by IRSA.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dropforge.errors import DropforgeError
from dropforge.install.access import COMPONENTS, Component
from dropforge.install.cloudformation import (
    Identity,
    allow,
    arn,
    association,
    bucket_policy,
    check_bucket,
    check_cluster,
    check_identity,
    check_key,
    check_namespace,
    closed_bucket,
    document,
    key_actions,
    keys,
    no,
    of_bucket,
    role,
    trust,
)
from dropforge.install.notifying import wanted
from dropforge.layout import DROPS

#: Seconds. `dropforge_airflow.triggers.queue_settings` warns of less: messages shall not come again while Airflow may
#: still store their event (`[triggerer] shared_stream_ack_timeout` is 300).
VISIBILITY: Final = 360
RETENTION: Final = 1_209_600  # seconds; the most that SQS keeps
RECEIVES: Final = 20  # an outage of S3 takes one each time the message comes again
_REPLACED: Final = 30  # days, of versions that were replaced or deleted

_QUEUE: Final = re.compile(r"[A-Za-z0-9_-]{1,75}")


@dataclass(frozen=True)
class Account:
    """What is to be made.

    :param bucket: of ledger, datasets and runs. :param queue: of the queue, its dead letters are `QUEUE-dead`.
    :param cluster: of EKS. :param identity: how pods get their roles.
    :param provider: ARN of the cluster's OIDC provider, for IRSA.
    :param airflow: namespace of Airflow. :param training: namespaces of training and curation.
    :param make_bucket: False if there is one; see `dropforge.install.notifying` for its notification.
    :param key: ARN of a KMS key for the bucket; without one S3 encrypts with its own.
    :param drop_buckets: other buckets, which there are, that drops come from.
    """

    bucket: str
    cluster: str
    queue: str = "dropforge-drops"
    identity: Identity = "pod-identity"
    provider: str = ""
    airflow: str = "airflow"
    training: tuple[str, ...] = ("training",)
    make_bucket: bool = True
    key: str = ""
    drop_buckets: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """:raises DropforgeError: for a name that AWS or Kubernetes would refuse, and what cannot work together."""
        for bucket in (self.bucket, *self.drop_buckets):
            check_bucket(bucket)
        if self.bucket in self.drop_buckets:
            raise DropforgeError(f"bucket {self.bucket}", "it is named twice", "Name other buckets beside it")
        if not _QUEUE.fullmatch(self.queue):
            raise no("queue", self.queue, "at most 75 letters, digits, hyphens and underscores")
        check_cluster(self.cluster)
        for namespace in (self.airflow, *self.training):
            check_namespace(namespace)
        check_key(self.key)
        check_identity(self.identity, self.provider)

    @property
    def buckets(self) -> tuple[str, ...]:
        """All that drops come from."""
        return (self.bucket, *self.drop_buckets)

    def namespaces(self, component: Component) -> tuple[str, ...]:
        """Where the component runs."""
        return (self.airflow,) if component.airflow or component.name == "mlflow" else self.training


def template(account: Account) -> dict[str, Any]:
    """The CloudFormation template, as plain values."""
    resources: dict[str, Any] = {"DeadLetters": _dead_letters(account), "Queue": _queue(account)}
    resources["QueuePolicy"] = _queue_policy(account)
    if account.make_bucket:
        resources["Bucket"] = _bucket(account)
        resources["BucketPolicy"] = bucket_policy(account.bucket)
    for component in COMPONENTS:
        resources[component.role] = _role(account, component)
        if account.identity == "pod-identity":
            for number, namespace in enumerate(account.namespaces(component)):
                resources[f"{component.name.capitalize()}Pods{number or ''}"] = association(
                    account.cluster, namespace, component.account, component.role
                )
    resources["UploaderPolicy"] = _uploaders(account)
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "Dropforge: bucket, queue, dead letters, and a role per component. Rendered; change its source.",
        "Resources": resources,
        "Outputs": _outputs(account),
    }


def _dead_letters(account: Account) -> dict[str, Any]:
    return {
        "Type": "AWS::SQS::Queue",
        "DeletionPolicy": "Retain",
        "UpdateReplacePolicy": "Retain",
        "Properties": {
            "QueueName": f"{account.queue}-dead",
            "MessageRetentionPeriod": RETENTION,
            "SqsManagedSseEnabled": True,
        },
    }


def _queue(account: Account) -> dict[str, Any]:
    return {
        "Type": "AWS::SQS::Queue",
        "DeletionPolicy": "Retain",
        "UpdateReplacePolicy": "Retain",
        "Properties": {
            "QueueName": account.queue,
            "VisibilityTimeout": VISIBILITY,
            "MessageRetentionPeriod": RETENTION,
            "ReceiveMessageWaitTimeSeconds": 20,
            # With a customer's KMS key S3 could not send; SQS's own encryption needs no right to a key.
            "SqsManagedSseEnabled": True,
            "RedrivePolicy": {"deadLetterTargetArn": arn("DeadLetters"), "maxReceiveCount": RECEIVES},
        },
    }


def _queue_policy(account: Account) -> dict[str, Any]:
    return {
        "Type": "AWS::SQS::QueuePolicy",
        "Properties": {
            "Queues": [{"Ref": "Queue"}],
            "PolicyDocument": document(
                {
                    "Sid": "OnlyTheBucketsOfDropsSend",
                    "Effect": "Allow",
                    "Principal": {"Service": "s3.amazonaws.com"},
                    "Action": "sqs:SendMessage",
                    "Resource": arn("Queue"),
                    "Condition": {
                        "ArnEquals": {"aws:SourceArn": [of_bucket(bucket) for bucket in account.buckets]},
                        # A bucket of that name in another account is not meant.
                        "StringEquals": {"aws:SourceAccount": {"Ref": "AWS::AccountId"}},
                    },
                }
            ),
        },
    }


def _bucket(account: Account) -> dict[str, Any]:
    told = wanted("")
    made = closed_bucket(account.bucket, account.key)
    properties = made["Properties"]
    properties["VersioningConfiguration"] = {"Status": "Enabled"}
    properties["LifecycleConfiguration"]["Rules"].append(
        {
            "Id": "replaced-versions",
            "Status": "Enabled",
            "NoncurrentVersionExpiration": {"NoncurrentDays": _REPLACED},
        }
    )
    properties["NotificationConfiguration"] = {
        "QueueConfigurations": [
            {
                "Event": told["Events"][0],
                "Queue": arn("Queue"),
                "Filter": {"S3Key": {"Rules": told["Filter"]["Key"]["FilterRules"]}},
            }
        ]
    }
    # S3 tries whether it may send to the queue when the notification is set.
    return {**made, "DependsOn": "QueuePolicy"}


def _role(account: Account, component: Component) -> dict[str, Any]:
    subjects = [f"system:serviceaccount:{name}:{component.account}" for name in account.namespaces(component)]
    return role(component.what, trust(account.identity, account.provider, subjects), statements(account, component))


def statements(account: Account, component: Component) -> list[dict[str, Any]]:
    """What a component may do, as statements of a policy."""
    # Drops alone may lie in other buckets.
    places = [(account.bucket, component)]
    if DROPS in component.reads:
        only = Component(component.name, component.account, component.what, reads=(DROPS,))
        places += [(bucket, only) for bucket in account.drop_buckets]
    found: list[dict[str, Any]] = []
    for bucket, one in places:
        found.append(_listing(bucket, one.reads))
        found.append(allow(["s3:GetObject", "s3:GetObjectVersion"], keys(bucket, one.reads)))
        if one.writes:
            actions = ["s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
            found.append(allow(actions, keys(bucket, one.writes)))
        if one.deletes:
            found.append(allow(["s3:DeleteObject"], keys(bucket, one.deletes)))
    if component.queue:
        taking = ["sqs:ReceiveMessage", "sqs:DeleteMessage", "sqs:ChangeMessageVisibility"]
        looking = ["sqs:GetQueueAttributes", "sqs:GetQueueUrl"]
        found.append(allow([*taking, *looking], [arn("Queue")]))
        found.append(allow(["sqs:SendMessage", *looking], [arn("DeadLetters")]))
    if account.key:
        found.append(allow(key_actions(bool(component.writes)), [account.key]))
    return found


def _uploaders(account: Account) -> dict[str, Any]:
    found = []
    for bucket in account.buckets:
        found.append(_listing(bucket, (DROPS,)))
        actions = ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
        found.append(allow(actions, keys(bucket, (DROPS,))))
    if account.key:
        found.append(allow(key_actions(True), [account.key]))
    return {
        "Type": "AWS::IAM::ManagedPolicy",
        "Properties": {
            "Description": "Dropforge: who may upload drops, and nothing else",
            "PolicyDocument": document(*found),
        },
    }


def _listing(bucket: str, prefixes: Sequence[str]) -> dict[str, Any]:
    wanted = [word for prefix in prefixes for word in (prefix, f"{prefix}*")]
    return {
        "Effect": "Allow",
        "Action": ["s3:ListBucket"],
        "Resource": [of_bucket(bucket)],
        # `IfExists`: a look at an object that is not there has no prefix, and would be answered 403 in place of 404.
        "Condition": {"StringLikeIfExists": {"s3:prefix": wanted}},
    }


def _outputs(account: Account) -> dict[str, Any]:
    outputs: dict[str, Any] = {
        "QueueUrl": {"Description": "DROPFORGE_QUEUE_URL", "Value": {"Ref": "Queue"}},
        "QueueArn": {"Description": "What a bucket notifies", "Value": arn("Queue")},
        "BucketName": {"Description": "DROPFORGE_BUCKET", "Value": account.bucket},
        "UploaderPolicyArn": {"Description": "For users who upload drops", "Value": {"Ref": "UploaderPolicy"}},
    }
    for component in COMPONENTS:
        name = f"{component.role}Arn"
        what = f"Of service account {component.account}"
        outputs[name] = {"Description": what, "Value": arn(component.role)}
    return outputs
