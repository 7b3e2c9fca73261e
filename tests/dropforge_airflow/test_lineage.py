"""What a task has told goes into the events of OpenLineage's provider, which is asked here as its listener asks it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from airflow.providers.openlineage.extractors import ExtractorManager
from airflow.sdk import BaseOperator
from airflow.sdk.execution_time.context import set_current_context
from airflow.utils.state import TaskInstanceState
from dropforge_airflow import lineage
from dropforge_airflow.lineage import HUB, Lineage, Name
from dropforge_airflow.operators import CurateOperator, TrainOperator
from dropforge_airflow.tasks import data

from dropforge import layout
from dropforge.dataset import Manifest
from dropforge.recipes import load_recipe
from dropforge.run import RunSpec
from tests.dropforge_airflow.conftest import Yard

DIGEST = "d" * 64
RUN = "fam-1"
DATASET = Name("s3://b", f"datasets/fam/{DIGEST}")


def asked(task: BaseOperator, state: TaskInstanceState = TaskInstanceState.SUCCESS) -> tuple[set[Name], set[Name]]:
    """What the event of a task names: inputs and outputs."""
    run = cast(Any, SimpleNamespace(run_id="r"))
    found = ExtractorManager().extract_metadata(run, task, state, task_instance=SimpleNamespace(task=task))
    named = [[Name(one.namespace, one.name) for one in names] for names in (found.inputs, found.outputs)]
    assert all(len(set(names)) == len(names) for names in named)
    return set(named[0]), set(named[1])


def test_a_task_tells_what_it_reads_and_makes_and_each_is_named_once() -> None:
    task = BaseOperator(task_id="t")
    assert asked(task) == (set(), set())
    one, two = Name("s3://b", "one"), Name("s3://b", "two")
    with set_current_context(cast(Any, {"task": task})):
        lineage.tell(lambda: Lineage([one]))
        assert asked(task, TaskInstanceState.FAILED) == ({one}, set())
        lineage.tell(lambda: Lineage([one], [two, two]))
    assert asked(task) == ({one}, {two})


def test_a_name_that_cannot_be_found_fails_no_task() -> None:
    def away() -> Lineage:
        raise ConnectionError("the store is away")

    task = BaseOperator(task_id="t")
    with set_current_context(cast(Any, {"task": task})):
        lineage.tell(away)
    assert asked(task) == (set(), set())
    lineage.tell(away)  # outside of a task


def test_where_nobody_asks_nothing_is_imported() -> None:
    code = (
        "import sys; from airflow.sdk import BaseOperator;"
        "from airflow.sdk.execution_time.context import set_current_context;"
        "from dropforge_airflow import lineage;"
        "\nwith set_current_context({'task': BaseOperator(task_id='t')}): lineage.tell(lambda: 1 / 0)"
        "\nprint([name for name in sys.modules if name.startswith('openlineage')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("s3://b/drops/fam/d1/", Name("s3://b", "drops/fam/d1")),
        ("s3://b/lake/a#b?c/", Name("s3://b", "lake/a#b?c")),
        ("s3://b", Name("s3://b", "")),
        ("hf://datasets/o/n@abc/", Name(HUB, "datasets/o/n@abc")),
        ("/models/one/", Name("file", "/models/one")),
        ("file:///models/one", Name("file", "/models/one")),
    ],
)
def test_a_place_by_its_address(address: str, name: Name) -> None:
    assert lineage.at(address) == name


@pytest.mark.parametrize(
    ("base", "names"),
    [
        ({"model": None, "revision": None}, []),
        ({"model": "Qwen/Qwen3-4B", "revision": "c0ffee"}, [Name(HUB, "Qwen/Qwen3-4B@c0ffee")]),
        ({"model": "gpt2", "revision": None}, [Name(HUB, "gpt2")]),
        ({"model": "s3://b/runs/fam-0/model", "revision": None}, [Name("s3://b", "runs/fam-0/model")]),
        ({"model": "/models/one", "revision": None}, [Name("file", "/models/one")]),
    ],
)
def test_the_model_that_a_training_begins_with(base: dict[str, Any], names: list[Name]) -> None:
    assert lineage.base(base) == names


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ({"prefix": "drops/fam/d1/"}, {Name("s3://b", "drops/fam/d1")}),
        ({"prefix": "s3://other/drops/fam/d1/"}, {Name("s3://other", "drops/fam/d1")}),
        (
            {"prefix": "drops/fam/", "parts": [{"drop": "d1", "id": "1"}, {"drop": "d2", "id": "2"}]},
            {Name("s3://b", "drops/fam/d1"), Name("s3://b", "drops/fam/d2")},
        ),
        (
            {"prefix": "s3://other/drops/fam/", "parts": [{"drop": "d1", "id": "1"}]},
            {Name("s3://other", "drops/fam/d1")},
        ),
        ({"prefix": "lake/chats/", "source": {"prefix": "lake/chats/"}}, {Name("s3://b", "lake/chats")}),
        ({"prefix": "datasets/fam/shards/", "source": {"dataset": f"fam/{DIGEST}"}}, {DATASET}),
        ({"prefix": "hf://datasets/o/n@abc/", "source": {"hub": "o/n"}}, {Name(HUB, "datasets/o/n@abc")}),
    ],
)
def test_what_a_curation_reads(plan: dict[str, Any], names: set[Name]) -> None:
    plan["recipe"] = {"data": {"source": plan.pop("source", None)}}
    assert set(lineage.curating(cast(Any, plan), "s3://b").read) == names


def test_a_version_of_a_family_that_adds_up_is_made_of_the_one_before() -> None:
    made = cast(Manifest, SimpleNamespace(family="fam", digest=DIGEST, parent="e" * 64))
    assert lineage.curated("s3://b", made) == ([Name("s3://b", f"datasets/fam/{'e' * 64}")], [DATASET])


def test_a_curation_names_its_rows_although_it_fails(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"prefix": "drops/fam/d1/", "recipe": load_recipe("tiny").plain()}
    task = CurateOperator(task_id="curate", planned=plan).prepare_for_execution()

    def broken(planned: Any) -> Any:
        raise ValueError("bad rows")

    monkeypatch.setattr(data, "curate", broken)
    with set_current_context(cast(Any, {"task": task})), pytest.raises(ValueError, match="bad rows"):
        cast(Any, task).execute({})
    assert asked(task, TaskInstanceState.FAILED) == ({Name(f"s3://{yard.bucket}", "drops/fam/d1")}, set())


def test_a_training_names_its_model_only_if_it_made_one(yard: Yard) -> None:
    recipe = load_recipe("tiny").plain()
    spec = RunSpec(RUN, "fam", 1, "s3://b/runs/fam-1", "s3://b", "s3://b/m", DIGEST, recipe, "code")
    yard.store.put(layout.run_key(RUN), spec.to_json())
    labels = {"dropforge/run": RUN, "dropforge/family": "fam", "dropforge/purpose": "train"}
    manifest = {"metadata": {"labels": labels, "annotations": {"dropforge/run-folder": f"{spec.root}/"}}}

    task = cast(TrainOperator, TrainOperator(task_id="train", manifest=manifest).prepare_for_execution())

    def killed() -> Any:
        raise RuntimeError("killed")

    with set_current_context(cast(Any, {"task": task})):
        with pytest.raises(RuntimeError, match="killed"):
            task._named(killed)
        assert asked(task, TaskInstanceState.FAILED) == ({DATASET}, set())
        task._named(dict)
    assert asked(task) == ({DATASET}, {Name("s3://b", "runs/fam-1/model")})
    idle = cast(TrainOperator, TrainOperator(task_id="train", manifest={}).prepare_for_execution())
    with set_current_context(cast(Any, {"task": idle})):
        assert cast(Any, idle).execute({}) == {}
    assert asked(idle) == (set(), set())


def test_a_version_and_an_alias_are_named_as_mlflow_loads_them() -> None:
    assert lineage.version("http://ml:5000/", "fam", "3") == Name("mlflow://ml:5000", "models:/fam/3")
    assert lineage.alias("https://ml/mlflow", "fam", "champion") == Name("mlflow://ml/mlflow", "models:/fam@champion")
