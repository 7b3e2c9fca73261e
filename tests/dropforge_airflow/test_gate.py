"""The tasks from measurement to report: the gate's table is what MLflow shows, and stays so when they are cleared."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dropforge_airflow.assets import MODELS
from dropforge_airflow.tasks import promote, turn
from dropforge_airflow.tasks.opened import Opened
from dropforge_airflow.tasks.run import open_run

from dropforge import family_recipe, gangs, layout, tracking
from dropforge.gangs import Gang
from dropforge.recipes import load_recipe
from dropforge.tracking import Champion
from tests.dropforge_airflow.conftest import Yard
from tests.dropforge_airflow.test_open_run import CURATED, PLAN
from tests.markdown import narrow

SECTION: dict[str, Any] = {
    "slices": [{"by": "source", "guards": [{"metric": "eval/loss", "max_regression": 0.5}]}],
    "guards": [{"metric": "model/bytes", "max_regression": 0.1}, {"metric": "cost/core_hours", "at_most": 10.0}],
    "stale": {"after_days": 5, "min_improvement": -0.2},
}
SIDES = ("candidate", "champion")


def opened_run(yard: Yard, counter: int) -> Opened:
    plan = {**PLAN, "counter": counter, "recipe": load_recipe("tiny", {"promote": SECTION}).plain()}
    opened: Opened = open_run(plan, CURATED, f"dag-run-{counter}")  # type: ignore[arg-type]
    model = {"uri": f"{opened['root']}/model", "digest": str(counter) * 64}
    report = {"steps": 20, "eval": {"before": {"eval/loss": 6.0}, "after": {"eval/loss": 2.0}}, "model": model}
    yard.store.put(layout.report_key(opened["run"]), json.dumps(report).encode())
    gangs.keep(yard.store, opened["run"], Gang("train", "j", "u", 1, gpus=0, cores=2, created=0, started=0, ended=3600))
    return opened


def measured(yard: Yard, opened: Opened, champion: str | None) -> dict[str, Any]:
    figures = [{"eval/loss": loss, "model/bytes": 100.0, "model/rows_per_second": 9.5} for loss in (2.1, 2.0)]
    part = {"by": "source", "name": "a.jsonl", "rows": 30, **{side: {"eval/loss": 1.5} for side in SIDES}}
    found = {
        "rows": 70,
        "candidate": figures[0],
        "champion": figures[1] if champion else None,
        "champion_version": champion,
        "champion_days": 6.5 if champion else None,
        "slices": [part],
    }
    yard.store.put(layout.evaluation_key(opened["run"]), json.dumps(found).encode())
    return found


def test_the_gates_table_is_what_mlflow_shows(
    yard: Yard, mlflow_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    monkeypatch.setenv("DROPFORGE_BUCKET", yard.bucket)
    monkeypatch.chdir(tmp_path)
    mlflow = tracking.client(mlflow_server)
    events = {MODELS: SimpleNamespace(extra=None)}
    context = {"dag": SimpleNamespace(dag_id="finetune"), "run_id": "dag-run"}

    first = opened_run(yard, 1)
    measured(yard, first, None)
    assert promote.decide(first)["promote"]
    assert promote.register(first, outlet_events=events, **context)["version"] == "1"

    second = opened_run(yard, 2)
    evaluation = measured(yard, second, "1")
    decided = [promote.decide(second) for _ in range(2)]
    assert decided[0] == decided[1]  # cleared
    assert decided[0]["promote"]  # it is worse, and the champion is old

    run = mlflow.get_run(second["mlflow_run"])
    shown, checks = run.data.metrics, json.loads(yard.store.get(layout.verdict_key(second["run"])))["checks"]
    told = {(check["name"], check["candidate"], check["reference"]) for check in checks}
    assert ("better than champion", shown["candidate/loss"], shown["champion/loss"]) in told
    assert ("guard", shown["candidate/model/bytes"], shown["champion/model/bytes"]) in told
    names = [f"{side}/slice/source/a.jsonl/loss" for side in SIDES]
    assert ("slice", *(shown[name] for name in names)) in told
    assert ("age", evaluation["champion_days"], 5.0) in told
    assert ("guard", 2.0, 10.0) in told  # core-hours
    table = Path(mlflow.download_artifacts(second["mlflow_run"], "verdict.md", str(tmp_path))).read_text()
    assert narrow(table).count("| yes |") == len(checks)

    listed = promote.register(second, outlet_events=events, **context)
    assert (listed["version"], listed["promoted"], listed["previous"]) == ("2", True, "1")
    assert listed["reason"] == decided[0]["reason"]
    link = run.data.tags[tracking.TAG_COMPARE]
    assert first["mlflow_run"] in link
    assert second["mlflow_run"] in link
    promote.report(second, listed)
    summary = yard.store.get(f"{layout.run_prefix(second['run'])}summary.md").decode()
    assert f"[Candidate and champion side by side]({link})" in summary
    assert f"[Candidate and champion side by side]({link})" in table
    assert yard.store.stat(layout.move_key("fam")) is None

    # Cleared after the family has reviewers: the champion stays, and nobody was asked about it.
    family_recipe.write(yard.store, "fam", {"extends": "tiny", "promote": {"approval": {}}}, "tiny", "ann")
    again = promote.register(second, outlet_events=events, **context)
    assert again == listed
    promote.report(second, again)
    assert "awaiting approval" not in yard.store.get(f"{layout.run_prefix(second['run'])}summary.md").decode()
    assert not promote.register(first, outlet_events=events, **context)["promoted"]


def test_a_champions_age_is_that_of_its_registration() -> None:
    from datetime import UTC, datetime, timedelta

    now = datetime(2026, 11, 24, tzinfo=UTC)
    old = Champion("3", "s3://b/m", "r", created=now - timedelta(days=2, hours=12))
    assert turn.noted(old, now) == {"version": "3", "model": "s3://b/m", "days": 2.5}
    assert turn.noted(Champion("3", "s3://b/m", "r"), now)["days"] is None
