"""Tracking against a real MLflow server: one run per run, one version per run, an alias that moves by the rule."""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qs

import pytest

from dropforge import tracking
from dropforge.errors import DataError, DropforgeError
from dropforge.promotion import Policy, Verdict, decide
from dropforge.recipes.load import load_recipe
from dropforge.registered_name import check_name, check_names
from dropforge.rest import Rest
from dropforge.run import RunSpec, Start
from tests.markdown import narrow

VERSIONS = "mlflow.modelVersions"  # on a logged model: what MLflow's pages link to it
REPORT = {"model": {"uri": "s3://b/runs/r/model", "digest": "abc"}}
ELSEWHERE = [
    "s3://b/runs/r2/model",
    "s3://b/runs/r/../r2/model",
    "s3://b/runs/r/",
    "s3://b/runs/r/x?y",
    "/etc",
    "s3://a/m",
]


@pytest.fixture
def server(mlflow_server: str) -> str:
    return mlflow_server


@pytest.fixture
def spec() -> RunSpec:
    family = f"fam-{uuid.uuid4().hex[:8]}"
    recipe = {"train": {"method": "full"}}
    return RunSpec(f"{family}-1", family, 1, "s3://b/runs/r", "s3://b", "m", "d" * 64, recipe, "c", drop={"id": "x"})


def verdict(promote: bool) -> Verdict:
    return decide({"eval/loss": 1.0 if promote else 9.0}, None, {"eval/loss": 5.0}, Policy())


def opened(server: str, spec: RunSpec) -> RunSpec:
    return replace(spec, tracking=tracking.open_run(server, spec, {"train.seed": "1"}, {tracking.TAG_DAG_RUN: "x"}))


def test_opening_twice_gives_one_run(server: str, spec: RunSpec) -> None:
    many = {f"key.{number}": "v" * 7000 for number in range(150)}
    first = tracking.open_run(server, spec, many, {tracking.TAG_DAG_RUN: "one"})
    tracking.close_run(server, first.run_id, "FAILED")
    second = tracking.open_run(server, spec, many, {tracking.TAG_DAG_RUN: "two"})
    assert first == second
    run = tracking.client(server).get_run(first.run_id)
    assert run.info.status == "RUNNING"
    assert len(run.data.params) == 150
    assert run.data.tags[tracking.TAG_DAG_RUN] == "two"


def test_what_airflow_s_run_was_before_it_was_cleared_is_ended(server: str, spec: RunSpec) -> None:
    mlflow = tracking.client(server)
    before, other = opened(server, spec).tracking, replace(spec, run=f"{spec.family}-other")
    elsewhere = tracking.open_run(server, other, {}, {tracking.TAG_DAG_RUN: "y"})
    parent = mlflow.create_run(elsewhere.experiment_id, tags={tracking.TAG_DAG_RUN: "x"}).info.run_id  # of a sweep
    again = opened(server, replace(spec, run=f"{spec.family}-2")).tracking
    assert before is not None
    assert again is not None
    states = [mlflow.get_run(run).info.status for run in (before.run_id, elsewhere.run_id, parent, again.run_id)]
    assert states == ["KILLED", "RUNNING", "RUNNING", "RUNNING"]
    reason = mlflow.get_run(before.run_id).data.tags[tracking.TAG_REASON]
    assert reason == f"Airflow's run was cleared, and is {spec.family}-2 now"


def test_files_of_a_mix_may_have_any_name(server: str, spec: RunSpec) -> None:
    mix = {"chats (1).jsonl": 2.0, "faq+answers.jsonl": 0.5, "../../xs": 1.0, "a\nb": 1.0, "x" * 300: 1.0}
    first = tracking.open_run(server, spec, load_recipe("tiny", {"data": {"mix": mix}}).flat(), {})
    assert json.loads(tracking.client(server).get_run(first.run_id).data.params["data.mix"]) == mix


