"""Reading JSON that may have any shape: what is not as expected reads as empty, and nothing raises."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def whole(value: Any) -> int | None:
    """A whole number, also one written as text; None if it is none."""
    try:
        return None if isinstance(value, bool | float) else int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def text(value: Any) -> str | None:
    return str(value) if value else None


def moment(value: Any) -> datetime | None:
    """A time stamp of the API as an aware datetime, or None."""
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    try:
        found = datetime.fromisoformat(str(value)) if value else None
    except ValueError:
        return None
    return found if found is None or found.tzinfo else found.replace(tzinfo=UTC)


def labels(thing: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(mapping(thing.get("metadata")).get("labels"))


def name(thing: Mapping[str, Any]) -> str:
    return str(mapping(thing.get("metadata")).get("name") or "")
