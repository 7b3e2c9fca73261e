"""Charts whose source is at hand: the keys of our values are theirs, and Helm renders them for each size.

Helm is `DROPFORGE_HELM`, or `helm` of the PATH. A chart is a folder of `DROPFORGE_CHARTS`, named as its release (what
`helm pull --untar` makes), or lies in the Go module of its program.
"""

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
from dropforge.install.steps import SIZES, STEPS, VARIABLES, Chart, Place
from tests.dropforge.install.test_values import FILES, ROOT, listed

HELM = os.environ.get("DROPFORGE_HELM") or shutil.which("helm") or ""
CHARTS = Path(os.environ.get("DROPFORGE_CHARTS") or "/none")
MODULES = Path(os.environ.get("GOMODCACHE") or Path.home() / "go" / "pkg" / "mod")
SOURCES = {  # Go modules of the programs, which bring their charts
    "kueue": "sigs.k8s.io/kueue@v{version}/charts/kueue",
    "spark-operator": "github.com/kubeflow/spark-operator/v2@v{version}/charts/spark-operator-chart",
    "nvidia-device-plugin": (
        "github.com/!n!v!i!d!i!a/k8s-device-plugin@v{version}/deployments/helm/nvidia-device-plugin"
    ),
}
STEP_OF = {step.chart.release: step for step in STEPS if step.chart and step.chart.version}
NAMES = sorted(name for name in STEP_OF if name in SOURCES or (CHARTS / name).is_dir())
RENDERED = [(name, size) for name in NAMES for size in STEP_OF[name].sizes]
IMAGE = ("image.repository=r.example/dropforge-mlflow", "image.digest=sha256:aa")

needs_helm = pytest.mark.skipif(not HELM, reason="there is no Helm: name one by DROPFORGE_HELM")


def source(chart: Chart) -> Path:
    own = CHARTS / chart.release
    found = own if own.is_dir() else MODULES / SOURCES[chart.release].format(version=chart.version)
    if not found.is_dir():
        pytest.skip(f"{found} is not there")
    return found


def given(chart: Chart) -> list[str]:
    """What the plan's `--set` says, with the examples of its variables put in by a shell."""
    script = "\n".join(f'echo "{setting}"' for setting in chart.settings)
    env = {name: example for name, (example, _) in VARIABLES.items()}
    return subprocess.run(["bash", "-c", script], env=env, check=True, capture_output=True, text=True).stdout.split()


def render(
    release: str, chart: str | Path, size: Any, *settings: str, namespace: str = "airflow", on: Place = "any"
) -> list[Any]:
    words = [word for name in values_of(release, size, on, FILES) for word in ("--values", name)]
    words += [word for setting in settings for word in ("--set", setting)]
    command = [HELM, "template", release, str(chart), "--namespace", namespace, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if one]


def one(found: list[Any], kind: str, name: str) -> Any:
    return next(each for each in found if each["kind"] == kind and each["metadata"]["name"] == name)


@needs_helm
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


@needs_helm
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


@needs_helm
def test_mlflow_and_its_migration_come_from_a_private_registry() -> None:
    found = render(
        "mlflow", "helm-values/mlflow", "team", "artifacts=s3://b/mlflow", "imagePullSecrets[0].name=r", *IMAGE
    )
    for kind, name in (("Deployment", "mlflow"), ("Job", "mlflow-migration")):
        assert one(found, kind, name)["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "r"}]


@needs_helm
def test_a_chart_that_lacks_its_bucket_is_refused() -> None:
    done = subprocess.run([HELM, "template", "helm-values/mlflow"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "s3://BUCKET/mlflow" in done.stderr


@pytest.mark.parametrize("release", NAMES)
def test_every_key_that_we_list_is_in_the_charts_own_values(release: str) -> None:
    chart = STEP_OF[release].chart
    assert chart is not None
    values = yaml.safe_load((source(chart) / "values.yaml").read_text())
    for key in listed(release)[1]:
        there = values
        for part in key.removesuffix(".*").split("."):
            if there in ({}, None):  # a mapping of any names
                break
            assert part in there, f"{release} {chart.version} has no {key}"
            there = there[part]


def objects_of(release: str, size: Any) -> tuple[str, list[Any]]:
    """The namespace of a step of the plan, and what its chart makes of our values."""
    if release == "mlflow":
        return "airflow", render("mlflow", "helm-values/mlflow", size, "artifacts=s3://b/mlflow", *IMAGE)
    step = STEP_OF[release]
    assert step.chart is not None
    on: Place = "any" if "any" in step.places else step.places[0]
    settings = given(step.chart)
    namespace = step.chart.namespace
    return namespace, render(release, source(step.chart), size, *settings, namespace=namespace, on=on)


@needs_helm
@pytest.mark.parametrize(("release", "size"), RENDERED)
def test_helm_renders_them_with_our_values(release: str, size: Any) -> None:
    _, found = objects_of(release, size)
    kinds = {one["kind"] for one in found}
    assert kinds & {"Deployment", "DaemonSet", "StatefulSet"}
