"""Curation against an S3 server: reads pinned by entity tag, uploads, conditional manifest, the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from typer.testing import CliRunner

import curation
from curation.eval_sets import prepare
from curation.plan import fetch, make_rules
from curation.streams import DEFAULT_LIMITS
from dropforge.drop import read_drop
from dropforge.errors import DataError
from dropforge.family_recipe import read_own
from dropforge.recipe import Recipe
from dropforge.recipe_data import Source
from dropforge.saved import saved_files
from dropforge.sources import pin
from dropforge.store import S3Store
from tests.moto_server import moto_server


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Store]:
    with moto_server() as url:
        client = boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
        )
        client.create_bucket(Bucket="bucket")
        yield S3Store("bucket", client=client)


def test_drop_in_s3(
    bucket: S3Store, texts: Callable[..., list[bytes]], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    bucket.put("drops/fam/d1/part one/a+b.jsonl", b"\n".join(texts(60)))
    bucket.put("drops/fam/d1/_SUCCESS", b"")
    drop = read_drop(bucket, "fam", "d1")
    manifest = curation.curate(bucket, drop, recipe(), workdir=tmp_path / "w")
    assert manifest.counts["input"] == 60
    assert {info.key for info in bucket.list("datasets/")} == {
        *(shard.key for shard in manifest.shards),
        *manifest.files.values(),
        f"datasets/fam/{manifest.digest}/manifest.json",
    }
    again = curation.curate(bucket, drop, recipe(), workdir=tmp_path / "w2")
    assert again.to_json() == manifest.to_json()

    bucket.put("drops/fam/d1/part one/a+b.jsonl", b"\n".join(texts(61)))
    with pytest.raises(DataError, match="changed while it was being read"):
        curation.curate(bucket, drop, recipe(), workdir=tmp_path / "w3")
    bucket.delete("drops/fam/d1/part one/a+b.jsonl")
    with pytest.raises(DataError, match="no such object"):
        curation.curate(bucket, drop, recipe(), workdir=tmp_path / "w4")


def test_what_was_archived_after_it_was_entered_is_the_error_of_its_drop(
    bucket: S3Store, recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """One that another try changes nothing about: files, the drop's recipe, saved data sets and evaluation sets."""
    files = {"a.jsonl": b'{"text": "a"}', "recipe.yaml": b"{}", "_SUCCESS": b""}
    for name, body in files.items():
        bucket.put(f"drops/cold/d1/{name}", body)
    drop = read_drop(bucket, "cold", "d1")
    for name, body in files.items():
        bucket.client.put_object(
            Bucket=bucket.bucket, Key=f"drops/cold/d1/{name}", Body=body, StorageClass="DEEP_ARCHIVE"
        )
    with pytest.raises(DataError, match=r"file 'a.jsonl' of the drop drops/cold/d1/: it is archived"):
        fetch(bucket, drop, [drop.files[0]], tmp_path, lambda *_: None)
    with pytest.raises(DataError, match=r"recipe.yaml of drop cold/d1: it is archived"):
        read_own(bucket, drop)
    for name in ("state.json", "dataset_info.json"):
        bucket.client.put_object(Bucket=bucket.bucket, Key=f"saved/{name}", Body=b"{}", StorageClass="GLACIER")
    with pytest.raises(DataError, match=r"file saved/state.json: it is archived"):
        saved_files(bucket, "saved/", {"state.json", "dataset_info.json"})
    asked = recipe(decontaminate={"sets": {"mine": "drops/cold/d1/a.jsonl"}})
    assert asked.curation.decontaminate is not None
    with pytest.raises(DataError, match=r"evaluation set 'mine' \(drops/cold/d1/a.jsonl\): it is archived"):
        prepare(bucket, asked.curation.decontaminate, make_rules(asked), tmp_path / "sets", DEFAULT_LIMITS)


def test_a_bucket_that_keeps_versions_is_read_as_it_was(
    bucket: S3Store, texts: Callable[..., list[bytes]], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """Replaced and deleted files are read; the right to read versions is used for nothing else."""
    bucket.client.create_bucket(Bucket="versions")
    bucket.client.put_object(Bucket="versions", Key="drops/fam/d1/old.jsonl", Body=b"\n".join(texts(5, 90)))
    bucket.client.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    store, asked = S3Store("versions", client=bucket.client), list[str]()
    store.put("drops/fam/d1/a.jsonl", b"\n".join(texts(60)))
    store.put("drops/fam/d1/b.jsonl", b"\n".join(texts(20, 60)))
    store.put("drops/fam/d1/_SUCCESS", b"")
    drop = read_drop(store, "fam", "d1")

    def see(params: dict[str, Any], **_: Any) -> None:
        if "versionId" in params["query_string"]:
            asked.append(params["url_path"].rpartition("/")[2])

    bucket.client.meta.events.register("before-call.s3.GetObject", see)
    whole = curation.curate(store, drop, recipe(), workdir=tmp_path / "w")
    assert (whole.counts["input"], asked) == (85, [])
    store.put("drops/fam/d1/a.jsonl", b"\n".join(texts(60, 200)))
    store.delete("drops/fam/d1/b.jsonl")
    store.delete(f"datasets/fam/{whole.digest}/manifest.json")
    again = curation.curate(store, drop, recipe(), workdir=tmp_path / "w2")
    assert again.digest == whole.digest
    assert sorted(asked) == ["a.jsonl", "b.jsonl"]
    bucket.client.delete_object(Bucket="versions", Key="drops/fam/d1/a.jsonl", VersionId=drop.files[0].version_id)
    with pytest.raises(DataError, match=r"a\.jsonl.*changed while it was being read"):
        curation.curate(store, drop, recipe(), workdir=tmp_path / "w3")


def test_a_source_in_s3(
    bucket: S3Store, texts: Callable[..., list[bytes]], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    bucket.put("lake/part one/a+b.jsonl", b"\n".join(texts(60)))
    drop = pin(bucket, Source(prefix="lake/"), "lake")
    made = curation.curate(bucket, drop, recipe(), workdir=tmp_path / "w")
    assert made.counts["input"] == 60
    again = pin(bucket, Source(dataset=f"lake/{made.digest}"), "again")
    assert curation.curate(bucket, again, recipe(), workdir=tmp_path / "w2").counts == made.counts
    bucket.put("lake/part one/a+b.jsonl", b"\n".join(texts(61)))
    with pytest.raises(DataError, match=r"the recipe asks for.*data\.source\.id"):
        pin(bucket, Source(prefix="lake/", id=drop.id), "lake")


def test_command_line(texts: Callable[..., list[bytes]], tmp_path: Path) -> None:
    import typer

    from curation.__main__ import main

    app = typer.Typer()
    app.command()(main)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"\n".join(texts(60)))
    run = CliRunner()
    result = run.invoke(app, [str(folder), "--out", str(tmp_path / "out"), "--recipe", "tiny"])
    assert result.exit_code == 0, result.output
    card = next(line.split(maxsplit=1)[1] for line in result.output.splitlines() if line.startswith("card"))
    assert "<h1>local</h1>" in Path(card).read_text()
    for bad, said in (("nowhere", "it is not there"), ("empty", "it holds no data file")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        result = run.invoke(app, [str(tmp_path / bad), "--out", str(tmp_path / "out")])
        assert result.exit_code == 1
        assert said in result.output
