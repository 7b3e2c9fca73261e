"""What docker-compose.yaml and the script of its secrets promise, and can be seen without starting anything."""

from __future__ import annotations

import base64
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from dropforge_airflow import body_limit
from mlflow.server.security_utils import is_allowed_host_header, should_block_cors_request

from dropforge.run_limits import run_limits
from dropforge.stack.services import _API_BODY
from tests.compose.server import ENV_SCRIPT, make_env
from tests.images.dockerfile import REPOSITORY, VERSION

TEXT = (REPOSITORY / "docker-compose.yaml").read_text()
FILE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, Any] = FILE["services"]
ONCE = {"databases", "airflow-migrate"}
SECRET = re.compile(r"PASSW|TOKEN|SECRET|_KEY", re.IGNORECASE)


@pytest.fixture(params=sorted(SERVICES))
def service(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"name": request.param, **SERVICES[request.param]}


def test_only_this_machine_can_ask(service: dict[str, Any]) -> None:
    assert all(str(port).startswith("${BIND_ADDRESS:-127.0.0.1}:") for port in service.get("ports", []))
    assert bool(service.get("ports")) == (service["name"] in ("airflow-api", "mlflow"))
    assert "network_mode" not in service
    assert not service.get("privileged")


def test_no_service_takes_the_machines_memory_or_disk(service: dict[str, Any]) -> None:
    assert service["mem_limit"]
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}


def test_s3_is_published_by_a_file_of_its_own() -> None:
    more = yaml.safe_load((REPOSITORY / "images/objects/published.yaml").read_text())["services"]
    assert more == {"objects": {"ports": ["${BIND_ADDRESS:-127.0.0.1}:${S3_PORT:-9000}:9000"]}}


def test_a_drop_may_not_ask_for_any_amount_by_default() -> None:
    given = SERVICES["airflow-scheduler"]["environment"]["DROPFORGE_LIMITS"]
    default = re.fullmatch(r"\$\{DROPFORGE_LIMITS-(.*)\}", given)
    assert default is not None
    found = run_limits({"DROPFORGE_LIMITS": default[1]})
    assert {"nodes", "retries", "minutes", "rows", "bytes"} <= {
        name for name, value in vars(found).items() if value is not None
    }


def test_who_has_no_login_cannot_fill_the_memory_of_airflow_s_api_server() -> None:
    """A body is kept whole before anybody is asked for a login, and no proxy stands before this port."""
    assert SERVICES["airflow-api"]["environment"][body_limit.VARIABLE] == str(_API_BODY)


def test_another_s3_is_named_by_env() -> None:
    env = {**SERVICES["trainer"]["environment"], **SERVICES["airflow-scheduler"]["environment"]}
    assert env["AWS_ENDPOINT_URL"] == "${S3_ENDPOINT_URL-http://objects:9000}"
    assert env["DROPFORGE_QUEUE_URL"].startswith("${SQS_QUEUE_URL-http://objects:9000/")
    assert env["DROPFORGE_BUCKET"] == "${S3_BUCKET:-dropforge}"


def test_what_stays_is_started_again_and_looked_at(service: dict[str, Any]) -> None:
    once = service["name"] in ONCE
    assert service["restart"] == ("on-failure" if once else "unless-stopped")
    assert ("healthcheck" in service) != once


def test_no_secret_is_written_down(service: dict[str, Any]) -> None:
    for name, value in (service.get("environment") or {}).items():
        if SECRET.search(name) and not name.endswith("_FILE"):
            assert re.fullmatch(r"\$\{\w+:\?.*\}|\$\{(HF_TOKEN|DROPFORGE_PII_KEY):-\}", str(value)), name
    assert not SECRET.search(str(service.get("command", "")))


def test_images_are_of_one_version(service: dict[str, Any]) -> None:
    image = re.sub(r"\$\{DROPFORGE_[A-Z]+_IMAGE:-(.*)\}$", r"\1", service["image"])
    assert (image != service["image"]) == image.startswith("dropforge-")
    assert f":{VERSION}" in image or re.fullmatch(r"docker\.io/library/postgres:\d+\.\d+", image)
    builders = [name for name, item in SERVICES.items() if item["image"] == service["image"] and "build" in item]
    assert len(builders) == image.startswith("dropforge-"), "each image is built once"
    assert "build" in service or service.get("pull_policy", "").endswith(":-never}") or not builders
    assert not service.get("build") or (REPOSITORY / service["build"]["dockerfile"]).exists()


@pytest.mark.parametrize("name", ["docker-compose.yaml", "images/stack/docker-compose.yaml"])
def test_images_that_are_built_here_are_told_their_commit(name: str) -> None:
    services = yaml.safe_load((REPOSITORY / name).read_text())["services"]
    built = [item["build"] for item in services.values() if "build" in item]
    assert built
    assert all(item["args"]["REVISION"] == "${DROPFORGE_REVISION:-}" for item in built)