def test_what_fails_while_a_run_is_opened_ends_it(server: str, spec: RunSpec) -> None:
    with pytest.raises(Exception, match="INVALID_PARAMETER_VALUE"):
        tracking.open_run(server, spec, {"a key": "fine", "a\nkey": "refused"}, {})
    mlflow = tracking.client(server)
    (found,) = tracking.search(mlflow, tracking.TAG_RUN, spec.run)
    assert found.info.status == "FAILED"
    again = tracking.open_run(server, spec, {"a key": "fine"}, {})
    assert again.run_id == found.info.run_id
    assert mlflow.get_run(again.run_id).info.status == "RUNNING"
    with pytest.raises(KeyboardInterrupt), tracking.failed_by_error(server, again.run_id):
        raise KeyboardInterrupt
    assert mlflow.get_run(again.run_id).info.status == "FAILED"


def test_a_server_that_is_away_hides_no_error_and_costs_no_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError), tracking.failed_by_error("http://127.0.0.1:1", "abc"):
        raise ZeroDivisionError
    assert time.monotonic() - began < 20  # MLflow's own retries take four minutes
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"


def test_the_data_that_went_in_stand_on_run_and_version(server: str, spec: RunSpec) -> None:
    drop = {"id": "e" * 32, "prefix": "s3://b/drops/fam/d1/"}
    run = replace(spec, drop=drop, dataset="s3://b/datasets/fam/d/manifest.json")
    for _ in range(2):
        run = opened(server, run)
    tracking.register(server, run, REPORT, verdict(True), alias="champion", compared_with=None)
    mlflow = tracking.client(server)
    assert run.tracking is not None
    found = mlflow.get_run(run.tracking.run_id)
    for tags in (found.data.tags, mlflow.get_model_version(spec.family, "1").tags):
        assert tags[tracking.TAG_DROP] == "e" * 32
        assert tags[tracking.TAG_SOURCE] == "s3://b/drops/fam/d1/"
        assert tags[tracking.TAG_DATASET] == "d" * 64
    (told,) = found.inputs.dataset_inputs
    assert (told.dataset.name, told.dataset.digest) == (spec.family, "d" * 36)
    assert json.loads(told.dataset.source)["uri"] == run.dataset
    assert [(tag.key, tag.value) for tag in told.tags] == [("mlflow.data.context", "training")]


def test_a_failed_run_is_not_turned_into_a_finished_one(server: str, spec: RunSpec) -> None:
    run = opened(server, spec).tracking
    assert run is not None
    tracking.close_run(server, run.run_id, "KILLED", {"why": "test"})
    tracking.close_run(server, run.run_id, "FINISHED")
    assert tracking.client(server).get_run(run.run_id).info.status == "KILLED"


def test_the_alias_moves_only_by_the_rule(server: str, spec: RunSpec) -> None:
    one = opened(server, spec)
    assert tracking.champion(server, spec.family) is None
    done = tracking.register(server, one, REPORT, verdict(True), alias="champion", compared_with=None)
    assert (done.version, done.promoted, done.previous) == ("1", True, None)
    two = opened(server, replace(spec, run=f"{spec.family}-2"))
    kept = tracking.register(server, two, REPORT, verdict(False), alias="champion", compared_with="1")
    assert (kept.version, kept.promoted) == ("2", False)
    champion = tracking.champion(server, spec.family)
    assert champion is not None
    assert (champion.version, champion.model) == ("1", "s3://b/runs/r/model")
    assert (champion.run, champion.digest) == (spec.run, "abc")  # by which a run goes on from it
    three = opened(server, replace(spec, run=f"{spec.family}-3"))
    moved = tracking.register(server, three, REPORT, verdict(True), alias="champion", compared_with="1")
    assert (moved.version, moved.previous) == ("3", "1")


