"""Where the services are: read from the environment, so that only it differs between a laptop and production.

Credentials are not here: boto3 and Airflow's connection find them by themselves (`AWS_*`, `AIRFLOW_CONN_*`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dropforge.errors import DropforgeError

SELF_SERVICE: Final = "DROPFORGE_SELF_SERVICE"
READABLE: Final = "DROPFORGE_READABLE"
_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Settings:
    """
    :param bucket: S3 bucket of drops, datasets and runs.
    :param bucket_alias: its short name in partition keys, which are limited to 250 characters.
    :param queue_url: SQS queues that the buckets notify, with spaces or commas between them; empty where `drops/` is
        polled instead.
    :param tracking_uri: address of the MLflow server.
    :param airflow_url: address of Airflow's API server.
    :param state: folder of the embedded stack.
    :param drop_patience: minutes that a drop may wait for files that its `_SUCCESS` lists.
    :param drop_buckets: other buckets that drops come from, with their aliases.
    :param self_service: whether the recipe of a family's first drop becomes the family's.
    """

    bucket: str
    bucket_alias: str
    queue_url: str
    tracking_uri: str
    airflow_url: str
    state: Path
    drop_patience: float = 60.0
    drop_buckets: Mapping[str, str] = field(default_factory=dict)
    self_service: bool = False

    @property
    def root(self) -> str:
        """Address of the bucket."""
        return f"s3://{self.bucket}"

    @property
    def queue_urls(self) -> tuple[str, ...]:
        return split(self.queue_url)

    @property
    def aliases(self) -> dict[str, str]:
        """All buckets that drops come from with their aliases, that of the ledger first."""
        return {self.bucket: self.bucket_alias, **self.drop_buckets}

    def to_env(self) -> dict[str, str]:
        others = " ".join(f"{alias}={bucket}" for bucket, alias in self.drop_buckets.items())
        return {
            **({"DROPFORGE_DROP_BUCKETS": others} if others else {}),
            "DROPFORGE_BUCKET": self.bucket,
            "DROPFORGE_BUCKET_ALIAS": self.bucket_alias,
            "DROPFORGE_QUEUE_URL": self.queue_url,
            "DROPFORGE_AIRFLOW_URL": self.airflow_url,
            "DROPFORGE_STATE": str(self.state),
            SELF_SERVICE: "1" if self.self_service else "0",
            "MLFLOW_TRACKING_URI": self.tracking_uri,
        }


def default_state() -> Path:
    """The state folder: `DROPFORGE_STATE`, else `.dropforge` in the current folder."""
    return absolute(Path(os.environ.get("DROPFORGE_STATE") or ".dropforge"))


def absolute(path: Path) -> Path:
    """The path from the root on. :raises DropforgeError: if it hangs on a current folder that is not there any more."""
    try:
        return path.absolute()
    except FileNotFoundError:
        raise DropforgeError(
            "the current folder", "it was removed", f"Change to another, or name {path} from the root on"
        ) from None


def without_login(tracking_uri: str, variable: str = "MLFLOW_TRACKING_URI") -> str:
    """The address of MLflow, which goes into `run.json`, logs and links: it must not carry a login.

    A password with characters that an address does not allow is found too, and is not repeated in the error.

    :raises DropforgeError: if it does.
    """
    web = tracking_uri.lower().startswith(("http:", "https:"))
    try:
        login = "@" in (tracking_uri if web else urlsplit(tracking_uri).netloc)
    except ValueError:
        login = "@" in tracking_uri
    if login:
        raise DropforgeError(
            f"MLflow's address ({variable})",
            "it carries a login, which would be written to run.json, logs and links",
            "Name the server alone, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN",
        )
    return tracking_uri


def from_env(env: Mapping[str, str] = os.environ) -> Settings:
    """:raises DropforgeError: naming the variable that is missing, or an address that carries a login."""

    def need(name: str) -> str:
        if not env.get(name):
            raise DropforgeError(
                f"environment variable {name}",
                "it is not set",
                "Set it, or start a stack on this machine with `dropforge up`",
            )
        return env[name]

    bucket = need("DROPFORGE_BUCKET")
    alias = env.get("DROPFORGE_BUCKET_ALIAS") or bucket
    return Settings(
        bucket=bucket,
        bucket_alias=alias,
        queue_url=env.get("DROPFORGE_QUEUE_URL", ""),
        tracking_uri=without_login(need("MLFLOW_TRACKING_URI")),
        airflow_url=env.get("DROPFORGE_AIRFLOW_URL", ""),
        state=Path(env.get("DROPFORGE_STATE") or ".dropforge").absolute(),
        drop_patience=_minutes(env, "DROPFORGE_DROP_PATIENCE", Settings.drop_patience),
        drop_buckets=_buckets(env.get("DROPFORGE_DROP_BUCKETS", ""), bucket, alias),
        self_service=is_self_service(env),
    )


def is_self_service(env: Mapping[str, str], default: str = "0") -> bool:
    """Tell whether the recipe of a family's first drop becomes the family's: `DROPFORGE_SELF_SERVICE`.

    :raises DropforgeError: if it is neither 1 nor 0.
    """
    value = env.get(SELF_SERVICE) or default
    if value not in {"0", "1"}:
        raise DropforgeError(f"environment variable {SELF_SERVICE}", f"it is {value!r}", "Set it to 1 or 0")
    return value == "1"


def families_folder(dags: Path) -> Path:
    """Folder of the families' files: `DROPFORGE_FAMILIES`, else `families` beside the folder of the DAG files."""
    return Path(os.environ.get("DROPFORGE_FAMILIES") or dags.parent / "families")


def split(text: str) -> tuple[str, ...]:
    """The words of a list with spaces or commas between them, each once."""
    return tuple(dict.fromkeys(text.replace(",", " ").split()))


def _buckets(text: str, own: str, own_alias: str) -> dict[str, str]:
    """Buckets with their aliases, from words as `ALIAS=BUCKET` or `BUCKET`. :raises DropforgeError: for others."""
    thing, found = "environment variable DROPFORGE_DROP_BUCKETS", {own: own_alias}
    for word in split(text):
        alias, _, bucket = word.rpartition("=")
        alias = alias or bucket
        if not _ALIAS.fullmatch(alias) or not _ALIAS.fullmatch(bucket):
            raise DropforgeError(
                thing,
                f"{word!r} is no bucket",
                "Write ALIAS=BUCKET or BUCKET, of at most 63 letters, digits, dots and hyphens",
            )
        if found.get(bucket, alias) != alias:
            raise DropforgeError(thing, f"bucket {bucket} has the alias {found[bucket]} already", "Give it one alias")
        if any(known == alias and other != bucket for other, known in found.items()):
            raise DropforgeError(thing, f"two buckets have the alias {alias}", "Give each one of its own")
        found[bucket] = alias
    return {bucket: alias for bucket, alias in found.items() if bucket != own}


def _minutes(env: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(env.get(name) or default)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100_000:
        raise DropforgeError(
            f"environment variable {name}", f"{env[name]!r} is no number of minutes", "Give one, as 60"
        )
    return value
