"""One real stack for all end-to-end tests: Airflow, MLflow, S3, SQS and the local cluster on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dropforge.cli.upload import find_files
from dropforge.stack import control
from tests.e2e.harness import Stack

CALENDAR = """
cron: 0 3 1 1 *
data: all
recipe: {extends: tiny, evaluate: {max_rows: 40}, promote: {min_improvement: 0}}
alert: {after_runs: 1}
"""


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    (folder / "families").mkdir()
    # Before the start: Airflow reads a DAG file that is unchanged only every ten minutes.
    (folder / "families" / "by-calendar.yaml").write_text(CALENDAR)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DROPFORGE_FAMILIES", str(folder / "families"))
        control.start(folder)
    try:
        control.wait_ready(folder)
        before = dict(os.environ)
        found = Stack(folder)  # connecting puts the stack's addresses into the environment
        found.env = {key: value for key, value in os.environ.items() if before.get(key) != value}
        os.environ.clear()
        os.environ.update(before)
        yield found
    finally:
        control.stop(folder)


def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Item | None) -> None:
    """The stack ends with its last test: an idle one would take other tests' cores until the session ends."""
    if "stack" in item.funcargs and (nextitem is None or nextitem.path.parent != item.path.parent):
        control.stop(item.funcargs["stack"].folder)


@pytest.fixture(autouse=True)
def environment(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack's addresses, for these tests and no others."""
    for key, value in stack.env.items():
        monkeypatch.setenv(key, value)


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Path]]:
    """Files of the two sample drops."""
    from dropforge.samples import write_sample

    folder = tmp_path_factory.mktemp("samples")
    written = {part: write_sample(folder / str(part), part=part) for part in (1, 2)}
    return {part: find_files(list(paths)) for part, paths in written.items()}
