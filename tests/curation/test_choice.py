"""Which engine takes a drop, why, and about how long it will take."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import curation
from curation.engines.choice import AUTO_SPARK_BYTES, choose
from curation.engines.estimate import seconds
from dropforge.drop import Drop
from dropforge.errors import DropforgeError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

MakeRecipe = Callable[..., Recipe]


def absent() -> str:
    raise DropforgeError("Spark", "there is no `java` on the path", "Install Java 17 or later")


def there() -> str:
    return "PySpark 4"


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))


def test_auto_takes_spark_for_what_one_machine_is_long_about(recipe: MakeRecipe) -> None:
    asked = recipe(engine="auto", workers=0).curation
    assert choose(asked, AUTO_SPARK_BYTES - 1, absent).engine == "embedded"
    taken = choose(asked, AUTO_SPARK_BYTES, there)
    assert taken.engine == "spark"
    assert taken.why.startswith("200.0 GB planned, Spark from 200 GB on; embedded about ")
    assert taken.why.endswith(" on 4 cores (PySpark 4)")
    stays = choose(asked, AUTO_SPARK_BYTES, absent)
    assert stays.engine == "embedded"
    assert stays.why.endswith(" on 4 cores, but there is no `java` on the path")


def test_auto_takes_spark_where_the_deadline_asks_for_it(recipe: MakeRecipe) -> None:
    planned = 10 * 10**9
    took = seconds(recipe(engine="auto", workers=0).curation, planned, 4)
    tight, wide = (recipe(engine="auto", workers=0, deadline_minutes=round(took / 60 * n)).curation for n in (0.5, 2))
    within = choose(wide, planned, there, 64)
    assert within.engine == "embedded"
    assert ", within the deadline of " in within.why
    taken = choose(tight, planned, there, 64)
    assert taken.engine == "spark"
    assert "on 4 cores, beyond the deadline of " in taken.why
    assert "on 64 cores, within the deadline of " in taken.why
    assert choose(tight, planned, absent, 64).engine == "embedded"
    fewer = choose(tight, planned, there, 1)
    assert (fewer.engine, fewer.why.endswith(", and Spark is not sooner")) == ("embedded", True)


def test_the_estimate_grows_with_bytes_and_stages_and_shrinks_with_cores(recipe: MakeRecipe) -> None:
    plain = recipe().curation
    assert seconds(plain, 2 * 10**9, 1) == pytest.approx(2 * seconds(plain, 10**9, 1))
    assert seconds(plain, 10**9, 8) < seconds(plain, 10**9, 2) < seconds(plain, 10**9, 1)
    assert seconds(plain, 10**9, 8, shared=True) == pytest.approx(seconds(plain, 10**9, 1) / 8)
    stages: list[dict[str, Any]] = [
        {"dedup": {}},
        {"pii": {}},
        {"quality": {"gopher": {}}},
        {"quality": {"gopher_repetition": {}}},
        {"quality": {"c4": {}}},
        {"unicode": "repair"},
        {"language": {"keep": ["en"]}},
    ]
    for stage in stages:
        assert seconds(recipe(**stage).curation, 10**9, 1) > seconds(plain, 10**9, 1), stage


def test_spark_is_refused_before_anything_is_read_where_java_is_missing(
    store: FolderStore,
    upload: Callable[..., Drop],
    tmp_path: Path,
    recipe: MakeRecipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drop = upload({"a.jsonl": b'{"text": "a"}\n{"text": "b"}\n'})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(DropforgeError, match=r"Spark: .*(java|PySpark).*curation.engine: embedded"):
        curation.curate(store, drop, recipe(engine="spark"), workdir=tmp_path / "work")
    assert not (tmp_path / "work").exists()
    told: list[str] = []
    curation.curate(store, drop, recipe(engine="auto"), workdir=tmp_path / "work", say=told.append)
    assert told == ["Curation engine embedded: 0.0 GB planned, Spark from 200 GB on; about 1 s on 1 core"]
