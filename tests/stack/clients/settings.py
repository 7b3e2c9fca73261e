"""What is told of buckets and objects beside their bodies: tags, rights, rules, locks, notifications."""

from __future__ import annotations

import datetime
import json
from typing import Any
from urllib.parse import unquote_plus

from tests.stack.clients.place import Place, refused

TAGS = [{"Key": "Team", "Value": "blue + green"}, {"Key": "a/b:c=d@e._-", "Value": "1"}]
READERS = "http://acs.amazonaws.com/groups/global/AllUsers"


def _by_key(tags: list[dict[str, str]]) -> list[dict[str, str]]:
    return sorted(tags, key=lambda tag: tag["Key"])


def _rights(answer: dict[str, Any]) -> set[tuple[str, str]]:
    return {(grant["Grantee"].get("URI", "owner"), grant["Permission"]) for grant in answer["Grants"]}


def tags_of_an_object(at: Place) -> None:
    at.put("a")
    named = {"Bucket": at.bucket, "Key": "a"}
    assert at.s3.get_object_tagging(**named)["TagSet"] == []
    at.s3.put_object_tagging(**named, Tagging={"TagSet": TAGS})
    assert _by_key(at.s3.get_object_tagging(**named)["TagSet"]) == TAGS
    at.s3.delete_object_tagging(**named)
    assert at.s3.get_object_tagging(**named)["TagSet"] == []


def tags_told_with_the_body(at: Place) -> None:
    at.put("a", Tagging="Team=blue%20%2B%20green&a%2Fb%3Ac%3Dd%40e._-=1")
    assert _by_key(at.s3.get_object_tagging(Bucket=at.bucket, Key="a")["TagSet"]) == TAGS
    assert at.s3.get_object(Bucket=at.bucket, Key="a")["TagCount"] == 2
    at.put("a")
    assert at.s3.get_object_tagging(Bucket=at.bucket, Key="a")["TagSet"] == []


def too_many_tags(at: Place) -> None:
    at.put("a")
    many = [{"Key": str(number), "Value": "x"} for number in range(11)]
    with refused("InvalidTag", "BadRequest"):
        at.s3.put_object_tagging(Bucket=at.bucket, Key="a", Tagging={"TagSet": many})


def a_tag_that_is_told_twice(at: Place) -> None:
    at.put("a")
    with refused("InvalidTag"):
        twice = [{"Key": "a", "Value": "1"}, {"Key": "a", "Value": "2"}]
        at.s3.put_object_tagging(Bucket=at.bucket, Key="a", Tagging={"TagSet": twice})


def tags_of_any_script(at: Place) -> None:
    at.put("a")
    told = [{"Key": "日本", "Value": "ü"}]
    at.s3.put_object_tagging(Bucket=at.bucket, Key="a", Tagging={"TagSet": told})
    assert at.s3.get_object_tagging(Bucket=at.bucket, Key="a")["TagSet"] == told


def tags_of_a_bucket(at: Place) -> None:
    with refused("NoSuchTagSet"):
        at.s3.get_bucket_tagging(Bucket=at.bucket)
    at.s3.put_bucket_tagging(Bucket=at.bucket, Tagging={"TagSet": TAGS})
    assert _by_key(at.s3.get_bucket_tagging(Bucket=at.bucket)["TagSet"]) == TAGS
    at.s3.delete_bucket_tagging(Bucket=at.bucket)
    with refused("NoSuchTagSet"):
        at.s3.get_bucket_tagging(Bucket=at.bucket)


def a_tag_of_a_bucket_without_a_value(at: Place) -> None:
    at.s3.put_bucket_tagging(Bucket=at.bucket, Tagging={"TagSet": [{"Key": "a", "Value": ""}]})
    assert at.s3.get_bucket_tagging(Bucket=at.bucket)["TagSet"] == [{"Key": "a", "Value": ""}]


def rights_to_an_object(at: Place) -> None:
    at.put("a")
    named = {"Bucket": at.bucket, "Key": "a"}
    answer = at.s3.get_object_acl(**named)
    assert _rights(answer) == {("owner", "FULL_CONTROL")}
    at.s3.put_object_acl(**named, ACL="public-read")
    assert _rights(at.s3.get_object_acl(**named)) == {("owner", "FULL_CONTROL"), (READERS, "READ")}


