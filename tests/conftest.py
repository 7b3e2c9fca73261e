"""What tests share: a real S3 and SQS interface on 127.0.0.1, and stores on it."""

from __future__ import annotations

import os
import re
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

from dropforge.store import FolderStore, S3Store, Store, s3_client

# As in a rank (trainer.launch), and before torch is imported: threads that spin while they wait take the others' cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Half of the CPU time of a short-lived Spark goes into compiling Java once more, and collecting garbage in parallel.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# How long an example takes is the machine's affair, not the code's.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

_ON_GPUS = os.environ.get("DROPFORGE_RANKS_ON") == "cuda"
_PASSED: set[str] = set()

RANKS = "tests/trainer/test_ranks"  # one server of ranks for all of them

# Where the time goes, the longest first: a worker that begins one of these late ends last. A folder is run whole by one
# worker, because its files share services that take long to start; each line of a folder has services of its own.
_LONGEST = (
    "tests/cluster/",
    "tests/e2e/test_whole_way.py",
    "tests/e2e/",
    "tests/trainer/test_launch.py",
    "tests/kubeflow_training/airflow_side/",
    "tests/dropforge/",
    "tests/kubeflow_training/kills/",
    "tests/kubeflow_training/examples/",
    "tests/kubeflow_training/contract/test_elastic.py",
    "tests/trainer/test_loop.py",
    RANKS,
    "tests/curation/test_engines.py",
    "tests/curation/test_memory.py",
    "tests/kubeflow_training/test_provider.py",
    "tests/dags/",
)


def scope(nodeid: str) -> str:
    """What one worker runs whole: the first line of `_LONGEST` that fits, else the file."""
    path, _, test = nodeid.partition("::")
    # Hundreds of cells: half an hour if one worker ran them all.
    if method := re.match(r"test_the_rest_of_the_matrix\[.*-(full|lora|config)-", test):
        return f"{path}:{method[1]}"
    return next((found for found in _LONGEST if path.startswith(found)), path)


class ByPlace(LoadScopeScheduling):
    """Hands out files and folders whole.

    A scheduler of our own, because the `xdist_group` marks of pytest-xdist 3.8 are without effect in pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        found = scope(nodeid)
        # Each of these files takes minutes there: one worker for all of them would end long after the others.
        return nodeid.partition("::")[0] if found == RANKS and self.config.option.markexpr == "exact" else found


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """More than there are cores, because much of the time is waiting; each with its services takes up to 3 GB."""
    return max(1, min(len(os.sched_getaffinity(0)) * 3 // 2, psutil.virtual_memory().total // 3_000_000_000))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByPlace:
    return ByPlace(config, log)


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """On GPUs, say what was left out, and why: green is not all of it where there are few."""
    if not _ON_GPUS:
        return
    reasons = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    terminalreporter.section("left out")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5} {reason.removeprefix('Skipped: ')}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Nothing but skipped tests is no success on a machine that was to have GPUs."""
    if _ON_GPUS and exitstatus == pytest.ExitCode.OK and not _PASSED:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _PASSED.add(report.nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(scope(item.nodeid), len(order)))


@pytest.fixture(scope="session")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a moto server; the environment points boto3 to it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    values = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    yield values["AWS_ENDPOINT_URL"]
    for key, value in before.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    server.stop()


@pytest.fixture
def s3_store(aws: str) -> S3Store:
    """A store on a bucket of its own."""
    client = s3_client()
    bucket = f"test-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    return S3Store(bucket, client=client)


@pytest.fixture(params=["s3", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Every kind of store: what is promised must hold for each."""
    if request.param == "s3":
        found: S3Store = request.getfixturevalue("s3_store")
        return found
    return FolderStore(tmp_path / "store")
