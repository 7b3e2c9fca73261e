"""Where a case runs: a server, a fresh bucket on it and an empty folder."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

REGION = "us-east-1"
MIB = 1 << 20


@dataclass(frozen=True)
class Target:
    """A server's address and what signs requests to it."""

    name: str
    url: str
    access_key: str
    secret_key: str
    _clients: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def client(self, service: str = "s3", signature: str | None = None, **more: Any) -> Any:
        """A boto3 client, made once for each kind."""
        wanted = (service, signature or "", *map(str, more.items()))
        if wanted not in self._clients:
            self._clients[wanted] = boto3.client(
                service,
                endpoint_url=self.url,
                aws_access_key_id=self.access_key,
                aws_secret_access_key=self.secret_key,
                region_name=REGION,
                config=Config(
                    retries={"total_max_attempts": 1},
                    connect_timeout=5,
                    read_timeout=60,
                    signature_version=signature or ("s3v4" if service == "s3" else None),
                    **more,
                ),
            )
        return self._clients[wanted]

    def environment(self, home: Path) -> dict[str, str]:
        """What a program of its own is told, with nothing of whoever runs the tests."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@dataclass(frozen=True)
class Place:
    """A bucket that no other case uses, and short names for what most cases do."""

    target: Target
    bucket: str
    path: Path

    @property
    def s3(self) -> Any:
        return self.target.client()

    @property
    def sqs(self) -> Any:
        return self.target.client("sqs")

    def new_bucket(self, **more: Any) -> str:
        bucket = new_name()
        self.s3.create_bucket(Bucket=bucket, **more)
        return bucket

    def new_queue(self, suffix: str = "", **attributes: str) -> str:
        """The address of a queue that no other case uses."""
        return str(self.sqs.create_queue(QueueName=new_name() + suffix, Attributes=attributes)["QueueUrl"])

    def put(self, *keys: str, body: bytes = b"x", **more: Any) -> dict[str, Any]:
        """Write one or more objects; the last answer."""
        answer: dict[str, Any] = {}
        for key in keys:
            answer = self.s3.put_object(Bucket=self.bucket, Key=key, Body=body, **more)
        return answer

    def get(self, key: str, **more: Any) -> bytes:
        return bytes(self.s3.get_object(Bucket=self.bucket, Key=key, **more)["Body"].read())

    def head(self, key: str, **more: Any) -> dict[str, Any]:
        return dict(self.s3.head_object(Bucket=self.bucket, Key=key, **more))

    def keys(self, bucket: str | None = None, **more: Any) -> list[str]:
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=bucket or self.bucket, **more)
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def keep_versions(self, status: str = "Enabled") -> None:
        self.s3.put_bucket_versioning(Bucket=self.bucket, VersioningConfiguration={"Status": status})


def new_name() -> str:
    return f"case-{uuid.uuid4().hex[:16]}"


@contextlib.contextmanager
def refused(*codes: str) -> Iterator[None]:
    """What happens inside is refused with one of these codes."""
    with pytest.raises(ClientError) as error:
        yield
    assert error.value.response["Error"]["Code"] in codes


@contextlib.contextmanager
def plain_moto(log: Path) -> Iterator[Target]:
    """Moto's own server, in a process of its own: its state is the process's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    # Told nothing by what else these tests set: `dropforge.stack.objects` gives moto settings of its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MOTO_", "S3_"))}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None, log.read_text()
                try:
                    urllib.request.urlopen(f"{url}/moto-api/data.json").close()
                    break
                except OSError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield Target("moto", url, "AKIAIOSFODNN7EXAMPLE", "any")
        finally:
            process.kill()
            process.wait()