def test_where_a_run_began_stands_on_it_and_on_its_version(server: str, spec: RunSpec) -> None:
    start = Start(asked="champion", kind="champion", run="one", version="3", digest="d" * 64)
    code = {"wheel": "s3://b/w/own-1.0-py3-none-any.whl", "sha256": "e" * 64}
    begun = opened(server, replace(spec, start=start, recipe={**spec.recipe, "code": code}, drop={"id": "x"}))
    mlflow = tracking.client(server)
    assert begun.tracking is not None
    tracking.note(server, begun.tracking.run_id, tracking.TAG_RUN_DIGEST, "f" * 64)
    tracking.register(server, begun, REPORT, verdict(True), alias="champion", compared_with=None)
    told = "version 3, run one, digest dddddddddddd"
    assert mlflow.get_run(begun.tracking.run_id).data.tags[tracking.TAG_START] == told
    tags = mlflow.get_model_version(spec.family, "1").tags
    assert (tags[tracking.TAG_START], tags[tracking.TAG_CODE]) == (told, f"own-1.0-py3-none-any.whl ({'e' * 64})")
    champion = tracking.champion(server, spec.family)
    assert champion is not None
    assert (champion.drop, champion.dataset, champion.run_digest) == ("x", spec.dataset_digest, "f" * 64)


@pytest.mark.parametrize("uri", ELSEWHERE)
def test_a_model_outside_its_run_s_folder_becomes_no_version(server: str, spec: RunSpec, uri: str) -> None:
    model = {"uri": uri, "digest": "abc"}
    with pytest.raises(DataError, match="is not below the run's own folder s3://b/runs/r/"):
        tracking.register(server, spec, {"model": model}, verdict(True), alias="champion", compared_with=None)
    with pytest.raises(DataError, match="is not below"):
        tracking.register_checkpoint(server, spec, model, 10, "d", "m-1")
    assert not tracking.client(server).search_registered_models(f"name = '{spec.family}'")


def test_registering_twice_gives_one_version(server: str, spec: RunSpec) -> None:
    run = opened(server, spec)
    for _ in range(2):
        done = tracking.register(server, run, REPORT, verdict(True), alias="champion", compared_with=None)
        assert (done.version, done.previous) == ("1", None)


def test_pages_say_what_a_family_a_run_and_a_version_are_and_how_to_use_them(server: str, spec: RunSpec) -> None:
    recipe = {"base": {"model": "Qwen/Qwen2.5-0.5B"}, "train": {"method": "lora"}}
    drop = {"id": "x", "family": spec.family, "drop": "monday"}
    spec = opened(server, replace(spec, recipe=recipe, drop=drop, counter=2))
    assert spec.tracking is not None
    mlflow = tracking.client(server)
    run, experiment = mlflow.get_run(spec.tracking.run_id), mlflow.get_experiment_by_name(spec.family)
    assert run.info.run_name == f"{spec.family}/monday#2 · Qwen2.5-0.5B, lora"
    assert experiment is not None
    assert f"models:/{spec.family}@champion" in experiment.tags[tracking.TAG_NOTE]
    tracking.register(server, spec, REPORT, verdict(True), alias="champion", compared_with=None)
    told = mlflow.get_model_version(spec.family, "1").description
    assert told.startswith("Promoted: ")
    assert f'mlflow.pyfunc.load_model("models:/{spec.family}/1")' in told
    assert "| check | candidate |" in narrow(told)
    assert f"{spec.family}@champion" in mlflow.get_registered_model(spec.family).description

    title, now = f"{spec.family}/monday#2 · Qwen2.5-0.5B, lora", lambda: mlflow.get_run(run.info.run_id).info.run_name
    for promoted, ended in ((True, "version 1, promoted"), (False, "version 1, not promoted")):
        tracking.show_result(server, run.info.run_id, spec, "1", promoted=promoted)
        assert now() == f"{title} · {ended}"

    # What a person writes stays.
    mlflow.update_run(run.info.run_id, name="mine")
    tracking.show_result(server, run.info.run_id, spec, "1", promoted=True)
    assert now() == "mine"
    mlflow.update_model_version(spec.family, "1", "mine")
    tracking.register(server, spec, REPORT, verdict(True), alias="champion", compared_with=None)
    assert mlflow.get_model_version(spec.family, "1").description == "mine"
    for text, known in (
        ("# f, version 1", "# f, version 1"),
        ("# f, version 1 (champion)", "# f, version 1 (champion)"),
    ):
        tracking.describe(server, spec.tracking.run_id, text)
        assert mlflow.get_run(spec.tracking.run_id).data.tags[tracking.TAG_NOTE] == known
    mlflow.set_tag(spec.tracking.run_id, tracking.TAG_NOTE, "mine")
    tracking.describe(server, spec.tracking.run_id, "# f, version 1")
    assert mlflow.get_run(spec.tracking.run_id).data.tags[tracking.TAG_NOTE] == "mine"


