"""The one way to read a JSON object that pods, other programs or a power cut may have left in a store.

How many bytes are read, how deeply brackets are nested and how large a number is are bounded, so whoever goes on with
the values meets no surprise of theirs. Standard library only: the trainer reads by it. It decides nothing else: what
cannot be read is an error for a person, or none to whoever passes over `ValueError`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dropforge.errors import DropforgeError
from dropforge.store import MissingObjectError, Store, TooLargeError, read_bounded

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: Bytes of an object below `runs/`, or of one of the ledger.
MOST: Final = 32 << 20
#: Bytes of a checkpoint's manifest; 10,000 ranks' files need 2 MB.
MOST_MANIFEST: Final = 4 << 20
#: Bytes of what lists the files of a drop; 100,000 with the longest keys take 130 MB.
MOST_LISTED: Final = 256 << 20
#: A limit of our own, for the interpreter's depends on its version and on who calls.
DEEPEST: Final = 100
#: Digits of a whole number; any of so many has a float.
DIGITS: Final = 300
#: What looking at values ends with that nobody of ours has written, and a store that is away does not.
UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_MEND: Final = "Restore it from the bucket's versions, or delete it"
_KINDS: Final = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "a truth value"}
#: Types of a record's fields, by how they are annotated.
_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "None": (type(None),),
    "Mapping": (Mapping,),
    "tuple": (tuple,),
}

T = TypeVar("T")
Record = TypeVar("Record", bound="DataclassInstance")


class UnreadableError(DropforgeError, ValueError):
    """An object that holds something else than it should."""


def read_object(
    store: Store, key: str, mend: str = "", *, most: int = MOST, etag: str | None = None, sha256: str | None = None
) -> dict[str, Any]:
    """Read a JSON object from a store.

    :param mend: what to do if it cannot be read. :param most: bytes that it may have. :param etag: as of `Store.open`.
    :param sha256: of the bytes that were written there, if that is known.
    :raises UnreadableError: naming the object, if it cannot be read, or holds other bytes.
    :raises MissingObjectError: if it is not there.
    """
    thing = f"object {store.uri}/{key}"
    try:
        data = read_bounded(store, key, most, etag)
    except TooLargeError as error:
        raise UnreadableError(thing, f"it cannot be read: {error.cause}", mend or _MEND) from None
    if sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != sha256:
        cause = f"it was changed: its SHA-256 is {found[:12]}, and what was written there had {sha256:.12}"
        raise UnreadableError(thing, cause, "Restore that from the bucket's versions")
    return parse_object(data, thing, mend)


def find_object(store: Store, key: str, *, most: int = MOST) -> dict[str, Any]:
    """Read a JSON object as `read_object`; empty if there is none, or it cannot be read."""
    try:
        return read_object(store, key, most=most)
    except (MissingObjectError, UnreadableError):
        return {}


def read_as(store: Store, key: str, make: Callable[[dict[str, Any]], T], mend: str = "", *, most: int = MOST) -> T:
    """Read a JSON object as `read_object`, and make something of it; what that meets in it is told in the same way."""
    values = read_object(store, key, mend, most=most)
    try:
        return make(values)
    except UNREADABLE as error:
        raise UnreadableError(f"object {store.uri}/{key}", f"it cannot be read ({error!r})", mend or _MEND) from error


def typed(made: Record) -> Record:
    """Return a record whose fields of plain types hold values of these. :raises TypeError: otherwise."""
    for one in fields(made):
        names = [name.partition("[")[0] for name in str(one.type).split(" | ")]
        kinds = tuple(kind for name in names for kind in _FIELDS.get(name, (object,)))
        if not isinstance(getattr(made, one.name), kinds):
            raise TypeError(f"{one.name} is of type {type(getattr(made, one.name)).__name__}")
    return made


def parse_object(data: bytes | str, thing: str, mend: str = "") -> dict[str, Any]:
    """The JSON object of a text that was read to a bound. :param thing: what it is, for the error.

    :raises UnreadableError: if it is none, is nested more than `DEEPEST` deep, or has a number that no float holds.
    """
    value = parse_value(data, thing, mend)
    if isinstance(value, dict):
        return value
    why = f"it is {_KINDS.get(type(value), 'null')} and no object"
    raise UnreadableError(thing, f"it cannot be read: {why}", mend or _MEND)


def parse_value(data: bytes | str, thing: str, mend: str = "") -> Any:
    """The JSON value of a text, as `parse_object` reads an object."""
    try:
        value = json.loads(data, parse_int=_whole_number)
        if is_too_deep(value, brackets(data)):
            raise RecursionError
        return value
    except RecursionError:
        why = f"brackets are nested more than {DEEPEST} deep"
    except ValueError as error:
        why = f"it is no JSON ({error})"
    raise UnreadableError(thing, f"it cannot be read: {why}", mend or _MEND)


def _whole_number(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def brackets(data: bytes | str) -> int:
    """Count the brackets that open in a JSON text: it holds as many lists and objects at most."""
    return data.count(b"{") + data.count(b"[") if isinstance(data, bytes) else data.count("{") + data.count("[")


def is_too_deep(value: Any, opened: int) -> bool:
    """Tell whether a JSON value is nested more than `DEEPEST` deep.

    :param opened: `brackets` of its text: counting them is quicker than looking at the value.
    """
    return opened > DEEPEST and _depth(value) > DEEPEST


def _depth(value: Any) -> int:
    """How deeply lists and objects are nested, level by level."""
    found, level = 0, [value]
    while level:
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [part for parts in inner for part in parts]
        found += bool(inner)
    return found