def rights_told_one_by_one(at: Place) -> None:
    at.put("a")
    named = {"Bucket": at.bucket, "Key": "a"}
    answer = at.s3.get_object_acl(**named)
    at.s3.put_object_acl(
        **named,
        AccessControlPolicy={
            "Owner": answer["Owner"],
            "Grants": [{"Grantee": {"Type": "Group", "URI": READERS}, "Permission": "READ"}],
        },
    )
    assert _rights(at.s3.get_object_acl(**named)) == {(READERS, "READ")}


def rights_told_with_the_body(at: Place) -> None:
    at.put("a", ACL="public-read")
    assert (READERS, "READ") in _rights(at.s3.get_object_acl(Bucket=at.bucket, Key="a"))


def rights_to_a_bucket(at: Place) -> None:
    assert _rights(at.s3.get_bucket_acl(Bucket=at.bucket)) == {("owner", "FULL_CONTROL")}
    at.s3.put_bucket_acl(Bucket=at.bucket, ACL="public-read-write")
    assert (READERS, "READ") in _rights(at.s3.get_bucket_acl(Bucket=at.bucket))
    bucket = at.new_bucket(ACL="public-read")
    assert (READERS, "READ") in _rights(at.s3.get_bucket_acl(Bucket=bucket))


def a_right_of_two_kinds(at: Place) -> None:
    at.s3.put_bucket_acl(Bucket=at.bucket, ACL="public-read-write")
    found = _rights(at.s3.get_bucket_acl(Bucket=at.bucket))
    assert found == {("owner", "FULL_CONTROL"), (READERS, "READ"), (READERS, "WRITE")}


def rights_told_in_headers(at: Place) -> None:
    at.put("a", GrantRead=f'uri="{READERS}"')
    assert (READERS, "READ") in _rights(at.s3.get_object_acl(Bucket=at.bucket, Key="a"))


def rights_to_a_bucket_told_one_by_one(at: Place) -> None:
    owner = at.s3.get_bucket_acl(Bucket=at.bucket)["Owner"]
    grants = [
        {"Grantee": {"Type": "CanonicalUser", "ID": owner["ID"]}, "Permission": "FULL_CONTROL"},
        {"Grantee": {"Type": "Group", "URI": READERS}, "Permission": "READ"},
    ]
    at.s3.put_bucket_acl(Bucket=at.bucket, AccessControlPolicy={"Owner": owner, "Grants": grants})
    assert _rights(at.s3.get_bucket_acl(Bucket=at.bucket)) == {("owner", "FULL_CONTROL"), (READERS, "READ")}


def a_policy(at: Place) -> None:
    with refused("NoSuchBucketPolicy"):
        at.s3.get_bucket_policy(Bucket=at.bucket)
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:PutObject",
        "Resource": f"arn:aws:s3:::{at.bucket}/*",
    }
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    at.s3.put_bucket_policy(Bucket=at.bucket, Policy=json.dumps(policy))
    assert json.loads(at.s3.get_bucket_policy(Bucket=at.bucket)["Policy"]) == policy
    at.s3.delete_bucket_policy(Bucket=at.bucket)
    with refused("NoSuchBucketPolicy"):
        at.s3.get_bucket_policy(Bucket=at.bucket)


def rules_for_other_origins(at: Place) -> None:
    rule = {
        "AllowedMethods": ["GET", "PUT"],
        "AllowedOrigins": ["https://example.com"],
        "AllowedHeaders": ["Authorization"],
        "ExposeHeaders": ["ETag"],
        "MaxAgeSeconds": 60,
    }
    at.s3.put_bucket_cors(Bucket=at.bucket, CORSConfiguration={"CORSRules": [rule]})
    assert at.s3.get_bucket_cors(Bucket=at.bucket)["CORSRules"] == [rule]
    at.s3.delete_bucket_cors(Bucket=at.bucket)
    with refused("NoSuchCORSConfiguration"):
        at.s3.get_bucket_cors(Bucket=at.bucket)