def test_make_server_names_the_commit_of_the_clone_and_that_files_changed_since(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", tmp_path, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    def told() -> str:
        done = subprocess.run(
            ["make", "--no-print-directory", "server", f"COMPOSE={compose}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "compose-ports.sh").write_text("")
    for name in ("Makefile", "images/compose-env.sh"):
        (tmp_path / name).write_bytes((REPOSITORY / name).read_bytes())
    compose = tmp_path / "compose.sh"
    compose.write_text('#!/bin/sh\necho "$* of <$DROPFORGE_REVISION>"\n')
    compose.chmod(0o755)
    assert told() == "up -d --build of <>"
    git("init", "--quiet")
    git("add", "Makefile")
    git("-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "--quiet", "--message", "one")
    git("tag", "v1")
    assert told() == f"up -d --build of <{git('rev-parse', 'HEAD')}>"
    (tmp_path / "Makefile").write_text((REPOSITORY / "Makefile").read_text() + "\n")
    assert told() == f"up -d --build of <{git('rev-parse', 'HEAD')}+>"


def test_what_must_last_is_in_volumes() -> None:
    def mounted(name: str) -> set[str]:
        return {volume.split(":")[0] for volume in SERVICES[name]["volumes"]}

    assert {"database", "objects", "state", "logs"} == set(FILE["volumes"])
    assert "database" in mounted("postgres")
    assert "objects" in mounted("objects")
    for name in ("airflow-api", "airflow-scheduler", "airflow-triggerer", "airflow-dag-processor"):
        assert {"state", "logs"} <= mounted(name)
    assert "state" in mounted("trainer") & mounted("trainer-gpu")


def test_files_that_are_mounted_are_there(service: dict[str, Any]) -> None:
    for volume in service.get("volumes", []):
        source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
        assert not source.startswith(".") or (REPOSITORY / source).exists(), source


def test_gpus_are_for_the_profile_of_that_name() -> None:
    assert SERVICES["trainer"]["profiles"] == ["cpu"]
    assert SERVICES["trainer-gpu"]["profiles"] == ["gpu"]
    (device,) = SERVICES["trainer-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert "deploy" not in SERVICES["trainer"]


def test_the_password_of_the_administrator_is_known_to_one_service_alone() -> None:
    assert [name for name, item in SERVICES.items() if "AIRFLOW_ADMIN_PASSWORD" in str(item)] == ["airflow-api"]
    assert {name for name, item in SERVICES.items() if "POSTGRES_PASSWORD" in str(item)} == {"postgres", "databases"}
    training = SERVICES["trainer"]["environment"]
    assert [name for name in training if re.search("FERNET|JWT|PASSW", name)] == ["MLFLOW_TRACKING_PASSWORD"]
    assert "MLFLOW_TRAINER_PASSWORD" in training["MLFLOW_TRACKING_PASSWORD"]
    assert [name for name, item in SERVICES.items() if "MLFLOW_ADMIN_PASSWORD" in str(item)] == ["mlflow"]


def test_the_script_makes_all_secrets_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    first = make_env(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert set(re.findall(r"\$\{(\w+):\?", TEXT)) <= set(first)
    assert len(set(first.values())) == len(first)
    assert re.fullmatch("[1-9][0-9]*m", first["TRAINER_MEMORY"])
    assert len(base64.urlsafe_b64decode(first["FERNET_KEY"])) == 32
    before = path.read_bytes()
    assert make_env(path) == first
    assert path.read_bytes() == before
    assert make_env(tmp_path / "other")["POSTGRES_PASSWORD"] != first["POSTGRES_PASSWORD"]
    assert {item.name for item in tmp_path.iterdir()} == {".env", "other"}


def test_the_script_keeps_what_people_wrote_and_adds_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("# ours\nPOSTGRES_PASSWORD=a=b c\nAIRFLOW_PORT=81\nCOMPOSE_PROFILES=gpu")  # without a last line end
    path.chmod(0o644)
    found = make_env(path)
    assert found["POSTGRES_PASSWORD"] == "a=b c"
    assert (found["AIRFLOW_PORT"], found["COMPOSE_PROFILES"]) == ("81", "gpu")
    assert len(found["JWT_SECRET"]) >= 64
    assert path.read_text().startswith("# ours\n")
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("somebody_was_first", [True, False])
def test_no_secrets_are_left_where_the_file_could_not_be_made(tmp_path: Path, somebody_was_first: bool) -> None:
    path, programs = tmp_path / "server" / ".env", tmp_path / "bin"
    for folder in (path.parent, programs):
        folder.mkdir()
    (programs / "ln").write_text(
        f"#!/bin/sh\n{'echo A=b >$2' if somebody_was_first else ':'}\necho no links here >&2; exit 1\n"
    )
    (programs / "ln").chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", str(ENV_SCRIPT), str(path)], env=env, capture_output=True, text=True, timeout=30)
    left = [item.name for item in path.parent.iterdir()]
    if somebody_was_first:
        assert done.returncode == 0
        assert left == [".env"]
        assert path.read_text().startswith("A=b\n")
    else:
        assert done.returncode == 1
        assert f"{path} could not be made: no links here" in done.stderr
        assert left == []


def test_a_proxy_before_it_is_named_by_env() -> None:
    def filled(text: str, env: dict[str, str]) -> str:
        while (inner := re.sub(r"\$\{(\w+):-([^${}]*)\}", lambda found: env.get(found[1]) or found[2], text)) != text:
            text = inner
        return text

    airflow, mlflow = SERVICES["airflow-api"]["environment"], SERVICES["mlflow"]["environment"]
    urls = (airflow["AIRFLOW__API__BASE_URL"], airflow["DROPFORGE_MLFLOW_URL"])
    assert [filled(url, {"AIRFLOW_PORT": "81"}) for url in urls] == ["http://127.0.0.1:81", "http://127.0.0.1:5000"]
    proxy = {"AIRFLOW_URL": "https://a.example", "MLFLOW_URL": "https://m.example", "MLFLOW_HOSTS": "m.example"}
    assert [filled(url, proxy) for url in urls] == ["https://a.example", "https://m.example"]
    for env, known in ((proxy, True), ({}, False)):
        hosts = filled(mlflow["MLFLOW_SERVER_ALLOWED_HOSTS"], env).split(",")
        assert is_allowed_host_header(hosts, "m.example") is known
        assert is_allowed_host_header(hosts, "mlflow:5000")
        assert not is_allowed_host_header(hosts, "evil.example")
        origins = [origin for origin in filled(mlflow["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"], env).split(",") if origin]
        assert should_block_cors_request("https://m.example", "POST", origins) is not known
        assert should_block_cors_request("https://evil.example", "POST", origins)


@pytest.mark.parametrize("name", ["AIRFLOW_PORT", "MLFLOW_PORT", "S3_PORT"])
def test_a_port_of_another_program_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("COMPOSE_FILE", raising=False)
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        one.listen()
        taken, free = one.getsockname()[1], other.getsockname()[1]
        script, settings = REPOSITORY / "images" / "compose-ports.sh", tmp_path / ".env"

        def run(port: int | str, compose: str) -> subprocess.CompletedProcess[str]:
            lines = {"AIRFLOW_PORT": free, "MLFLOW_PORT": free, "S3_PORT": free, **further, name: port}
            settings.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
            return subprocess.run(["sh", str(script), compose, str(settings)], capture_output=True, text=True)

        further = {} if name != "S3_PORT" else {"COMPOSE_FILE": "docker-compose.yaml:images/objects/published.yaml"}
        done = run(taken, "true")
        assert done.returncode == 1
        assert f"port {taken} is taken by another program" in done.stderr
        assert f"write another {name}" in done.stderr
        assert run(taken, "echo a-container").returncode == 0, "the server itself"
        assert run(free, "true").returncode == 0
        assert run(free, "no-such-program").returncode == 0
        assert "is no port" in run("x", "true").stderr
        for spelled in (f'"{taken}"', f"'{taken}'  # ours", f"{taken} # ours", f"{taken}\r"):  # as Compose reads them
            assert f"port {taken} is taken" in run(spelled, "true").stderr, spelled
        with monkeypatch.context() as patched:  # the environment comes first
            patched.setenv(name, str(taken))
            assert f"port {taken} is taken" in run(free, "true").stderr
        if further:
            monkeypatch.setenv("COMPOSE_FILE", "docker-compose.yaml")
            assert run(taken, "true").returncode == 0, "published nowhere"


def test_a_secret_without_a_value_is_made_and_one_that_is_exported_is_kept(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("JWT_SECRET=\nAPI_SECRET_KEY=  \nexport FERNET_KEY=ours\nCOMPOSE_PROFILES=\n")
    subprocess.run(["sh", str(ENV_SCRIPT), str(path)], check=True, capture_output=True)
    lines = path.read_text().splitlines()
    assert lines[:4] == ["JWT_SECRET=", "API_SECRET_KEY=  ", "export FERNET_KEY=ours", "COMPOSE_PROFILES="]
    made = [line.partition("=") for line in lines[4:]]
    assert {"JWT_SECRET", "API_SECRET_KEY"} <= {name for name, _, value in made if len(value) > 32}
    assert not {"FERNET_KEY", "COMPOSE_PROFILES"} & {name for name, *_ in made}
    before = path.read_text()
    subprocess.run(["sh", str(ENV_SCRIPT), str(path)], check=True, capture_output=True)
    assert path.read_text() == before


def test_two_scripts_at_once_agree(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    running = [subprocess.Popen(["sh", str(ENV_SCRIPT), str(path)], stderr=subprocess.PIPE) for _ in range(8)]
    assert [one.wait(30) for one in running] == [0] * 8
    told = [one.stderr.read().decode() for one in running if one.stderr]
    assert sum("made" in text for text in told) == 1
    assert [item.name for item in tmp_path.iterdir()] == [".env"]
    assert path.read_text().count("FERNET_KEY=") == 1
