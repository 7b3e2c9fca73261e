"""docker-compose.yaml for real: a drop becomes a registered model, also when every container dies on the way."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import boto3
import httpx
import pytest
import torch
from mlflow import MlflowClient

from dropforge import layout, tracking
from tests.compose.server import ENGINE, PROJECT, WANTED, Server, engine, page_commands
from tests.trainer.toy import sample_rows

pytestmark = [pytest.mark.compose, pytest.mark.timeout(2400)]

RECIPE = """
extends: tiny
train: {max_steps: %d, checkpoint_every: 10, eval_every: 0}
"""


class Times:
    """How long each part took, for people who look at the output."""

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()

    def note(self, what: str) -> None:
        now = time.monotonic()
        print(f"\ncompose: {what} after {now - self.last:.0f} s ({now - self.began:.0f} s in all)", flush=True)
        self.last = now


@pytest.fixture(scope="module")
def times() -> Times:
    return Times()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, times: Times) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), Path(torch.__file__).parents[1])
    server.fetch_images()
    try:
        server.remove()
        server.compose("build")
        times.note("images built")
        server.compose("up", "--detach")
        server.wait_until_ready()
        times.note("every service healthy")
        with pytest.MonkeyPatch.context() as patched:
            for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
                patched.setenv(name, server.client_env[name])
            yield server
    finally:
        server.remove()
        times.note("taken down")


def dropforge(server: Server, *words: str, timeout: float = 600) -> str:
    """The command on this machine."""
    done = subprocess.run(
        [Path(sys.executable).parent / "dropforge", *words],
        env={**os.environ, **server.client_env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def write_drop(folder: Path, seed: int, steps: int = 400) -> Path:
    folder.mkdir()
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, sample_rows(200, seed))))
    (folder / "recipe.yaml").write_text(RECIPE % steps)
    return folder


def test_only_what_is_published_is_open_and_only_to_this_machine(server: Server) -> None:
    for service in WANTED:
        bindings = server.inspect(service)["NetworkSettings"]["Ports"] or {}
        assert {found["HostIp"] for binding in bindings.values() for found in binding or []} <= {"127.0.0.1"}
        ids = engine("exec", server.container(service), "sh", "-c", "grep -E '^(Uid|NoNewPrivs)' /proc/1/status")
        assert "NoNewPrivs:\t1" in ids
        if service != "postgres":
            assert "Uid:\t0\t" not in ids, service


def test_mlflow_asks_for_a_login_and_trainings_may_not_promote(server: Server) -> None:
    api = f"{server.client_env['MLFLOW_TRACKING_URI']}/api/2.0/mlflow"

    def answer(path: str, login: str | None, body: bytes | None = None) -> int:
        headers = {"Content-Type": "application/json"}
        if login:
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{api}/{path}", body, headers), timeout=30) as found:
                return int(found.status)
        except urllib.error.HTTPError as error:
            return error.code

    search, alias = "experiments/search?max_results=1", b'{"name": "toy", "alias": "champion", "version": "1"}'
    trainer = f"trainer:{server.secrets['MLFLOW_TRAINER_PASSWORD']}"
    assert answer(search, None) == 401
    assert answer(search, "admin:wrong") == 401
    assert answer(search, f"admin:{server.secrets['MLFLOW_ADMIN_PASSWORD']}") == 200
    assert answer(search, trainer) == 200
    assert answer("registered-models/alias", trainer, alias) == 403


def test_a_drop_becomes_a_registered_model_though_every_container_is_killed(
    server: Server, times: Times, tmp_path: Path
) -> None:
    client = MlflowClient(server.client_env["MLFLOW_TRACKING_URI"])
    dropforge(server, "drop", str(write_drop(tmp_path / "drop", 1)), "--family", "toy", "--name", "one")

    def step() -> int:
        found = client.search_experiments(filter_string="name = 'toy'") or client.search_experiments()
        runs = client.search_runs([item.experiment_id for item in found], "tags.`dropforge.family` = 'toy'")
        points = client.get_metric_history(runs[0].info.run_id, "train/loss") if runs else []
        return max((point.step for point in points), default=0)

    server.until(lambda: step() >= 20, "it trains", 300)
    times.note("20 steps trained")
    for service in reversed(WANTED):
        before = server.inspect(service)["State"]["StartedAt"]
        server.kill(service)
        server.until(
            lambda service=service, before=before: (
                server.inspect(service)["State"]["StartedAt"] != before and server.healthy(service)
            ),
            f"{service} is healthy again",
            180,
        )
        times.note(f"{service} killed and healthy again")
    server.wait_until_ready()
    told = dropforge(server, "follow", "toy/one")
    times.note("the run has ended")
    assert "toy/one  success" in told, told
    version = client.get_model_version_by_alias("toy", "champion")
    run = client.get_run(version.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["train/loss"] > 0
    # The trainer's death was one of them: another attempt went on from a checkpoint.
    assert int(run.data.tags["dropforge.attempt"]) >= 2
    assert int(run.data.tags[tracking.TAG_RESUMED]) >= 10
    causes = run.data.tags[tracking.TAG_CAUSES]
    print(f"\ncompose: {causes=}")
    assert f"attempt 1: {causes.partition(',')[0]}" in run.data.tags[tracking.TAG_FAILURE]
    assert step() == 400


def test_it_is_the_model_of_a_run_that_nobody_disturbed(server: Server, times: Times, tmp_path: Path) -> None:
    dropforge(
        server,
        "drop",
        str(write_drop(tmp_path / "drop", 1)),
        "--family",
        "calm",
        "--name",
        "one",
        "--follow",
        timeout=1200,
    )
    times.note("the same drop in another family, undisturbed")
    client = MlflowClient(server.client_env["MLFLOW_TRACKING_URI"])
    env = server.client_env
    s3 = boto3.client(
        "s3",
        endpoint_url=env["AWS_ENDPOINT_URL"],
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        region_name=env["AWS_DEFAULT_REGION"],
    )
    digests = {}
    for family in ("toy", "calm"):
        run = client.get_run(client.get_model_version_by_alias(family, "champion").run_id).data.tags
        key = f"{layout.run_prefix(run[tracking.TAG_RUN])}model/model.safetensors"
        digests[family] = hashlib.sha256(s3.get_object(Bucket="dropforge", Key=key)["Body"].read()).hexdigest()
    assert digests["toy"] == digests["calm"]


def test_mlflow_s_image_serves_the_model(server: Server, times: Times) -> None:
    """With this machine's packages, as the trainer of this server."""
    inside = {
        "MLFLOW_TRACKING_URI": "http://mlflow:5000",
        "MLFLOW_TRACKING_USERNAME": "trainer",
        "MLFLOW_TRACKING_PASSWORD": server.secrets["MLFLOW_TRAINER_PASSWORD"],
        "AWS_ENDPOINT_URL": "http://objects:9000",
        **{name: server.client_env[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")},
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with server.serving("toy@champion", inside) as address:
        rows = {"dataframe_records": [{"prompt": "What is 1 + 1?"}, {"prompt": "Who are you?"}]}
        found = httpx.post(f"{address}/invocations", json=rows, timeout=120)
    times.note("its model served, and two rows answered")
    assert found.status_code == 200, found.text
    assert len(found.json()["predictions"]) == len(rows["dataframe_records"])


def test_a_database_whose_host_goes_without_a_word_is_found_again_at_its_new_address(
    server: Server, times: Times
) -> None:
    """As when a machine is switched off: nobody closes its connections, and its database starts somewhere else."""
    if os.geteuid() or not all(map(shutil.which, ("nsenter", "ip"))):
        pytest.skip("taking a container off its network needs root, nsenter and ip")
    container, pid = server.container("postgres"), server.inspect("postgres")["State"]["Pid"]
    subprocess.run(["nsenter", f"-t{pid}", "-n", "ip", "link", "set", "eth0", "down"], check=True)
    engine("kill", container)
    engine("start", container)  # with another network namespace, which a restart by the engine's policy would keep
    server.until(lambda: server.healthy("postgres"), "it is healthy", 60)
    since = datetime.now(UTC)

    def heard() -> bool:
        """Whether each of Airflow's parts has written to the new one."""
        health = server.airflow_health()
        beats = [health[part][f"latest_{part}_heartbeat"] for part in ("scheduler", "triggerer", "dag_processor")]
        return all(datetime.fromisoformat(beat) > since for beat in beats)

    server.until(heard, "Airflow's parts have found it", 180)
    server.wait_until_ready(180)
    client = MlflowClient(server.client_env["MLFLOW_TRACKING_URI"])
    assert client.get_model_version_by_alias("toy", "champion").version
    times.note("the database's host gone, and found by all again")


def test_a_restart_of_all_loses_nothing(server: Server, times: Times, tmp_path: Path) -> None:
    client = MlflowClient(server.client_env["MLFLOW_TRACKING_URI"])
    before = client.get_model_version_by_alias("toy", "champion")
    server.compose("down")
    assert server.services() == []
    server.compose("up", "--detach")
    server.wait_until_ready()
    times.note("down and up again")
    after = client.get_model_version_by_alias("toy", "champion")
    assert (after.version, after.run_id) == (before.version, before.run_id)
    assert client.get_run(before.run_id).data.metrics["train/loss"] > 0
    # The command in the container knows the same, and what comes now is trained as before.
    container = server.container("airflow-api")
    assert "FINISHED" in engine("exec", container, "dropforge", "runs", "--family", "toy")
    engine("cp", str(write_drop(tmp_path / "drop", 2, steps=20)), f"{container}:/tmp/drop")
    told = engine("exec", container, "dropforge", "drop", "/tmp/drop", "--family", "again", "--follow", timeout=400)
    times.note("another drop has ended")
    assert client.get_model_version_by_alias("again", "champion").version, told


def test_a_first_drop_by_the_commands_of_the_page(server: Server, times: Times, tmp_path: Path) -> None:
    """As they stand there, but for the family and the ports, which this server has of its own."""
    client = MlflowClient(server.client_env["MLFLOW_TRACKING_URI"])
    shutil.copy(server.env_file, tmp_path / ".env")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (inside,) = page_commands("docker-compose.md", "A first run")
    _published, outside = page_commands("docker-compose.md", "Upload from outside")
    ports = {"8080": "AIRFLOW_PORT", "5000": "MLFLOW_PORT", "9000": "S3_PORT"}
    for number, commands in enumerate((inside, outside), 1):
        for written, name in ports.items():
            commands = commands.replace(f"127.0.0.1:{written}", f"127.0.0.1:{server.ports[name]}")
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, sample_rows(200, 10 + number))))
        told = server.type(commands.replace("--family toy", "--family page"), tmp_path)
        times.note("a drop by the page has ended")
        versions = client.search_model_versions("name = 'page'")
        assert len(versions) == number, told


