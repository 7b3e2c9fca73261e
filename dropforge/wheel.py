"""A wheel of a user's own functions (`code` of a recipe), named by its digest: fetched, looked at, and unpacked.

Nothing is installed, built or resolved: a wheel is a zip file whose modules come behind all others on the import path,
and what they need must be there. Who only plans reads its entry points and runs nothing of it. What an archive can do
to whom unpacks it (paths that leave the folder, links, a few kilobytes that become gigabytes) is refused.

Needs the standard library only, as all that the trainer's image shares with the planning.
"""

from __future__ import annotations

import configparser
import errno
import hashlib
import re
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from dropforge.errors import RecipeError
from dropforge.store import MissingObjectError, Store, open_store, split_uri

ROWS: Final = "dropforge.row_functions"
ANSWERS: Final = "dropforge.answer_metrics"
FIGURES: Final = "dropforge.evaluation_metrics"
CALLBACKS: Final = "dropforge.callbacks"
KERNELS: Final = "dropforge.kernels"
GROUPS: Final[Mapping[str, str]] = {
    ROWS: "row functions",
    ANSWERS: "metrics of answers",
    FIGURES: "metrics of an evaluation",
    CALLBACKS: "callbacks",
    KERNELS: "kernels of the curation",
}
LARGEST: Final = 64 << 20  # bytes of a wheel
UNPACKED: Final = 256 << 20  # bytes of its files
FILES: Final = 5000
TAKEN: Final[Mapping[str, tuple[str, ...]]] = {  # names of figures that are ours
    ANSWERS: ("exact-match", "token-f1", "rouge-l", "valid-json", "ended", "tokens"),
    FIGURES: ("loss", "perplexity", "accuracy", "bits_per_byte", "macro_f1"),
}
_KEY: Final = "recipe key `code.wheel`"
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,40}")
_TARGET: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_TABLE: Final = 1 << 20  # bytes of its entry points, at most
_PIECE: Final = 1 << 20
#: What zipfile raises.
_TORN: Final = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError, ValueError)
_PACKED: Final = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})


@dataclass(frozen=True)
class Wheel:
    """What a wheel provides.

    :param name: of its file. :param provides: by group, for each name the `module:attribute` behind it.
    """

    name: str
    sha256: str
    provides: Mapping[str, Mapping[str, str]]

    def names(self, group: str) -> tuple[str, ...]:
        """Names in one of our groups, in the order in which they take part."""
        return tuple(sorted(self.provides.get(group, {})))

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        names = {words: list(self.names(group)) for group, words in GROUPS.items() if self.names(group)}
        return {"wheel": self.name, "sha256": self.sha256, "provides": names}

    def __str__(self) -> str:
        told = [f"{words} {', '.join(self.names(group))}" for group, words in GROUPS.items() if self.names(group)]
        return f"{self.name} ({self.sha256}): {'; '.join(told)}"


