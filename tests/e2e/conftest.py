"""One real stack for all end-to-end tests: Airflow, MLflow, S3, SQS and the local cluster on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dropforge.client.upload import find_files
from dropforge.stack import control
from tests.e2e import faults
from tests.e2e.harness import Stack, running
from tests.e2e.statsd import Statsd, statsd

CALENDAR = """
cron: 0 3 1 1 *
data: all
recipe: {extends: tiny, evaluate: {max_rows: 40}, promote: {min_improvement: 0}}
alert: {after_runs: 1}
"""
GATHERED = """
intake: {window: 1 minute, rate: 1 per minute}
recipe: {extends: tiny, evaluate: {max_rows: 40}}
"""
# Each of its runs waits for a person's word before it takes anything; nobody knows what it would cost.
CROWDED = """
intake: {max_active_runs: 1}
recipe:
  extends: tiny
  evaluate: {max_rows: 40}
  compute: {price: {core_hour: 100, currency: EUR}, limits: {ask_above: {cost: 0.001}}}
"""

# Only what names data and models: an event costs each task a tenth of a second.
NAMING = [
    {"scope": {}, "controls": {"emit": False}},
    {
        "scope": {"dag_id": "dropforge_.*", "task_id": "curate|train|register|move|answer"},
        "match_mode": "regex",
        "controls": {"emit": True},
    },
]


@pytest.fixture(scope="session")
def airflow_metrics() -> Iterator[Statsd]:
    """What the stack's Airflow sends."""
    with statsd() as found:
        yield found


@pytest.fixture(scope="session")
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, airflow_metrics: Statsd
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    (folder / "families").mkdir()
    # Before the start: Airflow reads a DAG file that is unchanged only every ten minutes.
    (folder / "families" / "by-calendar.yaml").write_text(CALENDAR)
    if any(item.get_closest_marker("matrix") for item in request.session.items):
        faults.install(folder)
    (folder / "families" / "gathered.yaml").write_text(GATHERED)
    (folder / "families" / "crowded.yaml").write_text(CROWDED)
    (folder / "lineage").mkdir()
    lineage = {"type": "file", "log_file_path": str(folder / "lineage" / "event")}
    env = {
        # Of who has a PostgreSQL of his own: they must not reach the stack's.
        **{"PGOPTIONS": "-c nonsense=1", "PGPORT": "6543", "PGSERVICE": "mine"},
        "DROPFORGE_FAMILIES": str(folder / "families"),
        "DROPFORGE_READABLE": "hub:* family:backwards",  # one family begins with a checkpoint of another
        "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps(lineage),
        "AIRFLOW__OPENLINEAGE__EMISSION_POLICY": json.dumps(NAMING),
        "AIRFLOW__METRICS__STATSD_ON": "True",
        "AIRFLOW__METRICS__STATSD_HOST": "127.0.0.1",
        "AIRFLOW__METRICS__STATSD_PORT": str(airflow_metrics.port),
        "prometheus_multiproc_dir": str(folder / "prometheus"),  # MLflow's
    }
    with running(folder, env) as found:
        yield found


def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Item | None) -> None:
    """The stack ends with its last test: an idle one would take other tests' cores until the session ends."""
    if "stack" in item.funcargs and (nextitem is None or nextitem.path.parent != item.path.parent):
        control.stop(item.funcargs["stack"].folder)


@pytest.fixture(scope="module", autouse=True)
def environment(stack: Stack) -> Iterator[None]:
    """The stack's addresses and logins, for these tests and no others."""
    with pytest.MonkeyPatch.context() as patched:
        for key, value in stack.env.items():
            patched.setenv(key, value)
        yield


@pytest.fixture(scope="module", autouse=True)
def nothing_trains_on(stack: Stack, environment: None) -> Iterator[None]:
    """What a failed test leaves in training ends with its file, and takes no time from the tests of others."""
    yield
    stack.end_trainings()


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Path]]:
    """Files of the two sample drops."""
    from dropforge.samples import write_sample

    folder = tmp_path_factory.mktemp("samples")
    written = {part: write_sample(folder / str(part), part=part) for part in (1, 2)}
    return {part: find_files(list(paths)) for part, paths in written.items()}
