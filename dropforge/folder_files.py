"""Which files a person means to give: one, or those of a folder that are not hidden and do not lie outside it."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

from dropforge.errors import DataError
from dropforge.text import has_surrogates

#: To go through a folder that one may enter and not list, where the system has a way.
_PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
_ITSELF = "Put the file itself there, and start again"
_NO_TEXT = "its name is no UTF-8"
_NOT_HERE = "the locale of this process cannot read its name: set PYTHONUTF8=1"
#: Hidden files and folders that nobody takes for rows: of desktops, Git, notebooks, downloads, and Spark's check sums.
_EVERYWHERE = re.compile(
    r"\.(?:DS_Store|directory|git|gitignore|gitattributes|gitkeep|ipynb_checkpoints|cache|huggingface|_.*|.*\.crc)"
)


def files_of(path: Path, on_skip: Callable[[Path, str], None] = lambda _path, _why: None) -> dict[str, Path]:
    """Return a file by its name, also where it is a link: it is what the person named; or the files below a folder.

    Paths are real ones, for `open_unlinked`: whoever writes in the folder may put a link in a file's place later.

    :param on_skip: as of `files_below`.
    :raises DataError: if it is neither, or the file's name cannot be a key.
    """
    if path.is_dir():
        return files_below(path, on_skip)
    if not path.is_file():
        raise DataError(f"path {str(path)!r}", "it is neither a file nor a folder", "Check the spelling")
    if has_surrogates(path.name):
        raise DataError(f"file {str(path)!r}", f"{_NO_TEXT}, as a key has to be", "Give it another")
    return {path.name: path.resolve()}


def files_below(folder: Path, on_skip: Callable[[Path, str], None] = lambda _path, _why: None) -> dict[str, Path]:
    """Return the files below a folder by their relative key, sorted; hidden ones are left out.

    :param on_skip: called with each hidden file or folder, but for those that programs leave in any folder; with each
        symbolic link that is left out, and why: what it leads to is not in the folder, is
        not there, is hidden, or is a folder, which would be read twice or without end; with each name that is no
        UTF-8, which a key has to be; and with each folder that cannot be read.
    """
    root = folder.resolve()
    found: dict[str, Path] = {}

    def unreadable(error: OSError) -> None:
        on_skip(Path(error.filename), f"it cannot be read ({error.strerror})")

    for where, folders, names in os.walk(folder, onerror=unreadable):
        here = Path(where)
        for name in sorted(name for name in [*folders, *names] if _is_hidden(name)):
            on_skip(here / name, "it is hidden")
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in [name for name in folders if has_surrogates(name)]:
            folders.remove(name)
            on_skip(here / name, _why_no_text(name))
        for name in folders:
            if (here / name).is_symlink():  # which `os.walk` does not follow
                on_skip(here / name, "it is a link to a folder")
        for name in sorted(names):
            path = here / name
            if name.startswith("."):
                continue
            if has_surrogates(name):
                on_skip(path, _why_no_text(name))
                continue
            target = path.resolve()
            if path.is_symlink():
                if not path.exists():
                    on_skip(path, "it is a link to nothing")
                    continue
                if not target.is_relative_to(root):
                    on_skip(path, f"it is a link out of {folder}")
                    continue
                if any(part.startswith(".") for part in target.relative_to(root).parts):
                    on_skip(path, "it is a link to a hidden file")
                    continue
            if not path.is_file():
                on_skip(path, "it is no file, as a pipe is none")
            elif not target.is_relative_to(root):
                on_skip(path, f"it is behind a link out of {folder}")
            else:
                found[path.relative_to(folder).as_posix()] = target
    return dict(sorted(found.items()))


def open_unlinked(path: Path) -> BufferedReader:
    """Open a file by its real path, on which nothing may be a link by now.

    :raises DataError: if something is. :raises OSError: if it is gone, or cannot be read.
    """
    folder = os.open(path.anchor, _PASS)
    try:
        for part in path.parts[1:-1]:
            inner = os.open(part, _PASS | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        handle = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            raise DataError(f"file {str(path)!r}", "a link has come in its way since it was found", _ITSELF) from error
        error.filename = str(path)
        raise
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError(f"file {str(path)!r}", "it is none any more", _ITSELF)
    return os.fdopen(handle, "rb")


def _is_hidden(name: str) -> bool:
    """Tell whether a name is that of something hidden which a person may have meant to give."""
    return name.startswith(".") and not _EVERYWHERE.fullmatch(name)


def _why_no_text(name: str) -> str:
    try:
        os.fsencode(name).decode()
    except UnicodeDecodeError:
        return _NO_TEXT
    return _NOT_HERE