def a_lifecycle(at: Place) -> None:
    rules = [
        {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": "tmp/"}, "Expiration": {"Days": 3}},
        {
            "ID": "parts",
            "Status": "Disabled",
            "Filter": {"Prefix": ""},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2},
            "NoncurrentVersionExpiration": {"NoncurrentDays": 9},
        },
    ]
    at.s3.put_bucket_lifecycle_configuration(Bucket=at.bucket, LifecycleConfiguration={"Rules": rules})
    assert at.s3.get_bucket_lifecycle_configuration(Bucket=at.bucket)["Rules"] == rules
    at.s3.delete_bucket_lifecycle(Bucket=at.bucket)
    with refused("NoSuchLifecycleConfiguration"):
        at.s3.get_bucket_lifecycle_configuration(Bucket=at.bucket)


def encryption(at: Place) -> None:
    rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": "k1"}}
    at.s3.put_bucket_encryption(Bucket=at.bucket, ServerSideEncryptionConfiguration={"Rules": [rule]})
    found = at.s3.get_bucket_encryption(Bucket=at.bucket)["ServerSideEncryptionConfiguration"]["Rules"][0]
    assert found["ApplyServerSideEncryptionByDefault"] == rule["ApplyServerSideEncryptionByDefault"]
    at.put("a")
    assert at.head("a")["ServerSideEncryption"] == "aws:kms"


def encryption_told_with_the_body(at: Place) -> None:
    assert at.put("a", ServerSideEncryption="AES256")["ServerSideEncryption"] == "AES256"
    assert at.head("a")["ServerSideEncryption"] == "AES256"


def a_website(at: Place) -> None:
    told = {"IndexDocument": {"Suffix": "index.html"}, "ErrorDocument": {"Key": "error.html"}}
    at.s3.put_bucket_website(Bucket=at.bucket, WebsiteConfiguration=told)
    found = at.s3.get_bucket_website(Bucket=at.bucket)
    assert {name: found[name] for name in told} == told
    at.s3.delete_bucket_website(Bucket=at.bucket)
    with refused("NoSuchWebsiteConfiguration"):
        at.s3.get_bucket_website(Bucket=at.bucket)


def logging(at: Place) -> None:
    logs = at.new_bucket(ObjectOwnership="BucketOwnerPreferred")
    at.s3.put_bucket_acl(Bucket=logs, ACL="log-delivery-write")
    told = {"TargetBucket": logs, "TargetPrefix": "of/"}
    at.s3.put_bucket_logging(Bucket=at.bucket, BucketLoggingStatus={"LoggingEnabled": told})
    found = at.s3.get_bucket_logging(Bucket=at.bucket)["LoggingEnabled"]
    assert {name: found[name] for name in told} == told


def logs_are_written(at: Place) -> None:
    logs = at.new_bucket(ACL="log-delivery-write")
    told = {"TargetBucket": logs, "TargetPrefix": "of/"}
    at.s3.put_bucket_logging(Bucket=at.bucket, BucketLoggingStatus={"LoggingEnabled": told})
    at.put("a")
    at.s3.put_bucket_logging(Bucket=at.bucket, BucketLoggingStatus={})
    assert "LoggingEnabled" not in at.s3.get_bucket_logging(Bucket=at.bucket)
    assert any(at.bucket in at.s3.get_object(Bucket=logs, Key=key)["Body"].read().decode() for key in at.keys(logs))


def ownership(at: Place) -> None:
    told = {"Rules": [{"ObjectOwnership": "BucketOwnerPreferred"}]}
    at.s3.put_bucket_ownership_controls(Bucket=at.bucket, OwnershipControls=told)
    assert at.s3.get_bucket_ownership_controls(Bucket=at.bucket)["OwnershipControls"] == told
    at.s3.delete_bucket_ownership_controls(Bucket=at.bucket)
    with refused("OwnershipControlsNotFoundError"):
        at.s3.get_bucket_ownership_controls(Bucket=at.bucket)


def a_block_of_public_access(at: Place) -> None:
    told = {
        "BlockPublicAcls": True,
        "IgnorePublicAcls": False,
        "BlockPublicPolicy": True,
        "RestrictPublicBuckets": False,
    }
    at.s3.put_public_access_block(Bucket=at.bucket, PublicAccessBlockConfiguration=told)
    assert at.s3.get_public_access_block(Bucket=at.bucket)["PublicAccessBlockConfiguration"] == told
    at.s3.delete_public_access_block(Bucket=at.bucket)
    with refused("NoSuchPublicAccessBlockConfiguration"):
        at.s3.get_public_access_block(Bucket=at.bucket)


