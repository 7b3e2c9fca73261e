"""Listing objects and buckets, in both versions of the interface."""

from __future__ import annotations

from tests.stack.clients.place import Place, refused

TREE = ("a", "b/1", "b/2", "b/c/3", "d/4", "e")


def v1_gives_all_keys_in_order(at: Place) -> None:
    at.put(*reversed(TREE))
    answer = at.s3.list_objects(Bucket=at.bucket)
    assert [item["Key"] for item in answer["Contents"]] == sorted(TREE)
    assert not answer["IsTruncated"]


def v1_prefix_and_delimiter(at: Place) -> None:
    at.put(*TREE)
    answer = at.s3.list_objects(Bucket=at.bucket, Delimiter="/")
    assert [item["Key"] for item in answer["Contents"]] == ["a", "e"]
    assert [item["Prefix"] for item in answer["CommonPrefixes"]] == ["b/", "d/"]
    answer = at.s3.list_objects(Bucket=at.bucket, Delimiter="/", Prefix="b/")
    assert [item["Key"] for item in answer["Contents"]] == ["b/1", "b/2"]
    assert [item["Prefix"] for item in answer["CommonPrefixes"]] == ["b/c/"]


def v1_goes_on_after_a_marker(at: Place) -> None:
    at.put(*TREE)
    answer = at.s3.list_objects(Bucket=at.bucket, MaxKeys=2)
    assert answer["IsTruncated"]
    answer = at.s3.list_objects(Bucket=at.bucket, Marker=answer["Contents"][-1]["Key"])
    assert [item["Key"] for item in answer["Contents"]] == ["b/2", "b/c/3", "d/4", "e"]
    pages = at.s3.get_paginator("list_objects").paginate(Bucket=at.bucket, PaginationConfig={"PageSize": 2})
    assert [item["Key"] for page in pages for item in page["Contents"]] == list(TREE)


def v1_next_marker_with_a_delimiter(at: Place) -> None:
    at.put(*TREE)
    found, marker = [], ""
    for _ in range(10):
        answer = at.s3.list_objects(Bucket=at.bucket, Delimiter="/", MaxKeys=1, Marker=marker)
        found += [item["Key"] for item in answer.get("Contents", [])]
        found += [item["Prefix"] for item in answer.get("CommonPrefixes", [])]
        if not answer["IsTruncated"]:
            break
        marker = answer["NextMarker"]
    assert found == ["a", "b/", "d/", "e"]


def v1_names_the_owner(at: Place) -> None:
    at.put("a")
    assert at.s3.list_objects(Bucket=at.bucket)["Contents"][0]["Owner"]["ID"]


def v1_marker_beyond_the_last_key(at: Place) -> None:
    at.put(*TREE)
    answer = at.s3.list_objects(Bucket=at.bucket, Marker="zzz")
    assert "Contents" not in answer
    assert not answer["IsTruncated"]


def v2_prefix_and_delimiter(at: Place) -> None:
    at.put(*TREE)
    answer = at.s3.list_objects_v2(Bucket=at.bucket, Delimiter="/", Prefix="b/")
    assert [item["Key"] for item in answer["Contents"]] == ["b/1", "b/2"]
    assert [item["Prefix"] for item in answer["CommonPrefixes"]] == ["b/c/"]
    assert answer["KeyCount"] == 3
    assert (answer["Prefix"], answer["Delimiter"], answer["Name"]) == ("b/", "/", at.bucket)


def v2_other_delimiters(at: Place) -> None:
    at.put("x.1", "x.2", "y%1", "z z", "one")
    for delimiter, prefix in ((".", "x."), ("%", "y%"), (" ", "z ")):
        answer = at.s3.list_objects_v2(Bucket=at.bucket, Delimiter=delimiter)
        assert [item["Prefix"] for item in answer["CommonPrefixes"]] == [prefix]
    answer = at.s3.list_objects_v2(Bucket=at.bucket, Delimiter="none-has-it")
    assert answer["KeyCount"] == 5


def v2_pages_of_two(at: Place) -> None:
    at.put(*TREE)
    assert at.keys(PaginationConfig={"PageSize": 2}) == list(TREE)
    first = at.s3.list_objects_v2(Bucket=at.bucket, MaxKeys=2)
    assert (first["IsTruncated"], first["KeyCount"], first["MaxKeys"]) == (True, 2, 2)
    second = at.s3.list_objects_v2(Bucket=at.bucket, MaxKeys=2, ContinuationToken=first["NextContinuationToken"])
    assert [item["Key"] for item in second["Contents"]] == ["b/2", "b/c/3"]


def v2_a_page_names_the_token_it_was_asked_by(at: Place) -> None:
    at.put(*TREE)
    token = at.s3.list_objects_v2(Bucket=at.bucket, MaxKeys=2)["NextContinuationToken"]
    assert at.s3.list_objects_v2(Bucket=at.bucket, ContinuationToken=token)["ContinuationToken"] == token


def v2_pages_count_common_prefixes(at: Place) -> None:
    at.put(*TREE)
    found = []
    for page in at.s3.get_paginator("list_objects_v2").paginate(
        Bucket=at.bucket, Delimiter="/", PaginationConfig={"PageSize": 1}
    ):
        assert page["KeyCount"] == 1
        found += [item["Key"] for item in page.get("Contents", [])]
        found += [item["Prefix"] for item in page.get("CommonPrefixes", [])]
    assert found == ["a", "b/", "d/", "e"]


