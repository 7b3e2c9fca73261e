"""What an installation has beside its charts passes the API server, and Kueue takes its configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dropforge.cli.app import app

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
AWS = ("--subnet", "subnet-0123456789abcdef0", "--security-group", "sg-0123456789abcdef0")


def kubectl(*words: str, feed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(["kubectl", *words], input=feed, capture_output=True, text=True)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[None]:
    """Those of an installation; made, and removed, only if they are not there."""
    if not Path(os.environ.get("KUBECONFIG", "/none")).is_file():
        pytest.skip("KUBECONFIG names no cluster")
    made = [name for name in ("airflow", "training", "monitoring") if kubectl("create", "ns", name).returncode == 0]
    yield
    for name in made:
        kubectl("delete", "ns", name, "--wait=false")


def printed(*words: str) -> str:
    done = CliRunner().invoke(app, ["manifests", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("namespaces", "rights"),
        ("keys", "--size", "laptop"),
        ("grafana-login",),
        ("job-triggerer", "--image", "r.example/a@sha256:" + "a" * 64),
        ("network-policies", "--port", "9000"),
        ("storage-classes", *AWS, "--file-system", "fs-0123456789abcdef0"),
        ("claims", "--recipe", str(Path(__file__).parent / "claims.yaml")),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.usefixtures("namespaces")
def test_manifests_pass_the_api_server(words: tuple[str, ...]) -> None:
    # Strict: a field that the server does not know is an error.
    done = kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", feed=printed(*words))
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("namespaces")
def test_the_database_passes_too_and_a_wrong_field_does_not() -> None:
    text = (ROOT / "helm-values" / "postgres.yaml").read_text()
    for feed, code in ((text, 0), (text.replace("serviceName:", "serviceNames:"), 1)):
        done = kubectl("apply", "--dry-run=server", "--validate=strict", "--namespace", "airflow", "-f", "-", feed=feed)
        assert done.returncode == code, done.stderr


@pytest.mark.usefixtures("namespaces")
def test_airflow_may_start_jobs_and_read_no_secrets() -> None:
    assert kubectl("apply", "-f", "-", feed=printed("rights")).returncode == 0
    for account, verb, what, may in (
        ("airflow-worker", "create", "pytorchjobs.kubeflow.org", "yes"),
        ("airflow-triggerer", "watch", "pytorchjobs.kubeflow.org", "yes"),
        ("airflow-triggerer", "get", "nodes", "yes"),
        ("airflow-triggerer", "list", "nodes", "no"),
        ("airflow-worker", "get", "secrets", "no"),
        ("airflow-worker", "create", "pods", "no"),
        ("airflow-api-server", "create", "pytorchjobs.kubeflow.org", "no"),
    ):
        answer = kubectl(
            "auth", "can-i", verb, what, "--namespace", "training", "--as", f"system:serviceaccount:airflow:{account}"
        )
        assert answer.stdout.strip() == may, f"{account} {verb} {what}: {answer.stdout}{answer.stderr}"


def test_kueue_takes_its_configuration_and_would_refuse_another(tmp_path: Path) -> None:
    kueue = shutil.which("kueue")
    if not kueue:
        pytest.skip("there is no kueue on the PATH")
    values = yaml.safe_load((ROOT / "helm-values" / "kueue.yaml").read_text())
    text = values["managerConfig"]["controllerManagerConfigYaml"]
    for words, told in ((text, "Successfully loaded"), (text.replace("blockAdmission", "block"), "unknown field")):
        (tmp_path / "kueue.yaml").write_text(words)
        # It ends at once, for want of a cluster.
        env = {**os.environ, "KUBECONFIG": str(tmp_path / "none")}
        done = subprocess.run(
            [kueue, "--config", str(tmp_path / "kueue.yaml")], env=env, capture_output=True, text=True, timeout=60
        )
        assert told in done.stdout + done.stderr
