"""A sweep whose trials wait in one queue of the cluster: who is stopped early leaves its place to the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from kubeflow_training.jobs.kinds import PYTORCH_JOB
from kubeflow_training.jobs.manifest.ownership import Owner

from dropforge import sweeps, tracking
from dropforge.client.airflow import FINETUNE, SWEEP
from tests.cluster.conftest import Namespace
from tests.e2e.harness import Stack, typed, wait
from tests.kubeflow_training.kueue_situations import GROUP, QUEUE, VERSION, queue
from tests.kubeflow_training.rights import admin, create, documents
from tests.kubeflow_training.situations import PRETEND
from tests.kubeflow_training.situations import Stage as Yard

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

FAMILY = "in-queue"
FILE = """
recipe:
  extends: queued
  train: {max_steps: 100, eval_every: 10}
space:
  train.learning_rate: [1.0e-3, 1.0e-4]
at_once: 2
early_stop: {after_trials: 1}
"""


@pytest.fixture
def room_for_one(namespace: Namespace) -> Iterator[None]:
    """A queue with room for one trial, whose pods do nothing; the stack's account may see how it stands there."""
    shipped = [one for one in documents(namespace.name, "kueue") if one["metadata"]["name"].endswith("-kueue")]
    create(admin(), namespace.name, *shipped)
    yard = Yard(admin(), namespace.name)
    queue(yard, cpus="0.6", flavor={"nodeLabels": PRETEND["node_selector"], "tolerations": PRETEND["tolerations"]})
    yield
    yard.close()


class Trials:
    """The jobs of a sweep's trials."""

    def __init__(self, stack: Stack, namespace: Namespace, sweep: str) -> None:
        self.stack, self.namespace, self.sweep = stack, namespace, sweep

    def jobs(self) -> dict[int, dict[str, Any]]:
        runs = {sweeps.trial_run(self.sweep, number): number for number in (0, 1)}
        owners = [(Owner.of(job), job) for job in self.namespace.jobs()]
        return {runs[owner.run_id]: job for owner, job in owners if owner is not None and owner.run_id in runs}

    def waiting(self) -> set[int]:
        return {number for number, job in self.jobs().items() if PYTORCH_JOB.suspended(job)}

    def measure(self, number: int, loss: float) -> None:
        """What the trial would have measured, were its pods real."""
        noted = sweeps.noted(self.stack.connection.store, FAMILY, self.sweep)[number]
        self.stack.mlflow.log_metric(noted.mlflow_run, "eval/loss", loss, step=10)

    def workloads(self) -> list[Any]:
        custom = self.namespace.custom
        found = custom.list_namespaced_custom_object(GROUP, VERSION, self.namespace.name, "workloads")
        return list(found["items"])

    def tab(self, number: int) -> dict[str, Any]:
        """What the tab of the trial's run shows of its job."""
        query = urlencode({"run_id": sweeps.trial_run(self.sweep, number), "task_id": "train"})
        page = self.stack.connection.airflow._call("GET", f"/dropforge/dags/{FINETUNE}/task.json?{query}")
        found: dict[str, Any] = page["job"]
        return found


def test_a_trial_that_is_stopped_early_leaves_its_place_in_the_queue(
    stack: Stack,
    namespace: Namespace,
    room_for_one: None,
    sample: dict[str, Path],
    presets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DROPFORGE_PRESETS", str(presets))
    for name, path in sample.items():
        if not name.startswith("_"):
            stack.connection.store.put(f"sources/queued/{name}", path.read_bytes())
    file = tmp_path / "sweep.yaml"
    file.write_text(FILE)
    done = typed(stack, "sweep", str(file), "--family", FAMILY, "--data", "prefix:sources/queued/")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Sweep ")]
    sweep = line.removeprefix("Sweep ").partition(": ")[0]
    trials = Trials(stack, namespace, sweep)

    wait("one trial at work, and one behind it", lambda: len(trials.jobs()) == 2 and len(trials.waiting()) == 1)
    (second,) = trials.waiting()
    first = 1 - second
    wait("its pod", lambda: len(namespace.running()) == 1)
    shown = wait("its place", lambda: (job := trials.tab(second)).get("position") and job["reason"] and job, 60)
    assert (shown["phase"], shown["reason"], shown["queue"], shown["position"]) == ("queued", "quota", QUEUE, 1)
    assert "waits at position 1 of queue training: couldn't assign flavors" in shown["message"]
    assert trials.tab(first)["phase"] == "running"

    trials.measure(first, 9.0)
    trials.measure(second, 1.0)
    wait("the end of what has fallen behind", lambda: first not in trials.jobs())
    wait("who comes after it", lambda: trials.jobs() and not trials.waiting() and len(namespace.running()) == 1)
    mapped = stack.connection.airflow.mapped_states
    wait("the skip of its trial", lambda: mapped(SWEEP, sweep, "trial").get(first) == "skipped")
    (tracked,) = stack.tracked(sweeps.trial_run(sweep, first))
    assert tracked.info.status == "KILLED"
    assert "is worse than" in tracked.data.tags[tracking.TAG_STOPPED]

    stack.connection.airflow.fail_run(SWEEP, sweep)
    wait("the end of the sweep", lambda: stack.connection.airflow.dag_run(SWEEP, sweep)["state"] == "failed")
    assert trials.jobs() == {}
    wait("an empty queue", lambda: not trials.workloads(), 60)
    assert namespace.running() == []
