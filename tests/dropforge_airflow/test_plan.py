"""Which drop, which recipe, and who may have it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from airflow.sdk.api.datamodels._generated import DagRun, DagRunType
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from dropforge_airflow.filled import filled
from dropforge_airflow.tasks import plan as plan_task
from dropforge_airflow.tasks.data import Curated
from dropforge_airflow.tasks.failure import no_retry
from dropforge_airflow.tasks.plan import Plan, make_plan
from dropforge_airflow.tasks.recipe import Installation, resolve_recipe
from dropforge_airflow.tasks.run import make_spec
from kubeflow_training.jobs.local import LocalCluster

from dropforge import family_recipe, layout, ledger
from dropforge.drop import Drop, partition_key, read_drop
from dropforge.errors import DataError, DropforgeError, RecipeError
from dropforge.readable import Readable
from dropforge.recipes import load_recipe
from dropforge.recipes.load import build_recipe
from dropforge.run import RunSpec, Start
from dropforge.run_limits import RunLimits
from dropforge.settings import Settings
from dropforge.start import model_digest
from dropforge.store import Store
from dropforge.tracking import Champion
from tests.wheels import make_wheel

#: One user, who owns all families.
ALONE = Installation("tiny", self_service=True)


def upload(store: Store, drop: str = "d1", recipe: str | None = None) -> Drop:
    store.put(f"drops/fam/{drop}/a.jsonl", f'{{"text": "{drop}"}}'.encode())
    if recipe is not None:
        store.put(f"drops/fam/{drop}/recipe.yaml", recipe.encode())
    store.put(f"drops/fam/{drop}/_SUCCESS", b"")
    return read_drop(store, "fam", drop, "b")


def entered(store: Store, drop: str = "d1", recipe: str | None = None) -> Drop:
    found = upload(store, drop, recipe)
    ledger.record(store, found)
    return found


def plan(store: Store, source: Drop | None = None, owner: str = "run-1", **params: Any) -> Any:
    """Make the plan of an event run if `source` is given, else of a run from the form."""
    key = partition_key("b", source) if source else None
    return make_plan(store, "b", params, partition_key=key, owner=owner, installation=ALONE)


def test_the_form_reads_the_drop_that_it_names_though_others_held_its_bytes_first(store: Store) -> None:
    """Its own recipe lies beside it; of an upload that was trained on and deleted nothing is left to read."""
    first = entered(store, "d1", "train: {max_steps: 7}\n")
    ledger.prove(store, "fam", [first.id])
    for name in ("a.jsonl", "recipe.yaml", "_SUCCESS"):
        store.put(f"drops/fam/d2/{name}", store.get(f"drops/fam/d1/{name}"))
    store.delete_all("drops/fam/d1/")
    found = plan(store, drop="fam/d2")
    assert (found["drop"], found["drop_id"], found["recipe"]["train"]["max_steps"]) == ("d2", first.id, 7)


def test_an_event_run_takes_its_drop(store: Store) -> None:
    drop = entered(store)
    made = plan(store, drop)
    assert (made["family"], made["drop"], made["drop_id"], made["counter"]) == ("fam", "d1", drop.id, 1)
    assert made["recipe"]["train"]["max_steps"] == 20
    claimed = json.loads(store.get(layout.claim_key("fam", drop.id, 1)))
    assert made["date"] == claimed["at"][:10]
    assert ledger.owner_of(store, "fam", drop.id) == "run-1"
    assert list(ledger.pending(store)) == []


def test_a_second_run_of_the_same_drop_is_skipped_and_told_why(store: Store) -> None:
    drop = entered(store)
    plan(store, drop)
    with pytest.raises(AirflowSkipException, match=r"belongs to run run-1.*again"):
        plan(store, drop, owner="run-2")


def test_a_retried_task_has_the_same_plan(store: Store) -> None:
    drop = entered(store)
    assert plan(store, drop) == plan(store, drop)
    first = plan(store, None, owner="run-2", drop="fam/d1", again=True)
    assert first["counter"] == 2
    assert plan(store, None, owner="run-2", drop="fam/d1", again=True) == first


@pytest.mark.parametrize(
    "asked",
    [{"drop": "fam/d1"}, {"drop": " fam/d1/ "}, {"drop": "drops/fam/d1/"}, {"drop": "d1", "family": "fam"}],
)
def test_a_person_names_a_drop(store: Store, asked: dict[str, str]) -> None:
    upload(store)  # in the bucket, but no event ever told of it
    assert plan(store, **asked)["drop"] == "d1"


@pytest.mark.parametrize("family", [None, "fam"])
def test_a_person_names_a_drop_by_its_id(store: Store, family: str | None) -> None:
    drop = entered(store)
    params = {"preset": "tiny", "drop": drop.id, "family": family}
    assert make_plan(store, "b", params, partition_key=None, owner="run-1")["drop_id"] == drop.id


@pytest.mark.parametrize(
    ("asked", "cause"),
    [
        ({}, "it is empty"),
        ({"drop": "  "}, "it is empty"),
        ({"drop": "d1"}, "its family is not given"),
        ({"drop": "fam/gone"}, "there is no _SUCCESS"),
        ({"drop": "fam/d1", "family": "other"}, "not of family 'other'"),
        ({"drop": "fam/../x"}, "a drop's name is"),
        ({"drop": "Fam/d1"}, "a family is"),
        ({"drop": "0" * 32}, "the ledger has no such drop"),
        ({"drop": "0" * 32, "family": "fam"}, "family fam has no such drop"),
    ],
)
def test_a_drop_that_is_not_there_is_an_error_for_people(store: Store, asked: dict[str, str], cause: str) -> None:
    upload(store)
    with pytest.raises(DataError, match=cause):
        make_plan(store, "b", {"preset": "tiny", **asked}, partition_key=None, owner="run-1")


def test_preset_then_the_drops_recipe_then_the_form(store: Store) -> None:
    recipe = "train: {learning_rate: 0.002, max_steps: 7}"
    made = plan(store, entered(store, recipe=recipe), train_max_steps=9, overrides={"train": {"clip": 0.5}})
    train = made["recipe"]["train"]
    assert (train["sequence_length"], train["learning_rate"], train["max_steps"], train["clip"]) == (128, 0.002, 9, 0.5)


def test_the_first_drops_recipe_is_the_familys_and_a_later_drop_does_not_change_it(store: Store) -> None:
    buys = "promote: {min_improvement: -1.0, better_than_base: false}\n"
    plan(store, entered(store, recipe="train: {max_steps: 7}\ndata: {text_column: body}"))
    kept = family_recipe.read(store, "fam")
    assert kept is not None
    assert (kept.origin, kept.by, kept.recipe["train"]) == ("drop", "d1", {"max_steps": 7})
    with pytest.raises(
        RecipeError,
        match=r"recipe.yaml of drop fam/d2, recipe key `promote.\w+`: family fam \(set by its first drop, d1, .*UTC\) "
        r"has .*, and the recipe of this drop asks for .*`dropforge family set fam --recipe FILE` changes it",
    ):
        plan(store, entered(store, "d2", buys), owner="run-2")
    without = plan(store, entered(store, "d3"), owner="run-3")["recipe"]
    assert (without["train"]["max_steps"], without["data"]["text_column"]) == (7, "body")
    less = plan(store, entered(store, "d4", "train: {max_steps: 3}"), owner="run-4")["recipe"]
    assert less["train"]["max_steps"] == 3
    # A person decides by the form, as before.
    forced = plan(store, drop="fam/d1", again=True, owner="run-5", train_max_steps=90)["recipe"]
    assert forced["train"]["max_steps"] == 90


def test_a_drop_of_a_family_that_has_data_already_is_not_its_first(store: Store) -> None:
    store.put("datasets/fam/head.json", b"{}")
    drop = entered(store, recipe="promote: {min_improvement: -1.0}")
    with pytest.raises(RecipeError, match=r"preset tiny, which fam goes by, has 0.0.*`dropforge family set fam"):
        plan(store, drop)
    assert plan(store, entered(store, "d2"), owner="run-2")["recipe"]["promote"]["min_improvement"] == 0.0
    assert family_recipe.read(store, "fam") is None


def test_what_pods_of_trainings_may_write_makes_no_family_one_that_has_data(store: Store) -> None:
    for key in (
        "datasets/fam/tokens/manifest.json",
        "datasets/fam/tokens/passed.json",
        "datasets/fam/x/tokens/1/plan.json",
    ):
        store.put(key, b"{}")
    plan(store, entered(store, recipe="promote: {min_improvement: 0.5}"))
    kept = family_recipe.read(store, "fam")
    assert kept is not None
    assert kept.origin == "drop"


def test_a_family_s_recipe_that_cannot_be_used_is_not_told_of_the_drop(store: Store) -> None:
    family_recipe.write(store, "fam", {"extends": "gone"}, "tiny", "ann")
    with pytest.raises(RecipeError, match=r"^the recipe of family fam \(set by ann.*dropforge family set fam"):
        plan(store, entered(store, recipe="train: {max_steps: 3}"))


def test_a_first_drop_without_a_recipe_leaves_its_family_the_preset(store: Store) -> None:
    plan(store, entered(store))
    with pytest.raises(RecipeError, match=r"`promote.min_improvement`: family fam .* has 0.0"):
        plan(store, entered(store, "d2", "promote: {min_improvement: -1.0}"), owner="run-2")


def test_who_starts_a_run_does_not_choose_its_reviewers(store: Store) -> None:
    drop = entered(store)

    def approval(**form: Any) -> Any:
        asked = {name: yaml.safe_dump(value) if name == "recipe" else value for name, value in form.items()}
        return resolve_recipe(store, drop, filled({"drop": "fam/d1", **asked}, "b"), ALONE).recipe.promote.approval

    assert approval(recipe={"promote": {"approval": {"people": ["ann"]}}}).people == ("ann",)  # more is anybody's
    family_recipe.write(store, "fam", {"extends": "tiny", "promote": {"approval": {"people": ["bob"]}}}, "tiny", "ann")
    for form in ({}, {"preset": "tiny"}, {"recipe": {"promote": {"approval": {"people": ["bob"]}}}}):
        assert approval(**form).people == ("bob",)
    changed = r"`promote.approval`: the form changes what holds for family fam \(set"
    for other in (None, {"people": ["mallory"]}, {"people": []}, {"otherwise": "promote"}):
        for form in ({}, {"preset": "tiny"}):
            with pytest.raises(RecipeError, match=changed):
                approval(recipe={"promote": {"approval": other}}, **form)
    # A batch's window closed before the family had reviewers, or with them; whoever names it starts a run all the same.
    for kept in ({"extends": "tiny"}, {"extends": "tiny", "promote": {"approval": {"people": ["bob"]}}}):
        batch = {"drop": "fam/d1", "recipe": "train: {seed: 7}"}
        found = resolve_recipe(store, drop, filled(batch, "b"), ALONE, kept).recipe
        assert (found.promote.approval.people, found.train.seed) == (("bob",), 7)  # type: ignore[union-attr]
        for other in ("null", "{people: [mallory]}"):
            form = filled({**batch, "recipe": f"promote: {{approval: {other}}}"}, "b")
            with pytest.raises(RecipeError, match=changed):
                resolve_recipe(store, drop, form, ALONE, kept)


def test_a_preset_says_nothing_about_silence_where_the_family_has_reviewers(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop = entered(store)
    night = {"approval": {"otherwise": "promote", "deadline_hours": 0.01}}
    of_costs = {"stop_above": {"cost": 100}, "unknown": "start", "otherwise": "start", "deadline_hours": 0.01}
    recipe = {"extends": "tiny", "promote": night, "compute": {"limits": of_costs, "price": {"core_hour": 1}}}
    (tmp_path / "night.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setenv("DROPFORGE_PRESETS", str(tmp_path))
    asked = {"ask_above": {"cost": 5}, "people": ["ann"]}
    own = {"promote": {"approval": {"people": ["bob"]}}, "compute": {"limits": asked, "price": {"core_hour": 2}}}
    family_recipe.write(store, "fam", {"extends": "tiny", **own}, "tiny", "ann")
    of_family = resolve_recipe(store, drop, filled({"drop": "fam/d1"}, "b"), ALONE).recipe
    for form, gathered in (({"preset": "night"}, None), ({}, {"extends": "tiny", "promote": night})):
        found = resolve_recipe(store, drop, filled({"drop": "fam/d1", **form}, "b"), ALONE, gathered).recipe
        assert found.promote.approval == of_family.promote.approval
        assert (found.compute.limits, found.compute.price) == (of_family.compute.limits, of_family.compute.price)


@pytest.mark.parametrize("start", [{}, {"preset": "tiny"}])
def test_who_starts_a_run_does_not_choose_who_is_asked_about_its_costs(store: Store, start: dict[str, str]) -> None:
    drop = entered(store)
    limits = {"ask_above": {"cost": 5}, "people": ["ann"]}
    own = {"extends": "tiny", "compute": {"limits": limits, "price": {"core_hour": 1}, "gpu_tflops": 40}}
    family_recipe.write(store, "fam", own, "tiny", "ann")

    def resolved(**compute: Any) -> Any:
        form = {"drop": "fam/d1", **start, "recipe": yaml.safe_dump({"compute": compute})}
        return resolve_recipe(store, drop, filled(form, "b"), ALONE).recipe.compute

    found = resolved(cpus=2, limits=limits)
    assert (found.limits.people, found.price.core_hour, found.gpu_tflops, found.cpus) == (("ann",), 1, 40, 2)
    for other in (
        {"limits": None},
        {"limits": {"people": []}},
        {"limits": {"ask_above": {"cost": 500}}},
        {"limits": {"otherwise": "start"}},
        {"price": {"core_hour": 0.001}},
        {"gpu_tflops": 4000.0},
    ):
        with pytest.raises(
            RecipeError, match=rf"`compute.{next(iter(other))}`: the form changes what holds for family"
        ):
            resolved(**other)
    family_recipe.write(store, "fam", {**own, "compute": {"limits": {"ask_above": {"core_hours": 5}}}}, "tiny", "ann")
    assert resolved(limits=None, price={"core_hour": 3}).limits is None  # nobody is named


KERNELS = {"kernels": ["tidy"]}
CLUSTER = {"image": "r/i:1", "volumes": [{"claim": "work", "path": "/work", "read_only": False}]}
ON_CLUSTER = {**KERNELS, "engine": "spark", "spark": {"cluster": CLUSTER}}


@pytest.mark.parametrize("start", [{}, {"preset": "tiny"}])
@pytest.mark.parametrize("curation", [KERNELS, {**ON_CLUSTER, "engine": "auto"}, ON_CLUSTER])
def test_who_fills_in_the_form_chooses_no_code_that_a_task_of_airflow_runs(
    store: Store, start: dict[str, str], curation: dict[str, Any]
) -> None:
    drop, wheel = entered(store), {"wheel": "s3://b/drops/fam/d1/x-1-py3-none-any.whl", "sha256": "a" * 64}

    def resolved(**asked: Any) -> Any:
        form = {**start, "drop": "fam/d1", "recipe": yaml.safe_dump(asked)}
        return resolve_recipe(store, drop, filled(form, "b"), ALONE).recipe

    if curation is ON_CLUSTER:  # in pods, with their rights
        assert resolved(code=wheel, curation=curation).code.sha256 == wheel["sha256"]
        return
    with pytest.raises(RecipeError, match=r"`code.wheel`: the form names it.*dropforge family set"):
        resolved(code=wheel, curation=curation)
    assert resolved(code=wheel).code.sha256 == wheel["sha256"]  # for functions in the training's pods alone
    family_recipe.write(store, "fam", {"extends": "tiny", "code": wheel, "curation": KERNELS}, "tiny", "ann")
    if not start:
        assert resolved(curation=curation).curation.kernels == ("tidy",)
        with pytest.raises(RecipeError, match=r"`code.wheel`: the form names it"):
            resolved(code={**wheel, "sha256": "b" * 64})


def test_without_self_service_the_preset_holds_and_nothing_is_kept(store: Store) -> None:
    drop = entered(store, recipe="promote: {min_improvement: -1.0}")
    key = partition_key("b", drop)
    others = Installation("tiny")
    with pytest.raises(RecipeError, match=r"preset tiny, which fam goes by, has 0.0.*dropforge family set fam"):
        make_plan(store, "b", {}, partition_key=key, owner="run-1", installation=others)
    family_recipe.write(store, "fam", {"extends": "tiny", "promote": {"min_improvement": -1.0}}, "tiny", "ann")
    made = make_plan(store, "b", {}, partition_key=key, owner="run-1", installation=others)
    assert made["recipe"]["promote"]["min_improvement"] == -1.0


def test_the_familys_file_decides_and_no_drop_sets_its_recipe(store: Store, tmp_path: Path) -> None:
    (tmp_path / "fam.yaml").write_text("recipe: {extends: tiny, train: {max_steps: 9}}\nstart: champion")
    here = Installation("tiny", tmp_path, self_service=True)
    drop = entered(store, recipe="train: {max_steps: 4}")
    made = make_plan(store, "b", {}, partition_key=partition_key("b", drop), owner="run-1", installation=here)
    assert (made["recipe"]["train"]["max_steps"], made["recipe"]["base"]["start"]) == (4, "champion")
    assert family_recipe.read(store, "fam") is None
    more = entered(store, "d2", "train: {max_steps: 20}")
    with pytest.raises(RecipeError, match=r"family fam \(its file fam.yaml\) has 9, and lets a drop ask for no more"):
        make_plan(store, "b", {}, partition_key=partition_key("b", more), owner="run-2", installation=here)
    (tmp_path / "fam.yaml").write_text("recipe: {extends: nothing}")
    with pytest.raises(RecipeError, match=r"family file 'fam.yaml'"):
        make_plan(store, "b", {}, partition_key=partition_key("b", more), owner="run-2", installation=here)


def test_of_two_first_drops_one_sets_the_recipe_and_the_other_is_held_to_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    slower = entered(store, "d2", "train: {max_steps: 9}")
    keep = family_recipe.keep_first

    def after_another(*arguments: Any) -> bool:
        monkeypatch.setattr(family_recipe, "keep_first", keep)
        plan(store, entered(store, recipe="train: {max_steps: 7}"))
        return keep(*arguments)

    monkeypatch.setattr(family_recipe, "keep_first", after_another)
    with pytest.raises(RecipeError, match=r"drop fam/d2.*set by its first drop, d1.*has 7"):
        plan(store, slower, owner="run-2")


def test_a_first_drop_that_cannot_work_leaves_no_recipe(store: Store) -> None:
    with pytest.raises(RecipeError, match=r"compute.memory_gb"):
        plan(store, entered(store, recipe=LARGE))
    assert family_recipe.read(store, "fam") is None
    # Nor is what a person changed for one run the family's.
    again: dict[str, Any] = {"drop": "fam/d1", "again": True, "owner": "run-2"}
    plan(store, None, overrides={"compute": {"memory_gb": 500}}, **again)
    assert family_recipe.read(store, "fam") is None


def test_a_preset_that_a_person_chose_takes_the_familys_place(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    plan(store, entered(store, recipe="train: {max_steps: 7}\ndata: {text_column: body}"))
    made = plan(store, drop="fam/d1", again=True, owner="run-2", preset="tiny")["recipe"]
    assert (made["train"]["max_steps"], made["data"]["text_column"]) == (20, "body")
    assert "these do not count: ['train.max_steps']" in caplog.text


def test_a_drop_does_not_say_how_others_are_read_by_way_of_a_preset_or_the_form(
    store: Store,
) -> None:
    """Of the calendar's runs it says nothing at all."""
    plan(store, entered(store, recipe="data: {text_column: body}"))
    asked = {"drop": "fam/d1", "again": True}
    grows = {"overrides": {"curation": {"scope": "family"}}}
    with pytest.raises(RecipeError, match=r"`data\.text_column`.*preset tiny has .*for all its drops"):
        plan(store, owner="run-2", preset="tiny", **asked, **grows)
    upload(store, "d2", "data: {text_column: other}")
    with pytest.raises(RecipeError, match=r"`data\.text_column`.*family fam \(set by .*\) has .*for all its drops"):
        plan(store, owner="run-3", drop="fam/d2", **grows)
    made = plan(store, owner="run-4", drop="fam/d2", again=True, retrain={"reason": "it is Monday"}, **grows)
    assert made["recipe"]["data"]["text_column"] == "body"  # the family's
    assert made["retrain"] == {"reason": "it is Monday"}