def v2_starts_after_a_key(at: Place) -> None:
    at.put(*TREE)
    answer = at.s3.list_objects_v2(Bucket=at.bucket, StartAfter="b/2")
    assert answer["StartAfter"] == "b/2"
    assert [item["Key"] for item in answer["Contents"]] == ["b/c/3", "d/4", "e"]
    # What it starts after need not exist.
    assert at.keys(StartAfter="bz") == ["d/4", "e"]
    assert at.keys(StartAfter="zzz") == []


def v2_names_the_owner_if_asked(at: Place) -> None:
    at.put("a")
    assert "Owner" not in at.s3.list_objects_v2(Bucket=at.bucket)["Contents"][0]
    assert at.s3.list_objects_v2(Bucket=at.bucket, FetchOwner=True)["Contents"][0]["Owner"]["ID"]


def v2_no_keys_wanted(at: Place) -> None:
    at.put("a")
    answer = at.s3.list_objects_v2(Bucket=at.bucket, MaxKeys=0)
    assert not answer["IsTruncated"]
    assert "Contents" not in answer


def v2_an_unknown_prefix(at: Place) -> None:
    at.put(*TREE)
    answer = at.s3.list_objects_v2(Bucket=at.bucket, Prefix="nothing/")
    assert answer["KeyCount"] == 0
    assert "Contents" not in answer


def keys_are_url_encoded_if_asked(at: Place) -> None:
    at.put("a b/ü+1&2", "plain")
    for call in (at.s3.list_objects, at.s3.list_objects_v2):
        answer = call(Bucket=at.bucket, EncodingType="url")
        assert answer["EncodingType"] == "url"
        assert "%C3%BC%2B1%262" in answer["Contents"][0]["Key"]
        # Without it being asked for by name, boto3 decodes.
        assert call(Bucket=at.bucket)["Contents"][0]["Key"] == "a b/ü+1&2"


def prefixes_of_any_script(at: Place) -> None:
    at.put("日本/1", "日本/2", "ü/1", "sp ace/1", "a+b/1")
    answer = at.s3.list_objects_v2(Bucket=at.bucket, Delimiter="/")
    assert [item["Prefix"] for item in answer["CommonPrefixes"]] == ["a+b/", "sp ace/", "ü/", "日本/"]
    for prefix, count in (("日本/", 2), ("ü/", 1), ("sp ace/", 1), ("a+b/", 1)):
        assert at.s3.list_objects_v2(Bucket=at.bucket, Prefix=prefix)["KeyCount"] == count


def what_a_listing_says_of_an_object(at: Place) -> None:
    put = at.put("a", body=b"four")
    found = at.s3.list_objects_v2(Bucket=at.bucket)["Contents"][0]
    assert (found["Size"], found["ETag"], found["StorageClass"]) == (4, put["ETag"], "STANDARD")
    assert found["LastModified"].timestamp() == at.head("a")["LastModified"].timestamp()


def a_bucket_that_is_not_there(at: Place) -> None:
    for call in (at.s3.list_objects, at.s3.list_objects_v2, at.s3.list_object_versions):
        with refused("NoSuchBucket"):
            call(Bucket=f"{at.bucket}-none")
    with refused("404"):
        at.s3.head_bucket(Bucket=f"{at.bucket}-none")


def buckets_are_listed(at: Place) -> None:
    wanted = {at.bucket, at.new_bucket()}
    answer = at.s3.list_buckets()
    assert wanted <= {one["Name"] for one in answer["Buckets"]}
    assert answer["Owner"]["ID"]


def buckets_are_listed_by_name(at: Place) -> None:
    at.new_bucket()
    at.s3.create_bucket(Bucket=f"a-{at.bucket}")
    names = [one["Name"] for one in at.s3.list_buckets()["Buckets"]]
    assert names == sorted(names)


def buckets_of_a_prefix(at: Place) -> None:
    prefix = at.bucket[:12]
    assert [one["Name"] for one in at.s3.list_buckets(Prefix=prefix)["Buckets"]] == [at.bucket]


def a_bucket_is_made_once_and_deleted_empty(at: Place) -> None:
    at.s3.head_bucket(Bucket=at.bucket)
    assert at.s3.get_bucket_location(Bucket=at.bucket)["LocationConstraint"] is None
    at.put("a")
    with refused("BucketNotEmpty"):
        at.s3.delete_bucket(Bucket=at.bucket)
    at.s3.delete_object(Bucket=at.bucket, Key="a")
    at.s3.delete_bucket(Bucket=at.bucket)
    with refused("NoSuchBucket"):
        at.put("a")


def bucket_names_of_a_wrong_length(at: Place) -> None:
    for name in ("ab", "x" * 64):
        with refused("InvalidBucketName"):
            at.s3.create_bucket(Bucket=name)


def bucket_names_of_wrong_letters(at: Place) -> None:
    for name in ("Upper-Case", "under_score", "-dash"):
        with refused("InvalidBucketName"):
            at.s3.create_bucket(Bucket=name)


def a_bucket_of_another_region(at: Place) -> None:
    bucket = at.new_bucket(CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    assert at.s3.get_bucket_location(Bucket=bucket)["LocationConstraint"] == "eu-west-1"
