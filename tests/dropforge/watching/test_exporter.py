"""What the exporter tells is what ledger, folders and MLflow say, whoever asks and however often it is restarted."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from kubeflow_training.jobs.observation import Reason

from dropforge import gangs, layout, ledger, tracking
from dropforge.errors import DropforgeError
from dropforge.install.exporter import exporter
from dropforge.rest import Rest
from dropforge.store import S3Store
from dropforge.watching.exporter import KEEP, Exporter, Watch
from dropforge.watching.metrics import REASONS, TASKS
from dropforge.watching.runs import Runs, read_run
from dropforge.watching.snapshot import Names
from tests.dropforge.watching.conftest import Field, scraped, series, value

pytestmark = pytest.mark.timeout(300)


def test_each_state_is_told_from_what_is_stored(field: Field) -> None:
    runs = field.everything()
    family, text = field.family, scraped(field.exporter())
    found = series(text)
    for state, count in (("waiting", 1), ("taken", 1), ("superseded", 1)):
        assert value(found, "drops", family=family, state=state) == count, state
    assert value(found, "drops_refused", family=family) == 1
    since = value(found, "drop_oldest_waiting_timestamp_seconds", family=family)
    assert since == pytest.approx(time.time(), abs=60)
    assert value(found, "drop_wait_seconds_count", family=family) == 1
    told = {
        ("preparing", "", ""): 1,
        ("waiting", "", ""): 1,
        ("training", "", ""): 1,
        ("unread", "", ""): 0,
        ("judging", "", ""): 0,
        ("asked", "", ""): 1,
        ("finished", "", ""): 2,
        ("failed", "train", "out of memory"): 1,
        ("killed", "confirm", ""): 1,
        ("failed", "", ""): 0,  # so that the first failure is a change
    }
    for (state, task, reason), count in told.items():
        assert value(found, "runs", family=family, state=state, task=task, reason=reason) == count, state
    assert value(found, "gate_decisions", family=family, decision="promote") == 1
    assert value(found, "gate_decisions", family=family, decision="keep") == 1
    assert value(found, "runs_by_health", family=family, health="data-bound") == 1
    assert value(found, "runs_by_health", family=family, health="throttled") == 0
    assert value(found, "run_queue_seconds_sum", family=family) == 84
    assert value(found, "run_queue_seconds_bucket", family=family, le="15.0") == 0
    assert value(found, "run_queue_seconds_bucket", family=family, le="60.0") == 2
    # 2 + 2 + 0.5 hours of runs that have ended, and two GPUs for a minute.
    assert value(found, "gpu_seconds", family=family) == pytest.approx(4.5 * 3600 + 120, abs=60)
    assert value(found, "core_seconds", family=family) == pytest.approx(16 * 3600 + 480, abs=240)
    assert value(found, "training_gpus", family=family) == 2
    assert value(found, "training_cores", family=family) == 8
    assert value(found, "training_tokens_per_second", family=family) == 1000
    assert value(found, "training_loss", family=family) == 2.5
    assert value(found, "training_eval_loss", family=family) == 2.4
    assert value(found, "training_data_wait_ratio", family=family) == pytest.approx(0.2)
    assert value(found, "training_progress_ratio", family=family) == pytest.approx(0.3)
    saved = value(found, "training_checkpoint_timestamp_seconds", family=family)
    manifest = field.store.stat(f"{layout.run_prefix(runs['training'].run)}checkpoints/step-20/manifest.json")
    assert manifest is not None
    assert saved == manifest.modified
    for source in ("ledger", "mlflow", "folders"):
        assert value(found, "source_up", source=source) == 1
    assert value(found, "source_up", source="airflow") is None  # nobody asked it
    assert not any("run" in dict(labels) for _, labels in found)  # a run is no label


def test_the_names_are_as_prometheus_wants_them(field: Field) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed; Debian: apt install prometheus")
    field.everything()
    text = scraped(field.exporter())
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_restart_and_a_second_exporter_tell_the_same(field: Field) -> None:
    runs = field.everything()
    first = field.exporter()
    scraped(first)
    # A gang counted until now, and now its end is told, which was earlier: who saw it before knows no more than others.
    gang = gangs.kept(field.store, runs["training"].run)[0]
    gangs.keep(field.store, runs["training"].run, replace(gang, started=gang.created, ended=gang.created))
    before, again, other = (series(scraped(one)) for one in (first, first, field.exporter()))
    names = ("runs", "drops", "gate_decisions", "run_queue_seconds_sum", "gpu_seconds", "core_seconds", "training_gpus")
    for name in names:
        own = [
            {key: value for key, value in found.items() if key[0] == f"dropforge_{name}"}
            for found in (before, again, other)
        ]
        assert own[0]
        assert own[0] == own[1] == own[2]


def test_what_changes_is_seen_without_reading_all_again(field: Field) -> None:
    runs = field.everything()
    family = field.family
    asked: list[str] = []

    class Counting(Rest):
        def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
            asked.append((body or {}).get("filter", ""))
            return super().call(method, path, body)

    exporter = Exporter(Watch(field.store, Runs(Counting(field.mlflow))), 1)
    scraped(exporter)
    asked.clear()
    gang = gangs.kept(field.store, runs["training"].run)[0]
    hour = replace(gang, started=time.time() - 3600, ended=time.time())
    gangs.keep(field.store, runs["training"].run, hour)
    told = {tracking.TAG_ENDED_BY: "train", tracking.TAG_REASON: "node lost"}
    field.close(runs["training"], "FAILED", told, cost__gpu_hours=2.0)
    tracking.open_run(field.mlflow, runs["failed"], {}, {})  # cleared
    tracking.client(field.mlflow).delete_run(field.id(runs["waiting"]))
    found = series(scraped(exporter))
    assert value(found, "runs", family=family, state="failed", task="train", reason="node lost") == 1
    assert value(found, "runs", family=family, state="failed", task="train", reason="out of memory") is None
    assert value(found, "runs", family=family, state="preparing", task="", reason="") == 2  # with the cleared one
    assert value(found, "runs", family=family, state="training", task="", reason="") == 0
    assert value(found, "training_loss", family=family) is None
    # Those of the ended one are counted once.
    assert value(found, "gpu_seconds", family=family) == pytest.approx(6.5 * 3600, abs=60)
    assert all("status = 'RUNNING'" in one or "end_time >" in one for one in asked if one)


def test_a_source_that_is_away_hides_no_other_one(field: Field) -> None:
    field.everything()
    now = [time.time()]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
    watch = Watch(field.store, Runs(Rest(field.mlflow)), now=lambda: now[0])
    exporter = Exporter(watch, 1)
    scraped(exporter)
    watch.runs = Runs(Rest(nobody))
    found = series(scraped(exporter))
    assert value(found, "source_up", source="mlflow") == 0
    assert value(found, "source_up", source="ledger") == 1
    assert value(found, "runs", family=field.family, state="training", task="", reason="") == 1  # for a while
    now[0] += KEEP + 1
    found = series(scraped(exporter))
    assert value(found, "runs", family=field.family, state="training", task="", reason="") is None
    assert value(found, "drops", family=field.family, state="waiting") == 1
    last = value(found, "source_last_success_timestamp_seconds", source="mlflow")
    assert last == pytest.approx(now[0] - KEEP - 1, abs=1)


def test_a_bucket_that_is_away_is_not_blamed_on_mlflow(field: Field) -> None:
    field.everything()
    now = [time.time()]
    watch = Watch(field.store, Runs(Rest(field.mlflow)), now=lambda: now[0])
    exporter = Exporter(watch, 1)
    scraped(exporter)
    watch.store = S3Store("no-such-bucket", client=field.store.client)
    found = series(scraped(exporter))
    for source, up in (("mlflow", 1), ("folders", 0), ("ledger", 0)):
        assert value(found, "source_up", source=source) == up, source
    assert value(found, "training_gpus", family=field.family) == 2  # for a while
    now[0] += KEEP + 1
    found = series(scraped(exporter))
    assert value(found, "training_gpus", family=field.family) is None
    assert value(found, "runs", family=field.family, state="finished", task="", reason="") is None
    assert value(found, "source_up", source="mlflow") == 1


@pytest.mark.parametrize("evil", [b"{}", b"[1]", b"\xff", b'{"gpus": 1' + b"0" * 400 + b"}", b"[" * 100_000])
def test_a_folder_that_somebody_else_has_written_in_hides_no_other_run(
    field: Field, evil: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = field.open(1), field.open(2)
    field.begin(one)
    field.begin(other)
    field.store.put(layout.gang_key(one.run, "evil"), evil)
    exporter = field.exporter()
    for _ in range(3):
        found = series(scraped(exporter))
    assert value(found, "source_up", source="folders") == 1
    assert value(found, "runs", family=field.family, state="unread", task="", reason="") == 1
    assert value(found, "runs", family=field.family, state="training", task="", reason="") == 1
    assert value(found, "training_gpus", family=field.family) == 2
    assert [one.run in line for line in caplog.messages if "folder of run" in line] == [True]
    field.store.delete(layout.gang_key(one.run, "evil"))
    assert value(series(scraped(exporter)), "training_gpus", family=field.family) == 4


def test_runs_whose_folders_nobody_looks_at_do_not_wait(field: Field, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropforge.watching.exporter.OPEN_RUNS", 1)
    old, new = field.open(1), field.open(2)
    field.begin(old)
    field.queue(new, ago=100.0)
    found = series(scraped(field.exporter()))
    assert value(found, "runs", family=field.family, state="unread", task="", reason="") == 1
    assert value(found, "runs", family=field.family, state="waiting", task="", reason="") == 1
    since = value(found, "run_oldest_waiting_timestamp_seconds", family=field.family)
    assert since == pytest.approx(time.time() - 100, abs=30)  # and not since it was opened


def test_a_scrape_asks_no_source(field: Field) -> None:
    field.everything()
    watch = Watch(field.store, Runs(Rest(field.mlflow)))
    exporter = Exporter(watch, 1)
    exporter.look()
    watch.store = watch.runs = None  # type: ignore[assignment]
    assert list(exporter.collect()) == list(exporter.collect()) != []


def test_airflow_is_told_where_somebody_may_ask(field: Field) -> None:
    class Airflow:
        """Two DAGs, one of them paused."""

        def is_paused(self, dag: str) -> bool:
            return dag == "intake"

        def count_runs(self, dag: str, state: str) -> int:
            if dag == "gone":
                raise DropforgeError("Airflow", "it answered 404", "See its log")
            return {"failed": 3}.get(state, 0)

    found = series(scraped(field.exporter(airflow=Airflow(), dags=("intake", "finetune"))))
    assert value(found, "dag_paused", dag="intake") == 1
    assert value(found, "dag_paused", dag="finetune") == 0
    assert value(found, "dag_runs", dag="finetune", state="failed") == 3
    found = series(scraped(field.exporter(airflow=Airflow(), dags=("gone",))))
    assert value(found, "source_up", source="airflow") == 0


def test_runs_of_another_bucket_are_not_told(field: Field) -> None:
    runs = field.everything()
    field.store.delete_all(layout.run_prefix(runs["failed"].run))
    found = series(scraped(field.exporter()))
    assert value(found, "runs", family=field.family, state="failed", task="train", reason="out of memory") is None


def test_a_drop_whose_marker_outlived_its_claim_is_taken(field: Field) -> None:
    drop = field.drop("one")
    ledger.claim(field.store, field.family, drop.id, "run")
    ledger.wait(field.store, drop)  # a crash between the two writes
    found = series(scraped(field.exporter()))
    assert value(found, "run_queue_seconds_count", family=field.family) == 0  # the first run is a change
    assert value(found, "drops", family=field.family, state="waiting") == 0
    assert value(found, "drops", family=field.family, state="taken") == 1


def row(tags: dict[str, str], status: str = "FAILED", **metrics: Any) -> dict[str, Any]:
    """A run in MLflow's words."""
    return {
        "info": {"run_id": "1", "status": status, "start_time": 1, "end_time": 2},
        "data": {
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
            "metrics": [{"key": key, "value": value, "step": 1, "timestamp": 1} for key, value in metrics.items()],
        },
    }


