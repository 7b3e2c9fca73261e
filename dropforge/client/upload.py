"""Upload a drop: the files first, `_SUCCESS` with their sizes and checksums last."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path

from dropforge import layout
from dropforge.errors import DataError
from dropforge.folder_files import files_of, open_unlinked
from dropforge.store import Store


def find_files(paths: list[Path], on_skip: Callable[[Path, str], None] = lambda _path, _why: None) -> dict[str, Path]:
    """Files to upload by their relative key; hidden files are left out, and links out of a folder.

    :param on_skip: as of `files_below`.
    :raises DataError: if a path is missing, nothing is left, or two files would get one key.
    """
    files: dict[str, Path] = {}
    for path in paths:
        for key, item in files_of(path, on_skip).items():
            if any(part.startswith(".") for part in key.split("/")) or key == layout.SUCCESS:
                continue
            if key in files:
                raise DataError(f"file {key!r}", f"it comes from both {files[key]} and {item}", "Rename one of them")
            files[key] = item
    if not [key for key in files if key != layout.RECIPE]:
        raise DataError("drop", f"there is no data file in {', '.join(map(str, paths))}", "Name files with rows")
    return files


def upload(
    store: Store,
    family: str,
    name: str,
    files: dict[str, Path],
    progress: Callable[[int], None] = lambda _bytes: None,
) -> str:
    """Upload `files` as the drop FAMILY/NAME and complete it; returns the key of `_SUCCESS`.

    :raises DataError: if the drop is complete already, or another upload completes it meanwhile: a changed upload is a
        new drop.
    """
    prefix = layout.drop_prefix(family, name)
    if store.stat(prefix + layout.SUCCESS) is not None:
        raise DataError(f"drop {family}/{name}", "it is complete already", "Choose another name with --name")
    entries = []
    for key, path in sorted(files.items()):
        with open_unlinked(path) as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            # By its name another file may be sent by now.
            store.upload(_by_handle(stream) or path, prefix + key)
            size = os.fstat(stream.fileno()).st_size
        entries.append({"key": key, "size": size, "sha256": sha256})
        progress(size)
    if not store.put_if_absent(prefix + layout.SUCCESS, json.dumps(entries, indent=1).encode()):
        cause = "another upload has completed it meanwhile, with its own list of files"
        raise DataError(f"drop {family}/{name}", cause, "Upload yours under another name, with --name")
    return prefix + layout.SUCCESS


def _by_handle(stream: BufferedReader) -> Path | None:
    """The path by which a process opens a file that it has open; None where the system has none, as on a Mac."""
    path = Path(f"/proc/self/fd/{stream.fileno()}")
    return path if path.exists() else None


def default_name() -> str:
    """A drop's name from the time of day, which two uploads of one second do not share."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}-{secrets.token_hex(2)}"
