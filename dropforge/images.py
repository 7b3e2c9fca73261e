"""Images for teams' clusters: what they are called, and the commands that build and push them, as plain values.

Nothing is run here, and no file read but the lock. A password is never among the words of a command: it goes to the
standard input of a login.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from dropforge.errors import DropforgeError
from dropforge.secret_looks import looks_secret
from dropforge.whole_file import read_small

Engine = Literal["docker", "podman", "buildah"]
ENGINES: Final[tuple[Engine, ...]] = ("docker", "podman", "buildah")
SERVICES: Final = ("airflow", "curation", "mlflow", "objects", "trainer")
_COMPOSE: Final = frozenset({"airflow", "mlflow", "objects", "trainer"})
PLATFORMS: Final = ("linux/amd64", "linux/arm64")
_PROCESSORS: Final = {"x86_64": "amd64", "aarch64": "arm64"}
LOCK: Final = "images.lock"
_LARGEST_LOCK: Final = 1 << 20

_HOST: Final = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:\d{1,5})?"
_PATH: Final = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
_REGISTRY: Final = re.compile(rf"{_HOST}(/{_PATH})*")
_ECR: Final = re.compile(r"\d{12}\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True)
class Registry:
    """Where images lie: a host, and perhaps a path that all names begin with."""

    host: str
    path: str

    @classmethod
    def parse(cls, text: str) -> Registry:
        """:raises DropforgeError: if it is no address of a registry."""
        if not _REGISTRY.fullmatch(text):
            mend = "Give HOST[:PORT][/PATH] in small letters, such as registry.example/team, without https:// and login"
            raise DropforgeError(f"registry {text!r}", "it is no address of a registry", mend)
        host, _, path = text.partition("/")
        return cls(host, path)

    @property
    def ecr_region(self) -> str | None:
        """The region, if this is Amazon's registry."""
        found = _ECR.fullmatch(self.host)
        return found["region"] if found else None

    def repository(self, service: str) -> str:
        """Its name within the registry."""
        return "/".join(filter(None, [self.path, f"dropforge-{service}"]))

    def reference(self, service: str, tag: str) -> str:
        """:raises DropforgeError: if the tag is none, or moves."""
        if not _TAG.fullmatch(tag) or tag == "latest":
            raise DropforgeError(f"tag {tag!r}", "it is no tag that stays", "Give a version, such as 0.1.0")
        return f"{self.host}/{self.repository(service)}:{tag}"


def platform_of(machine: str) -> str:
    """Name of the platform whose images a machine builds without emulation. :param machine: of `platform.machine()`."""
    return f"linux/{_PROCESSORS.get(machine.lower(), machine.lower())}"


def check_arguments(arguments: Mapping[str, str]) -> None:
    """:raises DropforgeError: if one looks like a secret: what a build is told stays in the image's history."""
    for name, text in arguments.items():
        if looks_secret(name, text):
            mend = "Leave it out: no image of Dropforge needs a secret"
            raise DropforgeError(f"build argument {name}", "it looks like a secret, and would stay in the image", mend)


def declared(dockerfile: str) -> set[str]:
    """Names of the build arguments of a Dockerfile."""
    lines = re.findall(r"^ARG (.*)$", dockerfile, re.MULTILINE)
    return {name for line in lines for name in re.findall(r"(\w+)(?:=\S*)?", line)}


def defaults(dockerfile: str) -> dict[str, str]:
    """What the build arguments before a Dockerfile's first stage are unless somebody says otherwise.

    Its stages may be named by them, and Buildah 1.28 finds such a stage only where the argument is given.
    """
    head = re.split(r"^FROM ", dockerfile, maxsplit=1, flags=re.MULTILINE)[0]
    return dict(re.findall(r"^ARG (\w+)=(\S+)$", head, re.MULTILINE))


def build(
    engine: Engine,
    service: str,
    reference: str,
    platforms: Sequence[str],
    arguments: Mapping[str, str],
    pushed: Path | None = None,
) -> list[list[str]]:
    """Commands that build an image for all platforms, in the folder of the repository.

    :param pushed: file for what Docker says of the push, which it does as it builds.
    """
    given = [word for name, value in sorted(arguments.items()) for word in ("--build-arg", f"{name}={value}")]
    common = ["--platform", ",".join(platforms), *given, "--file", f"images/{service}/Dockerfile"]
    if engine == "docker":
        # A builder of its own keeps nothing for `docker run` unless told so, and can do that for one platform alone.
        loaded = ["--load"] if len(platforms) == 1 else []
        out = ["--push", "--metadata-file", str(pushed)] if pushed else loaded
        return [["docker", "buildx", "build", *common, "--tag", reference, *out, "."]]
    # A list that is there already would keep the images of last time.
    return [[engine, "manifest", "rm", reference], [engine, "build", *common, "--manifest", reference, "."]]


def push(engine: Engine, reference: str, told: Path) -> list[list[str]]:
    """Commands that push what `build` made, and leave its digest in a file. Docker has pushed it already."""
    if engine == "docker":
        return []
    return [[engine, "manifest", "push", "--all", "--digestfile", str(told), reference, f"docker://{reference}"]]


def digest(engine: Engine, told: str) -> str:
    """The digest that a push left. :raises DropforgeError: if there is none."""
    try:
        found = str(json.loads(told)["containerimage.digest"]) if engine == "docker" else told.strip()
    except (ValueError, KeyError):
        found = ""
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", found):
        mend = "Its last lines say why: log in where they name a login, else push again with a current release of it"
        raise DropforgeError(f"the push by {engine}", "it left no digest", mend)
    return found


def login(engine: Engine, host: str) -> list[str]:
    """The command that reads Amazon's password from its standard input."""
    return [engine, "login", "--username", "AWS", "--password-stdin", host]


def addresses(lock: bytes | str) -> dict[str, str]:
    """Each service's image by its digest, of the lock file's content. :raises DropforgeError: if it is none of ours."""
    try:
        there = json.loads(lock) if lock.strip() else {}
        if not isinstance(there, dict):
            raise TypeError
    except (ValueError, TypeError, RecursionError) as error:
        raise DropforgeError(LOCK, "it cannot be read", "Remove it, and push again") from error
    return there


def read_lock(path: Path) -> dict[str, str]:
    """Each service's image by its digest, as a push left it in a file; empty without the file.

    :raises DropforgeError: if it is none of ours.
    """
    try:
        return addresses(read_small(path, _LARGEST_LOCK))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise DropforgeError(str(path), cause, "Remove it, and push again") from None


def compose_env(there: Mapping[str, str]) -> str:
    """Return the lines of `.env` by which docker-compose.yaml takes these images.

    :raises DropforgeError: for one without a digest.
    """
    lines = [f"DROPFORGE_{name.upper()}_IMAGE={pinned(there[name])}" for name in sorted(there) if name in _COMPOSE]
    return "".join(f"{line}\n" for line in [*lines, "DROPFORGE_PULL_POLICY=missing"]) if lines else ""


def pinned(address: object) -> str:
    """The address, if it names an image by its digest. :raises DropforgeError: otherwise."""
    if not isinstance(address, str) or not re.fullmatch(rf"{_REGISTRY.pattern}@sha256:[0-9a-f]{{64}}", address):
        raise DropforgeError(LOCK, f"{address!r} names no image by its digest", "Remove it, and push again")
    return address


def locked(there: Mapping[str, str]) -> str:
    """Text of the lock file: each service's image by its digest, for recipes and values."""
    return json.dumps(dict(there), indent=2, sort_keys=True) + "\n"