def test_tags_that_a_person_has_written_become_no_labels(field: Field) -> None:
    runs = field.everything()
    evil = {tracking.TAG_ENDED_BY: 'x"} 1\n', tracking.TAG_REASON: "y" * 4000, tracking.TAG_HEALTH: "fast: yes"}
    field.close(runs["training"], "FAILED", evil)
    found = series(scraped(field.exporter()))
    assert value(found, "runs", family=field.family, state="failed", task="other", reason="other") == 1
    ours = {tracking.TAG_RUN: "a-1", tracking.TAG_FAMILY: "a"}
    assert read_run(row({})) is None
    odd = read_run(row({**ours, tracking.TAG_STEPS: "9" * 50, tracking.TAG_ATTEMPT: "-1"}, loss="NaN"))
    assert odd is not None
    assert (odd.steps, odd.attempts, odd.figures) == (0, 0, {})


def test_families_without_end_share_one_label() -> None:
    names = Names(most=3)
    names.take(["c", "b"])
    names.take([f"f{number}" for number in range(1000)])
    assert [names.label(family) for family in ("b", "c", "f0", "f1")] == ["b", "c", "f0", "other"]
    assert names.folded == 999


def test_the_reasons_are_those_of_the_job_library() -> None:
    assert {str(reason) for reason in Reason} == REASONS
    assert {"train", "evaluate", "reaper"} <= TASKS


