"""Reading JSON that may have any shape: what is not as expected reads as empty, and nothing raises.

`storable` is for what is written: there a container's words must fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

_DEEPEST: Final = 32
_UNSENT: Final = "a number of more than 64 bits"
_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def whole(value: Any) -> int | None:
    """A whole number of 64 bits, also one written as text; None if it is none."""
    try:
        found = None if isinstance(value, bool | float) else int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found is None or fits(found) else None


def fits(number: int) -> bool:
    """Whether a whole number has at most 64 bits; a larger one in an event ends Airflow's triggerer."""
    return -(1 << 63) <= number < 1 << 63


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


def born(thing: Mapping[str, Any]) -> datetime:
    """When an object was created; long ago if it does not say so."""
    return moment(mapping(thing.get("metadata")).get("creationTimestamp")) or _LONG_AGO


def last_seen(event: Mapping[str, Any]) -> datetime:
    """When an event was: old ones tell whole seconds, new ones fractions, and as text these do not compare."""
    return moment(event.get("lastTimestamp") or event.get("eventTime")) or born(event)


def labels(thing: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(mapping(thing.get("metadata")).get("labels"))


def name(thing: Mapping[str, Any]) -> str:
    return str(mapping(thing.get("metadata")).get("name") or "")


def storable(value: Any, depth: int = 0) -> Any:
    """What a container says becomes a row of Airflow's database, which takes no NUL, half character or infinity, and a
    message of its triggerer, which takes whole numbers of 64 bits.

    :raises ValueError: if it is nested too deep.
    """
    if depth > _DEEPEST:
        raise ValueError("nested too deep")
    if isinstance(value, dict):
        return {storable(key): storable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [storable(item, depth + 1) for item in value]
    if isinstance(value, str):
        return value.replace("\0", "\ufffd").encode(errors="replace").decode()
    if isinstance(value, int) and not isinstance(value, bool) and not fits(value):
        return _UNSENT
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
