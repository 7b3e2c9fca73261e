"""Run identity, run.json, job names, termination messages and the dataset manifest."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropforge import dataset
from dropforge.dataset import Manifest, Shard
from dropforge.errors import DataError, DropforgeError
from dropforge.run import TERMINATION_MESSAGE_LIMIT, RunSpec, Tracking, job_name, run_name, termination_message


def test_a_run_is_named_by_what_went_in() -> None:
    name = run_name("fam", {"a": 1, "b": 2}, "d", "c")
    assert name == run_name("fam", {"b": 2, "a": 1}, "d", "c")
    assert len({name, run_name("fam", {"a": 1}, "d", "c"), run_name("fam", {"a": 1, "b": 2}, "e", "c")}) == 3
    assert run_name("fam", {"a": 1, "b": 2}, "d", "c", 2).endswith("-2")


@given(st.from_regex(r"\A[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?\Z"), st.sampled_from(["train", "evaluate", ""]))
def test_job_names_suit_kubernetes(family: str, purpose: str) -> None:
    name = job_name(run_name(family, {}, "", ""), purpose)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name)
    assert len(f"{name}-node-0-9999-abcde") <= 63


def test_run_json_there_and_back() -> None:
    spec = RunSpec(
        "r", "f", 1, "s3://b/runs/r", "s3://b", "s3://b/m", "d", {"train": {}}, "c", tracking=Tracking("u", "i", "0")
    )
    assert RunSpec.from_json(spec.to_json()) == spec
    for text in (b"{}", b"[]", b"no", b'{"run": 1, "bogus": 2}'):
        with pytest.raises(DropforgeError, match=r"run\.json"):
            RunSpec.from_json(text)


@given(st.text(max_size=5000))
def test_a_termination_message_fits_and_is_json(message: str) -> None:
    data = termination_message(12, message, rank=3, step=7, steps=9)
    assert len(data) <= TERMINATION_MESSAGE_LIMIT
    assert json.loads(data)["exit_code"] == 12


def test_manifest_there_and_back() -> None:
    manifest = Manifest(
        "f", "d", {"input": 1}, {"salt": "x"}, (Shard("train", "k", "s", 3, 10), Shard("eval", "k", "s", 2, 1))
    )
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert (manifest.rows("train"), manifest.rows("eval")) == (3, 2)
    for text in (b"{}", b"no", manifest.to_json().replace(b'"schema": 1', b'"schema": 99')):
        with pytest.raises(DataError, match="dataset manifest"):
            Manifest.from_json(text)


def test_the_digest_covers_split_counts_and_rules() -> None:
    base = dataset.digest({"train": [b"a" * 16], "eval": [b"b" * 16]}, {"input": 2}, {"salt": 1})
    others = {
        dataset.digest({"train": [b"b" * 16], "eval": [b"a" * 16]}, {"input": 2}, {"salt": 1}),
        dataset.digest({"train": [b"a" * 16], "eval": [b"b" * 16]}, {"input": 3}, {"salt": 1}),
        dataset.digest({"train": [b"a" * 16], "eval": [b"b" * 16]}, {"input": 2}, {"salt": 2}),
    }
    assert base not in others
    assert len(others) == 3


def test_the_trainer_s_contracts_need_only_the_standard_library() -> None:
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'pydantic', 'boto3', 'mlflow', 'yaml', 'rich', 'typer', 'httpx'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import dropforge.run, dropforge.dataset, dropforge.layout, dropforge.store, dropforge.promotion\n"
        "import dropforge.aside, dropforge.wheel\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