def acceleration(at: Place) -> None:
    at.s3.put_bucket_accelerate_configuration(Bucket=at.bucket, AccelerateConfiguration={"Status": "Enabled"})
    assert at.s3.get_bucket_accelerate_configuration(Bucket=at.bucket)["Status"] == "Enabled"


def replication(at: Place) -> None:
    at.keep_versions()
    other = at.new_bucket()
    at.s3.put_bucket_versioning(Bucket=other, VersioningConfiguration={"Status": "Enabled"})
    rule = {
        "ID": "all",
        "Priority": 1,
        "Status": "Enabled",
        "Filter": {"Prefix": "r/"},
        "Destination": {"Bucket": f"arn:aws:s3:::{other}"},
        "DeleteMarkerReplication": {"Status": "Disabled"},
    }
    told = {"Role": "arn:aws:iam::123456789012:role/copier", "Rules": [rule]}
    at.s3.put_bucket_replication(Bucket=at.bucket, ReplicationConfiguration=told)
    found = at.s3.get_bucket_replication(Bucket=at.bucket)["ReplicationConfiguration"]
    assert (found["Role"], found["Rules"][0]["ID"], found["Rules"][0]["Destination"]) == (
        told["Role"],
        "all",
        rule["Destination"],
    )


def _locked(at: Place, days: int | None = None) -> str:
    bucket = at.new_bucket(ObjectLockEnabledForBucket=True)
    rule = {"Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": days}}} if days else {}
    at.s3.put_object_lock_configuration(Bucket=bucket, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", **rule})
    return bucket


def a_retention_forbids_deletion(at: Place) -> None:
    bucket = _locked(at)
    assert at.s3.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"
    version = at.s3.put_object(Bucket=bucket, Key="a", Body=b"x")["VersionId"]
    named = {"Bucket": bucket, "Key": "a", "VersionId": version}
    until = datetime.datetime.now(datetime.UTC).replace(microsecond=0) + datetime.timedelta(days=1)
    at.s3.put_object_retention(**named, Retention={"Mode": "GOVERNANCE", "RetainUntilDate": until})
    with refused("AccessDenied"):
        at.s3.delete_object(**named)
    at.s3.delete_object(Bucket=bucket, Key="a")  # hides it, and leaves the version
    assert at.s3.get_object(**named)["Body"].read() == b"x"
    at.s3.delete_object(**named, BypassGovernanceRetention=True)


def a_retention_is_read(at: Place) -> None:
    bucket = _locked(at)
    named = {"Bucket": bucket, "Key": "a"}
    at.s3.put_object(**named, Body=b"x")
    until = datetime.datetime.now(datetime.UTC).replace(microsecond=0) + datetime.timedelta(days=1)
    at.s3.put_object_retention(**named, Retention={"Mode": "COMPLIANCE", "RetainUntilDate": until})
    assert at.s3.get_object_retention(**named)["Retention"] == {"Mode": "COMPLIANCE", "RetainUntilDate": until}


def a_legal_hold_forbids_deletion(at: Place) -> None:
    bucket = _locked(at)
    version = at.s3.put_object(Bucket=bucket, Key="a", Body=b"x")["VersionId"]
    named = {"Bucket": bucket, "Key": "a", "VersionId": version}
    at.s3.put_object_legal_hold(**named, LegalHold={"Status": "ON"})
    assert at.s3.get_object_legal_hold(**named)["LegalHold"]["Status"] == "ON"
    with refused("AccessDenied"):
        at.s3.delete_object(**named)
    at.s3.put_object_legal_hold(**named, LegalHold={"Status": "OFF"})
    at.s3.delete_object(**named)


def a_bucket_has_a_retention_of_its_own(at: Place) -> None:
    bucket = _locked(at, days=2)
    found = at.s3.get_object_lock_configuration(Bucket=bucket)["ObjectLockConfiguration"]
    rule = found["Rule"]["DefaultRetention"]
    assert (rule["Mode"], rule["Days"]) == ("GOVERNANCE", 2)
    version = at.s3.put_object(Bucket=bucket, Key="a", Body=b"x")["VersionId"]
    head = at.s3.head_object(Bucket=bucket, Key="a")
    assert head["ObjectLockMode"] == "GOVERNANCE"
    assert head["ObjectLockRetainUntilDate"] > head["LastModified"] + datetime.timedelta(days=1)
    with refused("AccessDenied"):
        at.s3.delete_object(Bucket=bucket, Key="a", VersionId=version)


def a_lock_needs_a_bucket_for_it(at: Place) -> None:
    at.put("a")
    with refused("InvalidRequest"):
        at.s3.put_object_legal_hold(Bucket=at.bucket, Key="a", LegalHold={"Status": "ON"})
    with refused("ObjectLockConfigurationNotFoundError"):
        at.s3.get_object_lock_configuration(Bucket=at.bucket)


def _told(at: Place, events: list[str], **more: Any) -> str:
    """A queue that the bucket tells."""
    queue = at.new_queue()
    arn = at.sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    rule = {"Id": "told", "QueueArn": arn, "Events": events, **more}
    at.s3.put_bucket_notification_configuration(
        Bucket=at.bucket, NotificationConfiguration={"QueueConfigurations": [rule]}
    )
    found = at.s3.get_bucket_notification_configuration(Bucket=at.bucket)["QueueConfigurations"][0]
    assert (found["QueueArn"], found["Events"], found["Id"]) == (arn, events, "told")
    return queue


def _records(at: Place, queue: str) -> list[tuple[str, str, str]]:
    """The events of all messages; the test of the way that comes first is none."""
    found = []
    while messages := at.sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10).get("Messages"):
        for message in messages:
            for record in json.loads(message["Body"]).get("Records", []):
                key = unquote_plus(record["s3"]["object"]["key"])
                found.append((record["eventName"], record["s3"]["bucket"]["name"], key))
            at.sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
    return sorted(found)


