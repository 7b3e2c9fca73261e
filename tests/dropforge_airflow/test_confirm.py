"""Whether a person is asked before a run begins, and what becomes of the word."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from airflow.sdk.exceptions import AirflowFailException
from dropforge_airflow.asking import Question
from dropforge_airflow.operators import MeteredJobOperator
from dropforge_airflow.tasks import confirm
from dropforge_airflow.tasks.opened import Opened
from dropforge_airflow.tasks.run import ending, refused

from dropforge import confirmation, layout, tracking
from dropforge.confirmation import Word
from dropforge.estimate import estimate
from dropforge.forecast import Speed, forecast
from dropforge.recipes import load_recipe
from dropforge.run import RunSpec
from tests.dropforge_airflow.conftest import Yard
from tests.markdown import narrow

AT = datetime(2026, 11, 24, 5, tzinfo=UTC)
PRICE = {"core_hour": 3600.0, "currency": "EUR"}  # one a second


def opened(yard: Yard, limits: dict[str, Any] | None, seconds: float | None = 10, *, kept: bool = True) -> Opened:
    """A run that would take so many seconds of one core."""
    recipe = load_recipe("tiny", {"train": {"max_steps": 10}, "compute": {"price": PRICE, "limits": limits}})
    spec = RunSpec("fam-1", "fam", 1, "s3://b/r", "s3://b", "s3://b/m", "d" * 64, recipe.plain(), "code")
    yard.store.put(layout.run_key("fam-1"), spec.to_json())
    if kept:
        speed = None if seconds is None else Speed(10240 / seconds, "a test")
        plan = forecast(recipe, estimate(recipe), speed)
        yard.store.put(layout.forecast_key("fam-1"), json.dumps(plan.to_dict()).encode())
    known = {"run": "fam-1", "family": "fam", "root": "s3://b/r", "run_digest": spec.digest}
    return cast(Opened, {**known, "mlflow_url": "http://m/#/x", "mlflow_run": "m"})


@pytest.mark.parametrize(
    ("limits", "seconds", "told"),
    [
        (None, 10, "the recipe limits no plan"),
        ({"stop_above": {"cost": 1}}, 10, "the recipe limits no plan"),
        ({"ask_above": {"cost": 11}}, 10, "within the recipe's limits"),
        ({"ask_above": {"gpu_hours": 0}}, None, "within the recipe's limits"),
        ({"ask_above": {"cost": 11}, "unknown": "start"}, None, "as `compute.limits.unknown` says: cost not known"),
    ],
)
def test_nobody_is_asked_without_need(yard: Yard, limits: dict[str, Any] | None, seconds: float, told: str) -> None:
    found = confirm.question(opened(yard, limits, seconds))
    assert isinstance(found, str)
    assert told in found


def test_above_a_limit_the_plan_is_the_question(yard: Yard) -> None:
    limits = {"ask_above": {"cost": 9}, "otherwise": "start", "deadline_hours": 2, "people": ["ann"]}
    found = confirm.question(opened(yard, limits))
    assert isinstance(found, Question)
    assert (found.yes, found.deadline_hours, found.people) == (True, 2, ("ann",))
    assert "cost 10.00 EUR" in found.subject
    for line in (
        "- cost 10, and `compute.limits.ask_above.cost` is 9",
        "| time | about 10 s: a test |",
        "http://m/#/x",
    ):
        assert line in narrow(found.body)


def test_no_job_begins_without_the_answer_whatever_became_of_the_task(yard: Yard) -> None:
    """A task may be marked as a success."""

    def begins(limits: dict[str, Any] | None) -> Any:
        run = opened(yard, limits)
        labels = {"dropforge/run": "fam-1", "dropforge/family": "fam", "dropforge/purpose": "train"}
        noted = {"dropforge/run-folder": "s3://b/r/", "dropforge/run-digest": run["run_digest"]}
        manifest = {"metadata": {"labels": labels, "annotations": noted}}
        return MeteredJobOperator(task_id="train", manifest=manifest).execute(cast(Any, {}))

    limits = {"ask_above": {"cost": 9}}
    with pytest.raises(AirflowFailException, match=r"fam-1 does not begin: awaiting approval\. No pod was made"):
        begins(limits)
    confirmation.write(yard.store, "fam-1", Word(False, "ann", "2026-11-24"), {})
    with pytest.raises(AirflowFailException, match="does not begin: ann said no at"):
        begins(limits)
    confirmation.write(yard.store, "fam-1", Word(True, "ann", "2026-11-24"), {})
    for allowed in (limits, None):
        with pytest.raises(KeyError):  # as there is no context
            begins(allowed)


def test_what_a_pod_wrote_into_the_plan_words_no_question(yard: Yard) -> None:
    run, key = opened(yard, {"ask_above": {"cost": 9}}), layout.forecast_key("fam-1")
    plan = json.loads(yard.store.get(key))
    words = "it |\n\n# Confirmed\n![seen](http://e.example/p.png)\x00\ud800"
    yard.store.put(key, json.dumps({**plan, "source": words * 1000, "currency": words}).encode())
    found = confirm.question(run)
    assert isinstance(found, Question)
    assert found.subject.isprintable()
    assert not [part for part in ("\n# Confirmed", "![seen]", "\x00", "\ud800") if part in found.body]
    assert len(found.body) < 3000
    yard.store.put(key, json.dumps({**plan, "cost": words}).encode())
    with pytest.raises(AirflowFailException, match="cost is of type str"):
        confirm.question(run)


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_not_known_is_asked_about_unless_the_recipe_says_otherwise(yard: Yard, kept: bool) -> None:
    """Also where an older version opened the run and left no plan."""
    run = opened(yard, {"ask_above": {"cost": 9}}, None, kept=kept)
    found = confirm.question(run)
    assert isinstance(found, Question)
    assert found.yes is False
    assert "cost not known" in found.body
    with pytest.raises(AirflowFailException, match=r"does not begin: cost not known.*gpu_tflops"):
        confirm.question(opened(yard, {"ask_above": {"cost": 9}, "unknown": "stop"}, None, kept=kept))


def test_a_word_is_kept_and_only_a_yes_holds(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    monkeypatch.setattr(tracking, "note", lambda *given: noted.append(given[-1]))
    run = opened(yard, {"ask_above": {"cost": 9}})
    with pytest.raises(AirflowFailException, match="awaiting approval"):
        confirm.require_yes(run)
    assert refused(yard.store, "fam-1") is False
    told = confirm.take_answer(run, start=False, by="ann", at=AT)
    assert told == noted[-1] == "ann said no at 2026-11-24T05:00:00Z"
    assert refused(yard.store, "fam-1") is True
    with pytest.raises(AirflowFailException, match=r"ann said no.*No pod was made"):
        confirm.require_yes(run)
    assert isinstance(confirm.question(run), Question)
    confirm.take_answer(run, start=True, by=None, at=AT)
    confirm.require_yes(run)
    assert refused(yard.store, "fam-1") is False
    assert confirm.question(run) == "Approved before: no one answered by 2026-11-24T05:00:00Z, which counts as yes"
    assert json.loads(yard.store.get(layout.confirmation_key("fam-1")))["plan"]["cost"] == pytest.approx(10)


def test_a_refused_run_is_ended_by_its_task() -> None:
    states: dict[str, str | None] = {"open_run": "success", "confirm": "failed", "train": "upstream_failed"}
    assert ending(states) == ("FAILED", "confirm")
