"""Checksums: kept with the object, told to readers, and held against the body."""

from __future__ import annotations

import base64
import hashlib
import zlib
from typing import Any

import pytest

from tests.stack.clients.multipart import LEAST, begin, finish, send
from tests.stack.clients.place import Place, refused

BODY = b"what is summed"
KINDS = ("CRC32", "CRC32C", "SHA1", "SHA256", "CRC64NVME")


def _reflected(data: bytes, polynomial: int, bits: int) -> int:
    """A CRC as S3's kinds are: reflected, all bits set at first and turned at the end."""
    mask = (1 << bits) - 1
    value = mask
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (polynomial if value & 1 else 0)
    return value ^ mask


def checksum(kind: str, data: bytes) -> str:
    """A checksum as S3 writes it; boto3 alone knows two of the kinds not."""
    found = {
        "CRC32": lambda: zlib.crc32(data).to_bytes(4),
        "CRC32C": lambda: _reflected(data, 0x82F63B78, 32).to_bytes(4),
        "SHA1": lambda: hashlib.sha1(data).digest(),
        "SHA256": lambda: hashlib.sha256(data).digest(),
        "CRC64NVME": lambda: _reflected(data, 0x9A6C9329AC4BC9B5, 64).to_bytes(8),
    }[kind]()
    return base64.b64encode(found).decode()


def _kept(at: Place, kind: str) -> None:
    name, wanted = f"Checksum{kind}", checksum(kind, BODY)
    at.put("a", body=BODY, ChecksumAlgorithm=kind, **{name: wanted})
    assert at.head("a", ChecksumMode="ENABLED")[name] == wanted
    answer = at.s3.get_object(Bucket=at.bucket, Key="a", ChecksumMode="ENABLED")
    assert (answer[name], answer["Body"].read()) == (wanted, BODY)


def crc32_is_kept(at: Place) -> None:
    _kept(at, "CRC32")


def crc32c_is_kept(at: Place) -> None:
    _kept(at, "CRC32C")


def sha1_is_kept(at: Place) -> None:
    _kept(at, "SHA1")


def sha256_is_kept(at: Place) -> None:
    _kept(at, "SHA256")


def crc64nvme_is_kept(at: Place) -> None:
    _kept(at, "CRC64NVME")


def boto3_sums_as_it_sends(at: Place) -> None:
    # In the trailer of a chunked body, over HTTPS, and in a header here.
    for kind in ("CRC32", "SHA1", "SHA256"):
        answer = at.put("a", body=BODY, ChecksumAlgorithm=kind)
        assert answer[f"Checksum{kind}"] == checksum(kind, BODY)
        assert at.head("a", ChecksumMode="ENABLED")[f"Checksum{kind}"] == checksum(kind, BODY)


def a_checksum_is_not_told_unasked(at: Place) -> None:
    at.put("a", body=BODY, ChecksumAlgorithm="SHA256")
    assert "ChecksumSHA256" not in at.head("a")


def a_wrong_checksum_is_refused(at: Place) -> None:
    for kind in KINDS:
        with refused("BadDigest"):
            at.put("a", body=BODY, **{f"Checksum{kind}": checksum(kind, b"another")})
    assert at.keys() == []


def a_wrong_md5_is_refused(at: Place) -> None:
    md5 = base64.b64encode(hashlib.md5(b"another").digest()).decode()
    with refused("BadDigest"):
        at.put("a", body=BODY, ContentMD5=md5)
    assert at.keys() == []


def a_right_md5_is_taken(at: Place) -> None:
    at.put("a", body=BODY, ContentMD5=base64.b64encode(hashlib.md5(BODY).digest()).decode())
    assert at.get("a") == BODY


def a_copy_has_the_checksum(at: Place) -> None:
    at.put("a", body=BODY, ChecksumAlgorithm="SHA256")
    at.s3.copy_object(Bucket=at.bucket, Key="b", CopySource=f"{at.bucket}/a", ChecksumAlgorithm="SHA256")
    assert at.head("b", ChecksumMode="ENABLED")["ChecksumSHA256"] == checksum("SHA256", BODY)