def test_what_the_installation_does_not_let_be_read_is_refused_before_anything_is_read(store: Store) -> None:
    spec = RunSpec("other-1", "other", 1, f"{store.uri}/runs/other-1", store.uri, "m", "ab", {}, "code")
    store.put("runs/other-1/run.json", spec.to_json())
    entered(store)
    asked: dict[str, Any] = {"drop": "fam/d1", "again": True}
    for number, (over, key) in enumerate(
        [
            ({"base": {"model": "/etc", "scratch": None}}, "base.model"),
            ({"base": {"model": "s3://others/model", "scratch": None}}, "base.model"),
            ({"base": {"start": "runs/other-1/step-5"}}, "base.start"),
            (
                {"curation": {"decontaminate": {"sets": {"a": "drops/other/d1/a.jsonl"}}}},
                "curation.decontaminate.sets.a",
            ),
        ]
    ):
        with pytest.raises(RecipeError, match=rf"`{key}`: .*DROPFORGE_READABLE"):
            plan(store, owner=f"run-{number}", overrides=over, **asked)
    with pytest.raises(RecipeError, match=r"`data.source.dataset`: .*of family other.*DROPFORGE_READABLE"):
        plan(store, owner="run-9", family="fam", data=f"dataset:other/{'a' * 64}")
    over = {"evaluate": {"holdout": f"fam/{'a' * 64}"}}
    with pytest.raises(DataError, match=r"`evaluate.holdout`, dataset version fam/aaa.*it is not there"):
        plan(store, owner="run-10", overrides=over, **asked)


