"""Charts rendered by Helm: ours, and those whose source is at hand. Helm is `DROPFORGE_HELM`, or `helm` of the PATH."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from dropforge.install.plan import values_of
from dropforge.install.steps import SIZES, STEPS
from tests.dropforge.install.test_values import FILES, ROOT

HELM = os.environ.get("DROPFORGE_HELM") or shutil.which("helm") or ""
MODULES = Path(os.environ.get("GOMODCACHE") or Path.home() / "go" / "pkg" / "mod")
SOURCES = {  # Go modules of the programs, which bring their charts
    "kueue": MODULES / "sigs.k8s.io/kueue@v{version}/charts/kueue",
    "spark-operator": MODULES / "github.com/kubeflow/spark-operator/v2@v{version}/charts/spark-operator-chart",
}
IMAGE = ("image.repository=r.example/dropforge-mlflow", "image.digest=sha256:aa")

pytestmark = pytest.mark.skipif(not HELM, reason="there is no Helm: name one by DROPFORGE_HELM")


def render(release: str, chart: str | Path, size: Any, *settings: str, namespace: str = "airflow") -> list[Any]:
    words = [word for name in values_of(release, size, "any", FILES) for word in ("--values", name)]
    words += [word for setting in settings for word in ("--set", setting)]
    command = [HELM, "template", release, str(chart), "--namespace", namespace, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def one(found: list[Any], kind: str, name: str) -> Any:
    return next(each for each in found if each["kind"] == kind and each["metadata"]["name"] == name)


@pytest.mark.parametrize("size", SIZES)
def test_mlflow_answers_to_its_services_names_and_keeps_its_database_a_secret(size: Any) -> None:
    from mlflow.server.security_utils import is_allowed_host_header

    found = render("mlflow", "helm-values/mlflow", size, "artifacts=s3://b/mlflow", "hosts={ml.acme.example}", *IMAGE)
    container = one(found, "Deployment", "mlflow")["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "r.example/dropforge-mlflow@sha256:aa"
    env = {each["name"]: each for each in container["env"]}
    assert "value" not in env["MLFLOW_BACKEND_STORE_URI"]
    # The kubelet puts the pod's address in, if that stands before.
    assert list(env).index("POD_IP") < list(env).index("MLFLOW_SERVER_ALLOWED_HOSTS")
    allowed = env["MLFLOW_SERVER_ALLOWED_HOSTS"]["value"]
    hosts = allowed.replace("$(POD_IP)", "10.0.0.6").split(",")
    assert is_allowed_host_header(allowed.replace("$(POD_IP)", "fd00::6").split(","), "[fd00::6]:5000")
    assert "--expose-prometheus" in container["args"]
    for host in (
        "10.0.0.6:5000",
        "mlflow:5000",
        "mlflow.airflow:5000",
        "mlflow.airflow.svc.cluster.local:5000",
        "ml.acme.example",
    ):
        assert is_allowed_host_header(hosts, host)
    for host in ("evil.example", "mlflow.airflow.evil.example:5000", "10.0.0.7:5000"):
        assert not is_allowed_host_header(hosts, host)
    assert env["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"]["value"] == "https://ml.acme.example"
    migration = one(found, "Job", "mlflow-migration")
    assert migration["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"


def test_the_migration_makes_mlflows_tables_without_the_address_in_an_argument(tmp_path: Path) -> None:
    found = render("mlflow", "helm-values/mlflow", "team", "artifacts=s3://b/mlflow", *IMAGE)
    (container,) = one(found, "Job", "mlflow-migration")["spec"]["template"]["spec"]["containers"]
    program, *arguments = container["args"]
    # No shell, which would put the address, with its password, among a program's arguments.
    assert program == "python"
    assert "://" not in str(arguments)
    database = tmp_path / "mlflow.db"
    env = os.environ | {"MLFLOW_BACKEND_STORE_URI": f"sqlite:///{database}"}
    subprocess.run([sys.executable, *arguments], env=env, check=True, capture_output=True)
    with closing(sqlite3.connect(database)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert "registered_models" in tables


def test_mlflow_and_its_migration_come_from_a_private_registry() -> None:
    found = render(
        "mlflow", "helm-values/mlflow", "team", "artifacts=s3://b/mlflow", "imagePullSecrets[0].name=r", *IMAGE
    )
    for kind, name in (("Deployment", "mlflow"), ("Job", "mlflow-migration")):
        assert one(found, kind, name)["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "r"}]


def test_a_chart_that_lacks_its_bucket_is_refused() -> None:
    done = subprocess.run([HELM, "template", "helm-values/mlflow"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "s3://BUCKET/mlflow" in done.stderr


@pytest.mark.parametrize("release", sorted(SOURCES))
@pytest.mark.parametrize("size", ["production"])
def test_others_take_our_values(release: str, size: Any) -> None:
    chart = next(step.chart for step in STEPS if step.chart and step.chart.release == release)
    source = Path(str(SOURCES[release]).format(version=chart.version))
    if not source.is_dir():
        pytest.skip(f"{source} is not there")
    assert render(release, source, size, namespace=chart.namespace)
