"""Columns that mean nothing to curation and are kept all the same: one JSON text a row, beside what is trained on."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import cached_property
from typing import Any, Final, Literal

from curation.reasons import Reason, RejectError

#: What a recipe may ask for: names of columns, or every one that is not read for its meaning.
Asked = tuple[str, ...] | Literal["all"]


class _Every:
    """Holds whatever is asked for."""

    def __contains__(self, name: object) -> bool:
        return True


EVERY: Final[Container[str]] = _Every()


@dataclass(frozen=True)
class Extras:
    """Which columns of a row are kept.

    :param asked: as the recipe has it. :param read: columns that are read for their meaning, in small letters.
    :param masked: personal data are masked in what is kept: bytes are kept as the text that they hold, or not at all.
    """

    asked: Asked | None
    read: frozenset[str]
    masked: bool = False

    @cached_property
    def wanted(self) -> Container[str]:
        """Columns of a file that must be read, in small letters."""
        if self.asked == "all":
            return EVERY
        return self.read.union(name.strip().lower() for name in self.asked or ())

    def of(self, fields: Mapping[str, Any]) -> str | None:
        """The row's kept columns as canonical JSON: sorted names, no spaces; None if it has none.

        A column without a value is left out, so the same rows are the same in any format. Times are text of ISO 8601,
        bytes are base64, and what JSON has no number for (NaN, infinity) is null.

        :raises RejectError: if a value holds half of a surrogate pair, or is nested too deeply, or if it must be masked
            and is no text.
        """
        if self.asked == "all":
            names = [name for name in fields if name.strip().lower() not in self.read]
            kept = {name: fields[name] for name in names}
        else:
            kept = self._named(fields)
        kept = {name: value for name, value in kept.items() if value is not None}
        if not kept:
            return None
        try:
            if self.masked:
                kept = {name: _legible(value, name) for name, value in kept.items()}
            text = _written(kept)
            text.encode()
        except UnicodeEncodeError:
            raise RejectError(Reason.LONE_SURROGATE, "half of a surrogate pair in a kept column") from None
        except RecursionError:
            raise RejectError(Reason.TOO_DEEP, "brackets of a kept column are nested too deeply") from None
        return text

    def _named(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Columns by the recipe's names, without case where nothing fits exactly."""
        folded: dict[str, Any] = {}
        if any(name not in fields for name in self.asked or ()):
            folded = {name.strip().lower(): value for name, value in fields.items()}
        return {name: fields.get(name, folded.get(name.strip().lower())) for name in self.asked or ()}


def numbered(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a mapping that loses none: what has a name of one before it gets a number behind it."""
    made: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    for name, value in pairs:
        shown = name
        while shown in made:
            numbers[name] = numbers.get(name, 1) + 1
            shown = f"{name} {numbers[name]}"
        made[shown] = value
    return made


def scrubbed(text: str, scrub: Callable[[str], str]) -> str:
    """Kept columns with masks. Names that have the same mask are numbered, in the order of the text."""
    masked = scrub(text)
    if masked == text:
        return text
    twice = False

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal twice
        made = numbered(found)
        twice = twice or list(made) != [name for name, _ in found]
        return made

    try:
        value = json.loads(masked, object_pairs_hook=pairs)
        return _written(value) if twice else masked
    except (ValueError, RecursionError):
        return masked  # it can just be written, and not be read: what counts is masked


def _legible(value: Any, name: str) -> Any:
    """The value with text in the place of bytes: masks are found in text alone."""
    if isinstance(value, bytes):
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:  # of UTF-16, for example, where no mask would be found
            raise RejectError(Reason.BAD_FIELD, f"bytes in kept column `{name[:60]}` are no text that could be masked")
        return text
    if isinstance(value, dict):
        return {key: _legible(part, name) for key, part in value.items()}
    return [_legible(part, name) for part in value] if isinstance(value, list | tuple) else value


def _written(value: Any) -> str:
    how: dict[str, Any] = {"sort_keys": True, "ensure_ascii": False, "separators": (",", ":"), "default": _plain}
    try:
        return json.dumps(value, allow_nan=False, **how)
    except ValueError:
        return json.dumps(_finite(value), **how)


def _plain(value: Any) -> Any:
    """What only columns of Parquet and Arrow hold."""
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
