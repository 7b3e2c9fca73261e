"""What could keep the stack from working on this machine, each with what was found and what mends it."""

from __future__ import annotations

import contextlib
import enum
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dropforge.compiler import find_compiler
from dropforge.errors import DropforgeError, file_error
from dropforge.proxies import proxies
from dropforge.source_root import source_root
from dropforge.spark import find_spark
from dropforge.stack import databases, postgres
from dropforge.stack.databases import Databases
from dropforge.stack.secrets import secrets_path
from dropforge.stack.services import FOLDERS, LOCAL, hosts, passwords_path
from dropforge.stack.state import is_running, lock_path, mark_path, read_state, state_path
from dropforge.stack.supervisor import port_trouble
from dropforge.text import as_line

_GIB = 1 << 30
_PACKAGES = {
    "apache-airflow-core": (3, 3, 2),
    "mlflow": (3, 17, 0),
    "moto": (5, 2, 5),
    "torch": (2, 11, 0),
    "transformers": (5, 17, 0),
    "pyarrow": (21, 0, 0),
    "duckdb": (1, 5, 0),
}
_PROJECT_BEGAN = 1_760_000_000  # a clock that shows an earlier time is wrong


class Level(enum.Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report; `mend` is empty when there is nothing to mend."""

    check: str
    level: Level
    found: str
    mend: str = ""


def examine(folder: Path) -> list[Finding]:
    """Look at everything that a stack in `folder` needs."""
    return [finding for check in _CHECKS for finding in _findings(check, folder)]


def _findings(check: Callable[[Path], Iterator[Finding]], folder: Path) -> Iterator[Finding]:
    try:
        yield from check(folder)
    except (DropforgeError, OSError) as error:  # as of a state that cannot be read: the other checks are looked at
        if isinstance(error, OSError) and error.filename is None:
            raise
        told = file_error(error) if isinstance(error, OSError) else error
        yield Finding(check.__name__.replace("_", " "), Level.FAIL, f"{told.thing}: {told.cause}", told.mend)


def python_version(_: Path) -> Iterator[Finding]:
    version = sys.version_info
    found = f"{version.major}.{version.minor}.{version.micro}"
    good = (3, 11) <= version[:2] < (3, 14)
    yield Finding("python", Level.OK if good else Level.FAIL, found, "" if good else "Use Python 3.11, 3.12 or 3.13")


def system(_: Path) -> Iterator[Finding]:
    good = sys.platform == "linux" and hasattr(os, "pidfd_open")
    mend = "" if good else "The embedded stack needs Linux 5.3 or later; use a container or virtual machine"
    yield Finding("system", Level.OK if good else Level.FAIL, f"{os.uname().sysname} {os.uname().release}", mend)


def packages(_: Path) -> Iterator[Finding]:
    for name, least in _PACKAGES.items():
        wanted = ".".join(map(str, least))
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(
                name, Level.FAIL, "not installed", "Run `make install` in a clone, else `pip install 'dropforge[all]'`"
            )
            continue
        good = release(version) >= least
        yield Finding(name, Level.OK if good else Level.FAIL, version, "" if good else f"Install {wanted} or later")


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `2.15.0+cpu` is (2, 15, 0)."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def source(_: Path) -> Iterator[Finding]:
    try:
        yield Finding("dags", Level.OK, str(source_root() / "dags"))
    except DropforgeError as error:
        yield Finding("dags", Level.FAIL, error.cause, error.mend)


_GPU = ("name", "memory.total", "driver_version")


def gpus(_: Path) -> Iterator[Finding]:
    """GPUs as their driver lists them, and whether the installed PyTorch could use one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield Finding("GPUs", Level.OK, "none: trainings run on CPUs")
        return
    command = [program, f"--query-gpu={','.join(_GPU)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
        told = done.stdout.strip() or done.stderr.strip()
        good = done.returncode == 0 and bool(done.stdout.strip())
    except (OSError, subprocess.TimeoutExpired) as error:
        told, good = str(error), False
    lines = Counter(told.splitlines()) if good else Counter()
    if not lines or any(line.count(",") < len(_GPU) - 1 or "[" in line for line in lines):
        why = as_line(told) or "none is listed"
        yield Finding("GPUs", Level.WARN, f"the driver lists none that works: {why}", "Load its driver, or reboot")
        return
    for line, count in lines.items():
        name, memory, driver = line.rsplit(",", len(_GPU) - 1)
        yield Finding("GPUs", Level.OK, as_line(f"{count} x {name}, {memory.strip()}, driver {driver.strip()}"))
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        torch = importlib.metadata.version("torch")
        if torch.endswith("+cpu"):
            yield Finding("GPUs", Level.WARN, f"torch {torch} has no CUDA", "Install PyTorch's build for CUDA")


def compiler(_: Path) -> Iterator[Finding]:
    try:
        yield Finding("C++ compiler", Level.OK, f"{find_compiler()}, for `train.compile`")
    except DropforgeError as error:
        yield Finding("C++ compiler", Level.WARN, f"{error.cause}; `train.compile` is refused", error.mend)


def spark(_: Path) -> Iterator[Finding]:
    try:
        yield Finding("Spark", Level.OK, f"{find_spark()}, for `curation.engine: spark`")
    except DropforgeError as error:
        yield Finding("Spark", Level.WARN, f"{error.cause}; `curation.engine: spark` is refused", error.mend)


def database(folder: Path) -> Iterator[Finding]:
    try:
        wanted = Databases.of(folder)
        databases.check(folder, wanted)
        if wanted.embedded:
            postgres.find_programs()
            postgres.as_user(folder)
        else:
            databases.provide(wanted, make=False)
        yield Finding("database", Level.OK, str(wanted))
    except DropforgeError as error:
        yield Finding("database", Level.FAIL, f"{error.thing}: {error.cause}", error.mend)


def state_folder(folder: Path) -> Iterator[Finding]:
    existing = next(path for path in [folder, *folder.parents] if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield Finding("state folder", Level.FAIL, f"{existing}: {error.strerror}", "Choose another with `--state`")
        return
    running = ", a stack runs in it" if is_running(folder) else ""
    yield Finding("state folder", Level.OK, f"{folder}{running}")
    free = shutil.disk_usage(existing).free
    yield _amount("disk", free, least=2 * _GIB, enough=10 * _GIB, mend="Make room, or choose another disk: `--state`")


def misplaced(folder: Path) -> Iterator[Finding]:
    """What lies in the place of a folder, or of a file, and is none."""
    files = [place(folder) for place in (state_path, secrets_path, lock_path, mark_path, passwords_path)]
    logs = [path for path in folder.glob("logs/*.log") if path.is_symlink() or not path.is_file()]
    names = (*FOLDERS, "database", "objects")
    wrong = [path for name in names if os.path.lexists(path := folder / name) and not path.is_dir()]
    wrong += [path for path in files if os.path.lexists(path) and not path.is_file()]
    for path in [*wrong, *logs]:
        found = "it is no folder" if path.name in names else "it is no regular file"
        yield Finding("state folder", Level.FAIL, f"{path}: {found}", "Move it away; `dropforge up` makes another")


def memory(_: Path) -> Iterator[Finding]:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit = _cgroup_room()
    free = free if limit is None else min(free, limit)
    yield _amount("memory", free, least=2 * _GIB, enough=4 * _GIB, mend="Stop other programs; the stack takes 1.5 GiB")


def shared_memory(_: Path) -> Iterator[Finding]:
    folder = Path("/dev/shm")  # noqa: S108
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Finding(
            "shared memory", Level.WARN, "not writable", "Mount a tmpfs there: training workers share data by it"
        )
        return
    free = shutil.disk_usage(folder).free
    yield _amount("shared memory", free, least=0, enough=_GIB // 4, mend="Give the container more: `--shm-size=1g`")


def ports(folder: Path) -> Iterator[Finding]:
    state = read_state(folder)
    if state is None or is_running(folder):
        return
    for name, port in state.ports.items():
        good = not port_trouble(port, hosts(name, state.pod_host))
        found = f"{port} is {'free' if good else 'taken'}"
        mend = "" if good else f"The next `dropforge up` takes another; `--{name}-port` chooses one"
        yield Finding(f"port of {name}", Level.OK if good else Level.WARN, found, mend)


def loopback(_: Path) -> Iterator[Finding]:
    good = not port_trouble(0, [LOCAL])
    mend = "" if good else "Bring the loopback interface up: `ip link set lo up`"
    yield Finding("127.0.0.1", Level.OK if good else Level.FAIL, "usable" if good else "cannot be listened on", mend)
    if named := proxies(os.environ):
        found = f"{', '.join(named)} set; requests to this machine go past it"
        yield Finding("proxy", Level.OK, found)


def clock(folder: Path) -> Iterator[Finding]:
    now = time.time()
    late = now < _PROJECT_BEGAN
    newest = max((path.stat().st_mtime for path in folder.glob("*.json")), default=0.0)
    if late or newest > now + 300:
        found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
        mend = "Set it: Airflow's schedules and signed requests depend on it"
        yield Finding("clock", Level.FAIL if late else Level.WARN, f"{found} is too early", mend)
    else:
        yield Finding("clock", Level.OK, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now)))


def _amount(check: str, free: int, *, least: int, enough: int, mend: str) -> Finding:
    level = Level.FAIL if free < least else Level.WARN if free < enough else Level.OK
    return Finding(check, level, f"{free / _GIB:.1f} GiB free", "" if level is Level.OK else mend)


def _cgroup_room() -> int | None:
    """Bytes that this container may still take, or None where there is no limit."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            return int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):
            continue
    return None


_CHECKS: tuple[Callable[[Path], Iterator[Finding]], ...] = (
    python_version, system, packages, gpus, compiler, spark, source, database, state_folder, misplaced, memory,
    shared_memory, loopback, ports, clock,
)  # fmt: skip
