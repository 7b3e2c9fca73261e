"""The card of a dataset version, in Airflow."""

from __future__ import annotations

import json
import uuid

import pytest
from dropforge_airflow.assets import FINETUNE_DAG

from dropforge import layout
from dropforge.store import S3Store
from tests.dropforge_airflow.pages.conftest import Server

PATH = f"/dags/{FINETUNE_DAG}/card"
DIGEST = "0123456789abcdef" * 4


@pytest.fixture
def family(bucket: S3Store) -> str:
    """A family with a card that holds what somebody else may have written."""
    family = f"fam-{uuid.uuid4().hex[:8]}"
    key = f"{layout.dataset_prefix(family, DIGEST)}card-0123.html"
    bucket.put(key, b"<h1>Rows</h1><script>alert(1)</script>")
    bucket.put(layout.manifest_key(family, DIGEST), json.dumps({"files": {"card_html": key}}).encode())
    return family


def test_the_card_is_shown_and_nothing_of_it_runs(server: Server, family: str) -> None:
    answer = server.get(PATH, family=family, digest=DIGEST)
    assert answer.status_code == 200
    assert answer.text.startswith("<h1>Rows</h1>")
    rules = answer.headers["content-security-policy"].split("; ")
    assert "sandbox" in rules
    assert "default-src 'none'" in rules
    assert not any(rule.startswith("script-src") for rule in rules)


def test_who_may_not_read_logs_sees_no_rows(server: Server, family: str) -> None:
    for user, code in (("nologs", 403), ("elsewhere", 403), (None, 401)):
        assert server.get(PATH, user=user, family=family, digest=DIGEST).status_code == code


def test_a_manifest_leads_to_no_other_object(server: Server, bucket: S3Store, family: str) -> None:
    bucket.put("ledger/secret", b"secret")
    for value in ("ledger/secret", f"{layout.dataset_prefix(family, DIGEST)}passed.json", 7, None):
        digest = uuid.uuid4().hex * 2
        bucket.put(layout.manifest_key(family, digest), json.dumps({"files": {"card_html": value}}).encode())
        assert server.get(PATH, family=family, digest=digest).status_code == 404


@pytest.mark.parametrize(("family", "digest"), [("../ledger", DIGEST), ("fam", "../x"), ("fam", "0" * 64)])
def test_what_is_no_version_is_none(server: Server, bucket: S3Store, family: str, digest: str) -> None:
    assert server.get(PATH, family=family, digest=digest).status_code in (404, 422)