def test_a_champion_that_changed_meanwhile_stops_the_promotion(server: str, spec: RunSpec) -> None:
    tracking.register(server, opened(server, spec), REPORT, verdict(True), alias="champion", compared_with=None)
    late = opened(server, replace(spec, run=f"{spec.family}-2"))
    with pytest.raises(DropforgeError, match="moved from version none to 1"):
        tracking.register(server, late, REPORT, verdict(True), alias="champion", compared_with=None)
    champion = tracking.champion(server, spec.family)
    assert champion is not None
    assert champion.version == "1"


def test_a_candidate_that_was_promoted_is_compared_with_whom_it_replaced(server: str, spec: RunSpec) -> None:
    def rival(run: str) -> str | None:
        found = tracking.rival(server, spec.family, "champion", run)
        return None if found is None else found.version

    assert rival(spec.run) is None
    one, two = opened(server, spec), opened(server, replace(spec, run=f"{spec.family}-2"))
    tracking.register(server, one, REPORT, verdict(True), alias="champion", compared_with=None)
    assert (rival(one.run), rival(two.run)) == (None, "1")
    for _ in range(2):  # the second time as the task does that was cleared
        compared_with = rival(two.run)
        listed = tracking.register(server, two, REPORT, verdict(True), alias="champion", compared_with=compared_with)
        assert (listed.version, listed.promoted, listed.previous) == ("2", True, "1")
        assert (rival(one.run), rival(two.run)) == ("2", "1")
    tracking.client(server).delete_model_version(spec.family, "1")
    assert rival(two.run) is None


def test_a_verdict_against_the_champion_changes_nothing_and_says_so(server: str, spec: RunSpec) -> None:
    run = opened(server, spec)
    tracking.register(server, run, REPORT, verdict(True), alias="champion", compared_with=None)
    mlflow = tracking.client(server)
    before = mlflow.get_model_version(spec.family, "1")
    with pytest.raises(DropforgeError, match=r"version 1 of .*'champion' already.*`dropforge rollback fam-\w+`"):
        tracking.register(server, run, REPORT, verdict(False), alias="champion", compared_with=None)
    after = mlflow.get_model_version(spec.family, "1")
    assert (after.tags, after.description, after.aliases) == (before.tags, before.description, before.aliases)


def test_a_version_that_was_deleted_is_not_registered_again(server: str, spec: RunSpec) -> None:
    """The mark that it was rolled back went with it, and the reviewers' no."""
    run = opened(server, spec)
    tracking.register(server, run, REPORT, verdict(False), alias="champion", compared_with=None)
    tracking.client(server).delete_model_version(spec.family, "1")
    with pytest.raises(DropforgeError, match=r"version 1 of .*it was deleted since this run registered it"):
        tracking.register(server, run, REPORT, verdict(True), alias="champion", compared_with=None)
    assert tracking.champion(server, spec.family) is None


def test_the_measurement_is_on_the_run(server: str, spec: RunSpec) -> None:
    run = opened(server, spec).tracking
    assert run is not None
    evaluation = {"candidate": {"eval/loss": 1.0, "gen/rouge-l": 0.5, "rows": 3}, "champion": None}
    tracking.log_evaluation(server, run.run_id, spec.family, {**evaluation, "champion_version": None}, verdict(True), 7)
    data = tracking.client(server).get_run(run.run_id).data
    assert data.metrics == {"candidate/loss": 1.0, "candidate/gen/rouge-l": 0.5}
    assert data.tags[tracking.TAG_VERDICT].startswith("promote")
    assert tracking.TAG_CHAMPION not in data.tags
    for champion, told in ((None, "not promoted: "), ("3", "keep champion: ")):
        measured = {**evaluation, "champion_version": champion}
        tracking.log_evaluation(server, run.run_id, spec.family, measured, verdict(False), 7)
        data = tracking.client(server).get_run(run.run_id).data
        assert data.tags[tracking.TAG_VERDICT].startswith(told)
    tracking.log_evaluation(server, run.run_id, spec.family, {**evaluation, "champion_version": "3"}, verdict(True), 7)
    tags = tracking.client(server).get_run(run.run_id).data.tags
    assert tags[tracking.TAG_CHAMPION] == "3"
    assert tracking.TAG_COMPARE not in tags  # there is no such version to be seen beside