def attributes_have_the_checksum(at: Place) -> None:
    at.put("a", body=BODY, ChecksumAlgorithm="SHA256")
    answer = at.s3.get_object_attributes(Bucket=at.bucket, Key="a", ObjectAttributes=["Checksum"])
    assert answer["Checksum"]["ChecksumSHA256"] == checksum("SHA256", BODY)


def _composite(at: Place, kind: str) -> tuple[dict[str, Any], str]:
    """Upload two parts with their checksums: the last answer, and the checksum of their checksums."""
    upload, parts, digests = begin(at, ChecksumAlgorithm=kind), [], b""
    for number, body in ((1, b"a" * LEAST), (2, b"tail")):
        answer = at.s3.upload_part(
            Bucket=at.bucket, Key="big", UploadId=upload, PartNumber=number, Body=body, ChecksumAlgorithm=kind
        )
        parts.append({"PartNumber": number, "ETag": answer["ETag"], f"Checksum{kind}": checksum(kind, body)})
        digests += base64.b64decode(checksum(kind, body))
    return finish(at, upload, parts), checksum(kind, digests)


def a_checksum_of_checksums(at: Place) -> None:
    for kind in ("SHA256", "CRC32"):
        wanted = _composite(at, kind)[1]
        # S3 adds "-2", the number of parts.
        assert at.head("big", ChecksumMode="ENABLED")[f"Checksum{kind}"].removesuffix("-2") == wanted


def a_checksum_of_checksums_tells_the_number_of_parts(at: Place) -> None:
    wanted = _composite(at, "SHA256")[1]
    assert at.head("big", ChecksumMode="ENABLED")["ChecksumSHA256"] == f"{wanted}-2"


def the_end_of_an_upload_tells_its_checksum(at: Place) -> None:
    assert "ChecksumSHA256" in _composite(at, "SHA256")[0]


def a_checksum_of_the_whole(at: Place) -> None:
    upload = begin(at, ChecksumAlgorithm="CRC32", ChecksumType="FULL_OBJECT")
    bodies = (b"a" * LEAST, b"tail")
    finish(at, upload, [send(at, upload, number, body) for number, body in enumerate(bodies, 1)])
    head = at.head("big", ChecksumMode="ENABLED")
    assert (head["ChecksumCRC32"], head["ChecksumType"]) == (checksum("CRC32", b"".join(bodies)), "FULL_OBJECT")


def a_part_tells_its_checksum(at: Place) -> None:
    answer = at.s3.upload_part(
        Bucket=at.bucket,
        Key="big",
        UploadId=begin(at, ChecksumAlgorithm="SHA256"),
        PartNumber=1,
        Body=BODY,
        ChecksumAlgorithm="SHA256",
    )
    assert answer["ChecksumSHA256"] == checksum("SHA256", BODY)


def attributes_have_the_parts(at: Place) -> None:
    _composite(at, "SHA256")
    answer = at.s3.get_object_attributes(Bucket=at.bucket, Key="big", ObjectAttributes=["ObjectParts", "ObjectSize"])
    assert answer["ObjectSize"] == LEAST + 4
    assert answer["ObjectParts"]["TotalPartsCount"] == 2


def a_part_with_a_wrong_checksum_is_refused(at: Place) -> None:
    upload = begin(at, ChecksumAlgorithm="SHA256")
    with refused("BadDigest"):
        at.s3.upload_part(
            Bucket=at.bucket,
            Key="big",
            UploadId=upload,
            PartNumber=1,
            Body=BODY,
            ChecksumSHA256=checksum("SHA256", b"another"),
        )


def a_reader_checks_what_it_reads(at: Place) -> None:
    at.put("a", body=BODY, ChecksumAlgorithm="SHA256")
    body = at.s3.get_object(Bucket=at.bucket, Key="a", ChecksumMode="ENABLED")["Body"]
    assert type(body).__name__ == "StreamingChecksumBody"
    assert body.read() == BODY
    with pytest.raises(at.s3.exceptions.NoSuchKey):
        at.s3.get_object(Bucket=at.bucket, Key="none", ChecksumMode="ENABLED")