def test_a_backup_is_restored_by_the_commands_of_the_page(server: Server, times: Times, tmp_path: Path) -> None:
    client = MlflowClient(server.client_env["MLFLOW_TRACKING_URI"])
    before = client.get_model_version_by_alias("toy", "champion")
    shutil.copy(server.env_file, tmp_path / ".env")
    for commands in page_commands("docker-compose-operation.md", "Back up and restore"):
        server.type(commands.replace("dropforge-server", PROJECT), tmp_path)
    server.wait_until_ready()
    times.note("backed up, removed and restored")
    after = client.get_model_version_by_alias("toy", "champion")
    assert (after.version, after.run_id) == (before.version, before.run_id)
    assert "FINISHED" in dropforge(server, "runs", "--family", "toy")


def test_no_secret_is_in_logs_or_arguments(server: Server) -> None:
    secret = {name: value for name, value in server.secrets.items() if re.search("PASSWORD|KEY|SECRET", name)}
    texts = {service: server.logs(service) for service in [*WANTED, "databases", "airflow-migrate"]}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            texts[str(path)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    logs = engine("exec", server.container("airflow-api"), "sh", "-c", "cat $(find /opt/airflow/logs -name '*.log')")
    texts["logs of tasks"] = logs
    assert "dropforge" in logs
    for where, text in texts.items():
        assert not [name for name, value in secret.items() if value in text], where


def test_a_second_trainer_finds_the_cluster_taken(server: Server) -> None:
    image = server.inspect("trainer")["Image"]
    volume = f"{PROJECT}_state:/var/lib/dropforge"
    command = ["run", "--rm", "--user=50000:0", "--ulimit=host", "-v", volume, image]
    done = subprocess.run(
        [ENGINE, *command, "python3", "-m", "kubeflow_training.jobs.local", "/var/lib/dropforge/cluster"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "another supervisor runs there" in done.stderr


def test_it_is_stopped_and_removed_by_the_commands_of_the_page(server: Server, times: Times, tmp_path: Path) -> None:
    """The last of all."""
    (lines,) = page_commands("docker-compose-operation.md", "Update and remove")
    update, stop, down, remove = lines.splitlines()
    assert update.startswith("git pull && make server")

    def volumes() -> set[str]:
        found = engine("volume", "ls", "--format", "{{.Name}}").splitlines()
        return {name for name in found if name.startswith(f"{PROJECT}_")}

    kept = volumes()
    assert kept
    server.type(stop, tmp_path)
    assert not any(server.inspect(service)["State"]["Running"] for service in WANTED)
    server.compose("up", "--detach")
    server.wait_until_ready()
    times.note("stopped and up again")
    client = MlflowClient(server.client_env["MLFLOW_TRACKING_URI"])
    assert client.get_model_version_by_alias("toy", "champion").version
    server.type(down, tmp_path)
    assert (server.services(), volumes()) == ([], kept)
    server.type(remove, tmp_path)
    assert volumes() == set()
