"""`dropforge images`: build the images of a team's cluster, push them by their digests, and sign those."""

from __future__ import annotations

import base64
import importlib.metadata
import os
import platform as machine
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import boto3
import typer
from botocore.exceptions import BotoCoreError, ClientError

from dropforge import images, signatures
from dropforge.errors import DropforgeError
from dropforge.provenance import git_revision
from dropforge.source_root import source_root
from dropforge.terminal import Console, Text
from dropforge.whole_file import write_whole

app = typer.Typer(help="Build the images of a team's cluster, and push them.", no_args_is_help=True)

ServicesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[IMAGE]...", help=f"Of {', '.join(images.SERVICES)}. [default: all]")
]
RegistryOption = Annotated[str, typer.Option(metavar="HOST[/PATH]", help="Registry that the names begin with.")]
OwnRegistryOption = Annotated[
    str, typer.Option("--registry", metavar="HOST[/PATH]", help="Registry that the names begin with.")
]
TagOption = Annotated[str | None, typer.Option(help="Tag of the images. [default: Dropforge's version]")]
OwnPlatformOption = Annotated[
    list[str] | None,
    typer.Option("--platform", help="Platform of the images; repeat it for several. [default: this machine's]"),
]
PlatformOption = Annotated[
    list[str],
    typer.Option(
        "--platform",
        help="Platform of the images; repeat it for several. Name your nodes' where this machine emulates no other.",
    ),
]
ArgumentOption = Annotated[
    list[str] | None, typer.Option("--build-arg", metavar="NAME=VALUE", help="Such as VARIANT=cpu or BASE=IMAGE.")
]
EngineOption = Annotated[
    str | None, typer.Option(help=f"{', '.join(images.ENGINES)}. [default: the first of them that is installed]")
]
LockOption = Annotated[Path, typer.Option(help="File for the images' addresses by digest.")]


@app.command("build")
def build_command(
    services: ServicesArgument = None,
    registry: OwnRegistryOption = "localhost",
    tag: TagOption = None,
    platform: OwnPlatformOption = None,
    build_arg: ArgumentOption = None,
    engine: EngineOption = None,
) -> None:
    """Build the images; push nothing."""
    platforms = platform or [images.platform_of(machine.machine())]
    made = _Builder(registry, tag, platforms, build_arg or [], engine)
    for service in _named(services):
        made.build(service)


@app.command("push")
def push_command(
    registry: RegistryOption,
    services: ServicesArgument = None,
    tag: TagOption = None,
    platform: PlatformOption = list(images.PLATFORMS),  # noqa: B006 - Typer copies it
    build_arg: ArgumentOption = None,
    engine: EngineOption = None,
    lock: LockOption = Path(images.LOCK),
    sign: Annotated[
        str,
        typer.Option(
            help="Sign them by cosign: a private key's file, whose password is COSIGN_PASSWORD, or awskms://..."
        ),
    ] = "",
) -> None:
    """Build the images, push them, and write their digests. Amazon's repositories are created, and its login is done.

    For other registries, log in beforehand with the engine's own `login`.
    """
    if sign:
        _need_cosign()
        signatures.check_key(sign)
        signatures.check_password(sign, os.environ, sys.stdin.isatty())
    made = _Builder(registry, tag, platform, build_arg or [], engine)
    named = _named(services)
    there = images.read_lock(lock)
    if made.registry.ecr_region:
        _prepare_ecr(made, named)
    for service in named:
        address = made.push(service)
        if sign:
            _sign(sign, address)
        # After each, so that a push that fails later loses none.
        there[service] = address
        write_whole(lock, images.locked(there).encode())
        Console().print(Text(f"{service}: {address}"), soft_wrap=True)


