"""The one error that is meant for a person: it names the thing, the cause and the mend."""

from __future__ import annotations

import errno
import os
from typing import Final

from dropforge.text import escape, shorten

_MOST: Final = 4000  # characters of each part
# A disk, a quota or a limit on the size of files that takes no more bytes.
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CAUSES: Final = {errno.EEXIST: "something else is in its place", errno.EISDIR: "a folder is in its place"}
#: What to do about an error of the system, by its number.
MENDS: Final = {
    errno.ENOSPC: "Make room on its disk",
    errno.EDQUOT: "Make room within your quota",
    errno.EFBIG: "Raise the limit on the size of files (`ulimit -f`)",
    errno.EROFS: "Mount its disk for writing, or choose another folder",
    errno.EEXIST: "Move that away",
    errno.EISDIR: "Move that away",
    errno.ELOOP: "It is a link: move that away",
}


class DropforgeError(Exception):
    """Something a person can mend.

    :param thing: what is wrong, by name ("recipe key `train.learning_rat`").
    :param cause: why it is wrong.
    :param mend: what to do about it.

    Parts may quote what strangers wrote: each is shortened, and its control characters are spelled out.
    """

    def __init__(self, thing: str, cause: str, mend: str) -> None:
        thing, cause, mend = (shorten(escape(shorten(part, _MOST)), _MOST) for part in (thing, cause, mend))
        super().__init__(f"{thing}: {cause.rstrip('.')}. {mend}")
        self.thing, self.cause, self.mend = thing, cause, mend

    def __reduce__(self) -> tuple[type[DropforgeError], tuple[str, str, str]]:
        return type(self), (self.thing, self.cause, self.mend)


class RecipeError(DropforgeError):
    """A recipe that cannot be read, or that asks for what cannot work."""


class DataError(DropforgeError):
    """A drop or dataset that cannot be used."""


def file_error(error: OSError) -> DropforgeError:
    """What to tell of a file that the system refused; the error has to name one."""
    name = error.filename if error.filename2 is None else error.filename2  # of a move, where it goes
    cause = _CAUSES.get(error.errno or 0) or error.strerror or str(error)
    mend = MENDS.get(error.errno or 0, "See that it is there, and that you may read and write it")
    return DropforgeError(f"file {os.fsdecode(name)}", cause, mend)
