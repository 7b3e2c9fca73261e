"""The installation's limits, as its environment says them."""

from __future__ import annotations

import pytest

from dropforge.errors import DataError, DropforgeError, RecipeError
from dropforge.recipes import load_recipe
from dropforge.run_limits import RunLimits, run_limits


def test_limits_are_words_of_the_environment() -> None:
    assert run_limits({}) == RunLimits()
    said = "nodes=4 gpus=32,gpu_hours=200.5 retries=0 minutes=1440 executors=20 rows=10000000 bytes=50GB"
    assert run_limits({"DROPFORGE_LIMITS": said}) == RunLimits(4, 32, 200.5, 0, 1440, 20, 10**7, 50 * 10**9)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("node=4", "'node' is no limit. Did you mean nodes?"),
        ("everything=4", "is no limit. Known: nodes, gpus"),
        ("nodes", "'nodes' gives no number. Write it as nodes=4"),
        ("nodes=-1", "gives no number"),
        ("nodes=nan", "gives no number"),
        ("nodes=\uff11", "gives no number"),
        ("nodes=4GB", "gives no number"),
        ("bytes=50GiB", "gives no number"),
        ("nodes=" + "9" * 5000, "gives no number"),
        ("nodes=4 nodes=5", "nodes is listed twice"),
    ],
)
def test_a_word_that_is_no_limit_is_named(said: str, told: str) -> None:
    with pytest.raises(DropforgeError, match=told):
        run_limits({"DROPFORGE_LIMITS": said})


def test_rows_above_the_limit_are_refused() -> None:
    RunLimits(rows=10).check_rows("dataset fam/ab", 10)
    with pytest.raises(DataError, match=r"dataset fam/ab: rows come to 11, .*have 10 \(DROPFORGE_LIMITS: rows"):
        RunLimits(rows=10).check_rows("dataset fam/ab", 11)


def test_pods_of_spark_are_counted_where_spark_may_run() -> None:
    cluster = {"image": "spark", "executors": 21, "volumes": [{"claim": "work", "path": "/work", "read_only": False}]}
    recipe = load_recipe("tiny", {"curation": {"engine": "spark", "spark": {"cluster": cluster}}})
    with pytest.raises(RecipeError, match=r"`curation.spark.cluster.executors`: executors come to 21, .*have 20"):
        RunLimits(executors=20).check_recipe(recipe)
    RunLimits(executors=21).check_recipe(recipe)
