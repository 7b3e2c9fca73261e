"""What came of a sweep's trials, by what lies in the bucket and stands in a real MLflow."""

from __future__ import annotations

import json
import math
import uuid
from pathlib import Path
from typing import Any

import pytest

from dropforge import sweep_tracking, sweeps, tracking
from dropforge.errors import DataError
from dropforge.store import Store, open_store
from dropforge.sweeps import Member, Outcome, Stop
from tests.markdown import narrow

BY = "sweep__fam__1"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def by(trial: int) -> Member:
    return Member(by=BY, parent="p", trial=trial, candidate=False)


def trained(store: Store, trial: int, loss: Any, dataset: str = "d") -> None:
    sweeps.note(store, "fam", by(trial), f"fam-{trial}", f"m{trial}")
    report = {"eval": {"after": {"eval/loss": loss}}, "steps": 20, "seconds": 3.0, "dataset": dataset}
    store.put(f"runs/fam-{trial}/report.json", json.dumps(report).encode())


def test_what_came_of_each_trial(store: Store) -> None:
    trained(store, 0, 2.5)
    trained(store, 1, math.nan)
    sweeps.note(store, "fam", by(2), "fam-2", "m2")
    sweeps.stop(store, "fam", BY, 2, Stop(early=True, told="it is | worse"))
    found = sweeps.outcomes(store, "fam", BY, 4, "eval/loss")
    assert [one.state for one in found] == ["done", "done", "stopped early", "failed"]
    assert found[0] == Outcome(0, "done", "fam-0", 2.5, 20, 3.0)
    assert found[1].value is None
    assert sweeps.best(found, "lower") == found[0]
    text = narrow(sweeps.table(found, {0: "a | b"}, "eval/loss", 0))
    assert "| 0 | a \\| b | 2.5000 | 20 | 3 | best |" in text
    assert "| 2 | | - | - | - | stopped early: it is \\| worse |" in text


def test_what_a_trial_s_pod_wrote_is_a_text_in_the_table(store: Store) -> None:
    sweeps.note(store, "fam", by(0), "fam-0", "m0")
    report = {"steps": "x\n# [Reviewed](https://evil.example) ![](https://evil.example/p.png) <img src=x>"}
    store.put("runs/fam-0/report.json", json.dumps(report).encode())
    (*_, row) = sweeps.table(sweeps.outcomes(store, "fam", BY, 1, "eval/loss"), {}, "eval/loss", None).split("\n")
    assert "failed: its report cannot be read" in row
    assert "\\[Reviewed](https" in row
    assert "\\<img" in row


def test_the_best_is_the_first_of_equal_ones_in_the_metrics_direction() -> None:
    found = [Outcome(0, "failed"), *(Outcome(n, "done", "r", value) for n, value in enumerate([2.0, 1.0, 1.0], 1))]
    assert (sweeps.best(found, "lower") or found[0]).number == 2
    assert (sweeps.best(found, "higher") or found[0]).number == 1
    assert sweeps.best([Outcome(0, "failed")], "lower") is None


def test_a_trial_that_is_better_later_is_judged_by_a_run_of_its_own(store: Store) -> None:
    first = sweeps.candidate_run(BY)
    for number, run in ((1, first), (0, f"{first}__0"), (1, first), (0, f"{first}__0"), (2, f"{first}__2")):
        assert sweeps.keep_result(store, "fam", BY, [], number) == run
    key = next(info.key for info in store.list("sweeps/") if info.key.endswith("result.json"))
    store.put(key, b'{"best": 1, "trials": []}')  # as earlier versions kept it
    assert sweeps.keep_result(store, "fam", BY, [], 0) == f"{first}__0"
    assert sweeps.keep_result(store, "fam", BY, [], 1) == first


def test_figures_of_other_rows_are_not_compared(store: Store) -> None:
    trained(store, 0, 2.5)
    trained(store, 1, 2.0, dataset="other")
    with pytest.raises(DataError, match="trials 0 and 1 were measured on different dataset versions"):
        sweeps.outcomes(store, "fam", BY, 2, "eval/loss")


