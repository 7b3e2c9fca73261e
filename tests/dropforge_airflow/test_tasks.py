"""How a run ends, whose turn it is, and what people read about it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from dropforge_airflow import connection
from dropforge_airflow.approve import ApproveOperator
from dropforge_airflow.asking import Question
from dropforge_airflow.tasks import approval as asked_approval
from dropforge_airflow.tasks import data, foresee, promote, run, turn
from dropforge_airflow.tasks.data import Curated, check, here
from dropforge_airflow.tasks.opened import Opened, RunIdentity
from dropforge_airflow.tasks.plan import Plan
from dropforge_airflow.tasks.wall import whole_wall

from dropforge import approval, family_recipe, gangs, layout, tracking
from dropforge.dataset import Manifest, Shard
from dropforge.errors import DataError, RecipeError
from dropforge.gangs import Gang
from dropforge.json_objects import UnreadableError
from dropforge.recipes import load_recipe
from dropforge.run import RunSpec
from dropforge.settings import from_env
from dropforge.store import Store
from tests.dropforge_airflow.conftest import Yard

RECIPE = load_recipe("tiny")
ENV = {"DROPFORGE_BUCKET": "b", "MLFLOW_TRACKING_URI": "http://127.0.0.1:1"}
PLAN = Plan(family="fam", drop="d1", drop_id="0" * 32, counter=1, recipe=RECIPE.plain())
CURATED = Curated(digest="ab" * 32, manifest="s3://b/m.json", card="", rows={"train": 9, "eval": 1})

DONE = dict.fromkeys(["plan", "train", "evaluate", "report"], "success")


@pytest.mark.parametrize(
    ("states", "status", "task"),
    [
        (DONE, "FINISHED", ""),
        ({**DONE, "close_run": "running", "watcher": "failed"}, "FINISHED", ""),
        ({**DONE, "train": "failed", "evaluate": "upstream_failed", "report": "upstream_failed"}, "FAILED", "train"),
        ({**DONE, "report": "failed"}, "FAILED", "report"),
        # What Airflow leaves when a person marks the run as failed.
        ({**DONE, "train": "failed", "evaluate": "skipped", "report": "skipped"}, "KILLED", "train"),
        ({**DONE, "evaluate": "skipped", "report": "skipped"}, "KILLED", "evaluate"),
        ({**DONE, "evaluate": None}, "FAILED", "evaluate"),
    ],
)
def test_how_a_run_ended(states: dict[str, str | None], status: str, task: str) -> None:
    assert run.ending(states) == (status, task)


@pytest.mark.parametrize(
    ("states", "told", "left"),
    [
        (["success"] * 4, {}, None),
        (["success", "failed", "skipped", "skipped"], {}, "curate, before it was opened: failed"),
        (["success", "skipped", "skipped", "skipped"], {}, "curate, before it was opened: skipped"),
        (["success", "success", "success", "skipped"], {}, "open_run, before it was opened: skipped"),
        (["failed", "upstream_failed", "upstream_failed", "upstream_failed"], {}, "plan, before it was opened: failed"),
        ([None, None, None, None], {}, "plan, before it was opened: None"),
        (["success", "failed", "skipped", "skipped"], {"plan": "of before"}, "curate, before it was opened: failed"),
        (["skipped"] * 4, {"plan": "run a has taken it"}, "run a has taken it"),
        (["success", "success", "success", "skipped"], {"open_run": "the same rows"}, "the same rows"),
    ],
)
def test_a_run_that_was_never_opened_is_a_success_only_where_there_was_nothing_to_do(
    states: list[str | None], told: dict[str, str], left: str | None
) -> None:
    early = dict(zip(["plan", "curate", "check_data", "open_run"], states, strict=True))

    def said(task_ids: str, key: str) -> dict[str, str] | None:
        assert key == "nothing_new"
        return {"told": told[task_ids]} if task_ids in told else None

    ti = SimpleNamespace(
        dag_id="dropforge_finetune", get_task_states=lambda dag_id, run_ids: {"r": early}, xcom_pull=said
    )
    if left is None:
        assert "`close_run` says" in run.watcher(ti=ti, run_id="r")
        return
    nothing = left in told.values()
    with pytest.raises(AirflowSkipException if nothing else AirflowFailException, match=left):
        run.watcher(ti=ti, run_id="r")


def test_one_run_of_a_family_compares_at_a_time(store: Store) -> None:
    def ended(owner: str) -> bool:
        return owner == "dead"

    assert turn.take(store, "fam", "a", ended) == "a"
    assert turn.take(store, "fam", "a", ended) == "a"  # a retried task goes on
    assert turn.take(store, "fam", "b", ended) == "a"
    assert turn.take(store, "other", "b", ended) == "b"
    turn.give_up(store, "fam", "b")  # not the holder
    assert turn.take(store, "fam", "b", ended) == "a"
    turn.give_up(store, "fam", "a")
    assert turn.take(store, "fam", "dead", ended) == "dead"
    assert turn.take(store, "fam", "b", ended) == "b"  # a run that ended without giving up does not block for ever


def test_a_turn_left_behind_goes_to_one_of_two(store: Store) -> None:
    turn.take(store, "fam", "dead", lambda owner: False)

    def ended(owner: str) -> bool:  # while b looks at the dead run's state, c takes the turn
        if owner == "dead" and not taken:
            taken.append(turn.take(store, "fam", "c", lambda other: True))
        return True

    taken: list[str] = []
    assert turn.take(store, "fam", "b", ended) == "dead"
    assert taken == ["c"]
    assert turn.take(store, "fam", "c", lambda owner: False) == "c"


def test_the_same_run_has_the_same_name_and_another_recipe_another() -> None:
    settings = from_env(ENV)
    first = run.make_spec(settings, PLAN, CURATED, RECIPE)
    assert run.make_spec(settings, PLAN, CURATED, RECIPE) == first
    assert first.root == f"s3://b/runs/{first.run}"
    assert first.code
    other = load_recipe("tiny", {"train": {"seed": 1}})
    assert run.make_spec(settings, PLAN, CURATED, other).run != first.run
    again = run.make_spec(settings, Plan(**{**PLAN, "counter": 2}), CURATED, RECIPE)
    assert again.run.endswith("-2")


def measured(store: Store, **promote_keys: Any) -> RunIdentity:
    recipe = load_recipe("tiny", {"promote": promote_keys})
    spec = run.make_spec(from_env(ENV), PLAN, CURATED, recipe)
    store.put(layout.run_key(spec.run), spec.to_json())
    evaluation = {
        "rows": 7,
        "candidate": {"eval/loss": 2.0, "eval/accuracy": 0.5},
        "champion": {"eval/loss": 2.1, "eval/accuracy": 0.6},
        "champion_version": "3",
    }
    report = {
        "steps": 20,
        "tokens": 1234,
        "seconds": 5.0,
        "eval": {"before": {"eval/loss": 6.0, "eval/accuracy": 0.1}, "after": {"eval/loss": 2.0}},
        "resumed_from": 10,
        "attempts": [1, 2],
        "model": {"digest": "a" * 64},
    }
    store.put(layout.evaluation_key(spec.run), json.dumps(evaluation).encode())
    store.put(layout.report_key(spec.run), json.dumps(report).encode())
    return RunIdentity(run=spec.run, family=spec.family, root=spec.root, run_digest=spec.digest)


@pytest.mark.parametrize(
    ("policy", "promoted"),
    [({}, True), ({"min_improvement": 0.2}, False), ({"metric": "eval/accuracy"}, False)],
)
def test_the_recipes_policy_judges(store: Store, policy: dict[str, Any], promoted: bool) -> None:
    assert promote.judge(store, measured(store, **policy))[3].promote is promoted


def test_a_run_that_a_pod_changed_is_judged_by_none(store: Store) -> None:
    """What Airflow decides by stands in `run.json`, where a run's own pods may write."""
    opened = measured(store, approval={"people": ["ann"]}, min_improvement=0.2)
    key, before = layout.run_key(opened["run"]), opened.copy()
    before["run_digest"] = None  # of a run that an earlier version opened
    spec = RunSpec.read(store, key)
    policy = spec.recipe["promote"] | {"approval": None, "min_improvement": -1.0}
    store.put(key, replace(spec, recipe={**spec.recipe, "promote": policy}).to_json())
    with pytest.raises(UnreadableError, match=r"run\.json: it was changed: its SHA-256"):
        promote.judge(store, opened)
    store.put(key, replace(spec, family="payments").to_json())
    with pytest.raises(UnreadableError, match="`family` is 'payments', and the run was opened with 'fam'"):
        promote.judge(store, before)
    store.put(key, spec.to_json())
    assert not promote.judge(store, opened)[3].promote
    assert not promote.judge(store, before)[3].promote


