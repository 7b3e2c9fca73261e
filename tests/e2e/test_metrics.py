"""A real Prometheus scrapes the real stack: each query of the dashboards has an answer, as has what alerts ask for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dropforge import layout, tracking
from dropforge.client.airflow import FINETUNE
from dropforge.client.drops import wait_for_run
from dropforge.stack.state import read_state
from dropforge.watching.alerts import ALERTS
from dropforge.watching.dashboards import DASHBOARDS
from dropforge.watching.files import FOLDER
from dropforge.watching.panels import names_in
from tests.dropforge.watching.prometheus import Prometheus, need, prometheus
from tests.e2e.harness import Stack, wait
from tests.e2e.statsd import Statsd

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

FAMILY = "watched"
ENDLESS = """
extends: tiny
train: {{max_steps: 100000, log_every: 1, eval_every: 20, checkpoint_every: 20}}
evaluate: {{max_rows: 40}}
compute: {{nodes: 1, processes_per_node: 2, cpus: {cpus}}}
"""
#: Less than the recipe of its family, which is that of the drop before it.
SHORT = "train: {max_steps: 20}\n"

#: What no stack without GPUs and without a cluster can answer, and why.
NOT_HERE = {
    "DCGM_FI_": "DCGM's exporter needs NVIDIA's driver",
    "kube_": "kube-state-metrics needs a cluster",
    "dropforge_training_mfu_ratio": "the trainer knows peaks of GPUs alone",
}
# An alert's answer is empty while all is well, so what has to be there is each metric that it names.
ALERTED = {name for alert in ALERTS for name in names_in(alert.expr)}
ASKED = {
    expr.replace("$family", FAMILY)
    for expr in {query.expr for dashboard in DASHBOARDS for query in dashboard.queries()} | ALERTED
    if not any(name.startswith(tuple(NOT_HERE)) for name in names_in(expr))
}
# What only a run says that came to its report.
OF_A_REPORT = ("run_queue_seconds", "run_last_end_timestamp_seconds")


@pytest.fixture(scope="module")
def server(stack: Stack, airflow_metrics: Statsd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, for which there are `dropforge metrics` of the stack, Airflow and MLflow."""
    need()
    command = [str(Path(sys.executable).with_name("dropforge")), "metrics", "--port", "0", "--every", "1"]
    command += ["--state", str(stack.folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Metrics at "), line + process.communicate()[1]
        targets = {
            "dropforge": line.split("/")[2],
            "airflow": airflow_metrics.address,
            "mlflow": stack.connection.settings.tracking_uri.split("/")[2],
        }
        running = read_state(stack.folder)
        assert running is not None
        logins = {"mlflow": running.mlflow_login}
        with prometheus(tmp_path_factory.mktemp("prometheus"), targets, FOLDER / "rules.yaml", logins) as found:
            yield found
    finally:
        process.terminate()
        process.wait()


def one(server: Prometheus, expr: str) -> float | None:
    """The only value of an answer; None without one."""
    found = server.ask(expr)
    return float(found[0]["value"][1]) if found else None


def test_each_query_has_an_answer(stack: Stack, server: Prometheus, samples: dict[int, dict[str, Path]]) -> None:
    missing = set(ASKED)

    def answered(*but: str) -> bool:
        """Whether each query had its answer by now, those with one of these words left out."""
        missing.difference_update(
            [expr for expr in missing if any(told["value"][1] != "NaN" for told in server.ask(expr))]
        )
        return all(any(word in expr for word in but) for expr in missing)

    def until(*but: str) -> None:
        try:
            wait("answers", lambda: answered(*but), 300)
        except pytest.fail.Exception:
            pytest.fail("\n".join(["no series for", *sorted(missing)]))

    # Two runs of which the second waits for the first one's cores; before it, their drops wait for the DAG.
    airflow, store = stack.connection.airflow, stack.connection.store
    cpus = json.loads((Path(os.environ["KUBEFLOW_TRAINING_HOME"]) / "supervisor.json").read_text())["cpus"]
    airflow._call("PATCH", f"/api/v2/dags/{FINETUNE}", json={"is_paused": True})
    try:
        long = stack.drop(FAMILY, "long", samples[1], ENDLESS.format(cpus=cpus))
        wait("a drop that waits", lambda: one(server, f'dropforge_drops{{family="{FAMILY}",state="waiting"}}') == 1)
        wait("its wait", lambda: server.ask(f'dropforge_drop_oldest_waiting_timestamp_seconds{{family="{FAMILY}"}}'))
        answered()
    finally:
        airflow._call("PATCH", f"/api/v2/dags/{FINETUNE}", json={"is_paused": False})
    first = wait_for_run(stack.connection, long, 240)  # who waits for a paused DAG is looked at once a minute
    try:
        wait("training", lambda: one(server, f'dropforge_runs{{family="{FAMILY}",state="training"}}') == 1)
        (tracked,) = stack.tracked(first)
        folder = f"{layout.run_prefix(tracked.data.tags[tracking.TAG_RUN])}checkpoints/"
        # Before those that are told: an exporter that looked some seconds ago tells of one that is deleted by now.
        manifests = wait(
            "a checkpoint",
            lambda: [when for key, when in store.times(folder).items() if key.endswith("/manifest.json")],
        )
        short = stack.drop(FAMILY, "short", samples[2], SHORT)
        second = wait_for_run(stack.connection, short)
        until(*OF_A_REPORT)

        speed = one(server, f'dropforge_training_tokens_per_second{{family="{FAMILY}"}}')
        assert speed is not None
        assert speed > 0
        since = time.time() - (one(server, f'dropforge_training_last_step_timestamp_seconds{{family="{FAMILY}"}}') or 0)
        assert since < 30
        saved = one(server, f'dropforge_training_checkpoint_timestamp_seconds{{family="{FAMILY}"}}') or 0
        assert min(manifests) - 1 <= saved <= time.time()
    finally:  # it would hold the cores of all others
        stack.cancel(first)
    assert (stack.end(first), stack.end(second)) == ("failed", "success")
    until()
    for state, task in (("killed", 'task!=""'), ("finished", 'task=""')):
        asked = f'dropforge_runs{{family="{FAMILY}",state="{state}",{task}}}'
        assert wait(f"a run that is {state}", lambda asked=asked: one(server, asked), 60) == 1
    wait("the training's series to end", lambda: not server.ask(f'dropforge_training_loss{{family="{FAMILY}"}}'), 60)
    used = one(server, f'dropforge_core_seconds{{family="{FAMILY}"}}') or 0
    told = sum(stack.tracked(run)[0].data.metrics["cost/core_hours"] for run in (first, second))
    assert used == pytest.approx(3600 * told, rel=0.5, abs=10)

    # Everything is scraped without a complaint, each rule was worked out, and none of those that are critical fires.
    assert {(one["labels"]["job"], one["health"]) for one in server.get("targets")["activeTargets"]} == {
        (job, "up") for job in ("dropforge", "airflow", "mlflow")
    }
    (group,) = server.get("rules")["groups"]
    assert {(rule["name"], rule["health"]) for rule in group["rules"]} == {(alert.name, "ok") for alert in ALERTS}
    critical = [rule for rule in group["rules"] if rule["labels"]["severity"] == "critical"]
    assert critical
    assert not [rule["name"] for rule in critical if rule["state"] == "firing"]
