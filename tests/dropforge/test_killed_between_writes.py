"""SIGKILL between each two writes of what changes a family: the next try ends where an undisturbed one does."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from curation import increments
from dropforge import layout, rollback, tracking
from dropforge.moves import moving
from dropforge.run import RunSpec
from dropforge.store import S3Store, s3_client
from tests.dropforge.cli.test_forget import add
from tests.dropforge.test_rollback import Family
from tests.dropforge.test_tracking import verdict

pytestmark = pytest.mark.timeout(1200)  # a process for each write

_WRITES = {"POST", "PUT", "PATCH", "DELETE"}
# A server whose forks have all imports and no connection of anybody's.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["mlflow.tracking", __name__])


@contextmanager
def writes(at: Callable[[int], None] = lambda number: None) -> Iterator[list[str]]:
    """What this process writes by HTTP; `at` is told before each write is sent."""
    said: list[str] = []
    before = http.client.HTTPConnection.putrequest

    def putrequest(self: Any, method: str, url: str, *rest: Any, **more: Any) -> None:
        if method in _WRITES and not url.split("?")[0].endswith("/search"):
            said.append(f"{method} {url}")
            at(len(said))
        return before(self, method, url, *rest, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(http.client.HTTPConnection, "putrequest", putrequest)
        yield said


def killed_before(number: int, env: Mapping[str, str], do: Callable[..., object], given: tuple[Any, ...]) -> None:
    """In a process of its own: do it, and end by SIGKILL before this write."""
    os.environ.update(env)

    def at(found: int) -> None:
        if found == number:
            os.kill(os.getpid(), signal.SIGKILL)

    with writes(at):
        do(*given)


def each_kill(make: Callable[[], tuple[Any, ...]], do: Callable[..., object], facts: Callable[..., object]) -> int:
    """Do it undisturbed, then once for each write, killed before it and tried again.

    :param make: what `do` is given, of a family of its own. :param facts: what is to be seen afterwards.
    :returns: how many writes there are.
    """
    given = make()
    with writes() as said:
        do(*given)
    wanted = facts(*given)
    for number in range(1, len(said) + 1):
        given = make()
        child = _FORKS.Process(target=killed_before, args=(number, dict(os.environ), do, given))
        child.start()
        child.join(120)
        assert child.exitcode == -signal.SIGKILL, said[number - 1]
        do(*given)
        assert facts(*given) == wanted, f"killed before {said[number - 1]}"
    return len(said)


def register(server: str, bucket: str, spec: bytes, report: dict[str, Any], compared_with: str | None) -> None:
    """What the task does."""
    run = RunSpec.from_json(spec)
    hold = moving(S3Store(bucket), run.family, f"run {run.run}")
    tracking.register(server, run, report, verdict(True), alias="champion", compared_with=compared_with, hold=hold)


def move(server: str, bucket: str, choice: rollback.Choice) -> None:
    """What the task does."""
    hold = moving(S3Store(bucket), choice.family, "rollback one")
    rollback.move(server, choice, "it swears", "ada", hold)


def registry(server: str, bucket: str, family: str) -> dict[str, Any]:
    """Versions with their tags, the alias, the runs' word of them, and whether somebody holds the aliases."""
    mlflow = tracking.client(server)
    versions = {}
    for version in mlflow.search_model_versions(f"name = '{family}'"):
        told = {key: value.replace(family, "F") for key, value in version.tags.items()}
        if back := told.get(tracking.TAG_ROLLED_BACK):
            told[tracking.TAG_ROLLED_BACK] = json.dumps({**json.loads(back), "at": ""})
        run = mlflow.get_run(version.run_id).data.tags
        versions[version.version] = told, run.get(tracking.TAG_VERSION), version.source.replace(family, "F")
    (model,) = mlflow.search_registered_models(f"name = '{family}'")
    held = S3Store(bucket).stat(layout.move_key(family)) is not None
    return {"versions": versions, "aliases": dict(model.aliases), "tags": {**model.tags}.keys(), "held": held}


@pytest.fixture
def family(mlflow_server: str, s3_store: S3Store) -> Callable[[int], Family]:
    """A family with so many versions, each promoted."""

    def made(versions: int) -> Family:
        found = Family(mlflow_server, s3_store)
        for _ in range(versions):
            found.add()
        return found

    return made


@pytest.mark.parametrize("versions", [0, 1], ids=["the first version", "in the champion's place"])
def test_a_version_is_registered_and_promoted_once(family: Callable[[int], Family], versions: int) -> None:
    def make() -> tuple[Any, ...]:
        found = family(versions)
        spec, report = found.prepare()
        return found.server, found.store.bucket, spec.to_json(), report, str(versions) if versions else None

    def facts(server: str, bucket: str, spec: bytes, *_: Any) -> dict[str, Any]:
        return registry(server, bucket, RunSpec.from_json(spec).family)

    assert each_kill(make, register, facts) >= 7


def test_an_alias_goes_back_once(family: Callable[[int], Family]) -> None:
    def make() -> tuple[Any, ...]:
        found = family(2)
        return found.server, found.store.bucket, rollback.choose(found.server, found.store, found.name)

    def facts(server: str, bucket: str, choice: rollback.Choice) -> dict[str, Any]:
        return registry(server, bucket, choice.family)

    assert each_kill(make, move, facts) >= 4


def forget(bucket: str, family: str, folder: str) -> None:
    """What the command does, in a folder that a kill leaves behind."""
    from curation import forget as made

    name = made.name_of(S3Store(bucket), family, "patient-3")
    with tempfile.TemporaryDirectory(dir=folder) as workdir:
        made.again(S3Store(bucket), family, workdir=Path(workdir), say=lambda _: None, forget=name)


def test_a_group_is_forgotten_once(aws: str, tmp_path: Path) -> None:
    rows = [{"text": f"row number {n} of the test", "group": f"patient-{n // 5}"} for n in range(40)]

    def make() -> tuple[Any, ...]:
        bucket = f"test-{uuid.uuid4().hex[:12]}"
        s3_client().create_bucket(Bucket=bucket)
        folder = tmp_path / bucket
        add(S3Store(bucket), "fam", "one", rows[:20], folder)
        add(S3Store(bucket), "fam", "two", rows[20:], folder)
        return bucket, "fam", str(folder)

    def facts(bucket: str, family: str, _: str) -> dict[str, Any]:
        """The newest version, and all objects by their names: none is missing, and none is left over."""
        store = S3Store(bucket)
        head = increments.read_head(store, family)
        assert head is not None
        return {"head": head.manifest.digest, "objects": sorted(info.key for info in store.list(""))}

    assert each_kill(make, forget, facts) >= 5