def test_the_version_is_linked_to_the_checkpoint_whose_weights_it_has(server: str, spec: RunSpec) -> None:
    run = opened(server, spec)
    assert run.tracking is not None
    mlflow = tracking.client(server)
    made = {
        step: mlflow.create_logged_model(
            run.tracking.experiment_id, f"step-{step}", run.tracking.run_id, {tracking.TAG_STEP: str(step)}
        )
        for step in (10, 20)
    }
    report = {**REPORT, "exported_step": 10}
    tracking.register(server, run, report, verdict(True), alias="champion", compared_with=None)
    told = {step: mlflow.get_logged_model(model.model_id).tags.get(VERSIONS) for step, model in made.items()}
    assert json.loads(told[10] or "") == [{"name": spec.family, "version": "1"}]
    assert told[20] is None
    other = opened(server, replace(spec, run=f"{spec.family}-2"))
    tracking.register(server, other, report, verdict(False), alias="champion", compared_with="1")
    tracking.register(server, run, report, verdict(True), alias="champion", compared_with=None)
    assert mlflow.get_logged_model(made[10].model_id).tags[VERSIONS] == told[10]


def test_one_link_shows_candidate_and_champion_side_by_side(server: str, spec: RunSpec) -> None:
    one, two = opened(server, spec), opened(server, replace(spec, run=f"{spec.family}-2"))
    tracking.register(server, one, REPORT, verdict(True), alias="champion", compared_with=None)
    assert one.tracking is not None
    assert two.tracking is not None
    evaluation = {"candidate": {"eval/loss": 1.0}, "champion": {"eval/loss": 2.0}, "champion_version": "1"}
    tracking.log_evaluation(server, two.tracking.run_id, spec.family, evaluation, verdict(True), 7)
    mlflow = tracking.client(server)
    link = mlflow.get_run(two.tracking.run_id).data.tags[tracking.TAG_COMPARE]
    page, _, query = link.partition("?")
    assert page == f"{server}/#/compare-runs"
    asked = {key: json.loads(found[0]) for key, found in parse_qs(query).items()}
    assert asked == {
        "runs": [two.tracking.run_id, one.tracking.run_id],
        "experiments": [one.tracking.experiment_id],
    }
    assert link in mlflow_artifact(server, two.tracking.run_id, "verdict.md")
    mlflow.delete_run(one.tracking.run_id)
    mlflow.delete_model_version(spec.family, "1")
    assert tracking.side_by_side(server, two.tracking.run_id, spec.family, "1") is None


def mlflow_artifact(server: str, run: str, name: str) -> str:
    return Rest(server).artifact(run, "", name).decode()


def test_what_a_model_goes_back_to_stands_on_its_version(server: str, spec: RunSpec) -> None:
    base = {"model": "org/base", "revision": "c" * 40, "license": "apache-2.0"}
    recipe = {**spec.recipe, "data": {"license": "CC-BY-4.0"}}
    report = {"model": {**REPORT["model"], "base": base}}
    run = opened(server, replace(spec, recipe=recipe))
    tracking.register(server, run, report, verdict(True), alias="champion", compared_with=None)
    tags = tracking.client(server).get_model_version(spec.family, "1").tags
    assert {
        key.removeprefix("dropforge."): value for key, value in tags.items() if "base" in key or "license" in key
    } == {
        "base": "org/base",
        "base_revision": "c" * 40,
        "base_license": "apache-2.0",
        "data_license": "CC-BY-4.0",
    }


