"""Drops of another bucket, on a real S3: the ledger, datasets and runs stay where they are, and all know whence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dropforge_airflow.tasks.announce import Line
from dropforge_airflow.tasks.data import Curated
from dropforge_airflow.tasks.intake import Intake, Place, take_in
from dropforge_airflow.tasks.plan import make_plan
from dropforge_airflow.tasks.recipe import Installation
from dropforge_airflow.tasks.run import make_spec

import curation
from dropforge import inbox, layout, ledger, sources
from dropforge.errors import DropforgeError
from dropforge.letters import letters
from dropforge.recipe_data import Source
from dropforge.recipes.load import build_recipe
from dropforge.settings import Settings
from dropforge.store import S3Store

from .test_intake import arrive, upload

RECIPE = b"extends: tiny\ntrain: {max_steps: 7}\n"
ROWS = "\n".join(json.dumps({"text": f"row {number} of the other bucket"}) for number in range(60))


@pytest.fixture
def other(s3_store: S3Store) -> S3Store:
    bucket = f"{s3_store.bucket}-other"
    s3_store.client.create_bucket(Bucket=bucket)
    s3_store.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    return S3Store(bucket, client=s3_store.client)


def intake(store: S3Store, other: S3Store) -> Intake:
    return take_in(store, store.bucket, "main", Line, others={other.bucket: Place("eu", other)})


def test_a_drop_of_another_bucket_is_planned_curated_and_tracked(
    s3_store: S3Store, other: S3Store, tmp_path: Path
) -> None:
    other.put("drops/fam/d1/recipe.yaml", RECIPE)
    arrive(s3_store, upload(other, "fam", "d1", ROWS), bucket=other.bucket)
    (key,) = intake(s3_store, other).keys
    assert key.startswith("eu/fam/d1/")
    drop = ledger.read(s3_store, "fam", key.split("/")[3])
    address = f"s3://{other.bucket}/drops/fam/d1/"
    assert (drop.bucket, drop.root, drop.uploaded) == (other.bucket, address, True)
    assert all(file.version_id for file in drop.files)
    assert [one.id for one in ledger.arrived(s3_store, "fam")] == [drop.id]
    # Its files are replaced in their bucket meanwhile: the version that was entered is read.
    other.put("drops/fam/d1/a.jsonl", b'{"text": "other"}')
    planned = make_plan(
        s3_store,
        s3_store.bucket,
        {},
        partition_key=key,
        owner="run",
        installation=Installation(self_service=True),
    )
    recipe = build_recipe(planned["recipe"])
    assert recipe.train.max_steps == 7
    made = curation.curate(s3_store, drop, recipe, workdir=tmp_path / "work")
    assert made.rows("train") + made.rows("eval") == 60
    assert list(other.list("datasets/")) == []
    settings = Settings(s3_store.bucket, "main", "", "http://127.0.0.1:1", "", tmp_path)
    curated = Curated(digest=made.digest, manifest="s3://x/m", card="", rows={})
    spec = make_spec(settings, planned, curated, recipe)
    assert spec.drop["prefix"] == address  # the tag `dropforge.source` of the MLflow run and the model version
    assert spec.root.startswith(f"s3://{s3_store.bucket}/runs/")


def test_the_same_bytes_in_two_buckets_are_the_same_drop(s3_store: S3Store, other: S3Store) -> None:
    arrive(s3_store, upload(s3_store, "fam", "d1"), bucket=s3_store.bucket)
    arrive(s3_store, upload(other, "fam", "d1"), bucket=other.bucket)
    done = intake(s3_store, other)
    assert len(done.entered) == len(done.known) == len(done.keys) == 1


def test_a_refused_drop_says_where_it_lies_and_is_sent_again_from_there(s3_store: S3Store, other: S3Store) -> None:
    for store in (s3_store, other):
        arrive(s3_store, upload(store, "fam", "d1", success='[{"key": "b.jsonl", "size": 1}]'), bucket=store.bucket)
    intake(s3_store, other)
    with letters(s3_store, None, "") as found:
        assert sorted(letter.id for letter in found) == ["fam/d1", "fam/d1@eu"]
        other.put("drops/fam/d1/_SUCCESS", b"")
        next(letter for letter in found if letter.id == "fam/d1@eu").replay()
    assert [drop.bucket for drop in intake(s3_store, other).entered] == [other.bucket]
    with letters(s3_store, None, "") as found:
        assert [letter.id for letter in found] == ["fam/d1"]


def test_a_message_about_a_bucket_that_is_listed_no_more_is_said_and_others_go_on(
    s3_store: S3Store, other: S3Store, caplog: pytest.LogCaptureFixture
) -> None:
    arrive(s3_store, upload(other, "fam", "gone", '{"text": "x"}'), bucket=other.bucket)
    arrive(s3_store, upload(s3_store, "fam", "d1"), bucket=s3_store.bucket)
    assert len(take_in(s3_store, s3_store.bucket, "main", Line).keys) == 1
    assert f"it is about bucket '{other.bucket}'" in caplog.text


def test_drops_of_two_buckets_are_not_read_as_one(s3_store: S3Store, other: S3Store) -> None:
    arrive(s3_store, upload(other, "fam", "d1", '{"text": "1"}'), bucket=other.bucket)
    arrive(s3_store, upload(other, "fam", "d2", '{"text": "2"}'), bucket=other.bucket)
    arrive(s3_store, upload(s3_store, "fam", "d3", '{"text": "3"}'), bucket=s3_store.bucket)
    intake(s3_store, other)
    known = {drop.drop: drop.id for drop in ledger.arrived(s3_store, "fam")}
    both = sources.pin(s3_store, Source(drops=(known["d1"], known["d2"])), "fam")
    assert both.root == f"s3://{other.bucket}/drops/fam/"
    with s3_store.open(both.prefix + both.files[1].key) as stream:
        assert stream.read() == b'{"text": "2"}'
    with pytest.raises(DropforgeError, match="the drops are in several buckets"):
        sources.pin(s3_store, Source(drops=tuple(known.values())), "fam")


def test_an_address_in_the_inbox_leads_nowhere_else(s3_store: S3Store) -> None:
    """A forged message can name any key; only drops of listed buckets are looked at."""
    for key in ("s3://elsewhere/drops/fam/d1/_SUCCESS", "drops/fam/../../ledger/_SUCCESS", "ledger/drops/fam/x.json"):
        inbox.put(s3_store, inbox.found_body(s3_store.bucket, key, "e", "now"))
    done = take_in(s3_store, s3_store.bucket, "main", Line)
    assert (done.entered, done.refused, done.keys) == ([], {}, [])
    assert list(s3_store.list(layout.INBOX)) == []
