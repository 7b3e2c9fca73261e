"""S3 and SQS through Airflow's connection `dropforge_s3`; without such a connection, through the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_sqs import SQSClient

    from dropforge.store import S3Store

CONNECTION = "dropforge_s3"


def open_store(bucket: str, aws_conn_id: str = CONNECTION) -> S3Store:
    """The bucket as a store, for tasks and triggers."""
    from dropforge.store import S3Store

    return S3Store(bucket, client=s3(aws_conn_id))


def s3(aws_conn_id: str = CONNECTION, *, hurried: bool = False) -> S3Client:
    """A client for S3 with bounded time-outs; short ones and one try if `hurried`, for pages."""
    from airflow.providers.amazon.aws.hooks.s3 import S3Hook
    from botocore.config import Config

    config = Config(
        connect_timeout=2 if hurried else 10,
        read_timeout=5 if hurried else 60,
        retries={"mode": "standard", "max_attempts": 1 if hurried else 4},
    )
    client: S3Client = S3Hook(aws_conn_id=aws_conn_id, config=config).get_conn()
    return client


def sqs(aws_conn_id: str = CONNECTION) -> SQSClient:
    """A client for SQS; its read time-out leaves room for a long poll of 20 s."""
    from airflow.providers.amazon.aws.hooks.sqs import SqsHook
    from botocore.config import Config

    config = Config(connect_timeout=5, read_timeout=40, retries={"mode": "standard", "max_attempts": 2})
    client: SQSClient = SqsHook(aws_conn_id=aws_conn_id, config=config).get_conn()
    return client
