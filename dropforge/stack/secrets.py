"""The secrets of one stack: made once, kept in its state folder, readable by its owner only."""

from __future__ import annotations

import base64
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Secrets:
    """Random values; `repr` shows none of them."""

    access_key: str
    secret_key: str
    airflow_password: str
    fernet_key: str
    jwt_secret: str
    api_secret_key: str

    def __repr__(self) -> str:
        return "Secrets(...)"


def secrets_path(state: Path) -> Path:
    return state / "secrets.json"


def read_secrets(state: Path) -> Secrets:
    """The stack's secrets, made now if there are none yet."""
    path = secrets_path(state)
    if not path.exists():
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = Secrets(
            access_key="DF" + secrets.token_hex(16).upper(),
            secret_key=secrets.token_urlsafe(30),
            airflow_password=secrets.token_urlsafe(12),
            fernet_key=base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            jwt_secret=base64.b64encode(secrets.token_bytes(64)).decode(),
            api_secret_key=secrets.token_urlsafe(32),
        )
        write_private(path, json.dumps(asdict(fresh), indent=1), replace=False)
    return Secrets(**json.loads(path.read_text()))


def write_private(path: Path, text: str, *, replace: bool = True) -> None:
    """Write a file with mode 0600 that appears whole; without `replace`, an existing file stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:
        temporary.unlink()
        raise
    if replace:
        temporary.replace(path)
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