def test_where_a_person_is_asked_only_a_yes_to_this_pair_promotes(store: Store) -> None:
    opened = measured(store, approval={"people": ["ann"]})
    assert promote.judge(store, opened, person=False)[3].promote
    assert not promote.judge(store, opened)[3].promote
    yes = approval.Answer(True, "ann", "2026-11-24T05:00:00Z")
    approval.write(store, opened["run"], approval.Pair("a" * 64, "2"), yes)
    assert not promote.judge(store, opened)[3].promote
    approval.write(store, opened["run"], approval.Pair("a" * 64, "3"), yes)
    assert promote.judge(store, opened)[3].promote


def test_a_yes_of_before_a_clear_promotes_nothing_while_it_is_asked_anew(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may change tasks can mark the open question as done."""
    opened = measured(yard.store, approval={"people": ["ann"]})
    pair, told = approval.Pair("a" * 64, "3"), list[str]()
    approval.write(yard.store, opened["run"], pair, approval.Answer(True, "ann", "2026-11-24T05:00:00Z", "ann"))
    assert promote.judge(yard.store, opened)[3].promote
    monkeypatch.setattr(promote, "decide", lambda *_: told.append(promote.judge(yard.store, opened)[3].reason))
    ApproveOperator(task_id="approve", opened=opened).withdraw(pair.about)
    assert told == [promote.judge(yard.store, opened)[3].reason]
    assert "awaiting approval" in told[0]
    # The next try of one that was cut off before the verdict was written again.
    yard.store.put(layout.verdict_key(opened["run"]), b'{"promote": true}')
    ApproveOperator(task_id="approve", opened=opened).withdraw(pair.about)
    assert len(told) == 2
    yard.store.put(layout.verdict_key(opened["run"]), b'{"promote": false}')
    ApproveOperator(task_id="approve", opened=opened).withdraw(pair.about)
    assert len(told) == 2, "the first time nothing is said again"


def test_a_run_that_is_older_than_its_family_s_reviewers_is_not_promoted_past_them(
    store: Store, tmp_path: Path
) -> None:
    opened, families = measured(store), str(tmp_path)
    assert promote.judge(store, opened, families)[3].promote
    file = tmp_path / "fam.yaml"
    file.write_text("recipe: {extends: tiny, promote: {approval: {people: [ann]}}}")
    assert "awaiting approval" in promote.judge(store, opened, families)[3].reason
    file.write_text("recipe: {extends: gone}")
    with pytest.raises(RecipeError, match="gone"):
        promote.judge(store, opened, families)
    file.unlink()
    family_recipe.write(store, "fam", {"extends": "tiny", "promote": {"approval": {"people": ["ann"]}}}, "tiny", "bob")
    assert not promote.judge(store, opened)[3].promote
    for answer in (approval.Answer(True, "mallory", "now", "mallory"), approval.Answer(True, None, "now")):
        approval.write(store, opened["run"], approval.Pair("a" * 64, "3"), answer)
        assert "awaiting approval: " in promote.judge(store, opened)[3].reason
    yes = approval.Answer(True, "ann", "2026-11-24T05:00:00Z")
    approval.write(store, opened["run"], approval.Pair("a" * 64, "3"), yes)
    assert promote.judge(store, opened)[3].promote


@pytest.fixture
def waiting(store: Store, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """A run whose reviewers are to be asked, in a family without a champion."""
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(connection, "open_store", lambda _: store)
    monkeypatch.setattr(tracking, "champion", lambda *_: None)
    monkeypatch.setattr(tracking, "side_by_side", lambda *_: None)
    monkeypatch.setattr(asked_approval, "show", lambda *_: None)
    return cast("Opened", {**measured(store, approval={}), "mlflow_run": "1", "mlflow_url": "http://127.0.0.1:1/#/a"})


def test_nobody_is_asked_again_about_the_champion(waiting: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a task that was cleared: a no could not take the alias away."""
    question = asked_approval.question(waiting)
    assert isinstance(question, Question)
    assert question.people == ()
    for made_by, digest, asks in (
        (waiting["run"], "a" * 64, False),
        (waiting["run"], "b" * 64, True),  # a checkpoint of it, or what it made before
        ("fam-0", "a" * 64, True),
    ):
        holder = tracking.Champion("4", "s3://b/m", "1", made_by, digest)
        monkeypatch.setattr(tracking, "champion", lambda *_, holder=holder: holder)
        found = asked_approval.question(waiting)
        assert isinstance(found, Question) is asks
        assert asks or found == (
            "Version 4 is champion already, so no one is asked again. `dropforge rollback fam` takes it back"
        )


def test_whom_to_ask_is_the_family_s_word_of_now(store: Store, waiting: Opened) -> None:
    family_recipe.write(store, "fam", {"extends": "tiny", "promote": {"approval": {"people": ["ann"]}}}, "tiny", "bob")
    question = asked_approval.question(waiting)
    assert isinstance(question, Question)
    assert question.people == ("ann",)


def test_a_yes_is_for_the_candidate_that_was_asked_about(store: Store, waiting: Opened) -> None:
    """While a question waits, pods may write another model into the run's folder."""
    opened = waiting
    question = asked_approval.question(opened)
    assert isinstance(question, Question)
    key = layout.report_key(opened["run"])
    asked = store.get(key)
    store.put(key, json.dumps(json.loads(asked) | {"model": {"digest": "b" * 64}}).encode())
    asked_approval.take_answer(opened, question.about, promoted=True, by="ann", at=datetime(2026, 11, 24, tzinfo=UTC))
    assert "awaiting approval" in promote.judge(store, opened)[3].reason
    store.put(key, asked)
    assert promote.judge(store, opened)[3].promote


def test_what_the_run_has_used_can_hold_its_model_back(store: Store) -> None:
    for most, promoted in ((1.0, False), (3.0, True)):
        guard = {"metric": "cost/gpu_hours", "at_most": most}
        opened = measured(store, guards=[guard])
        assert "no finite cost/gpu_hours" in promote.judge(store, opened)[3].reason
        gang = Gang("train", "j", "u", 1, gpus=4, cores=8, created=0, started=0, ended=1800)
        gangs.keep(store, opened["run"], gang)
        verdict = promote.judge(store, opened)[3]
        assert verdict.promote is promoted
        assert any(f"cost/gpu_hours is 2.0000 and must be at most {most:g}" in c.reason for c in verdict.checks)


def test_models_of_different_tokenizers_are_compared_by_bits_per_byte(store: Store) -> None:
    opened = measured(store)
    evaluation = json.loads(store.get(layout.evaluation_key(opened["run"])))
    evaluation["same_tokenizer"] = False
    evaluation["candidate"]["eval/bits_per_byte"], evaluation["champion"]["eval/bits_per_byte"] = 1.2, 1.1
    store.put(layout.evaluation_key(opened["run"]), json.dumps(evaluation).encode())
    assert not promote.judge(store, opened)[3].promote  # although its loss per token is lower


def test_a_family_s_own_rows_are_judged_and_told(store: Store) -> None:
    opened = measured(store)
    spec = json.loads(store.get(layout.run_key(opened["run"])))
    spec["recipe"]["evaluate"]["holdout"] = f"own/{'a' * 64}"
    store.put(layout.run_key(opened["run"]), body := json.dumps(spec).encode())
    opened["run_digest"] = hashlib.sha256(body).hexdigest()
    evaluation = json.loads(store.get(layout.evaluation_key(opened["run"])))
    evaluation["candidate"]["holdout/loss"], evaluation["champion"]["holdout/loss"] = 3.0, 2.0
    evaluation["holdout"] = {"named": f"own/{'a' * 64}", "rows": 40, "trained_on": 2}
    store.put(layout.evaluation_key(opened["run"]), json.dumps(evaluation).encode())
    judged = promote.judge(store, opened)
    assert not judged[3].promote
    assert "holdout/loss is worse than the champion's by 50.00%" in judged[3].reason
    listed = promote.Listed(version="4", promoted=False, previous=None)
    text = promote.summary(judged[0], judged[1], judged[2], judged[3], listed, {})
    assert "And on 40 rows of `own/aaaa" in text
    assert "2 more are among the training rows" in text


def test_the_summary_tells_what_happened(store: Store) -> None:
    spec, evaluation, report, verdict = promote.judge(store, measured(store))
    listed = promote.Listed(version="4", promoted=True, previous="3")
    text = promote.summary(spec, evaluation, report, verdict, listed, {})
    for part in (
        "fam, version 4 (champion)",
        "6.0000 before",
        "2.0000 after",
        "step 10",
        "from version 3",
        "| measured",
    ):
        assert part in text
    assert "failed" not in text
    assert "- The evaluation has 7 rows, fewer than 20, and its figures say little: drop more data" in text
    assert "fewer than 10" not in text  # it had 20 steps
    few = promote.summary(spec, evaluation | {"rows": 20}, report | {"steps": 1}, verdict, listed, {})
    assert "- The training has 1 step, fewer than 10, and changes little: drop more data" in few
    assert "fewer than 20" not in few
    lost = Gang("train", "j", "u", 1, gpus=4, cores=8, reason="node lost", step=47, saved=40)
    text = promote.summary(spec, evaluation, report, verdict, listed, {}, failed=[lost, replace(lost, saved=47)])
    assert "- Trainings that failed: node lost, node lost; 7 steps were done again" in text
    text = promote.summary(spec, evaluation, report, verdict, listed, {}, failed=[replace(lost, saved=None)])
    assert "- Trainings that failed: node lost\n" in text


def test_what_a_pod_wrote_is_a_text_of_one_line_in_what_people_read(store: Store) -> None:
    words = "7 |\n\n# Approved\n[x](http://e.example) <b>\x1b[2J\x00\ud800" + "A" * 100_000
    opened = measured(store, slices=[{"by": "label", "guards": [{"metric": "eval/loss", "at_most": 0.1}]}])
    evaluation = json.loads(store.get(layout.evaluation_key(opened["run"])))
    evaluation["slices"] = [{"by": "label", "name": words, "rows": words, "candidate": {"eval/loss": 1.0}}]
    evaluation |= {"rows": words, "holdout": {"rows": words, "trained_on": words}}
    store.put(layout.evaluation_key(opened["run"]), json.dumps(evaluation).encode())
    gang = {
        "task": "train",
        "job": "j",
        "uid": "u",
        "number": 1,
        "gpus": 0,
        "cores": 1,
        "failed": True,
        "reason": words,
    }
    store.put(layout.gang_key(opened["run"], "u"), json.dumps(gang).encode())
    spec, evaluation, report, verdict = promote.judge(store, opened)
    listed = promote.Listed(version="4", promoted=False, previous=None)
    failed = gangs.failed(gangs.kept(store, opened["run"]), "train")
    wall = whole_wall(None, None, {"began": 0.0, "seconds": 5.0, words: 2.0})
    text = promote.summary(spec, evaluation, {**report, "resumed_from": words}, verdict, listed, wall, failed=failed)
    for line in (verdict.reason, run._reason(store, cast(Opened, opened), "train"), *text.split("\n")):
        assert line.isprintable()
        assert len(line) < 1500
    assert not any(line.startswith("# ") for line in text.split("\n")[1:])
    assert "[x](" not in text.replace("\\[", "")
    assert "<b>" not in text.replace("\\<", "")


def test_too_few_rows_and_steps_are_in_the_log_before_anything_expensive_begins(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(foresee, "_measured", lambda *_: (None, ""))
    dataset(store, files={"card_json": "card.json"})
    manifest = Manifest.from_json(store.get(layout.manifest_key("fam", "ab")))
    store.put("card.json", json.dumps({"statistics": {"totals": {"train": {"rows": 30, "chars": 900}}}}).encode())
    foresee.foresee(store, "", manifest, load_recipe("tiny", {"train": {"max_steps": None, "epochs": 1}}))
    assert "The training has about 1 step, fewer than 10" in caplog.text
    assert "The evaluation has 5 rows, fewer than 20" in caplog.text


def dataset(store: Store, **changes: Any) -> str:
    shards = []
    for split, rows in (("train", 30), ("eval", 5)):
        store.put(layout.shard_key("fam", split), b"x" * rows)
        shards.append(Shard(split, layout.shard_key("fam", split), split, rows, rows))
    counts = {"input": 35, "train": 30, "eval": 5}
    manifest = Manifest("fam", "ab", counts, {}, tuple(shards), **changes)
    store.put(layout.manifest_key("fam", "ab"), manifest.to_json())
    return "ab"


def test_what_is_not_for_the_pods_is_not_for_a_spark_beside_airflow() -> None:
    volumes = [{"claim": "w", "path": "/w", "read_only": False}]
    cluster = {"image": "curation:1", "namespace": "team", "work_path": "/w", "volumes": volumes}
    asked = {"engine": "auto", "deadline_minutes": 1}
    assert here(load_recipe("tiny", {"curation": asked})).curation.engine == "auto"
    assert (
        here(load_recipe("tiny", {"curation": {**asked, "spark": {"cluster": cluster}}})).curation.engine == "embedded"
    )


def test_the_log_has_the_warnings_of_the_card(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    lines = [f"{number}.tsv: 2 records run over\n[2026-01-01] ERROR - lines\x1b" for number in range(120)]
    store.put("card.json", json.dumps({"warnings": lines}).encode())
    made = Manifest(family="fam", digest="ab" * 32, counts={}, rules={}, shards=(), files={"card_json": "card.json"})
    data._told(from_env(ENV), store, made)
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    shown = [line.replace("\x1b", "\\x1b").replace("\n", " ") for line in lines[:100]]
    assert logged == [*shown, "20 more on the card"]


def test_a_whole_dataset_passes(store: Store) -> None:
    assert "35 rows" in check(store, "fam", dataset(store), RECIPE)["enough rows"]


def test_a_dataset_that_lost_a_shard_is_stopped_before_training(store: Store) -> None:
    digest = dataset(store)
    store.put(layout.shard_key("fam", "eval"), b"cut")
    with pytest.raises(DataError, match="has 3 bytes"):
        check(store, "fam", digest, RECIPE)
    store.delete(layout.shard_key("fam", "train"))
    with pytest.raises(DataError, match="is missing"):
        check(store, "fam", digest, RECIPE)


def test_the_recipes_own_rules_stop_a_dataset(store: Store) -> None:
    with pytest.raises(DataError, match="at least 36"):
        check(store, "fam", dataset(store), load_recipe("tiny", {"curation": {"min_rows": 36}}))


def test_what_the_gate_says_of_a_column_fits_an_xcom(store: Store) -> None:
    measured = {"unknown_keys": {"odd\0key": 3}}
    recipe = load_recipe("tiny", {"curation": {"unknown_keys": "refuse", "gate": {"override": "a test of names"}}})
    told = check(store, "fam", dataset(store, measured=measured), recipe)["no unknown keys"]
    assert told == "`odd\\x00key` (3 rows)"
