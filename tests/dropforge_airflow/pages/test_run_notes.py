"""The note of a run, which Airflow's lists show."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from dropforge_airflow import run_notes
from dropforge_airflow.assets import FINETUNE_DAG
from dropforge_airflow.run_notes import Ended, of_drop, of_plan, result, with_line

from tests.dropforge_airflow.pages.conftest import Server

PLAN = {"family": "support", "drop": "first", "recipe": {"base": {"model": "org/*m*"}, "train": {"method": "lora"}}}


def test_a_run_is_named_by_its_drop_from_its_beginning() -> None:
    assert of_drop("bucket/support/first/0123", {}) == "support/first"
    assert of_drop(None, {"data": "support/first", "preset": "lora"}) == "support/first · lora"
    assert of_drop(None, {"data": "hub:a/[b](http://x)\n<img>"}) == r"hub:a/\[b\]\(http://x\) \<img\>"
    assert of_drop(None, {}) == ""


def test_its_plan_says_what_it_trains() -> None:
    assert of_plan(Ended({"plan": PLAN}, {}, "http://m/#/runs/1")) == (
        r"support/first · org/\*m\* · lora · [MLflow](http://m/#/runs/1)"
    )
    assert of_plan(Ended({"plan": PLAN}, {}, "javascript:alert(1)")).endswith("lora")
    assert of_plan(Ended({"plan": "torn"})) == of_plan(Ended()) == ""


@pytest.mark.parametrize(
    ("state", "ended", "told"),
    [
        ("success", Ended({"register": {"version": "2", "promoted": True}}), "version 2, promoted"),
        (
            "success",
            Ended(
                {
                    "register": {"version": "3", "promoted": False, "reason": "boss said no"},
                    "decide": {"reason": "awaiting approval"},
                }
            ),
            "version 3, not promoted: boss said no",
        ),
        (
            "success",
            Ended({"register": {"version": "3", "promoted": False}, "decide": {"reason": "worse by 54%"}}),
            "version 3, not promoted: worse by 54%",
        ),
        ("failed", Ended({}, {"train": "failed", "report": "skipped", "close_run": "failed"}), "failed in `train`"),
        (
            "failed",
            Ended({}, {"plan": "failed"}, failures={"plan": "drop a/b: there is *none*. Upload it"}),
            r"failed in `plan`: drop a/b: there is \*none\*. Upload it",
        ),
        ("success", Ended({}, {"plan": "skipped", "curate": "skipped"}), "nothing to do: the log of `plan` says why"),
        (
            "success",
            Ended({"nothing_new": {"told": "Nothing new: as run a-1"}}, {"open_run": "skipped", "confirm": "skipped"}),
            "Nothing new: as run a-1",
        ),
        ("failed", Ended({}, {"train": "skipped", "close_run": "failed"}), "ended in `train`"),
        ("failed", Ended(), "failed"),
    ],
)  # fmt: skip
def test_what_came_of_it(state: str, ended: Ended, told: str) -> None:
    assert result(state, ended) == told


def test_what_a_person_wrote_stays() -> None:
    note = with_line(with_line("mine", "Run: ", "a/b"), "Result: ", "failed")
    assert note == "Run: a/b\n\nmine\n\nResult: failed"
    again = with_line(with_line(note, "Run: ", "a/b · lora"), "Result: ", "version 2")
    assert again == "Run: a/b · lora\n\nmine\n\nResult: version 2"
    assert with_line("x" * 995, "Result: ", "failed") == "x" * 995


def test_airflow_keeps_it_with_the_run(server: Server) -> None:
    assert run_notes._DAG == FINETUNE_DAG
    states = {"open_run": "success", "train": "failed"}
    dag_run = server.run(
        f"manual__{uuid.uuid4().hex}", states, opened={"mlflow_url": "http://m"}, failure="no room. Give it more"
    )

    def called(name: str, dag_run: str = dag_run, **changed: Any) -> str:
        from airflow.models.dagrun import DagRun
        from airflow.utils.session import create_session
        from sqlalchemy import select

        with create_session(scoped=False) as session:
            run = session.scalars(select(DagRun).where(DagRun.run_id == dag_run)).one()
            for key, value in changed.items():
                setattr(run, key, value)
            getattr(run_notes, f"on_dag_run_{name}")(run, "")
        with create_session(scoped=False) as session:
            return str(session.scalars(select(DagRun).where(DagRun.run_id == dag_run)).one().note)

    assert called("running", partition_key="b/support/first/0") == "Run: support/first"
    assert called("failed", state="failed") == "Run: support/first\n\nResult: failed in `train`: no room. Give it more"
    nothing = {"nothing_new": {"told": "Nothing new: as run a-1"}}
    second = server.run(f"manual__{uuid.uuid4().hex}", {"open_run": "skipped", "train": "skipped"}, opened=nothing)
    assert called("success", second, state="success") == "Result: Nothing new: as run a-1"