def a_queue_is_told_of_what_is_made(at: Place) -> None:
    queue = _told(at, ["s3:ObjectCreated:*"])
    at.put("a")
    at.s3.copy_object(Bucket=at.bucket, Key="b", CopySource=f"{at.bucket}/a")
    assert _records(at, queue) == [
        ("ObjectCreated:Copy", at.bucket, "b"),
        ("ObjectCreated:Put", at.bucket, "a"),
    ]


def a_queue_is_told_of_what_is_removed(at: Place) -> None:
    queue = _told(at, ["s3:ObjectRemoved:*"])
    at.put("a")
    at.s3.delete_object(Bucket=at.bucket, Key="a")
    assert _records(at, queue) == [("ObjectRemoved:Delete", at.bucket, "a")]


def a_queue_is_told_of_some_keys(at: Place) -> None:
    rules = [{"Name": "prefix", "Value": "in/"}, {"Name": "suffix", "Value": ".jsonl"}]
    queue = _told(at, ["s3:ObjectCreated:Put"], Filter={"Key": {"FilterRules": rules}})
    at.put("in/a.jsonl", "in/a.csv", "out/a.jsonl")
    assert _records(at, queue) == [("ObjectCreated:Put", at.bucket, "in/a.jsonl")]


def a_queue_is_told_of_an_upload_in_parts(at: Place) -> None:
    queue = _told(at, ["s3:ObjectCreated:CompleteMultipartUpload"])
    upload = at.s3.create_multipart_upload(Bucket=at.bucket, Key="a")["UploadId"]
    etag = at.s3.upload_part(Bucket=at.bucket, Key="a", UploadId=upload, PartNumber=1, Body=b"x")["ETag"]
    at.s3.complete_multipart_upload(
        Bucket=at.bucket, Key="a", UploadId=upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]}
    )
    assert _records(at, queue) == [("ObjectCreated:CompleteMultipartUpload", at.bucket, "a")]


def notifications_end(at: Place) -> None:
    queue = _told(at, ["s3:ObjectCreated:*"])
    at.s3.put_bucket_notification_configuration(Bucket=at.bucket, NotificationConfiguration={})
    at.put("a")
    assert _records(at, queue) == []
    assert "QueueConfigurations" not in at.s3.get_bucket_notification_configuration(Bucket=at.bucket)
