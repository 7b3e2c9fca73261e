"""How deeply brackets may be nested: a limit of our own, for the interpreter's depends on its version and on who calls.

What passes here may be followed by recursion anywhere behind.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from curation.reasons import Reason, RejectError
from dropforge.json_objects import DEEPEST, is_too_deep


class JsonObject(dict[str, Any]):
    """An object that stood as JSON text: what is null in it was written so, whatever holds the text."""

    __slots__ = ()


def too_deep() -> RejectError:
    return RejectError(Reason.TOO_DEEP, f"brackets are nested more than {DEEPEST} deep")


def check_depth(value: Any, brackets: int) -> None:
    """Refuse a JSON value that is nested too deeply.

    :param brackets: that open in its text: counting them is quicker than looking at the value.
    :raises RejectError: if it is.
    """
    if is_too_deep(value, brackets):
        raise too_deep()


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these fields. :raises RejectError: if one stands twice, of which one value would be lost."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise RejectError(Reason.DUPLICATE_FIELD, f"field {twice[:60]!r} appears twice")
    return fields


def _object(pairs: list[tuple[str, Any]]) -> JsonObject:
    return JsonObject(unique(pairs))


_decode = json.JSONDecoder(object_pairs_hook=_object).decode


def parse_text(text: str) -> Any:
    """The value of JSON that stands as text in a field.

    :raises ValueError: if it is no JSON. :raises RejectError: if it is nested too deeply, or a field stands twice.
    """
    try:
        value = _decode(text)
    except RecursionError:
        raise too_deep() from None
    check_depth(value, text.count("{") + text.count("["))
    return value
