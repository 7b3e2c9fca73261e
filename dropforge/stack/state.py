"""The state folder as others see it: is a stack running, where, and with which credentials.

`stack.json` is written by who has the lock on `supervisor.lock`, which tells whether a supervisor still lives: who
starts one takes the lock, writes that the stack of last time is stopped, and hands the lock to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import operator
import os
import shlex
import time
import unicodedata
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dropforge.errors import DropforgeError
from dropforge.json_objects import typed
from dropforge.settings import Settings, absolute, is_self_service
from dropforge.stack import mlflow_accounts
from dropforge.stack.processes import Traces
from dropforge.stack.secrets import Secrets, read_json, read_secrets, secrets_path, write_private

BUCKET = "dropforge"
QUEUE = "dropforge-drops"
DEAD_QUEUE = "dropforge-drops-dead"
ACCOUNT = "123456789012"
REGION = "us-east-1"
AIRFLOW_USER = "admin"
PORTS = ("objects", "mlflow", "airflow")
_LARGEST_PID = (1 << 31) - 1
# Fit for paths in addresses and configuration files without any quoting.
_BAD_CHARACTERS = set("%$?#\"'\\")
#: What services read in a stack's folder, some of it as code.
_PARTS = ("airflow", "cluster", "database", "objects", "secrets.json", "stack.json", "stack.mark")
_BAD_KINDS = {"Cc", "Cs"}  # control characters, and what stands for bytes that are no UTF-8


@dataclass(frozen=True)
class ServiceState:
    """One service: `status` is waiting, starting, healthy, failing, restarting, failed, done or stopped."""

    status: str
    port: int | None = None
    pid: int | None = None
    restarts: int = 0
    message: str = ""


@dataclass(frozen=True)
class StackState:
    """A stack that was started at least once. `phase` is starting, ready, degraded, failed, stopping or stopped.

    :param readable: its `DROPFORGE_READABLE`, empty for the default; None of one that an older version started.
    """

    folder: Path
    phase: str
    ports: dict[str, int]
    services: dict[str, ServiceState]
    supervisor: tuple[int, int]
    traces: Traces
    started: float
    secrets: Secrets = field(repr=False)
    pod_host: str | None = None
    readable: str | None = None

    @property
    def settings(self) -> Settings:
        return settings(self.folder, self.ports)

    @property
    def login(self) -> tuple[str, str]:
        """User and password of Airflow's pages."""
        return AIRFLOW_USER, self.secrets.airflow_password

    @property
    def mlflow_login(self) -> tuple[str, str]:
        """User and password of MLflow's pages."""
        return mlflow_accounts.PERSON.name, self.secrets.mlflow_password

    def env(self) -> dict[str, str]:
        """The environment of a person's client: addresses and credentials of S3, SQS, MLflow and the cluster."""
        login = mlflow_accounts.login(mlflow_accounts.PERSON, self.secrets)
        return {**client_env(self.folder, self.ports, self.secrets), **login}

    def pod_env(self) -> dict[str, str]:
        """What a training pod of a cluster has to know.

        :raises DropforgeError: if the stack was started without an address that pods can reach.
        """
        if self.pod_host is None:
            raise DropforgeError(
                f"stack in {self.folder}",
                "it listens on 127.0.0.1 only, where no pod can reach it",
                "Start it with `dropforge up --pod-host ADDRESS`, an address of this machine that the pods can reach",
            )
        env = self.env()
        return {
            "MLFLOW_TRACKING_URI": f"http://{self.pod_host}:{self.ports['mlflow']}",
            **mlflow_accounts.login(mlflow_accounts.TRAINER, self.secrets),
            "AWS_ENDPOINT_URL": f"http://{self.pod_host}:{self.ports['objects']}",
            **{name: env[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")},
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def check_folder(folder: Path) -> Path:
    """:raises DropforgeError: if the folder's path cannot be used in the addresses that the services take, or it is
    another user's."""
    folder = absolute(folder)
    signs = set(str(folder))
    bad = sorted(sign for sign in signs if sign in _BAD_CHARACTERS or unicodedata.category(sign) in _BAD_KINDS)
    if bad:
        raise DropforgeError(
            f"state folder {str(folder)!r}", f"its path contains {bad[0]!r}", "Choose another with `--state`"
        )
    if folder.exists() and not folder.is_dir():
        raise DropforgeError(f"state folder {str(folder)!r}", "it is not a folder", "Choose another with `--state`")
    _check_owner(folder)
    return folder


def _check_owner(folder: Path) -> None:
    """:raises DropforgeError: if a stack's folder, or a link to it, is another user's: its files say where data and
    logins are sent, and which processes `down` ends."""
    if not any(os.path.lexists(path(folder)) for path in (state_path, mark_path, lock_path, secrets_path)):
        return
    others = {folder.lstat().st_uid, folder.stat().st_uid} - {os.geteuid()}
    if others:
        raise DropforgeError(
            f"state folder {str(folder)!r}",
            f"it is of another user of this machine (uid {min(others)}), whose stack you would use",
            "Choose one of your own with `--state`, or work as that user",
        )


def check_private(folder: Path) -> None:
    """:raises DropforgeError: if others may enter a folder with parts of a stack, as none leaves it: one that came with
    an archive or a clone may hold code that the services would run."""
    parts = [name for name in _PARTS if os.path.lexists(folder / name)]
    if parts and folder.stat().st_mode & 0o077:
        raise DropforgeError(
            f"state folder {str(folder)!r}",
            f"others may enter it, as no stack leaves it, and its {parts[0]} may be a stranger's code",
            f"If your own stack made it, `{shlex.join(['chmod', '700', str(folder)])}`; else choose another with "
            "`--state`",
        )


def settings(folder: Path, ports: dict[str, int]) -> Settings:
    return Settings(
        bucket=BUCKET,
        bucket_alias=BUCKET,
        queue_url=f"http://127.0.0.1:{ports['objects']}/{ACCOUNT}/{QUEUE}",
        tracking_uri=f"http://127.0.0.1:{ports['mlflow']}",
        airflow_url=f"http://127.0.0.1:{ports['airflow']}",
        state=folder,
        self_service=is_self_service(os.environ, default="1"),  # its one user owns all families
    )


def client_env(folder: Path, ports: dict[str, int], secrets: Secrets) -> dict[str, str]:
    """What all of the stack's parts and clients share; who logs in to MLflow differs."""
    return {
        **settings(folder, ports).to_env(),
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['objects']}",
        "AWS_ACCESS_KEY_ID": secrets.access_key,
        "AWS_SECRET_ACCESS_KEY": secrets.secret_key,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "KUBEFLOW_TRAINING_HOME": str(folder / "cluster"),
    }


_LOCK_TRIES = 10  # who looks whether it is taken holds it for a moment
_LOCK_PAUSE = 0.02  # seconds
_ROOM = 17 << 20  # bytes; PostgreSQL writes its log in files of 16 MiB
#: Bytes that a stack writes when it starts for the first time: two databases with their tables, and logs.
FIRST_ROOM = 256 << 20


def full_disk(folder: Path, least: int = _ROOM) -> str:
    """What to say if the disk of the state folder is full, else nothing. :param least: bytes that it has to have."""
    found = os.statvfs(folder)
    full = found.f_bavail * found.f_frsize < least or (found.f_files > 0 and found.f_favail == 0)
    return f"the disk of {folder} is full: make room there" if full else ""


def state_path(folder: Path) -> Path:
    return folder / "stack.json"


def lock_path(folder: Path) -> Path:
    return folder / "supervisor.lock"


def mark_path(folder: Path) -> Path:
    return folder / "stack.mark"


def is_running(folder: Path) -> bool:
    """Whether a supervisor of this folder lives, or is about to be started."""
    try:
        handle = os.open(lock_path(folder), os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place would wait
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DropforgeError(
            f"state folder {folder}", f"{error.strerror} ({lock_path(folder).name})", "Choose another with `--state`"
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: those who look do not see each other
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def take_lock(folder: Path) -> int | None:
    """Take the folder's lock: a descriptor that holds it until the last process closes it, or None if another has it.

    Who starts a stack takes it, and hands it to the supervisor: nobody comes in between.

    :raises OSError: if it cannot be opened.
    """
    opened = os.open(lock_path(folder), os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
    handle = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)  # a child's standard streams would take its number
    os.close(opened)
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        time.sleep(_LOCK_PAUSE)
    os.close(handle)
    return None


def has_folder(folder: Path, lock: int) -> bool:
    """Whether this descriptor's lock is still the folder's: it is not once somebody removed, moved or replaced that."""
    try:
        found = lock_path(folder).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a disk that is away for a while says nothing of it
        return True
    return os.path.samestat(found, os.fstat(lock))


def read_state(folder: Path) -> StackState | None:
    """What the supervisor last wrote, or None if no stack was ever started in this folder.

    :raises DropforgeError: if it cannot be read.
    """
    folder = folder.absolute()
    try:
        return _stack_state(folder, read_json(state_path(folder)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DropforgeError(
            str(state_path(folder)), f"it cannot be read ({error!r})", "Delete it, then start with `dropforge up`"
        ) from error


def running_state(folder: Path) -> StackState | None:
    """The state of the stack that runs in this folder, or is being started again; None if there is none.

    :raises DropforgeError: as `read_state`.
    """
    state = read_state(folder)
    return state if state is not None and state.phase != "stopped" and is_running(folder) else None


def _stack_state(folder: Path, values: dict[str, Any]) -> StackState:
    traces, ports = values["traces"], values["ports"]
    return typed(
        StackState(
            folder=folder,
            phase=values["phase"],
            ports={name: _number(ports[name], 65535) for name in PORTS},
            services={name: typed(ServiceState(**service)) for name, service in values["services"].items()},
            supervisor=_identity(values["supervisor"]),
            traces=typed(
                Traces(
                    traces["boot"],
                    traces["stack_id"],
                    mark_path(folder),
                    frozenset(map(_identity, traces["processes"])),
                )
            ),
            started=values["started"],
            secrets=read_secrets(folder),
            pod_host=values.get("pod_host"),
            readable=values.get("readable"),
        )
    )


def _identity(values: Any) -> tuple[int, int]:
    pid, start = values
    return _number(pid, _LARGEST_PID), operator.index(start)


def _number(value: Any, most: int) -> int:
    """:raises ValueError: if it is none from 1 to `most`. :raises TypeError: if it is no whole number."""
    number = operator.index(value)
    if not 1 <= number <= most:
        raise ValueError(f"{number} is not from 1 to {most}")
    return number


def write_state(state: StackState) -> None:
    """For who has the lock. The file names ports and processes, no secret, and is its owner's alone all the same."""
    values = {
        "phase": state.phase,
        "ports": state.ports,
        "services": {name: asdict(service) for name, service in state.services.items()},
        "supervisor": state.supervisor,
        "started": state.started,
        "pod_host": state.pod_host,
        "readable": state.readable,
        "traces": {
            "boot": state.traces.boot,
            "stack_id": state.traces.stack_id,
            "processes": sorted(state.traces.processes),
        },
    }
    write_private(state_path(state.folder), json.dumps(values, indent=1))
