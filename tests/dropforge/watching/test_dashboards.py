"""A real Prometheus that scraped a real exporter answers each query of the dashboards; rules fire when they should."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dropforge.watching.alerts import ALERTS, RUNBOOKS, rules
from dropforge.watching.dashboards import DASHBOARDS
from dropforge.watching.files import FOLDER, files
from dropforge.watching.panels import is_ours, names_in, to_grafana
from tests.dropforge.watching.conftest import Field
from tests.dropforge.watching.prometheus import need, page, prometheus

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[3]
QUERIES = [query.expr for dashboard in DASHBOARDS for query in dashboard.queries()]
OTHERS = ("DCGM_FI_", "kube_", "airflow_", "mlflow_")
# Asked of a whole stack in tests/e2e/test_metrics.py: there is no Airflow here, and this MLflow exports nothing.
SERVICES = ("dropforge_dag_", "airflow_", "mlflow_")


@pytest.fixture
def address(field: Field) -> Iterator[str]:
    """Host and port of `dropforge metrics`, which sees something of each kind."""
    field.everything()
    env = {**os.environ, "DROPFORGE_BUCKET": field.store.bucket, "MLFLOW_TRACKING_URI": field.mlflow}
    env["DROPFORGE_STATE"] = "/nonexistent"
    command = [str(Path(sys.executable).with_name("dropforge")), "metrics", "--port", "0", "--every", "1"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Metrics at http://127.0.0.1:"), line + process.communicate()[1]
        yield line.split("/")[2]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_prometheus_answers_each_query(field: Field, address: str, tmp_path: Path) -> None:
    """Those about GPUs and pods from a page in the form of their exporters."""
    need()
    ours = [expr for expr in QUERIES if not any(name.startswith(SERVICES) for name in names_in(expr))]
    assert len([expr for expr in ours if is_ours(expr)]) > 30
    cluster = Path(__file__).with_name("cluster.prom").read_text().replace("FAMILY", field.family)
    rules_of = FOLDER / "rules.yaml"
    with (
        page(lambda: cluster) as others,
        prometheus(tmp_path / "prometheus", {"dropforge": address, "cluster": others}, rules_of) as server,
    ):
        waiting = {expr.replace("$family", field.family) for expr in ours}
        end = time.monotonic() + 60
        while waiting:
            waiting = {expr for expr in waiting if not server.ask(expr)}
            assert time.monotonic() < end, waiting
            time.sleep(0.1)
        # What the services answer is at least understood.
        for expr in set(QUERIES) - set(ours):
            assert not server.ask(expr.replace("$family", "x"))
        (group,) = server.get("rules")["groups"]
        assert {rule["name"] for rule in group["rules"]} == {alert.name for alert in ALERTS}
        assert not [rule for rule in group["rules"] if rule.get("lastError")]


def test_what_the_exporter_does_not_tell_is_asked_of_somebody_known() -> None:
    named = {name for expr in [*QUERIES, *(alert.expr for alert in ALERTS)] for name in names_in(expr)}
    assert {name for name in named if not name.startswith(("dropforge_", *OTHERS))} == set()
    assert {"DCGM_FI_DEV_GPU_UTIL", "dropforge_drop_wait_seconds_bucket", "mlflow_http_request_total"} <= named


def test_names_are_found_in_a_query() -> None:
    expr = 'sum by (a, b) (rate(x_total{c=~"d e", f="g"}[1h:5m])) / on (h) group_left (i) y > 1e3 or (z * 2)'
    assert names_in(expr) == {"x_total", "y", "z"}


def test_each_metric_has_a_place_on_the_pages() -> None:
    text = (ROOT / "docs/reference/prometheus-metrics.md").read_text()
    for expr in [*QUERIES, *(alert.expr for alert in ALERTS)]:
        for name in names_in(expr):
            if name.startswith("dropforge_"):
                short = re.sub(r"_(bucket|sum|count)$", "", name.removeprefix("dropforge_"))
                assert f"`{short}`" in text or f"`{short.removeprefix('training')}`" in text, name


def test_the_files_are_those_of_the_code() -> None:
    for name, content in files().items():
        assert (FOLDER / name).read_text() == content, "run `python -m dropforge.watching.files`"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.uid)
def test_panels_lie_beside_each_other(dashboard: Any) -> None:
    made = json.loads(json.dumps(to_grafana(dashboard)))
    taken: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    numbers = [panel["id"] for panel in made["panels"]]
    assert len(numbers) == len(set(numbers))


#: For each alert: series that let it fire, in promtool's words (one value a minute), and others that do not.
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "DropforgeMetricsMissing": ({}, {'dropforge_source_up{source="mlflow"}': "0x300"}),
    "DropforgeSourceDown": (
        {'dropforge_source_up{source="mlflow"}': "0x300"},
        {'dropforge_source_up{source="mlflow",instance="a"}': "0x300", 'dropforge_source_up{source="mlflow"}': "1x300"},
    ),
    "DropforgeIntakePaused": (
        {'dropforge_dag_paused{dag="d"}': "1x300"},
        {'dropforge_dag_paused{dag="d"}': "1x200 0x99"},
    ),
    "DropforgeDropWaits": (
        {'dropforge_drop_oldest_waiting_timestamp_seconds{family="a"}': "0x300"},
        {'dropforge_drop_oldest_waiting_timestamp_seconds{family="a"}': "0+60x300"},  # always another one
    ),
    "DropforgeInboxStuck": ({"dropforge_inbox_messages": "2x300"}, {"dropforge_inbox_messages": "2 0x9 3 0x289"}),
    "DropforgeDropRefused": (
        {'dropforge_drops_refused{family="a"}': "1x300"},
        {'dropforge_drops_refused{family="a"}': "0x300"},
    ),
    "DropforgeDeadMessages": ({"dropforge_dead_messages": "1x300"}, {"dropforge_dead_messages": "0x300"}),
    "DropforgeRunsFail": (
        {
            'dropforge_run_last_end_timestamp_seconds{family="a",state="failed"}': "9x300",
            'dropforge_run_last_end_timestamp_seconds{family="b",state="failed"}': "9x300",
            'dropforge_run_last_end_timestamp_seconds{family="b",state="finished"}': "8x300",
        },
        {
            'dropforge_run_last_end_timestamp_seconds{family="a",state="failed"}': "9x300",
            'dropforge_run_last_end_timestamp_seconds{family="a",state="finished"}': "10x300",
        },
    ),
    "DropforgeRunWaitsForPods": (
        {'dropforge_run_oldest_waiting_timestamp_seconds{family="a"}': "0x300"},
        {'dropforge_run_oldest_waiting_timestamp_seconds{family="a"}': "0+50x300"},
    ),
    "DropforgeTrainingStalled": (
        {'dropforge_training_last_step_timestamp_seconds{family="a"}': "0x300"},
        {'dropforge_training_last_step_timestamp_seconds{family="a"}': "0+60x300"},
    ),
    "DropforgeCheckpointOld": (
        {'dropforge_training_checkpoint_timestamp_seconds{family="a"}': "0x300"},
        {'dropforge_training_checkpoint_timestamp_seconds{family="a"}': "0+55x300"},
    ),
    "DropforgeTrainingSlow": (
        {'dropforge_training_tokens_per_second{family="a"}': "1000x250 500x50"},
        {'dropforge_training_tokens_per_second{family="a"}': "1000x250 700x50"},
    ),
    "DropforgeGpuXid": (
        {
            'DCGM_FI_DEV_XID_ERRORS{Hostname="n",gpu="0"}': "0x294 79x5",
            'DCGM_FI_DEV_XID_ERRORS{Hostname="n",gpu="1"}': "13x294 48x5",
            # Newer exporters, for which a new code is a new series.
            'DCGM_FI_DEV_XID_ERRORS{Hostname="n",gpu="2",err_code="0"}': "0x294 stale",
            'DCGM_FI_DEV_XID_ERRORS{Hostname="n",gpu="2",err_code="64"}': "_x295 64x4",
        },
        {
            'DCGM_FI_DEV_XID_ERRORS{Hostname="n",gpu="0"}': "0x300",
            'DCGM_FI_DEV_XID_ERRORS{Hostname="n",gpu="1"}': "0x200 79x99",  # mended since, but it stays the last
            **{
                f'DCGM_FI_DEV_XID_ERRORS{{Hostname="n",gpu="{code}"}}': f"0x294 {code}x5"
                for code in (13, 31, 43, 45, 63, 92, 94, 145, 154)
            },
            'DCGM_FI_DEV_XID_ERRORS{Hostname="m",gpu="0"}': "79x294 0x5",  # its exporter was started anew
        },
    ),
    "DropforgeGpuHot": (
        {'DCGM_FI_DEV_GPU_TEMP{Hostname="n",gpu="0"}': "90x300"},
        {'DCGM_FI_DEV_GPU_TEMP{Hostname="n",gpu="0"}': "90 80x299"},
    ),
    "DropforgeSchedulerSilent": ({"airflow_scheduler_heartbeat": "5x300"}, {"airflow_scheduler_heartbeat": "0+12x300"}),
}


#: How many of its bad series fire, where that is not one.
FIRE = {"DropforgeRunsFail": 2, "DropforgeGpuXid": 3}


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    need()
    assert CASES.keys() == {alert.name for alert in ALERTS}
    tests = []
    for alert, (bad, good) in CASES.items():
        for series in (bad, good):
            fires = 0 if series is good else FIRE.get(alert, 1)
            told = {
                "eval_time": "299m",
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)',
            }
            tests.append(
                {
                    "name": f"{alert} {'bad' if fires else 'good'}",
                    "interval": "1m",
                    "input_series": [{"series": name, "values": values} for name, values in series.items()],
                    "promql_expr_test": [{**told, "exp_samples": [{"labels": "{}", "value": fires}]}],
                }
            )
    path = tmp_path / "tests.yaml"
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules()))
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hours_are_those_of_one_exporter_whichever_was_up(tmp_path: Path) -> None:
    need()
    (expr,) = [expr for expr in QUERIES if "training_gpus" in expr and "sum_over_time" in expr]
    told = {"expr": f"round({expr.replace('$family', 'a')})", "eval_time": "200m"}
    name = 'dropforge_training_gpus{family="a",instance="%d"}'
    series = {name % 1: "8x30 stale", name % 2: "_x20 8x39 stale"}  # an hour, and both for ten minutes of it
    test = {
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [{**told, "exp_samples": [{"labels": '{family="a"}', "value": 8}]}],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_its_page() -> None:
    text = (ROOT / RUNBOOKS).read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == [alert.name for alert in ALERTS]
    assert all(len(body.strip()) > 150 for body in sections.values())
    (group,) = rules("https://example.org/runbooks")["groups"]
    urls = [rule["annotations"]["runbook_url"] for rule in group["rules"]]
    assert urls[0] == "https://example.org/runbooks#dropforgemetricsmissing"
