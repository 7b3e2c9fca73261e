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
from tests.compose.server import page_commands
from tests.dropforge.install.test_charts import HELM, needs_helm
from tests.e2e.harness import wait

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.outage,
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
        (folder / "plan.sh").write_text(text)
        head, *steps = re.split(r"^# \d+\. ", text, flags=re.MULTILINE)
        for name, value in variables.items():
            head, count = re.subn(rf"^{name}=.*$", f"{name}={value}", head, flags=re.MULTILINE)
            assert count == 1, f"{name} is no variable of the plan"
        self._head, self.folder = head, folder
        self._steps = {re.sub(r" \(.*\)$", "", step.partition("\n")[0]): step for step in steps}
        shutil.copytree(REPOSITORY / "helm-values", folder / "helm-values")
        pages = Path("docs", "how-to", "install")
        (folder / pages).mkdir(parents=True)
        for file in (Path("helm-values", "postgres.yaml"), pages / "database-pod.yaml"):
            text = (REPOSITORY / file).read_text()
            assert text.count("image: postgres:17.6") == 1
            (folder / file).write_text(text.replace("image: postgres:17.6", f"image: {images['postgres']}"))
        (folder / "images.lock").write_text("{}")
        for name in ("settings.env", "connections.env", "trainer.env", "preset.yaml"):
            (folder / name).write_bytes((REPOSITORY / "helm-values" / name).read_bytes())
        (folder / "bin").mkdir()
        (folder / "bin" / "helm").symlink_to(HELM)

    def give(self, title: str) -> str:
        """A step's commands with its check; what they print."""
        return self.type(title, "# " + self._steps[title])

    def type(self, title: str, commands: str) -> str:
        """:param title: of these commands, for who reads of their failure."""
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._head + commands],
            cwd=self.folder,
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


@pytest.fixture(scope="module")
def plan(machine_node: Any, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plan]:
    """The plan after its steps to MLflow."""
    core, folder = client.CoreV1Api(), tmp_path_factory.mktemp("plan")
    folder.chmod(0o755)
    data = folder / "data"
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
        made = Plan(folder, images, {"TRAINING": TRAINING, "MLFLOW_IMAGE": images["mlflow"]})
        for title in GIVEN:
            made.give(title)
        yield made
    finally:
        for name in (AIRFLOW, TRAINING):
            applied("delete", "namespace", name, "--ignore-not-found", "--timeout=120s")
        core.delete_persistent_volume(TRAINING)


def server() -> mlflow.MlflowClient:
    """MLflow in the cluster, by the address of its pod."""

    def address() -> str:
        words = ("get", "endpointslices", "-l", "kubernetes.io/service-name=mlflow", "-o")
        found = kubectl("-n", AIRFLOW, *words, "jsonpath={.items[*].endpoints[*].addresses[*]}").stdout.split()
        return f"http://{found[0]}:5000" if found else ""

    return mlflow.MlflowClient(str(wait("MLflow has an address", address, 60)))


def test_the_steps_lead_to_an_mlflow_that_keeps_what_it_is_told(plan: Plan) -> None:
    server().create_registered_model("toy")
    # As the page on upgrades says: what applies may be given again, and what creates refuses to.
    for title in ("Namespaces, accounts and rights", GIVEN[3], "MLflow"):
        plan.give(title)
    with pytest.raises(AssertionError, match="already exists"):
        plan.give("Airflow's keys")
    assert server().get_registered_model("toy").name == "toy"
    # MLflow's pods have no right to anything of the cluster, and what they are told holds no password.
    shown = kubectl("-n", AIRFLOW, "get", "deployment,configmap,statefulset", "-o", "yaml").stdout
    secret = kubectl("-n", AIRFLOW, "get", "secret", "dropforge-postgres", "-o", "jsonpath={.data.password}").stdout
    assert secret
    assert secret not in shown


def test_a_backup_brings_back_what_was_there_and_nothing_else(plan: Plan) -> None:
    server().create_registered_model("kept")
    (back_up,) = page_commands("kubernetes-backup.md", "Back up")
    plan.type("Back up", back_up)
    assert '"dropforge-airflow-keys"' in (plan.folder / "backup" / "secrets.json").read_text()
    server().delete_registered_model("kept")
    server().create_registered_model("later")
    (restore,) = page_commands("kubernetes-backup.md", "Restore into the same cluster")
    plan.type("Restore", restore)
    plan.give("MLflow")
    assert {"kept"} == {one.name for one in server().search_registered_models()} & {"kept", "later"}
