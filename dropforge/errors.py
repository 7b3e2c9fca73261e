"""The one error that is meant for a person: it names the thing, the cause and the mend."""

from __future__ import annotations

from typing import Final

from dropforge.text import escape, shorten

_MOST: Final = 4000  # characters of each part


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
