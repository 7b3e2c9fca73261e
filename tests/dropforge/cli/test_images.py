"""`dropforge images` against moto's ECR. The engine is a script that notes what it is told: it needs no base image."""

from __future__ import annotations

import base64
import json
import platform as machine
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from typer.testing import CliRunner, Result

from dropforge.cli.app import app
from dropforge.errors import DropforgeError

HOST = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
DIGEST = "sha256:" + "b" * 64
SCRIPT = f"""#!/bin/sh
echo "$@" >>"$NOTES/words"
case "$1 $2" in
  "login "*) cat >"$NOTES/password" ;;
  "manifest push") echo {DIGEST} >"$5"; exit ${{FAILS:-0}} ;;
  "manifest rm") exit 1 ;;
  "build "*) exit ${{BUILD_FAILS:-0}} ;;
  "buildx version") exit ${{NO_BUILDX:-0}} ;;
  "buildx build") case "$*" in *" --push "*) exit ${{FAILS:-0}} ;; *) exit ${{BUILD_FAILS:-0}} ;; esac ;;
esac
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which `podman` notes what it was told; no other engine is on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "podman"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("NOTES", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


COSIGN = """#!/bin/sh
echo "cosign $@" >>"$NOTES/words"
echo "password ${COSIGN_PASSWORD-none}" >>"$NOTES/said"
case "$1" in
  sign) exit ${SIGN_FAILS:-0} ;;
  verify) case "$*" in *"$UNSIGNED"*) echo "Error: no matching signatures" >&2; exit 12 ;; esac ;;
esac
"""


@pytest.fixture
def keys(notes: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a pair of keys; `cosign` is a script that notes what it is told."""
    script = notes / "bin" / "cosign"
    script.write_text(COSIGN)
    script.chmod(0o755)
    monkeypatch.setenv("COSIGN_PASSWORD", "s3cret-pw")
    monkeypatch.setenv("UNSIGNED", "nothing-of-this-name")
    (notes / "k.key").write_text("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\nx\n")
    (notes / "k.pub").write_text("-----BEGIN PUBLIC KEY-----\nMFkw\n-----END PUBLIC KEY-----\n")
    return notes


def test_what_was_pushed_is_signed_by_its_digest_before_it_stands_in_the_lock(keys: Path) -> None:
    done = call("push", "mlflow", "--registry", "registry.example/ml", "--sign", "k.key")
    assert done.exit_code == 0, done.output
    address = f"registry.example/ml/dropforge-mlflow@{DIGEST}"
    words = (keys / "words").read_text()
    assert words.splitlines()[-1] == f"cosign sign --yes --tlog-upload=false --recursive --key k.key {address}"
    assert json.loads((keys / "images.lock").read_text()) == {"mlflow": address}
    assert (keys / "said").read_text() == "password s3cret-pw\n"
    assert "s3cret-pw" not in words + done.output


