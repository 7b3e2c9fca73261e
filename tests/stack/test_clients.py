"""Real clients against our server and against plain moto: what moto can, ours can.

A case is a function of a module in `clients/`. It says what S3 or SQS does, and knows nothing of the server behind.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stack.clients import place
from tests.stack.conftest import Server

SUBJECTS = (
    "listings",
    "objects",
    "copies",
    "conditions",
    "checksums",
    "versions",
    "multipart",
    "settings",
    "signed",
    "queues",
    "tools",
)

# What S3 does and moto 5.2.5 does not.
KNOWN = {
    "listings.v1_next_marker_with_a_delimiter": "a marker that is a common prefix gives that prefix again",
    "listings.v2_a_page_names_the_token_it_was_asked_by": "the answer lacks ContinuationToken",
    "listings.buckets_are_listed_by_name": "they are listed in the order they were made in",
    "listings.bucket_names_of_wrong_letters": "it looks at a name's length only",
    "objects.a_key_that_is_too_long": "keys may have any length",
    "objects.a_quiet_delete_names_no_keys": "Quiet is ignored",
    "copies.if_the_source_is_the_one": "CopySourceIfMatch is ignored",
    "copies.if_the_source_was_not_changed": "CopySourceIfUnmodifiedSince is ignored",
    "copies.onto_what_is_not_there_yet": "IfNoneMatch of a copy is ignored",
    "checksums.a_wrong_checksum_is_refused": "checksums are kept as told, never held against the body",
    "checksums.a_wrong_md5_is_refused": "Content-MD5 is ignored",
    "checksums.a_part_with_a_wrong_checksum_is_refused": "checksums of parts are not looked at",
    "checksums.a_checksum_of_checksums_tells_the_number_of_parts": "the checksum lacks the number of parts",
    "checksums.the_end_of_an_upload_tells_its_checksum": "the last answer has no checksum",
    "checksums.attributes_have_the_parts": "attributes have no ObjectParts",
    "versions.deleting_a_marker_says_so": "the answer lacks DeleteMarker",
    "versions.a_marker_cannot_be_read": "it answers NoSuchVersion",
    "versions.a_missing_key_gets_a_marker_too": "only a key that is there gets a delete marker",
    "versions.a_suspended_bucket_replaces_its_null_version": "a write to a suspended bucket drops all older versions",
    "versions.a_suspended_bucket_keeps_its_versions_when_one_deletes": "a delete there leaves no marker",
    "multipart.as_many_uploads_as_asked_for": "MaxUploads is ignored",
    "multipart.parts_out_of_order": "parts are joined in any order",
    "multipart.a_number_before_the_first": "it answers NoSuchUpload",
    "multipart.a_part_copied_from_nothing": "the error has no code",
    "multipart.a_part_is_read_by_its_number": "GET ignores PartNumber",
    "multipart.a_part_after_the_end": "a part of an unknown upload is an internal error",
    "multipart.an_end_after_the_end": "the end of an unknown upload is an internal error",
    "multipart.rights_to_what_was_uploaded": "without rights of its own it is an internal error to ask for them",
    "multipart.a_copied_part_beyond_the_source": "it is not refused",
    "settings.a_tag_that_is_told_twice": "it is taken",
    "settings.a_tag_of_a_bucket_without_a_value": "the answer lacks the value",
    "settings.rights_told_one_by_one": "the body that gives rights to an object is not read",
    "settings.a_right_of_two_kinds": "of a grant with two permissions the first is told",
    "settings.a_retention_is_read": "it has no GetObjectRetention",
    "tools.rclone_uploads_in_parts": "the end of an upload tells version null, and no request may ask for it",
}

# And ours does.
MENDED = {
    "objects.a_key_that_is_too_long",
    "copies.if_the_source_is_the_one",
    "copies.if_the_source_was_not_changed",
    "copies.onto_what_is_not_there_yet",
    "checksums.a_wrong_checksum_is_refused",
    "checksums.a_wrong_md5_is_refused",
    "checksums.a_part_with_a_wrong_checksum_is_refused",
    "multipart.a_part_after_the_end",
    "multipart.an_end_after_the_end",
    "tools.rclone_uploads_in_parts",
}
SMOKE = {
    "versions.each_write_is_a_version",
    "settings.a_queue_is_told_of_what_is_made",
    "signed.a_form_by_the_newer_signature",
    "tools.aws_moves_a_big_object",
}


def _cases() -> dict[str, Callable[..., None]]:
    """All functions of the subjects that take a place and nothing else, by subject and name."""
    found = {}
    for subject in SUBJECTS:
        module = importlib.import_module(f"tests.stack.clients.{subject}")
        for name, function in vars(module).items():
            if not inspect.isfunction(function) or function.__module__ != module.__name__ or name.startswith("_"):
                continue
            if list(inspect.signature(function).parameters) == ["at"]:
                found[f"{subject}.{name}"] = function
    return found


CASES = _cases()


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[place.Target]:
    with place.plain_moto(tmp_path_factory.mktemp("moto") / "log") as target:
        yield target


@pytest.fixture(scope="module")
def ours(module_server: Server) -> place.Target:
    module_server.start()
    return place.Target("ours", module_server.url, module_server.access_key, module_server.secret_key)


def test_what_moto_cannot_is_a_case() -> None:
    assert KNOWN.keys() | SMOKE <= CASES.keys()
    assert KNOWN.keys() >= MENDED


@pytest.mark.parametrize("server", ["moto", "ours"])
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.smoke] * (case in SMOKE)) for case in CASES])
def test_case(case: str, server: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    target = request.getfixturevalue(server)
    if case in KNOWN and (server == "moto" or case not in MENDED):
        request.applymarker(pytest.mark.xfail(strict=True, reason=KNOWN[case]))
    bucket = place.new_name()
    target.client().create_bucket(Bucket=bucket)
    CASES[case](place.Place(target, bucket, tmp_path))
