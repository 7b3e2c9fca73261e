"""What a sweep gives its trials, what they share, and how one of them ends."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowSkipException
from dropforge_airflow.tasks import sweep, trial
from dropforge_airflow.tasks.data import Curated, workplace
from dropforge_airflow.tasks.plan import make_plan
from dropforge_airflow.tasks.run import make_spec

from dropforge import ledger, sweeps
from dropforge.drop import read_drop
from dropforge.errors import DataError, DropforgeError, RecipeError
from dropforge.recipes.load import build_recipe
from dropforge.settings import Settings, from_env
from dropforge.store import Store
from dropforge.sweep import Sweep, build_sweep
from dropforge.sweeps import Member, Stop

BY = "sweep__fam__1"
CURATED = Curated(digest="ab" * 32, manifest="s3://b/m.json", card="", rows={"train": 9, "eval": 1})


def asked(**more: Any) -> Sweep:
    return build_sweep({"recipe": {"extends": "tiny"}, "space": {"train.learning_rate": [1e-3, 1e-2]}, **more})


def dropped(store: Store, recipe: str | None = None) -> None:
    store.put("drops/fam/d1/a.jsonl", b'{"text": "d1"}')
    if recipe is not None:
        store.put("drops/fam/d1/recipe.yaml", recipe.encode())
    store.put("drops/fam/d1/_SUCCESS", b"")
    ledger.record(store, read_drop(store, "fam", "d1", "b"))


def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("DROPFORGE_BUCKET", "b")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    return from_env()


def of(number: int, *, candidate: bool = False) -> Member:
    return Member(by=BY, parent="p", trial=number, candidate=candidate)


def test_trials_share_a_claim_and_the_best_is_the_same_run_as_its_trial(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped(store)
    drop, confs = sweep.settle(store, "b", asked(), {"drop": "d1", "family": "fam"}, BY)
    ledger.claim(store, "fam", drop.id, "an-earlier-run")
    ledger.claim(store, "fam", drop.id, sweeps.candidate_run(BY), again=True)

    def name(number: int, owner: str, *, candidate: bool = False) -> str:
        params = {**confs[number], "sweep": of(number, candidate=candidate)}
        made = make_plan(store, "b", params, partition_key=None, owner=owner)
        assert made["counter"] == 2
        return make_spec(settings(monkeypatch), made, CURATED, build_recipe(made["recipe"])).run

    def folder(number: int) -> str:
        params = {**confs[number], "sweep": of(number)}
        return workplace(make_plan(store, "b", params, partition_key=None, owner="x"))

    assert folder(0) != folder(1), "they may curate side by side"
    names = [name(number, sweeps.trial_run(BY, number)) for number in range(2)]
    assert names[0] != names[1]
    assert name(1, sweeps.candidate_run(BY), candidate=True) == names[1]
    assert ledger.claim(store, "fam", drop.id, "a-later-run") is None


def test_a_source_is_pinned_for_all_trials(store: Store) -> None:
    store.put("rows/a.jsonl", b'{"text": "one"}')
    found = asked(recipe={"extends": "tiny", "data": {"source": {"prefix": "rows/"}}})
    drop, confs = sweep.settle(store, "b", found, {"family": "fam"}, BY)
    assert {conf["overrides"]["data"]["source"]["id"] for conf in confs} == {drop.id}
    make_plan(store, "b", {**confs[0], "sweep": of(0)}, partition_key=None, owner="x")
    store.put("rows/b.jsonl", b'{"text": "two"}')
    with pytest.raises(DataError, match="its files have the id"):
        make_plan(store, "b", {**confs[0], "sweep": of(0)}, partition_key=None, owner="x")


def test_a_source_with_the_files_of_an_upload_that_is_gone_is_pinned_by_its_files(store: Store) -> None:
    store.put("drops/fam/d1/a.jsonl", b'{"text": "one"}')
    store.put("drops/fam/d1/_SUCCESS", b"")
    ledger.record(store, read_drop(store, "fam", "d1", "b"))
    store.delete("drops/fam/d1/a.jsonl")
    store.put("rows/a.jsonl", b'{"text": "one"}')
    found = asked(recipe={"extends": "tiny", "data": {"source": {"prefix": "rows/"}}})
    drop, confs = sweep.settle(store, "b", found, {"family": "fam"}, BY)
    trial = make_plan(store, "b", {**confs[0], "sweep": of(0)}, partition_key=None, owner="x")
    assert (trial["drop_id"], trial["prefix"]) == (drop.id, "rows/")


def test_no_data_is_refused(store: Store) -> None:
    with pytest.raises(DataError, match="it has no data"):
        sweep.settle(store, "b", asked(), {"family": "fam"}, BY)


def test_of_the_drops_recipe_the_description_of_rows_lies_below_the_trials(store: Store) -> None:
    dropped(store, "data: {text_column: body}\ntrain: {clip: 0.5, learning_rate: 1e-5}\n")
    drop, confs = sweep.settle(store, "b", asked(), {"drop": "fam/d1"}, BY)
    recipes = sweep.check_recipes(store, "b", asked(), drop, confs)
    assert [one.train.learning_rate for one in recipes] == [1e-3, 1e-2]
    assert {(one.train.clip, one.data.text_column) for one in recipes} == {(1.0, "body")}

    stopping = asked(recipe={"extends": "tiny", "train": {"eval_every": 5}}, early_stop={})
    dropped_recipe = build_recipe({**recipes[0].plain()})
    assert dropped_recipe.train.eval_every == 0
    with pytest.raises(RecipeError, match="evaluates before and after"):
        sweep.check_recipes(store, "b", stopping, drop, confs)


OPENED: Any = {"family": "fam", "run": "fam-1", "sweep": of(1)}


@pytest.mark.parametrize(
    ("states", "otherwise", "stop", "status", "task"),
    [
        ({"train": "success", "champion": "skipped"}, ("KILLED", "champion"), None, "FINISHED", ""),
        ({"train": "success", "champion": "skipped"}, ("KILLED", "champion"), Stop(True, "slow"), "FINISHED", ""),
        ({"train": "failed"}, ("FAILED", "train"), None, "FAILED", "train"),
        ({"train": "failed"}, ("FAILED", "train"), Stop(True, "slow"), "KILLED", "sweep"),
        ({"train": "failed"}, ("KILLED", "train"), None, "KILLED", "train"),
    ],
)
def test_how_a_trial_ends(
    store: Store, states: dict[str, str | None], otherwise: Any, stop: Stop | None, status: str, task: str
) -> None:
    if stop is not None:
        sweeps.stop(store, "fam", BY, 1, stop)
    found, by, tags = trial.trial_ending(store, OPENED, states, otherwise)
    assert (found, by) == (status, task)
    assert tags == ({"dropforge.stopped": "slow"} if task == "sweep" else {})
    # The candidate, and a run of its own, end as their tasks say.
    for opened in ({**OPENED, "sweep": of(1, candidate=True)}, {**OPENED, "sweep": None}):
        assert trial.trial_ending(store, opened, states, otherwise) == (*otherwise, {})  # type: ignore[arg-type]


def test_a_trial_ends_before_the_turn_and_a_stopped_one_does_not_begin(store: Store) -> None:
    with pytest.raises(AirflowSkipException):
        trial.end_trial(OPENED)
    others: list[Any] = [{**OPENED, "sweep": of(1, candidate=True)}, {**OPENED, "sweep": None}, {"family": "fam"}]
    for other in others:
        trial.end_trial(other)

    sweeps.refuse_stopped(store, "fam", of(1))
    sweeps.stop(store, "fam", BY, 1, Stop(early=True, told="it was slow"))
    with pytest.raises(DropforgeError, match=r"it was ended: it was slow\. Submit its recipe"):
        sweeps.refuse_stopped(store, "fam", of(1))
    sweeps.refuse_stopped(store, "fam", of(1, candidate=True))
