"""The plan of a laptop, given step by step as it is printed: what one machine can run of it, to MLflow that answers.

Left out are the steps for which nothing is at hand: the training operator's manifests (the cluster has it already) and
Airflow's chart, with what stands on it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from kubernetes import client
from typer.testing import CliRunner

from dropforge import __version__
from dropforge.cli.app import app
from dropforge.install.keys import AIRFLOW
from tests.cluster.conftest import REPOSITORY, kubectl
from tests.cluster.team_place import NO_IMAGE, applied, load_image
from tests.dropforge.install.test_charts import HELM, needs_helm
from tests.e2e.harness import wait

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    needs_helm,
    pytest.mark.skipif(bool(NO_IMAGE), reason=NO_IMAGE),
]

TRAINING = f"test-{uuid.uuid4().hex[:10]}"
GIVEN = (
    "Namespaces, accounts and rights",
    "Airflow's keys",
    "PostgreSQL in the cluster",
    "Settings, connections and the preset of this installation",
    "What pods of trainings know",
    "MLflow",
)


class Plan:
    """`plan.sh` in a folder where a person has what it takes, and the person's shell.

    :param images: of PostgreSQL and MLflow. :param variables: those of its head that are set otherwise.
    """

    def __init__(self, folder: Path, images: dict[str, str], variables: dict[str, str]) -> None:
        words = ["install", "--plan", "--size", "laptop", "--on", "any", "--bucket", "acme-dropforge"]
        text = CliRunner().invoke(app, words, catch_exceptions=False).stdout
        head, *steps = re.split(r"^# \d+\. ", text, flags=re.MULTILINE)
        for name, value in variables.items():
            head, count = re.subn(rf"^{name}=.*$", f"{name}={value}", head, flags=re.MULTILINE)
            assert count == 1, f"{name} is no variable of the plan"
        self._head, self._folder = head, folder
        self._steps = {re.sub(r" \(.*\)$", "", step.partition("\n")[0]): step for step in steps}
        shutil.copytree(REPOSITORY / "helm-values", folder / "helm-values")
        postgres = folder / "helm-values" / "postgres.yaml"
        postgres.write_text(postgres.read_text().replace("image: postgres:17.6", f"image: {images['postgres']}"))
        for name in ("settings.env", "connections.env", "trainer.env", "preset.yaml"):
            (folder / name).write_bytes((REPOSITORY / "helm-values" / name).read_bytes())
        (folder / "bin").mkdir()
        (folder / "bin" / "helm").symlink_to(HELM)

    def give(self, title: str) -> str:
        """A step's commands with its check; what they print."""
        path = f"{self._folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._head + "# " + self._steps[title]],
            cwd=self._folder,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, f"{title}: {done.stdout}\n{_pods()}"
        return done.stdout


def _pods() -> str:
    """What there is to know of pods that do not start."""
    return "\n".join(kubectl(*words, "--namespace", AIRFLOW).stdout for words in (["get", "pods"], ["get", "events"]))


@pytest.fixture(scope="module")
def images() -> dict[str, str]:
    """Those that are on the node, by name, as the plan's variables and files have them."""
    postgres, server = "test.local/postgres:17.6", "test.local/dropforge-mlflow"
    load_image(Path(__file__).parent / "postgres", postgres)
    load_image(REPOSITORY / "images" / "mlflow", f"{server}:{__version__}", context=REPOSITORY)
    return {"postgres": postgres, "mlflow": f"{server}@"}  # of no registry, so there is no digest


@pytest.fixture
def plan(machine_node: Any, images: dict[str, str], tmp_path: Path) -> Iterator[Plan]:
    core = client.CoreV1Api()
    tmp_path.chmod(0o755)
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o777)  # a folder of the node gets no group of the pod
    # What a default storage class would make.
    volume = {
        "accessModes": ["ReadWriteOnce"],
        "capacity": {"storage": "20Gi"},
        "claimRef": {"namespace": AIRFLOW, "name": "data-postgres-0"},
        "hostPath": {"path": str(data)},
    }
    core.create_persistent_volume({"metadata": {"name": TRAINING}, "spec": volume})
    try:
        yield Plan(tmp_path, images, {"TRAINING": TRAINING, "MLFLOW_IMAGE": images["mlflow"]})
    finally:
        for name in (AIRFLOW, TRAINING):
            applied("delete", "namespace", name, "--ignore-not-found", "--timeout=120s")
        core.delete_persistent_volume(TRAINING)


def test_the_steps_lead_to_an_mlflow_that_keeps_what_it_is_told(plan: Plan) -> None:
    for title in GIVEN:
        plan.give(title)

    def address() -> str:
        words = ("get", "endpointslices", "-l", "kubernetes.io/service-name=mlflow", "-o")
        found = kubectl("-n", AIRFLOW, *words, "jsonpath={.items[*].endpoints[*].addresses[*]}").stdout.split()
        return f"http://{found[0]}:5000" if found else ""

    known = mlflow.MlflowClient(str(wait("MLflow has an address", address, 60)))
    known.create_registered_model("toy")
    # As the page on upgrades says: what applies may be given again, and what creates refuses to.
    for title in ("Namespaces, accounts and rights", GIVEN[3], "MLflow"):
        plan.give(title)
    with pytest.raises(AssertionError, match="already exists"):
        plan.give("Airflow's keys")
    again = mlflow.MlflowClient(str(wait("MLflow has an address", address, 60)))
    assert again.get_registered_model("toy").name == "toy"
    # MLflow's pods have no right to anything of the cluster, and what they are told holds no password.
    shown = kubectl("-n", AIRFLOW, "get", "deployment,configmap,statefulset", "-o", "yaml").stdout
    secret = kubectl("-n", AIRFLOW, "get", "secret", "dropforge-postgres", "-o", "jsonpath={.data.password}").stdout
    assert secret
    assert secret not in shown
