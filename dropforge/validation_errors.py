"""What pydantic says of a value, in the words that people who wrote it read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic_core import ErrorDetails

MISSING: Final = "it is missing"


def cause(error: ErrorDetails, *, shown: bool = True) -> str:
    """Return what is wrong with a value, as the cause of an error.

    :param error: one of `ValidationError.errors`. :param shown: say the value, if it is no section; never of secrets.
    """
    if error["type"] == "missing":
        return MISSING
    if error["type"] == "extra_forbidden":
        return "it is unknown"
    text = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    text = text.replace("Input should", "it should", 1)
    text = f"{text[:1].lower()}{text[1:]}"
    if not shown or isinstance(error.get("input"), Mapping | list):
        return text
    return f"{text}, not {error['input']!r:.60}"
