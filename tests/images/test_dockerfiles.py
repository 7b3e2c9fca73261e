"""What every image promises and can be read in its Dockerfile."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Set
from pathlib import Path

import pytest

from tests.images.dockerfile import NAMES, REPOSITORY, VERSION, Dockerfile

SERVICES = [name for name in NAMES if name != "stack"]
SECRET = re.compile(r"PASSW|TOKEN|SECRET|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE", re.IGNORECASE)


@pytest.fixture(params=NAMES)
def image(request: pytest.FixtureRequest) -> Dockerfile:
    return Dockerfile(request.param)


def test_there_is_one_for_each_service() -> None:
    assert {"airflow", "curation", "mlflow", "trainer"} <= set(NAMES)


def test_nothing_runs_as_root(image: Dockerfile) -> None:
    # By its number: a cluster that demands `runAsNonRoot` cannot look a name up.
    user = re.fullmatch(r"(\d+):(\d+)", image.last("USER"))
    assert user is not None
    assert user.groups() == (("50000", "0") if image.name == "airflow" else ("10001", "10001"))


def test_the_first_process_is_tini(image: Dockerfile) -> None:
    assert image.entrypoint[:2] == ["tini", "--"]


def test_what_listens_says_whether_it_is_healthy(image: Dockerfile) -> None:
    checks = [item.rest for item in image.last_stage if item.word == "HEALTHCHECK"]
    assert len(checks) == len([item for item in image.last_stage if item.word == "EXPOSE"])


def test_labels_say_what_it_is_and_which_code_is_in_it(image: Dockerfile) -> None:
    wanted = {
        f"org.opencontainers.image.{name}" for name in ("title", "description", "licenses", "version", "revision")
    }
    assert wanted <= set(image.labels)
    assert image.labels["org.opencontainers.image.version"] == "$VERSION"
    assert image.labels["org.opencontainers.image.revision"] == "$REVISION"
    assert image.arguments["VERSION"] == VERSION


def test_the_base_is_a_build_argument_and_pinned(image: Dockerfile) -> None:
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-bookworm|\S+@sha256:[0-9a-f]{64}", image.arguments["BASE"])
    stages: set[str] = set()
    for rest in image.all("FROM"):
        base, _, stage = rest.partition(" AS ")
        built = re.sub(r"\$\{(\w+)\}", lambda found: image.arguments.get(found[1], ""), base)
        assert base == "${BASE}" or built in stages, f"{base} is no stage of its own"
        stages.add(stage)
    assert "latest" not in image.text


def test_no_secret_is_given_to_the_build_or_kept_in_the_image(image: Dockerfile) -> None:
    assert not [name for name in [*image.arguments, *image.variables] if SECRET.search(name)]


def test_every_package_is_pinned(image: Dockerfile) -> None:
    named = set(re.findall(r"requirements/([\w-]+\.txt)", image.text))
    assert named
    assert "dev.txt" not in named or image.name == "stack"
    for name in named:
        lines = (REPOSITORY / "requirements" / name).read_text().splitlines()
        assert lines
        assert [line for line in lines if line and not re.match(r"[\w.-]+(\[[\w,-]+\])?==\S+( ;.*)?$", line)] == []


def test_what_is_copied_is_there(image: Dockerfile) -> None:
    for rest in image.all("COPY"):
        if "--from=" not in rest:
            for source in rest.split()[:-1]:
                assert (REPOSITORY / source).exists(), source


def context(path: Path) -> set[str]:
    """What a list of the form `*`, `!NAME`, ... lets into the context."""
    first, *rest = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert (first, rest[-1]) == ("*", "**/__pycache__")
    assert all(re.fullmatch(r"![\w.]+", line) for line in rest[:-1])  # nested names: not every engine reads them
    return {line.removeprefix("!") for line in rest[:-1]}


def size_of(names: Set[str]) -> int:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *names], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    paths = [REPOSITORY / path for path in filter(None, listed.stdout.split("\0"))]
    return sum(path.stat().st_size for path in paths if path.is_file())


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_copied_and_nothing_else_is_in_the_context(name: str) -> None:
    """Nor what the pages have people make in a clone: keys, files of secrets, a backup."""
    image = Dockerfile(name)
    copied = [source for rest in image.all("COPY") if "--from=" not in rest for source in rest.split()[:-1]]
    names = context(image.path.with_name("Dockerfile.dockerignore"))
    assert names == {source.partition("/")[0] for source in copied}
    assert names < context(REPOSITORY / ".dockerignore")
    assert size_of(names) < 5_000_000


def test_the_embedded_stack_has_all_of_the_code_and_nothing_that_is_made_in_a_clone() -> None:
    names = context(REPOSITORY / ".dockerignore")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert names <= {path.partition("/")[0] for path in listed.stdout.split("\0")}
    assert {"dropforge", "trainer", "curation", "plugins", "dags"} <= names
    assert size_of(names) < 6_000_000


@pytest.mark.parametrize("name", SERVICES)
def test_what_builds_is_left_behind(name: str) -> None:
    image = Dockerfile(name)
    stages = [rest.partition(" AS ")[2] for rest in image.all("FROM")]
    assert stages[0] == "tools"
    assert stages[-1] == name
    final = " ".join(item.rest for item in image.last_stage)
    assert "/opt/tools" not in final
    assert "pip install" not in final
    assert "cyclonedx-py environment" in image.text


@pytest.mark.parametrize("name", NAMES)
def test_only_the_trainer_has_a_compiler(name: str) -> None:
    found = bool(re.search(r"apt-get install[^&]*(gcc|g\+\+|clang|build-essential)", Dockerfile(name).text))
    assert found == (name == "trainer")


def test_what_builds_is_the_same_for_all() -> None:
    texts = [Dockerfile(name).text for name in SERVICES]
    pattern = re.compile(r"FROM \$\{BASE\} AS tools\n.*?image-tools\.txt\n(?=\n|ENV)", re.DOTALL)
    parts = {"".join(pattern.findall(text)) for text in texts}
    assert "" not in parts
    assert len(parts) == 1


def test_the_trainer_has_what_a_recipe_may_ask_for() -> None:
    pins = (REPOSITORY / "requirements/image-trainer.txt").read_text()
    for package in ("torch", "transformers", "peft", "datasets", "bitsandbytes", "tensorboard"):
        assert re.search(rf"^{package}==", pins, re.MULTILINE), package
    arguments = Dockerfile("trainer").arguments
    assert arguments["VARIANT"] == "gpu"
    assert arguments["FLASH_ATTN"] == "none"


def test_cuda_and_nccl_are_those_that_the_packages_bring() -> None:
    pins = dict(
        re.findall(r"^([\w-]+)==([\w.]+)", (REPOSITORY / "requirements/image-trainer.txt").read_text(), re.MULTILINE)
    )
    trainer = Dockerfile("trainer")
    every = [dict(re.findall(r"(\w+)=(\S+)", rest)) for rest in trainer.all("ARG")]
    assert {found["NCCL"] for found in every if "NCCL" in found} == {pins["nvidia-nccl-cu13"]}
    assert {found["CUDA"] for found in every if "CUDA" in found} == {pins["cuda-toolkit"]}
    assert len({found["EFA"] for found in every if "EFA" in found}) == 1
