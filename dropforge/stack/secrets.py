"""The secrets of one stack: each made once, kept in its state folder, readable by its owner only."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator, MutableMapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from dropforge.errors import DropforgeError
from dropforge.whole_file import write_whole


def _token(size: int) -> Any:
    """A field of that many random bytes, as text fit for addresses."""
    return field(default_factory=lambda: secrets.token_urlsafe(size))


@dataclass(frozen=True)
class Secrets:
    """Random values; `repr` shows none of them."""

    access_key: str = field(default_factory=lambda: "DF" + secrets.token_hex(16).upper())
    secret_key: str = _token(30)
    airflow_password: str = _token(12)
    fernet_key: str = field(default_factory=lambda: base64.urlsafe_b64encode(secrets.token_bytes(32)).decode())
    jwt_secret: str = field(default_factory=lambda: base64.b64encode(secrets.token_bytes(64)).decode())
    api_secret_key: str = _token(32)
    mlflow_password: str = _token(12)
    mlflow_airflow_password: str = _token(30)
    mlflow_trainer_password: str = _token(30)
    mlflow_secret_key: str = _token(32)

    def __repr__(self) -> str:
        return "Secrets(...)"


_OF_MLFLOW: Final = {
    "mlflow_password": "MLFLOW_ADMIN_PASSWORD",
    "mlflow_airflow_password": "MLFLOW_AIRFLOW_PASSWORD",
    "mlflow_trainer_password": "MLFLOW_TRAINER_PASSWORD",
    "mlflow_secret_key": "MLFLOW_SECRET_KEY",
}
_MOST = 16 << 20  # bytes of a file that is read whole, far more than the largest has
_NAMES = frozenset(value.name for value in fields(Secrets))


def secrets_path(state: Path) -> Path:
    return state / "secrets.json"


def read_secrets(state: Path) -> Secrets:
    """The stack's secrets; those that there are none of yet are made now.

    :raises DropforgeError: if they cannot be read, or made.
    """
    path = secrets_path(state)
    known = _known(path)
    if known.keys() < _NAMES:
        try:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(state):  # a command and the supervisor may both find that some are missing
                known = asdict(Secrets(**_known(path)))
                write_private(path, json.dumps(known, indent=1))
        except OSError as error:
            raise DropforgeError(
                f"the stack's secrets in {path}",
                f"they cannot be written ({error.strerror})",
                "Make room on its disk, and see that you may write there",
            ) from None
    return Secrets(**known)


def of_mlflow(env: MutableMapping[str, str]) -> Secrets:
    """Take the secrets of MLflow's accounts out of the environment, for a server of its own; the others are not used.

    :raises DropforgeError: naming a variable that is missing.
    """
    if missing := [name for name in _OF_MLFLOW.values() if not env.get(name)]:
        raise DropforgeError(
            f"environment variable {missing[0]}",
            "it is not set, and MLflow's accounts have no passwords without it",
            "Set it; `sh images/compose-env.sh` makes all of them for docker-compose.yaml",
        )
    return Secrets(**{key: env.pop(name) for key, name in _OF_MLFLOW.items()})


def _known(path: Path) -> dict[str, str]:
    try:
        known = read_json(path)
        if not isinstance(known, dict) or not all(isinstance(value, str) and value for value in known.values()):
            raise ValueError("they are no texts by name")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DropforgeError(
            f"the stack's secrets in {path}",
            f"they cannot be read ({type(error).__name__})",  # the error of a torn file may quote it
            "Put back a copy of the file, or delete it: new ones are made at the next start, and connections and "
            "variables that you entered in Airflow have to be entered again, as it kept them encrypted",
        ) from None
    return {name: value for name, value in known.items() if name in _NAMES}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read_json(path: Path) -> Any:
    """What a JSON file of the state folder holds. :raises ValueError: as `read_own`, or if it is no JSON."""
    try:
        return json.loads(read_own(path))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_own(path: Path) -> str:
    """The text of a file of the state folder, whatever lies in its place.

    :raises OSError: if it cannot be opened. :raises ValueError: if it is no file, is too large, or is no text.
    """
    with open(path, "rb", opener=_at_once) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise ValueError("it is no file")
        data = stream.read(_MOST + 1)
    if len(data) > _MOST:
        raise ValueError(f"it is larger than {_MOST >> 20} MiB")
    return data.decode()


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for who writes to it


def write_private(path: Path, text: str) -> None:
    """Write a file with mode 0600 that appears whole."""
    write_whole(path, text.encode(), 0o600)