def test_a_stop_is_written_once_and_forgotten_with_its_sweep_only(store: Store) -> None:
    assert sweeps.stopped(store, "fam", BY, 0) is None
    assert sweeps.stop(store, "fam", BY, 0, Stop(early=True, told="slow"))
    assert not sweeps.stop(store, "fam", BY, 0, Stop(early=False, told="its sweep was ended"))
    assert sweeps.stopped(store, "fam", BY, 0) == Stop(early=True, told="slow")
    assert sweeps.stopped(store, "fam", "sweep__fam__2", 0) is None
    sweeps.let_go_on(store, "fam", BY, 0)
    assert sweeps.stopped(store, "fam", BY, 0) is None


def test_names_stay_apart_however_long_the_sweeps_is() -> None:
    names = {sweeps.trial_run("x" * 300, number) for number in range(100)} | {sweeps.candidate_run("x" * 300)}
    assert len(names) == 101
    assert max(map(len, names)) <= 250


OF_A_TRIAL = {"by": "x", "parent": "y", "candidate": False}


@pytest.mark.parametrize(
    "values",
    [{"by": "x"}, ["x"], "x", *({**OF_A_TRIAL, "trial": trial} for trial in ("?", "1", -1, 1.0, True, 10**4200))],
)
def test_what_no_sweep_wrote_is_refused(values: Any) -> None:
    with pytest.raises(DataError, match="it was not written by a sweep"):
        sweeps.member(values)
    assert sweeps.member(None) is None


def test_one_run_in_mlflow_with_its_trials_below(mlflow_server: str) -> None:
    mlflow, family, sweep = tracking.client(mlflow_server), f"fam-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    parent, experiment = sweep_tracking.open_parent(mlflow_server, family, sweep, {"trials": "2"}, {"a": "b"})
    assert sweep_tracking.open_parent(mlflow_server, family, sweep, {"trials": "3"}, {}) == (parent, experiment)
    runs: dict[int, str] = {}
    for trial in range(2):
        member = Member(by=sweep, parent=parent, trial=trial, candidate=False)
        runs[trial] = mlflow.create_run(experiment, tags=sweep_tracking.trial_tags(member)).info.run_id
    for step, value in ((0, 7.0), (5, math.inf), (10, 6.0), (10, 5.0)):
        mlflow.log_metric(runs[0], "eval/loss", value, step=step)
    assert sweep_tracking.curves(mlflow_server, runs, "eval/loss") == {0: {0: 7.0, 5: math.inf, 10: 5.0}, 1: {}}
    assert sweep_tracking.curves(mlflow_server, {}, "eval/loss") == {}

    sweep_tracking.tell_best(mlflow_server, parent, Outcome(0, "done", "r", 5.0, 10), "eval/loss", "| table |")
    mlflow.set_tag(runs[0], tracking.TAG_VERSION, "4")
    assert sweep_tracking.tell_candidate(mlflow_server, parent, runs[0]) == {tracking.TAG_VERSION: "4"}
    tracking.close_run(mlflow_server, parent, "KILLED")
    sweep_tracking.reopen(mlflow_server, parent)
    tracking.close_run(mlflow_server, parent, "FINISHED")
    found = mlflow.get_run(parent)
    assert (found.info.status, found.data.metrics, found.data.tags["dropforge.best_trial"]) == (
        "FINISHED",
        {"eval/loss": 5.0},
        "0",
    )
    assert len(tracking.search(mlflow, tracking.TAG_PARENT, parent, family=family)) == 2
    sweep_tracking.tell_best(mlflow_server, parent, Outcome(0, "done", "r", 5.0, 10), "eval/loss", "")
    assert mlflow.get_run(parent).data.tags[tracking.TAG_VERSION] == "4"
    sweep_tracking.tell_best(mlflow_server, parent, Outcome(1, "done", "s", 4.0, 10), "eval/loss", "")
    assert tracking.TAG_VERSION not in mlflow.get_run(parent).data.tags, "it is the other trial's"