@app.command("verify")
def verify_command(
    key: Annotated[str, typer.Option(help="The public key's file, or its address as awskms://...")],
    services: ServicesArgument = None,
    lock: LockOption = Path(images.LOCK),
) -> None:
    """Check whether the images of the lock file are signed by a key. Exit code 1 if one is not."""
    _need_cosign()
    signatures.check_key(key)
    there = images.read_lock(lock)
    missing = [service for service in services or () if service not in there]
    if missing or not there:
        mend = "Push it first: dropforge images push --registry R --sign KEY"
        raise DropforgeError(f"image {missing[0]}" if missing else "images", f"{lock} names none", mend)
    bad = 0
    for service in services or sorted(there):
        done = subprocess.run(
            signatures.verify(key, images.pinned(there[service])),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["cosign says no more"]
        word = f"not verified: {said[-1]}" if done.returncode else "signed"
        Console().print(Text(f"{service}: {word}", style="red" if done.returncode else ""), soft_wrap=True)
        bad += bool(done.returncode)
    if bad:
        raise typer.Exit(1)


@app.command("env")
def env_command(lock: LockOption = Path(images.LOCK)) -> None:
    """Print the lines of `.env` by which docker-compose.yaml takes the images of the lock file, by their digests."""
    lines = images.compose_env(images.read_lock(lock))
    if not lines:
        mend = "Push them first: dropforge images push --registry R"
        raise DropforgeError("images", f"{lock} names none of docker-compose.yaml", mend)
    typer.echo(lines, nl=False)


class _Builder:
    """Runs the commands of one engine in the folder of the repository."""

    def __init__(
        self, registry: str, tag: str | None, platforms: Sequence[str], arguments: Sequence[str], engine: str | None
    ) -> None:
        self.registry = images.Registry.parse(registry)
        self.tag = tag or importlib.metadata.version("dropforge")
        self.engine = _engine(engine)
        self.root = source_root()
        self._platforms = platforms
        self._arguments = _arguments(arguments)
        known = set().union(*(images.declared(self._dockerfile(service)) for service in images.SERVICES))
        for name in self._arguments:
            if name not in known:
                mend = f"There are {', '.join(sorted(known))}"
                raise DropforgeError(f"build argument {name}", "no image has it", mend)

    def build(self, service: str, pushed: Path | None = None) -> str:
        reference = self.registry.reference(service, self.tag)
        dockerfile = self._dockerfile(service)
        declared = images.declared(dockerfile)
        given = images.defaults(dockerfile)
        given |= {name: value for name, value in self._arguments.items() if name in declared}
        given |= {"REVISION": git_revision(), "VERSION": importlib.metadata.version("dropforge")}
        for command in images.build(self.engine, service, reference, self._platforms, given, pushed):
            self._run(command, may_fail=command[1:3] == ["manifest", "rm"], pushes="--push" in command)
        return reference

    def push(self, service: str) -> str:
        """The image's address by its digest."""
        with tempfile.TemporaryDirectory(prefix="dropforge-images-") as folder:
            told = Path(folder, "told")
            reference = self.build(service, told)
            for command in images.push(self.engine, reference, told):
                self._run(command, pushes=True)
            found = images.digest(self.engine, told.read_text() if told.exists() else "")
        return f"{self.registry.host}/{self.registry.repository(service)}@{found}"

    def login(self, password: str) -> None:
        self._run(images.login(self.engine, self.registry.host), stdin=password)

    def _dockerfile(self, service: str) -> str:
        path = self.root / "images" / service / "Dockerfile"
        if not path.is_file():
            raise DropforgeError(
                f"folder {self.root}", f"it holds no {path.relative_to(self.root)}", "Run from a clone"
            )
        return path.read_text()

    def _run(
        self, command: Sequence[str], *, stdin: str | None = None, may_fail: bool = False, pushes: bool = False
    ) -> None:
        quiet = subprocess.DEVNULL if may_fail else None
        done = subprocess.run(command, cwd=self.root, input=stdin, text=True, stdout=quiet, stderr=quiet)
        if done.returncode and not may_fail:
            what, mend = f"`{' '.join(command[:3])}`", "Its last lines say why"
            if pushes:
                what += f" to {self.registry.host}"
                # Amazon's login is done by then.
                if not self.registry.ecr_region:
                    mend += f". If they name a login: `{self.engine} login {self.registry.host}`"
                mend += "; then give the command again: what is built is kept"
            raise DropforgeError(what, f"it ended with code {done.returncode}", mend)


def _need_cosign() -> None:
    if shutil.which("cosign") is None:
        raise DropforgeError("cosign", "it is not on the path", "Install cosign 2, https://docs.sigstore.dev/cosign/")


def _sign(key: str, address: str) -> None:
    """:raises DropforgeError: if it fails: then the image is pushed, and stands in no lock file."""
    done = subprocess.run(signatures.sign(key, address))
    if done.returncode:
        mend = "Its last lines say why; then give the command again: what is pushed is not sent twice"
        raise DropforgeError(f"image {address}", f"it is pushed, and cosign ended with code {done.returncode}", mend)


def _prepare_ecr(made: _Builder, services: Sequence[str]) -> None:
    """Make the repositories that are missing, and log in."""
    try:
        client: Any = boto3.client("ecr", region_name=made.registry.ecr_region)
        for service in services:
            name = made.registry.repository(service)
            try:
                client.create_repository(repositoryName=name, imageScanningConfiguration={"scanOnPush": True})
                Console().print(Text(f"repository {name} made"))
            except client.exceptions.RepositoryAlreadyExistsException:
                pass
        token = client.get_authorization_token()["authorizationData"][0]["authorizationToken"]
    except (BotoCoreError, ClientError) as error:
        mend = "Check the credentials: they need ecr:CreateRepository and ecr:GetAuthorizationToken"
        raise DropforgeError(f"registry {made.registry.host}", str(error), mend) from error
    made.login(base64.b64decode(token).decode().partition(":")[2])


def _engine(asked: str | None) -> images.Engine:
    without = False
    for engine in images.ENGINES:
        if asked in {None, engine} and shutil.which(engine):
            if engine != "docker" or _has_buildx():
                return engine
            without = True
    if without:
        mend = "Install it (package docker-buildx-plugin, https://docs.docker.com/go/buildx/), or Podman or Buildah"
        raise DropforgeError("engine docker", "it has no plugin buildx, which builds for a named platform", mend)
    thing = f"engine {asked}" if asked else "a tool that builds images"
    mend = f"Install one of {', '.join(images.ENGINES)}, or name one that is there by --engine"
    raise DropforgeError(thing, "it is not on the path", mend)


def _has_buildx() -> bool:
    return (
        subprocess.run(["docker", "buildx", "version"], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
    )


def _named(services: Sequence[str] | None) -> Sequence[str]:
    for service in services or ():
        if service not in images.SERVICES:
            raise DropforgeError(f"image {service}", "there is none", f"There are {', '.join(images.SERVICES)}")
    return services or images.SERVICES


def _arguments(pairs: Sequence[str]) -> Mapping[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise DropforgeError(f"build argument {pair}", "it has no value", "Give NAME=VALUE")
        found[name] = value
    images.check_arguments(found)
    return found