@pytest.mark.parametrize(
    ("limits", "over", "told"),
    [
        (
            RunLimits(nodes=2),
            {"nodes": 3},
            r"`compute.nodes`: nodes come to 3, and this installation lets .* 2",
        ),
        (
            RunLimits(gpus=6),
            {"nodes": 2, "gpus": 4, "processes_per_node": 4},
            r"gpus come to 8.*DROPFORGE_LIMITS: gpus",
        ),
        (RunLimits(retries=1), {"retries": 2}, r"DROPFORGE_LIMITS: retries"),
        (RunLimits(minutes=60), {"deadline_minutes": 61}, r"DROPFORGE_LIMITS: minutes"),
        (
            RunLimits(gpu_hours=10),
            {"gpus": 2, "processes_per_node": 2, "deadline_minutes": 120, "retries": 2},
            r"gpu_hours come to 12.*stop_above",
        ),
        (RunLimits(bytes=10), {}, r"drop fam/d1: bytes come to 14, and this installation lets a run have 10"),
    ],
)
def test_what_the_installation_lets_no_run_have_is_refused_with_the_limits_name(
    store: Store, limits: RunLimits, over: dict[str, Any], told: str
) -> None:
    params: dict[str, Any] = {"overrides": {"compute": {"backend": "kubernetes", **over}}}
    key = partition_key("b", entered(store))
    within = replace(ALONE, limits=limits)
    with pytest.raises(DataError if limits.bytes else RecipeError, match=told):
        make_plan(store, "b", params, partition_key=key, owner="run-1", installation=within)


