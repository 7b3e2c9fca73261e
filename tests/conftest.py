"""What tests share: a real S3 and SQS interface on 127.0.0.1, and stores on it."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
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

# Each process has an Airflow of its own, before anything imports it: never the user's, and never another worker's.
os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="dropforge-airflow-")
atexit.register(shutil.rmtree, os.environ["AIRFLOW_HOME"], ignore_errors=True)
os.environ.setdefault("AIRFLOW__CORE__UNIT_TEST_MODE", "False")
# As in a rank (trainer.launch), and before torch is imported: threads that spin while they wait take the others' cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Half of the CPU time of a short-lived Spark goes into compiling Java once more, and collecting garbage in parallel.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# How long an example takes is the machine's affair, not the code's.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

_ON_GPUS = os.environ.get("DROPFORGE_RANKS_ON") == "cuda"
_PASSED: set[str] = set()
# Seconds of tests that are slower than `make test` has room for, and say nothing of it.
_BEYOND: dict[str, float] = {}
# By worker and scope, when it began and ended there.
_SPENT: dict[tuple[str, str], tuple[float, float]] = {}

# Files and tests that take longer than `make test` has room for, each with the seconds that were measured.
_SLOW = {line.split()[1] for line in (Path(__file__).parent / "slow.txt").read_text().splitlines()}
#: What all else relies on is held on S3 too; what is decided on top of it is held on folders first.
ABOUT_STORES = {"test_store.py", "test_ledger.py"}
BOUND = 3.0  # seconds beside others on a busy machine; slow.txt has what takes one on a quiet one

RANKS = "tests/trainer/test_ranks"  # one server of ranks for all of them
ALERTS = "tests/e2e/test_a"  # with approval, a quarter of what would be the longest folder

# Where the time goes, the longest first: a worker that begins one of these late ends last. A folder is run whole by one
# worker, because its files share services that take long to start; each line of a folder has services of its own.
_LONGEST = (
    "tests/cluster/",
    "tests/e2e/test_whole_way.py",
    "tests/e2e/test_sweep.py",
    "tests/e2e/",
    ALERTS,
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
    """What one worker runs whole: the longest line of `_LONGEST` that fits, else the file."""
    path, _, test = nodeid.partition("::")
    # Hundreds of cells: half an hour if one worker ran them all.
    if method := re.match(r"test_the_rest_of_the_matrix\[.*-(full|lora|config)-", test):
        return f"{path}:{method[1]}"
    return max((found for found in _LONGEST if path.startswith(found)), key=len, default=path)


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", type=float, metavar="MINUTES", help="what these tests may take, told at their end")
    parser.addoption("--bound", action="store_true", help="fail if a test takes longer than its tier allows")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Which worker had what for more than a minute, so that one sees whether some waited for one.

    On GPUs, what was left out, and why: green is not all of it where there are few.
    """
    if budget := config.option.budget:
        minutes = terminalreporter._session_start.elapsed().seconds / 60
        over = "" if minutes <= budget else ": MORE THAN ITS BUDGET"
        terminalreporter.section(f"{minutes:.1f} of {budget:g} minutes{over}")
    if _BEYOND and config.option.bound:
        terminalreporter.section(f"above {BOUND:g} s: make them quicker, or name them in tests/slow.txt")
        for test, seconds in sorted(_BEYOND.items()):
            terminalreporter.line(f"{seconds:5.1f} {test}")
    if workers := sorted({worker for worker, _ in _SPENT if worker}):
        terminalreporter.section("seconds from start to end by worker")
        start = min(begun for begun, _ in _SPENT.values())
        for worker in workers:
            mine = sorted(
                (begun - start, ended - start, name) for (of, name), (begun, ended) in _SPENT.items() if of == worker
            )
            long = [f"{name} {begun:.0f}-{ended:.0f}" for begun, ended, name in mine if ended - begun > 60]
            terminalreporter.line(f"{worker} {max(ended for _, ended, _ in mine):.0f}: {', '.join(long)}")
    if not _ON_GPUS:
        return
    reasons = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    terminalreporter.section("left out")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5} {reason.removeprefix('Skipped: ')}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Nothing but skipped tests is no success on a machine that was to have GPUs, nor is a slow test with `--bound`."""
    if session.config.option.bound and _BEYOND and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if _ON_GPUS and exitstatus == pytest.ExitCode.OK and not _PASSED:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _PASSED.add(report.nodeid)
        if report.duration > BOUND and not {"slow", "smoke"} & report.keywords.keys():
            _BEYOND[report.nodeid] = report.duration
    if report.stop:  # a worker's crash has no time
        key = getattr(report, "worker_id", ""), scope(report.nodeid)
        begun, ended = _SPENT.get(key, (report.start, report.stop))
        _SPENT[key] = min(begun, report.start), max(ended, report.stop)


def is_slow(nodeid: str) -> bool:
    """Whether `slow.txt` names a test, with all of its parameters, or its file."""
    return not _SLOW.isdisjoint({nodeid.partition("[")[0], nodeid.partition("::")[0]})


@pytest.hookimpl(tryfirst=True)  # before `-m` picks by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        of_s3 = "store" in item.fixturenames and item.name.partition("[")[2].startswith("s3")  # type: ignore[attr-defined]
        if is_slow(item.nodeid) or (of_s3 and item.path.name not in ABOUT_STORES):
            item.add_marker("slow")
    order = {name: number for number, name in enumerate(_LONGEST)}

    def place(item: pytest.Item) -> int:
        # It stops the stack that its folder shares: in one process it comes after all others there.
        found = ALERTS if item.path.name == "test_stack.py" else scope(item.nodeid)
        return order.get(found, len(order))

    items.sort(key=place)


@pytest.fixture(scope="session")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a moto server; the environment points boto3 to it."""
    from tests.moto_server import moto_server

    values = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with moto_server() as url, pytest.MonkeyPatch.context() as patch:
        for name, value in {**values, "AWS_ENDPOINT_URL": url}.items():
            patch.setenv(name, value)
        yield url


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
