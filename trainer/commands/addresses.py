"""What a person may type for a run and for a dataset version, and what it stands for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dropforge.dataset import Manifest, read_manifest
from dropforge.errors import DataError, DropforgeError, RecipeError
from dropforge.layout import run_key
from dropforge.run import RunSpec
from dropforge.store import MissingObjectError, open_store, split_uri

_CHECKPOINT: Final = re.compile(r"(.+)/checkpoints/step-(\d+)/?")
_DATASET: Final = re.compile(r"(?:(.*)/)?datasets/[^/]+/[^/]+/manifest\.json")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")


@dataclass(frozen=True)
class Dataset:
    """A dataset version. :param root: address that the shards' keys are relative to."""

    uri: str
    root: str
    manifest: Manifest


def run_uri(address: str) -> str:
    """The address of `run.json` for a run's name, its folder, or that file.

    :raises RecipeError: if it can be no address.
    """
    _check_scheme(address)
    if "/" not in address and not address.endswith(".json") and not Path(address).is_dir():
        bucket = os.environ.get("DROPFORGE_BUCKET")
        if not bucket:
            raise RecipeError(
                f"run {address!r}",
                "it is no folder, and DROPFORGE_BUCKET names no bucket to look it up in",
                "Give the whole address, such as s3://BUCKET/runs/RUN",
            )
        return f"s3://{bucket}/{run_key(address)}"
    return address if address.endswith(".json") else f"{address.rstrip('/')}/run.json"


def open_run(address: str) -> RunSpec:
    """The run at an address. :raises RecipeError: if there is none."""
    uri = run_uri(address)
    root, key = split_uri(uri)
    try:
        return RunSpec.read(open_store(root), key)
    except (MissingObjectError, NotADirectoryError, IsADirectoryError):
        raise RecipeError(
            f"run {address}", f"there is no {uri}", "Give a run's folder or its run.json; `dropforge runs` lists runs"
        ) from None
    except DropforgeError as error:
        raise RecipeError(f"run {address}", error.cause, error.mend) from error


def split_checkpoint(address: str) -> tuple[str, int] | None:
    """`RUN/checkpoints/step-N` as the run's address and N; None for any other address."""
    match = _CHECKPOINT.fullmatch(address)
    return (match[1], int(match[2])) if match else None


def open_dataset(address: str) -> Dataset:
    """The dataset version at the address of its folder or `manifest.json`.

    :raises DataError: if there is none.
    """
    _check_scheme(address)
    uri = address if address.endswith(".json") else f"{address.rstrip('/')}/manifest.json"
    match = _DATASET.fullmatch(uri)
    if match is None:
        raise DataError(
            f"dataset {address}",
            "its address does not end as datasets/FAMILY/DIGEST/manifest.json, so its shards cannot be found",
            "Give the manifest where curation wrote it",
        )
    root, key = split_uri(uri)
    try:
        return Dataset(uri, match[1] or ".", read_manifest(open_store(root), key))
    except (MissingObjectError, NotADirectoryError, IsADirectoryError):
        raise DataError(
            f"dataset {address}", f"there is no {uri}", "Give a dataset's folder; a run's run.json names its own"
        ) from None


def spec_of(dataset: Dataset) -> RunSpec:
    """A run that is none: it has a dataset only."""
    manifest = dataset.manifest
    return RunSpec(
        run="",
        family=manifest.family,
        counter=0,
        root="",
        data_root=dataset.root,
        dataset=dataset.uri,
        dataset_digest=manifest.digest,
        recipe={},
        code="",
    )


def is_dataset(address: str) -> bool:
    """Whether an address looks like that of a dataset version, not of a run."""
    return address.endswith("manifest.json") or re.search(r"(^|/)datasets/(?!.*runs/)", address) is not None


def _check_scheme(address: str) -> None:
    match = _SCHEME.match(address)
    if match and match[1] not in ("s3", "file"):
        raise RecipeError(f"address {address}", f"{match[1]}:// is no storage", "Give s3://..., file://... or a path")