def fetch(address: str, sha256: str, path: Path, store: Store | None = None) -> Wheel:
    """Copy a wheel to this machine, and look at it.

    :param store: a bucket that holds it, where a client for it is at hand.

    :raises RecipeError: if it is not there, is another one, or is none that may be used.
    """
    root, name = split_uri(address)
    key = name if store is None else address.removeprefix(f"{store.uri}/")
    digest, size = hashlib.sha256(), 0
    try:
        with (store or open_store(root)).open(key) as source, path.open("wb") as target:
            while piece := source.read(_PIECE):
                size += len(piece)
                if size > LARGEST:
                    raise RecipeError(_KEY, f"{address} has more than {LARGEST >> 20} MiB", "Leave data out of it")
                digest.update(piece)
                target.write(piece)
    except (MissingObjectError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise RecipeError(_KEY, f"there is no {address}", "Upload the wheel, where the pods see it too") from None
    if digest.hexdigest() != sha256:
        raise RecipeError(
            "recipe key `code.sha256`",
            f"{address} has the SHA-256 {digest.hexdigest()}, not {sha256}",
            "Name the digest of the wheel that was reviewed, or give back its bytes",
        )
    return inspect(path, name)


def inspect(path: Path, name: str) -> Wheel:
    """What a wheel provides; nothing of it is run. :param name: of its file, as it was uploaded.

    :raises RecipeError: if it is no wheel, not for every machine, or could do harm where it is unpacked.
    """
    if not name.endswith("-none-any.whl"):
        raise _refused(name, "is no wheel for every machine (`...-none-any.whl`)", "Build it of Python files")
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    try:
        with _opened(path) as archive:
            _check(name, archive)
            tables = [entry for entry in archive.infolist() if _is_table(entry.filename)]
            text = b"".join(_bytes(archive, entry, _TABLE) for entry in tables).decode()
    except _TORN as error:
        raise _refused(name, f"cannot be read ({error})", "Build it again") from error
    return Wheel(name, digest, _entries(name, text))


def unpack(path: Path, folder: Path) -> None:
    """Unpack a wheel that was looked at into a folder, which appears whole or not at all.

    :raises RecipeError: if its bytes are not what it says of them.
    """
    staging = folder.parent / f".{folder.name}"
    shutil.rmtree(staging, ignore_errors=True)
    left = UNPACKED
    try:
        with _opened(path) as archive:
            _check(path.name, archive)
            for entry in archive.infolist():
                target = staging / entry.filename
                if entry.is_dir():
                    continue
                data = _bytes(archive, entry, left)
                left -= len(data)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
    except _TORN as error:
        raise _refused(path.name, f"cannot be unpacked ({error})", "Build it again") from error
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise zipfile.BadZipFile("its directory is before its beginning") from None


def _check(name: str, archive: zipfile.ZipFile) -> None:
    """:raises RecipeError: for what no wheel of ours has. Sizes are what the archive says; `_bytes` counts them."""
    entries = archive.infolist()
    if len(entries) > FILES or sum(entry.file_size for entry in entries) > UNPACKED:
        raise _refused(name, f"has more than {FILES} files or {UNPACKED >> 20} MiB unpacked", "Leave data out of it")
    seen: set[str] = set()  # files, in the letters of a file system that knows no case
    folders: set[str] = set()
    for entry in entries:
        parts = PurePosixPath(entry.filename).parts
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if (
            not parts
            or entry.filename.startswith("/")
            or ".." in parts
            or "\\" in entry.filename
            or ":" in entry.filename
            or "\0" in entry.orig_filename
        ):
            raise _refused(name, f"has a file {entry.filename[:80]!r}, which leaves its folder", "Do not use it")
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR) or entry.flag_bits & 1:
            raise _refused(name, f"has {entry.filename[:80]!r}, which is a link or encrypted", "Build it again")
        if entry.compress_type not in _PACKED:
            raise _refused(
                name, f"has {entry.filename[:80]!r}, which is packed otherwise than by deflate", "Build it again"
            )
        if parts[0].endswith(".data"):
            raise _refused(
                name, f"has {parts[0]!r}, whose files only an installer can place", "Build it of packages alone"
            )
        above = {"/".join(parts[:depth]).lower() for depth in range(1, len(parts) + entry.is_dir())}
        place = "/".join(parts).lower()
        if above & seen or (not entry.is_dir() and place in seen | folders):
            raise _refused(name, f"has {place[:80]!r} twice", "Build it again")
        folders |= above
        if not entry.is_dir():
            seen.add(place)


def _bytes(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, most: int) -> bytes:
    """A file's bytes. :raises RecipeError: if there are more than `most`, whatever the archive says of it."""
    with archive.open(entry) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise _refused(str(archive.filename), f"becomes more than {most} bytes at {entry.filename[:80]!r}", "Fix it")
    return data


def _is_table(name: str) -> bool:
    head, _, tail = name.partition("/")
    return tail == "entry_points.txt" and head.endswith(".dist-info")


def _entries(name: str, text: str) -> dict[str, dict[str, str]]:
    """Our groups of entry points (https://packaging.python.org/en/latest/specifications/entry-points/)."""
    table = configparser.ConfigParser(delimiters=("=",), interpolation=None, default_section="")
    table.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        table.read_string(text)
    except configparser.Error as error:
        cause = " ".join(str(error).split())[:200]
        raise _refused(name, f"has entry points that cannot be read ({cause})", "Build it again") from error
    ours = {group: dict(table[group]) for group in table.sections() if group.startswith("dropforge.")}
    strange = sorted(set(ours) - set(GROUPS))
    if strange:
        raise _refused(name, f"has entry points of {strange[0]!r}", f"What takes part is of {', '.join(GROUPS)}")
    if not any(ours.values()):
        raise _refused(name, "provides nothing that takes part", f"Give it entry points of {', '.join(GROUPS)}")
    for group, entries in ours.items():
        for own, target in entries.items():
            if not _NAME.fullmatch(own):
                raise _refused(
                    name, f"calls one of {group} {own[:60]!r}", "Use lower-case letters, digits, `-` and `_`"
                )
            if own in TAKEN.get(group, ()):
                raise _refused(name, f"calls one of {group} {own!r}, which is one of our figures", "Name it otherwise")
            if not _TARGET.fullmatch(target.strip()):
                raise _refused(name, f"says of {own!r} {target[:60]!r}, which is no `module:function`", "Fix it")
            entries[own] = target.strip()
    return ours


def _refused(name: str, cause: str, mend: str) -> RecipeError:
    return RecipeError(_KEY, f"{Path(name).name} {cause}", mend)