def test_a_run_that_is_ended_in_time_may_have_more_at_a_time(store: Store) -> None:
    compute = {"backend": "kubernetes", "gpus": 2, "processes_per_node": 2, "limits": {"stop_above": {"gpu_hours": 10}}}
    params: dict[str, Any] = {"overrides": {"compute": compute}}
    key = partition_key("b", entered(store))
    within = replace(ALONE, limits=RunLimits(gpu_hours=10))
    assert make_plan(store, "b", params, partition_key=key, owner="run-1", installation=within)["counter"] == 1


def test_what_this_machine_never_has_is_refused_before_anything_is_curated(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBEFLOW_TRAINING_HOME", str(tmp_path))
    assert (
        plan(store, entered(store), overrides={"compute": {"cpus": 500}})["counter"] == 1
    )  # nobody tells what there is
    for name, value in (("CPUS", "2"), ("MEMORY_GB", "8"), ("GPUS", "0")):
        monkeypatch.setenv(f"KUBEFLOW_TRAINING_{name}", value)
    supervisor = subprocess.Popen([sys.executable, "-m", "kubeflow_training.jobs.local", str(tmp_path)])
    try:
        while LocalCluster(tmp_path).offers() is None:
            assert supervisor.poll() is None
            time.sleep(0.05)
        with pytest.raises(RecipeError, match=r"asks for 500 cpus.*offers 2 cpus.*498 cpus too few"):
            plan(store, drop="fam/d1", again=True, owner="run-2", overrides={"compute": {"cpus": 500}})
        assert plan(store, drop="fam/d1", again=True, owner="run-3", overrides={"compute": {"cpus": 2}})["counter"] == 3
    finally:
        supervisor.terminate()
        supervisor.wait()


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ("train: {learning_rat: 1}", "recipe.yaml of drop fam/d1.*learning_rat.*learning_rate"),
        ("train: {learning_rate: fast}", "recipe.yaml of drop fam/d1.*learning_rate"),
        ("{", "recipe.yaml of drop fam/d1.*not a YAML mapping"),
        ("compute: {image: evil.example/trainer}", "a recipe in a drop may not choose it"),
        ("compute: {namespace: kube-system}", "a recipe in a drop may not choose it"),
        ("compute: {backend: kubernetes}", "a recipe in a drop may not choose it"),
        ("curation: {spark: {cluster: {image: evil.example/spark}}}", "a recipe in a drop may not choose it"),
        ("curation: {pii: {key_env: AWS_SECRET_ACCESS_KEY}}", "`curation.pii.key_env`: a recipe in a drop may not"),
        ("a: &a [1]\nb: *a", "aliases"),
        ("x: " + "y" * 70_000, "at most 64 KiB"),
        ("train: {sequence_length: 4096}", "recipe.yaml of drop fam/d1.*longer than the model"),
    ],
)
def test_a_bad_recipe_in_the_drop_names_the_drop(store: Store, recipe: str, text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        plan(store, entered(store, recipe=recipe))


def test_a_bad_recipe_ends_the_one_run_and_is_not_nudged_for_ever(store: Store) -> None:
    drop = entered(store, recipe="nonsense: 1")
    with pytest.raises(RecipeError):
        plan(store, drop)
    assert list(ledger.pending(store)) == []
    with pytest.raises(AirflowSkipException):
        plan(store, drop, owner="run-2")


LARGE = "base: {scratch: {hidden_size: 2048, layers: 16, heads: 16}}\n"


def test_a_model_that_its_pod_cannot_hold_is_refused_before_anything_runs(store: Store) -> None:
    drop = entered(store, recipe=LARGE)
    with (
        pytest.raises(AirflowFailException, match=r"`compute.memory_gb`: a pod of 2 GB.* Set it to (\d+)") as told,
        no_retry(),
    ):
        plan(store, drop)
    fits = int(str(told.value).split("Set it to ")[1].split(",")[0])
    assert list(ledger.pending(store)) == []  # and it is not nudged for ever
    enough = {"overrides": {"compute": {"memory_gb": fits}}, "drop": "fam/d1", "again": True}
    assert plan(store, None, **enough)["recipe"]["compute"]["memory_gb"] == fits


def test_where_the_memory_is_not_known_the_plan_says_so_and_goes_on(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    store.put("m/config.json", b"{}")
    assert plan(store, entered(store, recipe="base: {model: s3://b/m, scratch: null}"))["drop"] == "d1"  # b is ours
    assert "Memory of a rank: unknown: the base model's config is not available" in caplog.text


def test_a_base_that_the_trainer_would_refuse_is_refused_before_anything_is_curated(
    store: Store, tmp_path: Path
) -> None:
    """Its context is too short, or there is no model where it should be."""
    models = tmp_path / "models"
    (models / "short").mkdir(parents=True)
    (models / "empty").mkdir()
    config = json.dumps({"model_type": "bert", "max_position_embeddings": 64})
    (models / "short/config.json").write_text(config)
    store.put("models/short/config.json", config.encode())
    entered(store)
    reads = Readable(folders=(str(models), "/only/on/the/pods"))
    here = replace(ALONE, reads=reads)

    def start(model: str, number: int) -> Any:
        over = {"base": {"model": model, "scratch": None}, "train": {"sequence_length": 128}}
        asked = {"drop": "fam/d1", "again": True, "overrides": over}
        return make_plan(store, "b", asked, partition_key=None, owner=f"run-{number}", installation=here)

    short = r"`train.sequence_length`: 128 is longer than the base model's context of 64. Set it to 64 or less"
    for number, (model, text) in enumerate(
        [
            (str(models / "short"), short),
            ("s3://b/models/short", short),
            (str(models / "empty"), "empty has no config.json"),
            (f"file://{models}/mistyped", "mistyped has no config.json"),
            ("s3://b/models/mistyped", "mistyped has no config.json and safetensors. Upload"),
        ]
    ):
        with pytest.raises(RecipeError, match=text):
            start(model, number)
    assert start("/only/on/the/pods/m", 9)["drop"] == "d1"


def test_a_bad_form_names_its_key(store: Store) -> None:
    with pytest.raises(RecipeError, match=r"train\.clip"):
        plan(store, entered(store), overrides={"train": {"clip": -1}})


def test_a_bad_configuration_of_a_run_takes_no_drop(store: Store) -> None:
    drop = entered(store)
    for more in ({"retrain": "yes"}, {"sweep": "yes"}):
        with pytest.raises(DataError, match=f"configuration key `{next(iter(more))}`"):
            plan(store, drop, **more)
    assert ledger.owner_of(store, "fam", drop.id) is None


@pytest.mark.parametrize("key", ["sweep", "retrain"])
def test_no_one_but_a_task_says_that_a_sweep_or_the_calendar_started_a_run(
    store: Store, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep's trial of a person's own would be compared with the others, and could win."""
    monkeypatch.setattr(plan_task.connection, "open_store", lambda _: store)
    monkeypatch.setattr(plan_task, "from_env", lambda: SimpleNamespace(bucket="b", tracking_uri="http://127.0.0.1:9"))
    entered(store)
    by = {"by": "sweep__fam", "parent": "0" * 32, "trial": 0, "candidate": False}
    params: dict[str, Any] = {"drop": "fam/d1", "preset": "tiny", "overrides": None, key: by}
    run = DagRun.model_construct(run_type=DagRunType.MANUAL)
    with pytest.raises(AirflowFailException, match=f"configuration key `{key}`: only a task of Dropforge may set it"):
        plan_task.plan("", params, run_id="eve", dag_run=run)
    run.run_type = DagRunType.OPERATOR_TRIGGERED
    with pytest.raises(AirflowFailException) as other:
        plan_task.plan("", {**params, "drop": "fam/none"}, run_id="eve", dag_run=run)
    assert "only a task" not in str(other.value)


def test_errors_for_people_are_not_tried_again() -> None:
    with pytest.raises(AirflowFailException, match=r"thing: cause\. mend"), no_retry():
        raise RecipeError("thing", "cause", "mend")


def test_the_champion_is_looked_up_once_and_stands_in_the_plan(store: Store) -> None:
    champion_root = f"{store.uri}/runs/one"
    spec = RunSpec("one", "fam", 1, champion_root, store.uri, "m", "ab", load_recipe("tiny").plain(), "code")
    store.put("runs/one/run.json", spec.to_json())
    store.put("runs/one/report.json", b'{"model": {"files": {"config.json": "0"}}}')
    store.put("runs/one/model/config.json", b"{}")
    found = Champion("7", f"{champion_root}/model", "", "one", model_digest({"config.json": "0"}))
    entered(store)
    params = {"preset": "tiny", "drop": "fam/d1", "base_start": "champion"}
    made = make_plan(store, "b", params, partition_key=None, owner="run-1", find_champion=lambda *_: found)
    assert made["recipe"]["base"] == {**made["recipe"]["base"], "model": found.model, "scratch": None}
    assert made["start"] is not None
    assert (made["start"]["version"], made["start"]["digest"]) == ("7", found.digest)
    curated = Curated(digest="ab" * 32, manifest="m", card="", rows={})
    settings = Settings("b", "b", "", "", "", Path())
    planned = cast(Plan, json.loads(json.dumps(made)))  # as it comes from another task
    opened = make_spec(settings, planned, curated, build_recipe(made["recipe"]))
    assert opened.start == Start.read(made["start"])
    assert RunSpec.from_json(opened.to_json()) == opened


def test_a_start_that_is_gone_ends_the_run_before_anything_is_curated(store: Store) -> None:
    entered(store)
    with pytest.raises(RecipeError, match=r"`base.start`: runs/gone/step-5 comes from run 'gone'"):
        plan(store, None, drop="fam/d1", base_start="runs/gone/step-5")
    with pytest.raises(RecipeError, match=r"`base.start`"):
        plan(store, None, drop="fam/d1", again=True, owner="run-2", base_start="the best one")


def test_the_plan_says_what_a_wheel_of_ones_own_provides_and_refuses_another(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    code = make_wheel(tmp_path, {"own_plan.py": "raise SystemExit"}, {"dropforge.callbacks": {"watch": "own_plan:f"}})
    store.put(f"wheels/{Path(code['wheel']).name}", Path(code["wheel"]).read_bytes())
    code["wheel"] = f"{store.uri}/wheels/{Path(code['wheel']).name}"
    entered(store)
    made = plan(store, None, drop="fam/d1", overrides={"code": code})
    assert made["recipe"]["code"] == code
    assert "callbacks watch" in caplog.text  # and nothing of it was run
    with pytest.raises(RecipeError, match=r"`code.sha256`"):
        plan(store, None, drop="fam/d1", again=True, owner="run-2", overrides={"code": {**code, "sha256": "0" * 64}})


def test_spark_is_refused_where_it_cannot_run(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drop = entered(store, recipe="extends: tiny\n")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(DropforgeError, match=r"Spark: .*take `curation.engine: embedded`"):
        plan(store, drop, overrides={"curation": {"engine": "spark"}})


def test_a_run_from_the_form_takes_the_source_that_its_recipe_names(store: Store) -> None:
    store.put("lake/a.jsonl", b'{"text": "one"}')
    more = {"data": {"source": {"prefix": "lake/"}}}
    made = plan(store, family="fam", overrides=more)
    assert ledger.read(store, "fam", made["drop_id"]).prefix == "lake/"
    assert made["drop"] == f"source-{made['drop_id'][:12]}"
    assert plan(store, family="fam", overrides=more) == made
    assert list(ledger.pending(store)) == []
    with pytest.raises(AirflowSkipException, match="belongs to run run-1"):
        plan(store, owner="run-2", family="fam", overrides=more)
    with pytest.raises(DataError, match="form field `family`"):
        plan(store, owner="run-3", overrides=more)


def test_the_data_field_names_the_same_data_as_the_recipe(store: Store) -> None:
    store.put("lake/a.jsonl", b'{"text": "one"}')
    made = plan(store, family="fam", data="s3://b/lake/")
    assert made["recipe"]["data"]["source"]["prefix"] == "lake/"
    assert plan(store, family="fam", overrides={"data": {"source": {"prefix": "lake/"}}}) == made
    upload(store)
    assert plan(store, owner="run-2", data="drop:fam/d1")["drop"] == "d1"
    with pytest.raises(DataError, match="form field `family`"):
        plan(store, owner="run-3", data="prefix:lake/")
    with pytest.raises(RecipeError, match="belongs to Dropforge"):
        plan(store, owner="run-3", family="fam", data="prefix:ledger/")
    with pytest.raises(DataError, match=r"form field `data`: it is empty.*`dataset:FAMILY/DIGEST`"):
        plan(store, owner="run-3", family="fam", data=" ")


def test_a_pasted_recipe_wins_over_the_drops_and_is_held_to_the_same_rules(store: Store) -> None:
    drop = entered(store, recipe="train: {learning_rate: 0.002, max_steps: 7}")
    made = plan(store, drop, recipe="train: {max_steps: 9}\ncompute: {namespace: own}")
    train = made["recipe"]["train"]
    assert (train["learning_rate"], train["max_steps"], made["recipe"]["compute"]["namespace"]) == (0.002, 9, "own")
    again: dict[str, Any] = {"drop": "fam/d1", "again": True, "owner": "run-2"}
    for pasted, told in (
        ("train: {learning_rat: 1}", "Did you mean `train.learning_rate`"),
        ("train: {sequence_length: 4096}", "longer than the model"),
        ("extends: lora", "it is tiny, and the pasted recipe extends 'lora'"),
        ("train: {epochs: 1}\nx: &x 1", "recipe key `x`"),
    ):
        with pytest.raises(RecipeError, match=told):
            plan(store, None, recipe=pasted, **again, **({"preset": "tiny"} if "extends" in pasted else {}))


def test_a_source_beside_a_drop_is_refused(store: Store) -> None:
    recipe = "data: {source: {prefix: lake/}}"
    with pytest.raises(RecipeError, match=r"data\.source.*brings the data already"):
        plan(store, entered(store, recipe=recipe))
    upload(store, "d2")
    with pytest.raises(RecipeError, match=r"data\.source.*brings the data already"):
        plan(store, drop="fam/d2", overrides={"data": {"source": {"prefix": "lake/"}}})


def test_a_source_that_was_uploaded_before_is_read_where_it_is(store: Store) -> None:
    drop = entered(store)
    store.put("lake/a.jsonl", store.get("drops/fam/d1/a.jsonl"))
    more = {"data": {"source": {"prefix": "lake/"}}}
    made = plan(store, family="fam", overrides=more)
    assert (made["drop_id"], ledger.read(store, "fam", drop.id)) == (drop.id, drop)
    assert list(ledger.pending(store)) == []
    # Its files are gone: the upload stays entered, and the source is an entry of its own.
    store.delete("drops/fam/d1/a.jsonl")
    other = plan(store, owner="run-2", family="fam", overrides=more)
    assert ledger.read(store, "fam", other["drop_id"]).prefix == other["prefix"] == "lake/"
    assert (other["drop_id"] != drop.id, ledger.arrived(store, "fam")) == (True, (drop,))
    assert plan(store, owner="run-2", family="fam", overrides=more) == other
