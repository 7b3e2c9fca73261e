"""A run's gangs are counted once, whoever saw them end, and end it when it has used what it may."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from airflow.sdk.exceptions import AirflowFailException
from dropforge_airflow.operators import MeteredJobOperator
from dropforge_airflow.tasks import meter
from dropforge_airflow.tasks.meter import Meter
from dropforge_airflow.tasks.run import _settled
from kubeflow_training.gangs.reattach import Identity
from kubeflow_training.jobs.observation import Observation, Phase, Reason
from kubeflow_training.jobs.observation.progress import Progress

from dropforge import gangs, layout, tracking
from dropforge.recipes import load_recipe
from dropforge.run import RunSpec
from tests.dropforge_airflow.conftest import Yard

RUN = "fam-1"
LABELS = {"dropforge/run": RUN, "dropforge/family": "fam", "dropforge/purpose": "train"}
MANIFEST: dict[str, Any] = {"metadata": {"labels": LABELS, "annotations": {"dropforge/run-folder": "s3://b/r/"}}}


def opened(
    yard: Yard, train: dict[str, Any] | None = None, compute: dict[str, Any] | None = None, **stop_above: float
) -> None:
    """A run that may use so much, on two GPUs."""
    limits = {"stop_above": stop_above} if stop_above else None
    compute = {"gpus": 2, "processes_per_node": 2, "cpus": 8, "limits": limits, **(compute or {})}
    recipe = load_recipe("tiny", {"compute": compute, "train": train or {}})
    spec = RunSpec(RUN, "fam", 1, "s3://b/r", "s3://b", "s3://b/m", "d" * 64, recipe.plain(), "code")
    yard.store.put(layout.run_key(RUN), spec.to_json())


def job(number: int) -> dict[str, Any]:
    return {"name": f"train-g{number}", "uid": f"uid-{number}", "gang": number, "created": time.time() - 9000}


def ended(hours: float) -> Observation:
    """A gang that ran for so long."""
    start = datetime(2026, 11, 24, 5, tzinfo=UTC)
    finish = datetime.fromtimestamp(start.timestamp() + hours * 3600, UTC)
    return Observation(Phase.FAILED, started=start, finished=finish)


def test_all_gangs_together_use_up_what_a_run_may(yard: Yard) -> None:
    opened(yard, gpu_hours=3)
    found = Meter.of(MANIFEST)
    assert found.left(None) == pytest.approx(5400)
    found.began(job(1))
    assert found.left("uid-1") == pytest.approx(5400)  # its own time counts from its start
    for _ in range(2):  # an end may be seen twice
        found.ended(job(1), ended(1.0))
    found.began(job(2))
    assert found.left("uid-2") == pytest.approx(1800)
    assert found.used_up() is None
    found.ended(job(2), ended(0.6))
    found.ended(job(2), ended(99.0))
    told = found.used_up()
    assert told is not None
    assert "GPU-hours 3.2" in told
    assert "over 2 jobs with retries" in told
    assert f"base.start: runs/{RUN}/step-N" in told
    operator = MeteredJobOperator(task_id="train", manifest=MANIFEST)
    with pytest.raises(AirflowFailException, match="has used what it may"):
        operator.execute(cast(Any, {}))


def test_a_job_waits_for_its_first_pod_as_long_as_the_recipe_says(yard: Yard) -> None:
    now = time.time()
    for minutes, last in ((90, now + 5400), (None, None)):
        opened(yard, compute={"queue_timeout_minutes": minutes})
        limits = MeteredJobOperator(task_id="train", manifest=MANIFEST)._limits(
            cast(Any, {"ti": SimpleNamespace(try_number=1), "task_state_store": {}}),
            Identity("train", "default", "train", "f", "o", "g", "t", created=now),
        )
        assert limits.queue_until == last


def test_a_gang_with_fewer_nodes_uses_less_of_what_a_run_may(yard: Yard) -> None:
    few = {"nodes": 4, "min_nodes": 1, "queue_timeout_minutes": 5}
    opened(yard, compute=few, gpu_hours=4)
    found = Meter.of(MANIFEST)
    assert (found.min_nodes, found.left(None)) == (1, pytest.approx(1800))
    found.began(job(1), nodes=2)
    assert found.left("uid-1") == pytest.approx(3600)
    found.ended(job(1), ended(0.5))
    assert found.left(None) == pytest.approx(900)
    (kept,) = gangs.kept(yard.store, RUN)
    assert kept.gpus == 4
    limits = MeteredJobOperator(task_id="train", manifest=MANIFEST)._limits(
        cast(Any, {"ti": SimpleNamespace(try_number=1), "task_state_store": {}}),
        Identity("train", "default", "train", "f", "o", "g", "t", created=time.time()),
    )
    assert (limits.min_nodes, limits.place_seconds) == (1, 300)
    other = {"metadata": {**MANIFEST["metadata"], "labels": {**LABELS, "dropforge/purpose": "evaluate"}}}
    assert Meter.of(other).min_nodes is None


def test_a_limit_that_a_pod_took_away_ends_the_job(yard: Yard) -> None:
    opened(yard, gpu_hours=3)
    digest = RunSpec.read(yard.store, layout.run_key(RUN)).digest
    noted = {"dropforge/run-folder": "s3://b/r/", "dropforge/run-digest": digest}
    manifest = {"metadata": {"labels": LABELS, "annotations": noted}}
    assert Meter.of(manifest).left(None) == pytest.approx(5400)
    opened(yard)
    operator = MeteredJobOperator(task_id="train", manifest=manifest)
    with pytest.raises(AirflowFailException, match=r"run\.json: it was changed"):
        operator.execute(cast(Any, {}))


def test_why_a_gang_ended_badly_is_kept_with_it(yard: Yard) -> None:
    opened(yard)
    found = Meter.of(MANIFEST)
    found.began(job(1))
    found.ended(job(1), replace(ended(1.0), reason=Reason.NODE_LOST))
    found.began(job(2))
    found.ended(job(2), replace(ended(1.0), reason=Reason.OUT_OF_MEMORY))
    kept = gangs.kept(yard.store, RUN)
    assert [gang.reason for gang in kept] == ["node lost", "out of memory"]
    assert gangs.why_ended(kept, "train") == "out of memory"
    assert gangs.why_ended(kept, "evaluate") == ""
    found.ended(job(3), replace(ended(1.0), phase=Phase.SUCCEEDED, reason=None))
    assert gangs.why_ended(gangs.kept(yard.store, RUN), "train") == ""


def test_what_a_failed_training_lost_is_kept_with_it(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(yard, gpu_hours=9)
    found = Meter.of(MANIFEST)
    failed = replace(ended(1.0), reason=Reason.NODE_LOST, progress=Progress(47, 100))
    found.ended(job(1), failed)
    for step in (20, 40):
        manifest = json.dumps({"check": str(step)}).encode()
        yard.store.put(f"{layout.run_prefix(RUN)}checkpoints/step-{step}/manifest.json", manifest)
    found.ended(job(2), failed)
    found.ended(job(3), replace(failed, progress=None))
    assert [(gang.step, gang.saved, gang.lost_steps) for gang in found.failed()] == [
        (47, 0, 47),
        (47, 40, 7),
        (None, 40, None),
    ]
    monkeypatch.setattr(meter.aside, "sealed", lambda _: 1 / 0)
    found.ended(job(4), failed)
    last = found.failed()[-1]
    assert (last.step, last.saved, last.reason) == (47, None, "node lost")
    assert found.left(None) is not None


def test_what_lies_on_disks_of_nodes_is_not_called_lost(yard: Yard) -> None:
    opened(yard, train={"checkpoint_every": 50, "fast_checkpoints": {"folder": "/dev/shm", "every": 5}})
    found = Meter.of(MANIFEST)
    found.ended(job(1), replace(ended(1.0), reason=Reason.NODE_LOST, progress=Progress(47, 100)))
    assert [(gang.step, gang.saved, gang.lost_steps) for gang in found.failed()] == [(47, None, None)]


@pytest.mark.parametrize("phase", [Phase.CANCELLED, Phase.LOST])
def test_a_training_that_was_removed_has_not_failed(yard: Yard, phase: Phase) -> None:
    opened(yard)
    found = Meter.of(MANIFEST)
    found.ended(job(1), replace(ended(1.0), phase=phase, reason=Reason.DELETED))
    assert found.failed() == []
    assert gangs.why_ended(gangs.kept(yard.store, RUN), "train") == "deleted"


def test_a_gang_of_a_newer_version_is_read(yard: Yard) -> None:
    newer = b'{"task": "train", "job": "j", "uid": "u", "number": 1, "gpus": 0, "cores": 2, "mood": "x"}'
    yard.store.put(f"runs/{RUN}/gangs/u.json", newer)
    assert [gang.uid for gang in gangs.kept(yard.store, RUN)] == ["u"]


def test_without_a_limit_nothing_ends(yard: Yard) -> None:
    opened(yard)
    found = Meter.of(MANIFEST)
    found.ended(job(1), ended(1000.0))
    assert (found.left("uid-2"), found.used_up()) == (None, None)


def test_a_gang_that_nobody_saw_end_has_ended_when_the_next_begins(yard: Yard) -> None:
    opened(yard, gpu_hours=3)
    found = Meter.of(MANIFEST)
    found.began(job(1))
    found.began(job(2))
    found.began(job(2))  # found again after a retry
    first, second = gangs.kept(yard.store, RUN)
    assert first.ended is not None
    assert first.seconds(0) == pytest.approx(9000, abs=60)
    assert (second.started, second.ended) == (None, None)


class Ti:
    """What a trigger left of a job that was ended in the middle."""

    def __init__(self, seen: dict[str, Any]) -> None:
        self.seen = seen

    def xcom_pull(self, task_ids: str, key: str) -> Any:
        assert key == "pytorch_job_log"
        return self.seen.get(task_ids)


@pytest.mark.parametrize(("started", "hours"), [(3600.0, 2.0), (None, 0.0)])
def test_a_run_that_is_ended_in_the_middle_is_counted_until_then(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, started: float | None, hours: float
) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tracking, "log_hours", lambda *given: told.append(given))
    opened(yard, gpu_hours=1)
    Meter.of(MANIFEST).began(job(1))
    moment = None if started is None else datetime.fromtimestamp(time.time() - started, UTC)
    seen = Observation(Phase.RUNNING if started else Phase.QUEUED, started=moment)
    ti = Ti({"train": {"uid": "uid-1", "observation": seen.to_dict()}, "tokenise": None})
    spec = RunSpec.read(yard.store, layout.run_key(RUN))
    assert meter.settle(yard.store, spec, "m").gpu_hours == 0  # the reaper, hours later
    assert "without 1 whose end was not seen" in told[-1][-1]
    for _ in range(2):  # the teardown may be tried again
        found = meter.settle(yard.store, spec, "m", meter.seen_starts(ti))
    assert found.gpu_hours == pytest.approx(hours, abs=0.05)
    (metrics, tag, text) = told[-1][2:]
    assert metrics["cost/gpu_hours"] == found.gpu_hours
    assert tag == tracking.TAG_COST
    assert ("`compute.limits.stop_above.gpu_hours` is 1" in text) is bool(started)


def test_a_run_whose_hours_nobody_knows_is_closed_all_the_same(yard: Yard) -> None:
    opened(yard)
    yard.store.put(layout.gang_key(RUN, "uid-1"), b"{torn")
    run = cast(Any, {"run": RUN, "mlflow_run": "m"})
    assert _settled(yard.store, run, Ti({})) == "what it has used is not known"