@contextmanager
def serving(*words: str) -> Iterator[int]:
    """The port of the command, which finds neither bucket nor MLflow."""
    nowhere = dict.fromkeys(("AWS_ENDPOINT_URL", "MLFLOW_TRACKING_URI"), "http://127.0.0.1:9")
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "none")
    env = os.environ | nowhere | keys | {"DROPFORGE_BUCKET": "none-such"}
    command = [sys.executable, "-m", *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as started:
        try:
            assert started.stdout is not None
            yield int(started.stdout.readline().rpartition(":")[2].removesuffix("/metrics\n"))
        finally:
            started.terminate()


def status(address: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_in_a_cluster_it_is_scraped_by_addresses_of_both_kinds() -> None:
    deployment = next(one for one in exporter("image") if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    *words, option, _ = container["args"]
    assert option == "--port"
    with serving(*words) as port:
        for host in ("127.0.0.1", "[::1]") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            assert status(f"http://{host}:{port}/metrics", Host="exporter.airflow:9469") == 200


def test_on_a_machine_of_ones_own_no_page_reads_it_by_a_name_that_leads_there() -> None:
    with serving("dropforge", "metrics") as port:
        address = f"http://127.0.0.1:{port}/metrics"
        assert [status(address), status(address, Host=f"localhost:{port}")] == [200, 200]
        assert [status(address, Host=name) for name in ("evil.example", f"evil.example:{port}", "127.0.0.1.x.org")] == [
            403
        ] * 3
