"""What a recipe may have read with the installation's rights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dropforge.errors import DropforgeError, RecipeError
from dropforge.install.access import COMPONENTS
from dropforge.readable import Readable, readable
from dropforge.recipes.load import build_recipe, merge, resolve

RUNS = {"mine-1": "mine", "other-1": "other"}
SCRATCH = resolve({"extends": "tiny"})


def check(values: dict[str, Any], allowed: Readable, *presets: str) -> None:
    under = {key: value for key, value in SCRATCH.items() if key != "base" or "model" not in values.get("base", {})}
    allowed.check(build_recipe(merge(under, values)), "mine", "home", RUNS.get, lambda: presets)


def base(model: str) -> dict[str, Any]:
    return {"base": {"model": model}}


def sets(place: str) -> dict[str, Any]:
    return {"curation": {"decontaminate": {"sets": {"a": place}}}}


@pytest.mark.parametrize(
    "values",
    [
        base("/etc"),
        base("/proc/self/cwd"),
        base("file:///etc"),
        base("../models"),
        base("s3://other-bucket/model"),
        base("s3://home-of-others/model"),
        base("s3://home@elsewhere/model"),
        base("s3://home/runs/other-1/model"),
        base("s3://home/datasets/other/x"),
        base("s3://home/ledger/drops"),
        base("s3://home/mlflow/1/x"),
        base("s3://home/airflow/logs"),
        {"data": {"source": {"prefix": "airflow/logs/"}}},
        sets("airflow/logs/x.jsonl"),
        base("s3://home/lake/../runs/other-1/model"),
        base("s3://home//runs/other-1/model"),
        base("s3://home/r\tuns/other-1/model"),
        base("s3://home/lake?/runs/other-1/model"),
        base("s3://home/lake#/x"),
        base("S3://home/runs/other-1/model"),
        base("s3://home/runs/Gone_1/model"),
        base("s3://home/runs/gone-1/model"),
        base("s3://home/runs"),
        base("s3://home/drops/"),
        {"base": {"start": "runs/other-1/step-5"}},
        sets("drops/other/d1/rows.jsonl"),
        sets("s3://home/drops/other/d1/rows.jsonl"),
        sets("ledger/drops/mine/x.json"),
        sets("s3://elsewhere/rows.jsonl"),
        sets("x/../drops/other/d1/rows.jsonl"),
        {"data": {"source": {"dataset": f"other/{'a' * 64}"}}},
        {"evaluate": {"holdout": f"other/{'a' * 64}"}},
    ],
)
def test_what_is_of_others_or_of_the_machine_is_not_read(values: dict[str, Any]) -> None:
    with pytest.raises(
        RecipeError, match=r"DROPFORGE_READABLE.*May be read: bucket home, outside the folders of other"
    ):
        check(values, Readable())


@pytest.mark.parametrize(
    "place",
    [
        "s3://home/ledger/claims/other/x",
        "s3://home/ledger",
        "s3://home/drops/other/monday",
        "s3://home/datasets/other",
        "s3://home/runs/other-1",
        "s3://home/runs",
        "s3://home//ledger/inbox",
        "s3://home/lake/../ledger/inbox",
    ],
)
def test_checkpoints_go_to_no_place_that_dropforge_keeps_for_itself(place: str) -> None:
    with pytest.raises(RecipeError, match=r"`train.checkpoints`.*keeps for itself"):
        check({"train": {"checkpoints": place}}, Readable())
    for other in ("s3://home/checkpoints", "s3://home", "s3://home-of-others/runs", "/mnt/shared"):
        check({"train": {"checkpoints": other}}, Readable())


def test_every_place_of_the_components_is_closed_or_of_a_family() -> None:
    """What a component keeps is no family's to read, unless it is the family's own."""
    for prefix in {prefix for one in COMPONENTS for prefix in (*one.reads, *one.writes, *one.deletes)}:
        with pytest.raises(RecipeError):
            check({"data": {"source": {"prefix": f"{prefix.replace('*', 'other')}other-1/x/"}}}, Readable())


@pytest.mark.parametrize(
    "values",
    [
        base("meta-llama/Llama-3.2-1B"),
        base("gpt2"),
        base("s3://home/models/llama"),
        base("s3://home/runs/mine-1/model"),
        {"base": {"start": "runs/mine-1/step-5"}},
        {"base": {"start": "runs/gone-1/step-5"}},  # whoever looks for it says that there is none
        {"base": {"start": "champion"}},
        sets("eval-sets/gsm8k.jsonl"),
        sets("drops/mine/d1/rows.jsonl"),
        {"data": {"source": {"dataset": f"mine/{'a' * 64}"}}},
        {"evaluate": {"holdout": f"mine/{'a' * 64}"}},
        {"data": {"source": {"prefix": "lake/chats/"}}},
        {"data": {"source": {"hub": "allenai/tulu"}}},
    ],
)
def test_the_hub_and_what_is_of_the_family_or_of_nobody_is_read(values: dict[str, Any]) -> None:
    check(values, Readable())


def test_the_installation_names_hubs_prefixes_folders_and_families(tmp_path: Path) -> None:
    models, outside = tmp_path / "models", tmp_path / "outside"
    for folder in (models / "a", outside):
        folder.mkdir(parents=True)
    (models / "link").symlink_to(outside)
    (models / "current").symlink_to(models / "a")
    words = f"hub:meta-llama/* s3://models/llama, s3://home/runs/other-1/ {models}/ family:base-*"
    allowed = readable({"DROPFORGE_READABLE": words})
    for values in (
        base("meta-llama/Llama-3.2-1B"),
        base("s3://models/llama/1b"),
        base("s3://models/llama"),
        base(str(models / "a")),
        base(str(models / "current")),
        base("s3://home/runs/other-1/model"),
        {"base": {"model": "meta-llama/Llama-3.2-1B", "revision": "v2"}},
        base(f"file://{models}/a"),
        sets("drops/base-one/d1/rows.jsonl"),
        {"evaluate": {"holdout": f"base-one/{'a' * 64}"}},
    ):
        check(values, allowed)
    for values in (
        base("gpt2"),
        base("s3://models/llama-others/x"),
        base("s3://models/other"),
        base(f"{models}-others/a"),
        base(f"{models}/../outside"),
        base(str(models / "link")),
        base(f"{models}/current/../a"),
        {"base": {"model": "meta-llama/Llama-3.2-1B", "revision": "refs/pr/3"}},
        sets("drops/other/d1/rows.jsonl"),
        {"data": {"source": {"hub": "allenai/tulu"}}},
    ):
        with pytest.raises(RecipeError, match="DROPFORGE_READABLE"):
            check(values, allowed)


def test_the_refusal_of_a_folder_has_the_lines_that_let_it_be_read(tmp_path: Path) -> None:
    allowed = Readable(folders=("/models",), families=("base-*",))
    with pytest.raises(RecipeError) as refused:
        check(base(f"{tmp_path}/small"), allowed)
    words = f"hub:* /models family:base-* {tmp_path}/small"
    assert f"`dropforge down`, then `DROPFORGE_READABLE='{words}' dropforge up -d`" in refused.value.mend
    check(base(f"{tmp_path}/small"), readable({"DROPFORGE_READABLE": words}))
    for place in (f"{tmp_path}/a b", "../small"):  # no word can name them
        with pytest.raises(RecipeError, match="or for `dropforge up` in its environment"):
            check(base(place), allowed)


def test_what_a_preset_names_is_the_installation_s_own() -> None:
    check(base("/models/llama"), Readable(), "/models/llama")
    check(sets("s3://sets/gsm8k.jsonl"), Readable(), "s3://sets/gsm8k.jsonl")
    check({"evaluate": {"holdout": f"other/{'a' * 64}"}}, Readable(), f"other/{'a' * 64}")
    with pytest.raises(RecipeError, match="DROPFORGE_READABLE"):
        check(base("/models/llama/../other"), Readable(), "/models/llama")


@pytest.mark.parametrize("word", ["models", "hub:", "family:", "s3://", "s3://a/../b", "./models", "https://hub"])
def test_a_word_that_names_nothing_is_refused(word: str) -> None:
    with pytest.raises(DropforgeError, match=r"DROPFORGE_READABLE: .* names nothing to read"):
        readable({"DROPFORGE_READABLE": f"hub:* {word}"})
