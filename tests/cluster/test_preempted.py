"""A training of two ranks that an urgent one suspends on the real node: it goes on, and ends with the same bits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kubeflow_training.jobs.kinds import PYTORCH_JOB
from kubeflow_training.jobs.kubernetes import KubernetesCluster
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.observation import Observation, Phase, observe
from kubeflow_training.jobs.observation.reasons import Reason

from dropforge.job import SECRET, train_job
from dropforge.recipes.load import build_recipe
from dropforge.run import RunSpec
from dropforge.store import open_store
from tests.cluster.conftest import Namespace, opened, preset, where_python_is
from tests.cluster.queue_yard import Looks, queues
from tests.e2e.harness import wait
from tests.kubeflow_training.rights import admin
from tests.trainer.toy import Toy, sample_rows, write_dataset
from trainer.state.checkpoint import Checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

GANG = {"nodes": 2, "cpus": 0.7, "memory_gb": 2}
STEPS = 200
COURSE = {"max_steps": STEPS, "checkpoint_every": 1000, "eval_every": 50, "log_every": 1}
"""Nothing is saved but by who is stopped, and at the end."""


@pytest.fixture
def namespace(machine_node: Any, tmp_path: Path) -> Iterator[Namespace]:
    """A namespace whose pods mount a folder of this machine as the claim `bucket`."""
    (tmp_path / "bucket").mkdir()
    with opened(machine_node, tmp_path, machine="/", bucket=str(tmp_path / "bucket")) as made:
        made.core.create_namespaced_secret(made.name, {"metadata": {"name": SECRET}, "stringData": where_python_is()})
        yield made


@pytest.fixture
def toy(namespace: Namespace, tmp_path: Path) -> Toy:
    """That bucket, with a dataset."""
    root = str(tmp_path / "bucket")
    rows = {"train": sample_rows(300), "eval": sample_rows(40, seed=1)}
    return Toy(root, write_dataset(open_store(root), rows))


class Training:
    """A run whose job is the one that the fine-tune DAG would make of its recipe."""

    def __init__(self, toy: Toy, namespace: Namespace, name: str, priority: str) -> None:
        self.toy, self.name, self.namespace = toy, name, namespace
        self.backend = KubernetesCluster(admin(), PYTORCH_JOB)
        compute = preset(namespace.name)["compute"]
        bucket = {"claim": "bucket", "path": toy.root, "read_only": False}
        # The runs' folders in it are this test's own, so the pods are the user that it is.
        compute |= {"volumes": [*compute.get("volumes", []), bucket], "grace_seconds": 60, "run_as": None}
        uri = toy.run(name, train=COURSE, compute=compute | GANG | {"queue": "training", "priority": priority})
        spec = RunSpec.from_json(Path(uri).read_bytes())
        made = self.backend.create(pytorch_job(**train_job(spec, build_recipe(spec.recipe))))
        self.job = str(made.job["metadata"]["name"])

    def look(self) -> Observation:
        found = self.backend.read(self.job, self.namespace.name)
        assert found is not None
        return observe(found.job, found.pods, found.events)

    def step(self) -> int:
        return max((int(step) for step in re.findall(r'@progress {"step": (\d+)', self.log())), default=0)

    def log(self) -> str:
        pods = [name for name in self.namespace.running() if name == f"{self.job}-master-0"]
        return "".join(self.namespace.core.read_namespaced_pod_log(name, self.namespace.name) for name in pods)

    def saved(self) -> list[int]:
        keys = [item.key for item in self.toy.files(self.name).list("checkpoints/")]
        return sorted(int(key.split("step-")[1].split("/")[0]) for key in keys if key.endswith("/manifest.json"))

    def report(self) -> dict[str, Any]:
        return dict(json.loads(self.toy.files(self.name).get("report.json")))

    def final(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Weights and moments of the last checkpoint."""
        found = Checkpoints(self.toy.files(self.name), self.name, "", {})
        (seal,) = (seal for seal in found.seals() if seal.step == STEPS)
        saved = found.read(seal)
        return dict(saved.weights), dict(saved.moments)

    def model(self) -> bytes:
        return self.toy.files(self.name).get("model/model.safetensors")


@pytest.fixture
def priorities(namespace: Namespace) -> Iterator[tuple[str, str]]:
    """A queue with room for the cores of one gang of the real node; its priorities, the lower one first."""
    mark = namespace.name.removeprefix("test-")
    low, urgent = f"low-{mark}", f"urgent-{mark}"
    team = {"namespace": namespace.name, "queue": "training", "largest": GANG}
    file = {
        "flavors": {f"real-{mark}": {}},
        "priorities": {low: -100, urgent: 100},
        "teams": {f"team-{mark}": {**team, "quota": {f"real-{mark}": {"cpus": 1.6, "memory_gb": 8}}}},
    }
    with queues(file):
        yield low, urgent


def test_a_training_that_is_preempted_ends_with_the_bits_of_one_that_was_not(
    toy: Toy, namespace: Namespace, priorities: tuple[str, str]
) -> None:
    low, urgent = priorities
    looks = Looks(namespace.name)
    parts = Training(toy, namespace, "parts", low)
    wait("its first steps", lambda: parts.step() >= 3)

    whole = Training(toy, namespace, "whole", urgent)  # the same training, which nobody disturbs
    wait("its suspension", lambda: looks.preempted("InClusterQueue") == {parts.job})
    wait("its checkpoint", lambda: len(parts.saved()) == 1)
    (stopped,) = parts.saved()
    assert 3 <= stopped < STEPS
    wait("the urgent gang", lambda: looks.admitted() == {whole.job})
    seen = wait("why it waits", lambda: (found := parts.look()).phase is Phase.QUEUED and found.reason and found)
    assert (seen.reason, seen.queue) == (Reason.PREEMPTED, "training"), seen
    both = [f"{whole.job}-master-0", f"{whole.job}-worker-0"]
    wait("its pods alone", lambda: namespace.running() == both)
    wait("the end of the urgent one", lambda: whole.look().phase is Phase.SUCCEEDED)
    assert parts.saved() == [stopped]

    wait("the end of the other", lambda: parts.look().phase is Phase.SUCCEEDED)
    assert [attempt["resumed_from"] for attempt in parts.report()["attempts"]] == [None, stopped]
    assert [attempt["resumed_from"] for attempt in whole.report()["attempts"]] == [None]
    for left, right in zip(parts.final(), whole.final(), strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert parts.model() == whole.model()
    assert parts.report()["eval"] == whole.report()["eval"]
