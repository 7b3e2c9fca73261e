"""Where Loki keeps the logs of all pods, as a CloudFormation template: a stack of its own. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    key_actions,
    keys,
    of_bucket,
    role,
    trust,
)


@dataclass(frozen=True)
class Logs:
    """Where Loki keeps the logs of all pods: a bucket of their own, and the role of its account.

    :param identity, provider, key: as of `Account`. :param namespace, account: of Loki's pods.
    """

    bucket: str
    cluster: str
    identity: Identity = "pod-identity"
    provider: str = ""
    key: str = ""
    namespace: str = "monitoring"
    account: str = "loki"

    def __post_init__(self) -> None:
        """:raises DropforgeError: for a name that AWS or Kubernetes would refuse, and what cannot work together."""
        check_bucket(self.bucket)
        check_cluster(self.cluster)
        check_namespace(self.namespace)
        check_key(self.key)
        check_identity(self.identity, self.provider)


def logs_template(logs: Logs) -> dict[str, Any]:
    """The CloudFormation template of Loki's bucket and role, as plain values: a stack of its own."""
    # Loki removes what is older than its `retention_period` itself.
    actions = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    may = [allow(["s3:ListBucket"], [of_bucket(logs.bucket)]), allow(actions, keys(logs.bucket, ("",)))]
    if logs.key:
        may.append(allow(key_actions(True), [logs.key]))
    trusted = trust(logs.identity, logs.provider, [f"system:serviceaccount:{logs.namespace}:{logs.account}"])
    resources = {
        "Bucket": closed_bucket(logs.bucket, logs.key),
        "BucketPolicy": bucket_policy(logs.bucket),
        "LokiRole": role("Loki: the logs of all pods", trusted, may),
    }
    if logs.identity == "pod-identity":
        resources["LokiPods"] = association(logs.cluster, logs.namespace, logs.account, "LokiRole")
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "Dropforge: the bucket of logs, and the role of Loki. Rendered; change its source.",
        "Resources": resources,
        "Outputs": {"LokiRoleArn": {"Description": "Of service account loki", "Value": arn("LokiRole")}},
    }
