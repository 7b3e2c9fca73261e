"""The images of Airflow, MLflow and the curation, built whole, and started as pods are."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import curation
from dropforge import ledger
from dropforge.drop import read_drop
from dropforge.recipes.load import load_recipe
from dropforge.store import FolderStore
from tests.images.built import ANYBODY, CONFINED, Image, engine
from tests.trainer.toy import sample_rows

pytestmark = [pytest.mark.images, pytest.mark.timeout(1800)]


#: The image's own user, and one whom a cluster chose and no image knows.
USERS: dict[str, tuple[str, ...]] = {"own": (), "anybody": (ANYBODY,)}


def built(service: str) -> Iterator[Image]:
    image = Image.build(service, "test")
    yield image
    image.remove()


@pytest.fixture(scope="module")
def airflow() -> Iterator[Image]:
    yield from built("airflow")


@pytest.fixture(scope="module")
def mlflow() -> Iterator[Image]:
    yield from built("mlflow")


@pytest.fixture(scope="module")
def objects() -> Iterator[Image]:
    yield from built("objects")


@pytest.fixture(scope="module")
def stack() -> Iterator[Image]:
    yield from built("stack")


@pytest.fixture(scope="module")
def spark() -> Iterator[Image]:
    yield from built("curation")


@pytest.mark.parametrize("user", USERS)
def test_airflow_knows_every_dag_the_pages_and_the_provider(airflow: Image, user: str) -> None:
    look = (
        "airflow db migrate >/dev/null 2>&1; python -c 'import asyncpg, celery, psycopg2, redis'; "
        "airflow dags reserialize >/dev/null 2>&1; "
        "for what in 'dags list' 'dags list-import-errors' 'providers list' plugins; "
        'do echo "== $what"; airflow $what -o json 2>/dev/null | tail -n 1; done'
    )
    began = time.monotonic()
    done = airflow.run("bash", "-c", look, options=(*CONFINED, "--tmpfs=/opt/airflow", *USERS[user]))
    airflow.report("migrated and listed", time.monotonic() - began)
    assert done.returncode == 0, done.stdout
    found = {what: json.loads(told) for what, told in re.findall(r"^== (.*)\n(.*)$", done.stdout, re.MULTILINE)}
    dags = {item["dag_id"] for item in found["dags list"]}
    wanted = {"finetune", "intake", "reap", "rollback", "sweep", "checkpoints", "alerts"}
    assert {f"dropforge_{name}" for name in wanted} <= dags
    assert found["dags list-import-errors"] == []
    assert "dropforge" in {item["package_name"] for item in found["providers list"]}
    assert "dropforge" in {item["name"] for item in found["plugins"]}


def until(container: str, url: str, part: str, wanted: str, seconds: float) -> None:
    """Wait until a container answers itself so. :param part: of the answer, as Python asks for it."""
    ask = f"import urllib.request; print(urllib.request.urlopen('{url}').{part})"
    deadline = time.monotonic() + seconds
    while engine("exec", container, "sh", "-c", f'python -c "{ask}" 2>/dev/null || echo no') != wanted:
        assert time.monotonic() < deadline, engine("logs", container)
        assert engine("inspect", "-f", "{{.State.Running}}", container) == "true", engine("logs", container)


@pytest.mark.parametrize("user", USERS)
def test_mlflow_serves_and_ends_when_told(mlflow: Image, user: str) -> None:
    began = time.monotonic()
    env = {"MLFLOW_BACKEND_STORE_URI": "sqlite:////tmp/mlflow.db"}
    container = mlflow.start(env=env, options=(*CONFINED, *USERS[user]))
    until(container, "http://127.0.0.1:5000/health", "read().decode()", "OK", 200)
    mlflow.report("healthy", time.monotonic() - began)
    assert engine("exec", container, "cat", "/proc/1/comm") == "tini"
    assert engine("exec", container, "python", "-c", "import boto3, psycopg2; print('there')") == "there"
    engine("stop", "--time=60", container)
    assert engine("wait", container) == "0", engine("logs", container)


def test_objects_answers_and_ends_when_told(objects: Image) -> None:
    began = time.monotonic()
    container = objects.start(options=(*CONFINED, "--tmpfs=/var/lib/dropforge"))
    until(container, "http://127.0.0.1:9000/-/health", "status", "200", 100)
    objects.report("healthy", time.monotonic() - began)
    engine("stop", "--time=60", container)
    assert engine("wait", container) == "0", engine("logs", container)


def test_the_embedded_stack_makes_a_model_of_a_drop(stack: Image) -> None:
    began = time.monotonic()
    container = stack.start("dropforge", "demo", "--exit", options=(*CONFINED, "--tmpfs=/home/dropforge"))
    code = engine("wait", container, timeout=900)
    told = engine("logs", container)
    stack.report("the demo's model was registered", time.monotonic() - began)
    assert code == "0", told
    assert "champion" in told


PROGRAM = """
from pathlib import Path
from curation.engines.spark import SparkEngine, submitted
from curation.pipeline import curate
from dropforge.drop import read_drop
from dropforge.recipes.load import load_recipe
from dropforge.store import FolderStore
store, work = FolderStore(Path("/bucket")), Path("/tmp/work")
with submitted(work / "engine", {}) as session:
    made = curate(store, read_drop(store, "toy", "one"), load_recipe("tiny"), workdir=work, engine=SparkEngine(session))
print("digest", made.digest)
"""
"""What a driver does with a job, but for the job's file in S3."""


@pytest.mark.parametrize("user", USERS)
def test_spark_makes_the_dataset_that_this_machine_makes(spark: Image, tmp_path: Path, user: str) -> None:
    for name in ("there", "here"):
        store = FolderStore(tmp_path / name)
        store.put("drops/toy/one/rows.jsonl", "\n".join(map(json.dumps, sample_rows(60))).encode())
        store.put("drops/toy/one/_SUCCESS", b"")
        ledger.record(store, read_drop(store, "toy", "one"))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for path in [tmp_path / "there", *(tmp_path / "there").rglob("*"), program]:
        path.chmod(0o777 if path.is_dir() else 0o666)
    env = {"SPARK_DRIVER_BIND_ADDRESS": "127.0.0.1", "SPARK_LOCAL_IP": "127.0.0.1"}
    env["JAVA_TOOL_OPTIONS"] = os.environ["JAVA_TOOL_OPTIONS"]
    mounts = {tmp_path / "there": "/bucket", program: "/program.py"}
    began = time.monotonic()
    done = spark.run(
        "driver", "--master", "local[1]", "/program.py", mounts=mounts, env=env, options=(*CONFINED, *USERS[user])
    )
    spark.report("curated", time.monotonic() - began)
    assert done.returncode == 0, done.stdout[-5000:]
    digests = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("digest ")]
    store = FolderStore(tmp_path / "here")
    expected = curation.curate(store, read_drop(store, "toy", "one"), load_recipe("tiny"), workdir=tmp_path / "work")
    assert digests == [expected.digest]


def test_spark_s_entrypoint_tells_what_it_takes(spark: Image) -> None:
    done = spark.run("worker")
    assert done.returncode == 2
    assert "give driver or executor, not worker" in done.stdout
