"""`top`, `shell`, `queue` and the end of `stop` on real processes of the local cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from kubeflow_training.jobs.local.capacity import Resources
from kubeflow_training.jobs.manifest.ownership import Owner
from kubeflow_training.jobs.observation import Phase

from dropforge import layout, tracking
from dropforge.cli.ranks import Pod, Point, ranks_of, use
from dropforge.cli.waits import duration, starts
from dropforge.client.airflow import FINETUNE
from dropforge.run import RunSpec, Tracking
from dropforge.stages import STAGES
from dropforge.store import S3Store
from tests.dropforge.cli.conftest import DagRun, FakeAirflow, Terminal
from tests.kubeflow_training.conftest import Cluster, stopped_cluster  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(600)

OPENED = ("success",) * STAGES.index("train")
RANKS = """
import os, subprocess, sys, time
for local in range(2):
    rank = int(os.environ['PET_NODE_RANK']) * 2 + local
    env = {**os.environ, 'LOCAL_RANK': str(local), 'RANK': str(rank), 'OF_RANK': f'r{rank}'}
    work = 'import time\\nend = time.time() + 600\\nwhile time.time() < end: sum(range(400000)); time.sleep(0.05)'
    subprocess.Popen([sys.executable, '-c', work], env=env)
time.sleep(600)
"""


class Runs:
    """Runs that are opened in MLflow and have a job, as the tasks of the DAG leave them."""

    def __init__(self, cluster: Cluster, mlflow: str, store: S3Store, airflow: FakeAirflow) -> None:
        self.cluster, self.mlflow, self.store, self.airflow = cluster, mlflow, store, airflow

    def train(self, name: str, script: str, family: str = "work", **job: object) -> Tracking:
        dag_run = f"manual__{name}"
        params = {"compute.backend": "local", "compute.namespace": "default", "compute.grace_seconds": "5"}
        spec = RunSpec(name, family, 1, "", "", "", "0" * 64, {"train": {"method": "full"}}, "code")
        self.store.put(layout.run_key(name), spec.to_json())
        made = tracking.open_run(self.mlflow, spec, params, {tracking.TAG_DAG_RUN: dag_run})
        self.airflow.add(DagRun(dag_run, "running", (*OPENED, "deferred")))
        owner = Owner(FINETUNE, dag_run, "train")
        labels = {**owner.labels("1", 1), "dropforge/run": name, "dropforge/purpose": "train"}
        self.cluster.submit(script, name, labels=labels, annotations=owner.annotations("1", 1), **job)
        return made


@pytest.fixture
def runs(
    stopped_cluster: Cluster,  # noqa: F811
    terminal: Terminal,
    mlflow_server: str,
    s3_store: S3Store,
    airflow: FakeAirflow,
    monkeypatch: pytest.MonkeyPatch,
) -> Runs:
    stopped_cluster.start()
    monkeypatch.setenv("KUBEFLOW_TRAINING_HOME", str(stopped_cluster.home))
    return Runs(stopped_cluster, mlflow_server, s3_store, airflow)


def typed(terminal: Terminal, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from dropforge.cli.app import main; main()", *words]
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=os.environ, timeout=120
    )


def test_two_pods_of_two_ranks(runs: Runs, terminal: Terminal, airflow: FakeAirflow) -> None:
    made = runs.train("work-1", RANKS, nodes=2, processes_per_node=2)
    runs.cluster.wait(Phase.RUNNING, name="work-1")
    mlflow = tracking.client(runs.mlflow)
    now = int(time.time() * 1000)
    for name, value, step in (
        ("train/tokens", 640.0, 12),
        ("train/loss", 2.5, 12),
        ("train/tokens_per_second", 1234.0, 12),
        ("eval/loss", float("nan"), 10),
        ("system/node_1/cpu_utilization_percentage", 43.0, 5),
        ("system/node_1/gpu_1_utilization_percentage", 97.0, 5),
        ("system/node_1/gpu_1_memory_usage_megabytes", 41_000.0, 5),
    ):
        mlflow.log_metric(made.run_id, name, value, timestamp=now, step=step)
    mlflow.set_tag(made.run_id, tracking.TAG_STEPS, "120")
    runs.cluster.until(lambda: len(json.loads(terminal("top", "work-1", "--json").stdout)["ranks"]) == 4)

    def told() -> dict[str, object]:
        found: dict[str, object] = json.loads(terminal("top", "work-1", "--json").stdout)
        return found

    def busy() -> dict[str, object] | None:
        found = told()
        return found if all(rank["of"] == "process" and rank["cpu_percent"] for rank in found["ranks"]) else None  # type: ignore[attr-defined]

    found = runs.cluster.until(busy, 60)
    assert (found["stage"], found["state"], found["step"], found["steps"]) == ("train", "running", 12, 120)
    assert (found["loss"], found["eval_loss"], found["tokens_per_second"]) == (2.5, None, 1234.0)
    ranks: list[dict[str, object]] = found["ranks"]  # type: ignore[assignment]
    assert [rank["pod"] for rank in ranks] == ["work-1-master-0"] * 2 + ["work-1-worker-0"] * 2
    assert {rank["phase"] for rank in ranks} == {"Running"}
    assert [rank["gpu_percent"] for rank in ranks] == [None, None, None, 97.0]
    assert ranks[3]["gpu_memory_bytes"] == 41_000_000_000
    assert ranks[1]["seen_seconds"] is None  # nothing has been heard of the first node but its training
    assert all(rank["seen_seconds"] is not None for rank in (ranks[0], ranks[2], ranks[3]))
    assert all(1e6 < rank["memory_bytes"] < 1e9 for rank in ranks)  # type: ignore[operator]
    shown = terminal("top", "work-1", "--once").output
    assert "step 12/120  loss 2.5000  1,234 tok/s" in shown
    assert "97 %  41.0 GB" in shown

    done = typed(terminal, "shell", "work-1", "--rank", "3", "--", "sh", "-c", "echo $OF_RANK $RANK; pwd; exit 7")
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines()[0] == "r3 3"
    assert done.stdout.splitlines()[1].endswith("work-1-worker-0/work")
    done = typed(terminal, "shell", "work-1", "-r", "4", "--", "true")
    assert (done.returncode, "the job has ranks 0 to 3" in done.stderr) == (2, True)
    done = typed(terminal, "shell", "work-1", "--", "/none/[/red]")
    assert (done.returncode, "/none/[/red] cannot be started" in done.stderr) == (2, True)

    # Airflow calls it over while its processes still run: only their end is the end.
    airflow.dag_runs["manual__work-1"].state = "failed"
    airflow.dag_runs["manual__work-1"].states = (*OPENED, "failed")
    stopping = subprocess.Popen(
        [sys.executable, "-c", "from dropforge.cli.app import main; main()", "stop", "work-1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    runs.cluster.until(lambda: airflow.dag_runs["manual__work-1"].looks > 12, 60)
    assert stopping.poll() is None
    runs.cluster.client.delete("work-1", "default")
    assert stopping.wait(60) == 0
    assert runs.cluster.read("work-1") is None
    assert "none of its jobs is running now" in str(terminal("shell", "work-1").exception)
    assert json.loads(terminal("top", "work-1", "--json").stdout)["ranks"] == []


def test_runs_that_wait_are_listed_held_and_moved(runs: Runs, terminal: Terminal, airflow: FakeAirflow) -> None:
    now = int(time.time() * 1000)
    mlflow = tracking.client(runs.mlflow)
    first = runs.train("wait-1", "import time; time.sleep(600)", "waits", cpus=4)
    mlflow.log_metric(first.run_id, "train/eta_seconds", 600.0, timestamp=now)
    runs.cluster.wait(Phase.RUNNING, name="wait-1")
    before = RunSpec("wait-0", "waits", 1, "", "", "", "0" * 64, {"train": {"method": "full"}}, "code")
    ended = tracking.open_run(runs.mlflow, before, {}, {})
    mlflow.log_metric(ended.run_id, "wall/seconds", 1800.0)
    mlflow.set_terminated(ended.run_id, "FINISHED")
    for name in ("wait-2", "wait-3"):
        runs.train(name, "import time; time.sleep(600)", "waits", cpus=4)
    runs.cluster.until(lambda: "1 ahead" in runs.cluster.observe("wait-3").message)
    airflow.add(DagRun("manual__q", "queued"))
    waits = RunSpec("wait-5", "waits", 1, "", "", "", "0" * 64, {"train": {"method": "full"}}, "code")
    asked = tracking.open_run(runs.mlflow, waits, {}, {tracking.TAG_DAG_RUN: "manual__asked"})
    mlflow.set_tag(asked.run_id, tracking.TAG_APPROVAL, "asked until [/red]")
    airflow.add(DagRun("manual__asked", "running", (*("success",) * STAGES.index("approve"), "awaiting_input")))
    runs.store.put(layout.turn_key("waits"), json.dumps({"owner": "manual__wait-1"}).encode())
    turn = RunSpec("wait-4", "waits", 1, "", "", "", "0" * 64, {"train": {"method": "full"}}, "code")
    tracking.open_run(runs.mlflow, turn, {}, {tracking.TAG_DAG_RUN: "manual__turn"})
    airflow.add(DagRun("manual__turn", "running", (*("success",) * STAGES.index("champion"), "up_for_reschedule")))

    def listed() -> dict[str, dict[str, object]]:
        return {wait["run"] or wait["dag_run"]: wait for wait in json.loads(terminal("queue", "--json").stdout)}

    found = listed()
    assert found.keys() == {"wait-2", "wait-3", "wait-4", "wait-5", "manual__q"}
    assert (found["manual__q"]["place"], found["manual__q"]["position"]) == ("airflow", 1)
    assert found["wait-5"]["reason"] == "awaiting approval: dropforge approve wait-5 (asked until [/red])"
    assert found["wait-4"]["reason"] == "run wait-1, which its family compares now"
    two, three = found["wait-2"], found["wait-3"]
    assert (two["place"], two["position"], three["position"]) == ("machine", 1, 2)
    assert "waiting for 4 cpus" in str(two["reason"])
    spent = time.time() - now / 1000 + 1
    assert 600 - spent < float(str(two["eta"])) <= 600
    assert 2400 - spent < float(str(three["eta"])) <= 2400  # after the family's average
    assert terminal("queue", "priority", "wait-3", "2").exit_code == 0
    assert terminal("queue", "hold", "wait-2").exit_code == 0
    found = listed()
    assert (found["wait-3"]["position"], found["wait-3"]["priority"]) == (1, 2)
    assert (found["wait-2"]["held"], found["wait-2"]["position"], found["wait-2"]["eta"]) == (True, None, None)
    shown = terminal("queue").output
    left = range(600 - int(time.time() - now / 1000 + 2), 601)  # seconds: ten minutes, less what this has taken
    assert any(duration(seconds) in shown for seconds in left)
    assert "held" in shown
    assert terminal("queue", "release", "wait-2").exit_code == 0
    assert (listed()["wait-2"]["held"], listed()["wait-2"]["position"]) == (False, 2)
    assert "it waits in no queue: its job is running" in str(terminal("queue", "hold", "wait-1").exception)
    assert "it has no job now" in str(terminal("queue", "hold", "wait-4").exception)


def test_when_each_may_start() -> None:
    one, two = Resources(1), Resources(2)
    # Two are free in 10 s; nobody overtakes, and the third comes when the first of them is done.
    assert starts(Resources(), [(two, 10.0), (two, 50.0)], [(one, 5.0), (one, 100.0), (two, 1.0)]) == [10.0, 10.0, 50.0]
    assert starts(Resources(), [(two, None), (one, 7.0)], [(one, None), (one, 3.0)]) == [7.0, None]
    assert starts(two, [], [(two, 3.0), (two, 4.0), (Resources(3), 1.0), (one, 1.0)]) == [0.0, 3.0, None, None]


def test_what_an_earlier_gang_told_does_not_count() -> None:
    metrics = {
        "system/cpu_utilization_percentage": Point(50.0, 100.0),
        "system/system_memory_usage_megabytes": Point(2000.0, 300.0),
        "train/loss": Point(1.0, 90.0),
        "system/other/thing": Point(1.0, 900.0),
    }
    (rank,) = ranks_of([Pod("p", 0, "Running", "n")], 1, metrics, {}, since=200.0)
    assert (rank.cpu, rank.memory, rank.seen, rank.of) == (None, 2_000_000_000, 300.0, "node")
    used = use({0: (1.0, 5)}, {0: (2.0, 6), 1: (9.0, 7)}, 2.0)
    assert ((used[0].cpu, used[0].memory), (used[1].cpu, used[1].memory)) == ((50.0, 6), (None, 7))