def test_an_image_that_could_not_be_signed_stands_in_no_lock(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGN_FAILS", "1")
    with pytest.raises(DropforgeError, match="it is pushed, and cosign ended with code 1"):
        call("push", "mlflow", "--registry", "registry.example", "--sign", "awskms:///alias/images")
    assert not (keys / "images.lock").exists()


@pytest.mark.parametrize("key", ["none.key", "-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----", "--help", "https://x/k"])
def test_a_key_that_is_none_ends_it_before_anything_is_built(keys: Path, key: str) -> None:
    with pytest.raises(DropforgeError, match="it is neither a file nor the address of a key store") as raised:
        call("push", "mlflow", "--registry", "registry.example", f"--sign={key}")
    assert "BEGIN" not in str(raised.value)
    assert not (keys / "words").exists()


def test_without_cosign_or_a_password_nothing_is_built(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COSIGN_PASSWORD")
    with pytest.raises(DropforgeError, match="COSIGN_PASSWORD: it is not set"):
        call("push", "mlflow", "--registry", "registry.example", "--sign", "k.key")
    (keys / "bin" / "cosign").unlink()
    monkeypatch.setenv("PATH", str(keys / "bin"))
    with pytest.raises(DropforgeError, match="cosign: it is not on the path"):
        call("push", "mlflow", "--registry", "registry.example", "--sign", "k.key")
    assert not (keys / "words").exists()


def test_what_chooses_a_stage_is_said_though_nobody_chose(keys: Path) -> None:
    assert call("build", "trainer", "--registry", "registry.example").exit_code == 0
    assert " --build-arg VARIANT=gpu " in (keys / "words").read_text()


def test_a_build_without_a_registry_is_for_this_machine(keys: Path) -> None:
    assert call("build", "trainer").exit_code == 0
    assert f" localhost/dropforge-trainer:{version('dropforge')} " in (keys / "words").read_text()


def test_images_without_a_signature_are_named(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = {name: f"registry.example/dropforge-{name}@{DIGEST}" for name in ("mlflow", "trainer")}
    (keys / "images.lock").write_text(json.dumps(lock))
    done = CliRunner().invoke(app, ["images", "verify", "--key", "k.pub"])
    assert (done.exit_code, done.output) == (0, "mlflow: signed\ntrainer: signed\n")
    monkeypatch.setenv("UNSIGNED", "trainer")
    done = CliRunner().invoke(app, ["images", "verify", "--key", "k.pub"])
    assert (done.exit_code, "trainer: not verified: Error: no matching signatures" in done.output) == (1, True)
    for words, told in ((["curation"], "names none"), ([], "names no image by its digest")):
        (keys / "images.lock").write_text(json.dumps({"mlflow": "--insecure-ignore-tlog"}))
        with pytest.raises(DropforgeError, match=told):
            raise_of(["images", "verify", "--key", "k.pub", *words])


def test_a_policy_holds_a_public_key_and_no_other(keys: Path) -> None:
    words = ["manifests", "image-policy", "--registry", "registry.example/ml", "--key"]
    (policy,) = yaml.safe_load_all(CliRunner().invoke(app, [*words, "k.pub"]).output)
    assert policy["spec"]["images"] == [{"glob": "registry.example/ml/dropforge-*"}]
    assert policy["spec"]["authorities"][0]["key"] == {"data": (keys / "k.pub").read_text()}
    (policy,) = yaml.safe_load_all(CliRunner().invoke(app, [*words, "awskms:///alias/images"]).output)
    assert policy["spec"]["authorities"][0]["key"] == {"kms": "awskms:///alias/images"}
    for key in ("k.key", "none.pub", "env://KEY"):
        with pytest.raises(DropforgeError, match="it is no file that holds one"):
            raise_of([*words, key])
    with pytest.raises(DropforgeError, match="option --key: it is missing"):
        raise_of(words[:-1])


def raise_of(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exception is not None, done.output
    raise done.exception


@pytest.fixture
def ecr(aws: str) -> Iterator[Any]:
    client: Any = boto3.client("ecr", region_name="us-east-1")
    yield client
    for found in client.describe_repositories()["repositories"]:
        client.delete_repository(repositoryName=found["repositoryName"], force=True)


def call(*words: str) -> Result:
    done = CliRunner().invoke(app, ["images", *words, "--engine", "podman"])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def names(ecr: Any) -> list[str]:
    return sorted(found["repositoryName"] for found in ecr.describe_repositories()["repositories"])


def test_a_push_makes_repositories_logs_in_and_writes_digests(notes: Path, ecr: Any) -> None:
    ecr.create_repository(repositoryName="ml/dropforge-mlflow")
    done = call("push", "mlflow", "trainer", "--registry", f"{HOST}/ml", "--build-arg", "VARIANT=cpu")
    assert done.exit_code == 0, done.output
    assert names(ecr) == ["ml/dropforge-mlflow", "ml/dropforge-trainer"]
    token = ecr.get_authorization_token()["authorizationData"][0]["authorizationToken"]
    password = base64.b64decode(token).decode().partition(":")[2]
    assert (notes / "password").read_text() == password
    words = (notes / "words").read_text()
    assert f"login --username AWS --password-stdin {HOST}\n" in words
    assert password not in words.replace("--password-stdin", "")
    assert password not in done.output
    assert [line for line in words.splitlines() if "VARIANT=cpu" in line and "images/trainer" in line]
    assert not [line for line in words.splitlines() if "VARIANT=cpu" in line and "images/mlflow" in line]
    assert json.loads((notes / "images.lock").read_text()) == {
        "mlflow": f"{HOST}/ml/dropforge-mlflow@{DIGEST}",
        "trainer": f"{HOST}/ml/dropforge-trainer@{DIGEST}",
    }


def test_a_build_pushes_nothing_and_asks_nobody(notes: Path, ecr: Any) -> None:
    done = call("build", "curation", "--registry", f"{HOST}/ml", "--platform", "linux/arm64")
    assert done.exit_code == 0, done.output
    words = (notes / "words").read_text()
    assert "--platform linux/arm64 " in words
    assert "push" not in words
    assert "login" not in words
    assert names(ecr) == []
    assert not (notes / "images.lock").exists()


def test_a_build_needs_no_emulation_and_a_push_is_for_both_processors(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "machine", lambda: "aarch64")
    for command in ("build", "push"):
        call(command, "mlflow", "--registry", "registry.example")
    lines = (notes / "words").read_text().splitlines()
    built = [re.search(r"--platform (\S+)", line) for line in lines if line.startswith("build ")]
    assert [one and one[1] for one in built] == ["linux/arm64", "linux/amd64,linux/arm64"]


def test_a_docker_without_buildx_is_named_unless_another_engine_is_there(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_BUILDX", "1")
    (notes / "bin" / "docker").write_bytes((notes / "bin" / "podman").read_bytes())
    (notes / "bin" / "docker").chmod(0o755)
    words = ["images", "build", "mlflow", "--registry", "registry.example"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert "manifest rm" in (notes / "words").read_text()
    with pytest.raises(DropforgeError, match=r"engine docker: it has no plugin buildx.*docker-buildx-plugin"):
        raise_of([*words, "--engine", "docker"])


def test_a_push_that_fails_leaves_the_lock_as_it_was(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (notes / "images.lock").write_text('{"mlflow": "before"}')
    monkeypatch.setenv("FAILS", "3")
    with pytest.raises(DropforgeError, match=r"`podman manifest push` to registry\.example: it ended with code 3"):
        call("push", "mlflow", "--registry", "registry.example")
    assert (notes / "images.lock").read_text() == '{"mlflow": "before"}'


@pytest.mark.parametrize("engine", ["podman", "docker"])
def test_a_registry_without_a_login_is_named_with_the_command_that_logs_in(
    notes: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    if engine == "docker":
        (notes / "bin" / "podman").rename(notes / "bin" / "docker")
    monkeypatch.setenv("FAILS", "125")
    with pytest.raises(DropforgeError) as raised:
        raise_of(["images", "push", "mlflow", "--registry", "registry.example:5000/team", "--engine", engine])
    mend = f"If they name a login: `{engine} login registry.example:5000`; then give the command again"
    assert mend in str(raised.value)
    monkeypatch.setenv("FAILS", "0")
    monkeypatch.setenv("BUILD_FAILS", "1")
    with pytest.raises(DropforgeError) as raised:
        raise_of(["images", "build", "mlflow", "--registry", "registry.example:5000", "--engine", engine])
    assert "it ended with code 1. Its last lines say why" in str(raised.value)
    assert "login" not in str(raised.value)


def test_a_push_to_amazon_that_fails_asks_for_no_login(notes: Path, ecr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "3")
    with pytest.raises(DropforgeError, match="Its last lines say why; then give the command again") as raised:
        call("push", "mlflow", "--registry", HOST)
    assert "login" not in str(raised.value)


def test_a_torn_lock_is_told_with_the_mend(notes: Path) -> None:
    (notes / "images.lock").write_bytes(b'{"mlflow": "r\xc3')
    for words in (["env"], ["push", "mlflow", "--registry", "registry.example"]):
        told = CliRunner().invoke(app, ["images", *words]).exception
        assert str(told) == "images.lock: it cannot be read. Remove it, and push again"


def test_credentials_that_may_not_are_told(notes: Path, aws: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(DropforgeError, match=rf"registry {HOST}: .*ecr:CreateRepository"):
        call("push", "mlflow", "--registry", HOST)
    assert not (notes / "words").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing"], "image nothing: there is none"),
        (["--build-arg", "VARIANT"], "build argument VARIANT: it has no value"),
        (["--build-arg", "COLOUR=red"], "build argument COLOUR: no image has it"),
        (["--build-arg", "HF_TOKEN=x"], "build argument HF_TOKEN: it looks like a secret"),
        (["--tag", "latest"], "tag 'latest': it is no tag that stays"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(notes: Path, words: list[str], told: str) -> None:
    with pytest.raises(DropforgeError, match=told):
        call("build", *words, "--registry", "registry.example")
    assert not (notes / "words").exists()


def test_compose_takes_what_was_pushed(notes: Path) -> None:
    told = CliRunner().invoke(app, ["images", "env"])
    assert isinstance(told.exception, DropforgeError)
    address = f"r.example/team/dropforge-mlflow@{DIGEST}"
    Path("images.lock").write_text(json.dumps({"mlflow": address, "curation": address.replace("mlflow", "curation")}))
    told = CliRunner().invoke(app, ["images", "env"])
    assert told.stdout.splitlines() == [f"DROPFORGE_MLFLOW_IMAGE={address}", "DROPFORGE_PULL_POLICY=missing"]
    compose = (Path(__file__).parents[3] / "docker-compose.yaml").read_text()
    for line in told.stdout.splitlines():
        assert f"${{{line.partition('=')[0]}:-" in compose
    Path("images.lock").write_text(json.dumps({"mlflow": "r.example/team/dropforge-mlflow:latest"}))
    assert "names no image by its digest" in str(CliRunner().invoke(app, ["images", "env"]).exception)
