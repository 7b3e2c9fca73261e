"""What an installation has beside its charts passes the API server, and Kueue takes its configuration."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dropforge.cli.app import app
from dropforge.install.steps import SIZES
from tests.cluster.conftest import kubectl
from tests.dropforge.install.test_charts import RENDERED, needs_helm, objects_of

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
MODULES = Path(os.environ.get("GOMODCACHE") or Path.home() / "go" / "pkg" / "mod")
AWS = ("--subnet", "subnet-0123456789abcdef0", "--security-group", "sg-0123456789abcdef0")
ADDRESS = f"r.example/a@sha256:{'a' * 64}"
#: Each kind of `dropforge manifests`, with what it needs; held to be all by tests/dropforge/install/test_manifests.py.
WORDS: dict[str, tuple[str, ...]] = {
    "namespaces": (),
    "rights": (),
    "runtime": (),
    "keys": (),
    "grafana-login": (),
    "job-triggerer": ("--image", ADDRESS),
    "watching": ("--image", ADDRESS),
    "network-policies": ("--port", "9000"),
    "storage-classes": (*AWS, "--file-system", "fs-0123456789abcdef0"),
    "claims": ("--recipe", str(Path(__file__).parent / "claims.yaml")),
    "node-pools": ("--cluster", "training-1", "--instance", "p5.48xlarge", "--zone", "eu-west-1a"),
    "image-policy": ("--registry", "r.example/team", "--key", "awskms:///alias/images"),
}
#: Objects whose kinds a chart brings: where its program's Go module has them.
CRDS = {
    "runtime": (
        "github.com/kubeflow/trainer/v2@*/manifests/base/crds",
        ("trainer.kubeflow.org_trainingruntimes.yaml",),
    ),
    "watching": (
        "github.com/prometheus-operator/prometheus-operator@*/example/prometheus-operator-crd",
        ("monitoring.coreos.com_servicemonitors.yaml", "monitoring.coreos.com_prometheusrules.yaml"),
    ),
    "node-pools": (
        "github.com/aws/karpenter-provider-aws@*/pkg/apis/crds",
        ("karpenter.sh_nodepools.yaml", "karpenter.k8s.aws_ec2nodeclasses.yaml"),
    ),
    "image-policy": ("github.com/sigstore/policy-controller@*/config", ("300-clusterimagepolicy.yaml",)),
}


@pytest.fixture(scope="module")
def namespaces() -> Iterator[None]:
    """Those of an installation; made, and removed, only if they are not there."""
    if not Path(os.environ.get("KUBECONFIG", "/none")).is_file():
        pytest.skip("KUBECONFIG names no cluster")
    made = [name for name in ("airflow", "training", "monitoring") if kubectl("create", "ns", name).returncode == 0]
    yield
    for name in made:
        kubectl("delete", "ns", name, "--timeout=120s")  # the next module makes them anew


def printed(*words: str) -> str:
    done = CliRunner().invoke(app, ["manifests", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def dry_run(feed: str, *words: str) -> subprocess.CompletedProcess[str]:
    # Strict: a field that the server does not know is an error.
    return kubectl("apply", "--dry-run=server", "--validate=strict", *words, "-f", "-", feed=feed)


def kinds_of(name: str) -> list[Any]:
    """The kinds that a chart would bring. Skips where the module that has them is not at hand."""
    folder, files = CRDS[name]
    found = sorted(MODULES.glob(folder))
    if not found:
        pytest.skip(f"{MODULES / folder} is not there: `go mod download` its module")
    crds = [yaml.safe_load((found[-1] / file).read_text()) for file in files]
    for crd in crds:
        crd["spec"].pop("conversion", None)  # between versions, by a server that the chart would bring
    return crds


@contextmanager
def served(crds: list[Any]) -> Iterator[None]:
    """The cluster has these kinds; those that are made for it go again."""
    names = [str(crd["metadata"]["name"]) for crd in crds]
    feeds = dict(zip(names, map(yaml.safe_dump, crds), strict=True))
    made = [name for name in names if kubectl("create", "-f", "-", feed=feeds[name]).returncode == 0]
    try:
        for name in names:
            done = kubectl("wait", "--for", "condition=Established", f"crd/{name}", "--timeout", "30s")
            assert done.returncode == 0, done.stderr
        yield
    finally:
        if made:
            kubectl("delete", "crd", *made, "--wait=false")


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.usefixtures("namespaces")
def test_manifests_pass_the_api_server(name: str) -> None:
    texts = {printed(name, *WORDS[name], "--size", size) for size in SIZES}
    with served(kinds_of(name) if name in CRDS else []):
        for text in texts:
            done = dry_run(text)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("namespaces")
def test_what_a_size_alone_prints_passes_too(size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("images.lock").write_text(json.dumps({"airflow": ADDRESS}))
    done = CliRunner().invoke(app, ["install", "--size", size], catch_exceptions=False)
    found = list(yaml.safe_load_all(done.stdout))
    groups = {group.partition("/")[0] for group in kubectl("api-versions").stdout.split()}
    # What belongs to Kueue is looked at where it is (test_queues.py), and the runtime above.
    here = [one for one in found if one["apiVersion"].partition("/")[0] in {*groups, "monitoring.coreos.com"}]
    assert {one["apiVersion"].partition("/")[0] for one in found if one not in here} <= {
        "kueue.x-k8s.io",
        "trainer.kubeflow.org",
    }
    with served(kinds_of("watching") if size != "laptop" else []):
        done_here = dry_run(yaml.safe_dump_all(here))
    assert done_here.returncode == 0, done_here.stderr


@pytest.mark.parametrize(
    ("file", "namespace"),
    [
        ("helm-values/postgres.yaml", "airflow"),
        ("helm-values/spark-driver.yaml", "training"),
        ("helm-values/terminal.yaml", "training"),
        ("docs/how-to/install/database-pod.yaml", "airflow"),
        ("docs/how-to/install/gpu-pod.yaml", "training"),
    ],
)
@pytest.mark.usefixtures("namespaces")
def test_files_of_manifests_pass_too(file: str, namespace: str) -> None:
    # A pod is refused whose account is not there.
    assert kubectl("apply", "-f", "-", feed=printed("rights")).returncode == 0
    text = (ROOT / file).read_text().replace("NAMESPACE", namespace).replace("IMAGE", ADDRESS)
    done = dry_run(text, "--namespace", namespace)
    assert done.returncode == 0, done.stderr


@needs_helm
@pytest.mark.parametrize(("release", "size"), [*RENDERED, *(("mlflow", size) for size in SIZES)])
@pytest.mark.usefixtures("namespaces")
def test_what_charts_make_of_our_values_passes_too(release: str, size: str) -> None:
    namespace, found = objects_of(release, size)
    # The kinds of Prometheus come from a chart that is not at hand.
    here = [one for one in found if not one["apiVersion"].startswith("monitoring.coreos.com/")]
    placed = [one for one in here if "namespace" in one["metadata"]]
    made = kubectl("create", "ns", namespace).returncode == 0
    try:
        for objects, words in ((placed, ()), ([one for one in here if one not in placed], ("--namespace", namespace))):
            # Server-side, as a kind is too long for the annotation that the client's own way keeps.
            done = dry_run(yaml.safe_dump_all(objects), "--server-side", "--force-conflicts", *words)
            assert done.returncode == 0 or not objects, done.stderr
    finally:
        if made:
            kubectl("delete", "ns", namespace, "--wait=false")


@pytest.mark.usefixtures("namespaces")
def test_a_wrong_field_does_not_pass() -> None:
    text = (ROOT / "helm-values" / "postgres.yaml").read_text()
    done = dry_run(text.replace("serviceName:", "serviceNames:"), "--namespace", "airflow")
    assert done.returncode == 1, done.stderr


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
    # In words of 0.16, or of 0.19.
    loaded = "Successfully loaded|Configuration loaded"
    for words, told in ((text, loaded), (text.replace("blockAdmission", "block"), "unknown field")):
        (tmp_path / "kueue.yaml").write_text(words)
        # It ends at once, for want of a cluster.
        env = {**os.environ, "KUBECONFIG": str(tmp_path / "none")}
        done = subprocess.run(
            [kueue, "--config", str(tmp_path / "kueue.yaml")], env=env, capture_output=True, text=True, timeout=60
        )
        assert re.search(told, done.stdout + done.stderr)