@pytest.mark.parametrize("kind", ["a prompt", "a model"])
def test_what_somebody_else_has_registered_under_a_familys_name_is_left_alone(
    server: str, spec: RunSpec, kind: str
) -> None:
    mine = opened(server, spec)
    if kind == "a prompt":
        tracking.client(server).register_prompt(spec.family, "Answer {{question}}.")
    else:
        tracking.client(server).create_registered_model(spec.family)

    def versions() -> list[str]:
        found = Rest(server).call("GET", f"registered-models/get?name={spec.family}")["registered_model"]
        return [version["version"] for version in found.get("latest_versions", ())]

    before = versions()
    for _ in range(2):  # nor does a retry
        with pytest.raises(DataError, match=f"{kind} in MLflow's registry has its name.*family of another name"):
            tracking.register(server, mine, REPORT, verdict(True), alias="champion", compared_with=None)
    with pytest.raises(DataError, match=f"family {spec.family}: {kind} in MLflow's registry"):
        check_name(server, spec.family)
    assert versions() == before == (["1"] if kind == "a prompt" else [])
    if kind == "a model":  # whose owner gives it to the family
        tracking.client(server).set_registered_model_tag(spec.family, "dropforge.family", spec.family)
        check_name(server, spec.family)
        assert (
            tracking.register(server, mine, REPORT, verdict(True), alias="champion", compared_with=None).version == "1"
        )


@pytest.mark.parametrize("deleted", [False, True])
def test_an_experiment_of_somebody_else_is_neither_used_nor_restored(server: str, spec: RunSpec, deleted: bool) -> None:
    mlflow = tracking.client(server)
    made = mlflow.create_experiment(spec.family, tags={"owner": "anna"})
    run = mlflow.create_run(made).info.run_id
    if deleted:
        mlflow.delete_experiment(made)
    for ask in (lambda: opened(server, spec), lambda: check_names(server, spec.family)):
        with pytest.raises(DataError, match=f"family {spec.family}: an experiment in MLflow has its name"):
            ask()
    assert mlflow.get_experiment(made).lifecycle_stage == ("deleted" if deleted else "active")
    if deleted:
        mlflow.restore_experiment(made)
    mlflow.set_experiment_tag(made, "dropforge.family", spec.family)  # who owns it gives it to the family
    check_names(server, spec.family)
    mine = opened(server, spec)
    assert mine.tracking is not None
    assert mlflow.get_run(mine.tracking.run_id).info.experiment_id == mlflow.get_run(run).info.experiment_id


def test_an_experiment_of_an_earlier_version_is_known_by_its_runs_and_marked(server: str, spec: RunSpec) -> None:
    mlflow = tracking.client(server)
    made = mlflow.create_experiment(spec.family)
    mlflow.create_run(made, tags={"dropforge.run": "before"})
    check_names(server, spec.family)
    opened(server, spec)
    assert mlflow.get_experiment(made).tags["dropforge.family"] == spec.family


def test_a_free_name_and_ones_own_are_a_familys(server: str, spec: RunSpec) -> None:
    check_name(server, spec.family)
    tracking.register(server, opened(server, spec), REPORT, verdict(True), alias="champion", compared_with=None)
    check_name(server, spec.family)


@pytest.mark.parametrize(
    "text",
    ["x", "null", "7", '{"a": 1}', "[" * 100_000, '[7, {"a": []}]'],
    ids=["x", "null", "7", "object", "nested", "rows"],
)
def test_a_tag_of_versions_that_cannot_be_read_is_none(text: str) -> None:
    class Mlflow:
        def set_logged_model_tags(self, model: str, tags: dict[str, str]) -> None:
            written.update(tags)

    written: dict[str, str] = {}
    model = SimpleNamespace(model_id="m-1", tags={VERSIONS: text})
    tracking._link(cast(Any, Mlflow()), cast(Any, model), "fam", "3")
    assert json.loads(written[VERSIONS]) == [{"name": "fam", "version": "3"}]
