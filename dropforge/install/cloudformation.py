"""Pieces of CloudFormation templates, and the names that AWS would refuse. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from dropforge.errors import DropforgeError

Identity = Literal["pod-identity", "irsa"]

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_CLUSTER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_NAMESPACE: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_KEY: Final = re.compile(r"arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]{1,128}")
_PROVIDER: Final = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:oidc-provider/([A-Za-z0-9.-]+(?:/[A-Za-z0-9._-]+)*)")
_LEFTOVERS: Final = 7  # days, of uploads that nobody finished


def check_bucket(bucket: str) -> None:
    if not _BUCKET.fullmatch(bucket) or ".." in bucket or re.fullmatch(r"[0-9.]+", bucket):
        raise no("bucket", bucket, "3 to 63 lower-case letters, digits, dots and hyphens, as `acme-dropforge`")


def check_cluster(cluster: str) -> None:
    if not _CLUSTER.fullmatch(cluster):
        raise no("cluster", cluster, "at most 100 letters, digits, hyphens and underscores")


def check_namespace(name: str) -> None:
    """:raises DropforgeError: if Kubernetes would refuse it."""
    if not _NAMESPACE.fullmatch(name):
        raise no("namespace", name, "at most 63 lower-case letters, digits and hyphens")


def check_key(key: str) -> None:
    if key and not _KEY.fullmatch(key):
        raise no("KMS key", key, "an ARN, as arn:aws:kms:eu-west-1:111122223333:key/1234abcd-...")


def check_identity(identity: Identity, provider: str) -> None:
    if identity == "irsa" and not _PROVIDER.fullmatch(provider):
        raise DropforgeError(
            f"OIDC provider {provider!r}",
            "with `irsa` the roles trust the cluster's OIDC provider, and this is not its ARN",
            "Give --oidc-provider arn:aws:iam::ACCOUNT:oidc-provider/oidc.eks.REGION.amazonaws.com/id/ID, "
            "or take --identity pod-identity",
        )
    if identity != "irsa" and provider:
        raise DropforgeError(
            "OIDC provider", "pod identity needs none", "Leave --oidc-provider out, or take --identity irsa"
        )


def no(what: str, value: str, rule: str) -> DropforgeError:
    return DropforgeError(f"{what} {value!r}", "it can be none's name", f"Give {rule}")


def closed_bucket(name: str, key: str) -> dict[str, Any]:
    """One that is encrypted, closed to the public, and stays when the stack goes."""
    encryption: dict[str, Any] = {"SSEAlgorithm": "AES256"}
    if key:
        encryption = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}
    return {
        "Type": "AWS::S3::Bucket",
        "DeletionPolicy": "Retain",
        "UpdateReplacePolicy": "Retain",
        "Properties": {
            "BucketName": name,
            "BucketEncryption": {
                "ServerSideEncryptionConfiguration": [
                    {"ServerSideEncryptionByDefault": encryption, "BucketKeyEnabled": bool(key)}
                ]
            },
            "OwnershipControls": {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]},
            "PublicAccessBlockConfiguration": {
                "BlockPublicAcls": True,
                "BlockPublicPolicy": True,
                "IgnorePublicAcls": True,
                "RestrictPublicBuckets": True,
            },
            "LifecycleConfiguration": {
                "Rules": [
                    {
                        "Id": "unfinished-uploads",
                        "Status": "Enabled",
                        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": _LEFTOVERS},
                    }
                ]
            },
        },
    }


def bucket_policy(bucket: str) -> dict[str, Any]:
    return {
        "Type": "AWS::S3::BucketPolicy",
        "Properties": {
            "Bucket": {"Ref": "Bucket"},
            "PolicyDocument": document(
                {
                    "Sid": "EncryptedConnectionsAlone",
                    "Effect": "Deny",
                    "Principal": "*",
                    "Action": "s3:*",
                    "Resource": [of_bucket(bucket), of_bucket(bucket, "*")],
                    "Condition": {"Bool": {"aws:SecureTransport": "false"}},
                }
            ),
        },
    }


def role(what: str, trusted: Mapping[str, Any], may: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "Type": "AWS::IAM::Role",
        "Properties": {
            "Description": f"Dropforge: {what}"[:1000],
            "AssumeRolePolicyDocument": document(trusted),
            "Policies": [{"PolicyName": "dropforge", "PolicyDocument": document(*may)}],
        },
    }


def trust(identity: Identity, provider: str, subjects: Sequence[str]) -> dict[str, Any]:
    if identity == "pod-identity":
        return {
            "Effect": "Allow",
            "Principal": {"Service": "pods.eks.amazonaws.com"},
            "Action": ["sts:AssumeRole", "sts:TagSession"],
        }
    found = _PROVIDER.fullmatch(provider)
    assert found is not None
    return {
        "Effect": "Allow",
        "Principal": {"Federated": provider},
        "Action": "sts:AssumeRoleWithWebIdentity",
        "Condition": {"StringEquals": {f"{found[1]}:aud": "sts.amazonaws.com", f"{found[1]}:sub": list(subjects)}},
    }


def association(cluster: str, namespace: str, account: str, role: str) -> dict[str, Any]:
    return {
        "Type": "AWS::EKS::PodIdentityAssociation",
        "Properties": {
            "ClusterName": cluster,
            "Namespace": namespace,
            "ServiceAccount": account,
            "RoleArn": arn(role),
        },
    }


def allow(actions: Sequence[str], resources: Sequence[Any]) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": list(actions), "Resource": list(resources)}


def keys(bucket: str, prefixes: Sequence[str]) -> list[Any]:
    return [of_bucket(bucket, f"{prefix}*") for prefix in prefixes]


def key_actions(writes: bool) -> list[str]:
    return ["kms:Decrypt", *(["kms:GenerateDataKey"] if writes else [])]


def of_bucket(bucket: str, key: str = "") -> dict[str, str]:
    return {"Fn::Sub": f"arn:${{AWS::Partition}}:s3:::{bucket}{'/' if key else ''}{key}"}


def arn(name: str) -> dict[str, list[str]]:
    return {"Fn::GetAtt": [name, "Arn"]}


def document(*found: Mapping[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(found)}
