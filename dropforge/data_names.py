"""The one line by which people name the data of a run: a drop, a dataset version, a prefix, drops, or the hub. Pure."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

from dropforge import layout
from dropforge.errors import DataError

SYNTAX: Final = (
    "`FAMILY/DROP` or a drop's id, `dataset:FAMILY/DIGEST`, `prefix:lake/chats/` or `s3://BUCKET/lake/chats/`, "
    "`drops:ID,ID`, `hub:OWNER/NAME` with `?config=en&split=train&revision=v1.0` where needed"
)
_SORTS: Final = ("drop", "dataset", "prefix", "drops", "hub")
_SORT: Final = re.compile(r"([a-z]+):(?!//)(.*)", re.DOTALL)
_HUB: Final = ("config", "split", "revision")
_LIMIT: Final = 4000  # characters


class Named(NamedTuple):
    """:param drop: as people name one, or empty. :param source: the recipe's `data.source`, or None."""

    drop: str = ""
    source: dict[str, Any] | None = None


def read_name(text: str, bucket: str) -> Named:
    """What a line names; nothing if it is empty. Whether that is there, nobody has looked.

    :param bucket: of this installation; an address in another one is refused.
    :raises DataError: for a line that names nothing, with how to write it.
    """
    asked = text.strip()
    if len(asked) > _LIMIT:
        raise _wrong(asked, f"it has {len(asked):,} characters")
    if not asked:
        return Named()
    if asked.startswith("s3://"):
        return _address(asked, bucket)
    found = _SORT.fullmatch(asked)
    if found is None:
        return Named(drop=asked)
    sort, rest = found[1], found[2].strip()
    if sort not in _SORTS:
        raise _wrong(asked, f"there is no data of the sort `{sort}:`")
    if not rest:
        raise _wrong(asked, f"nothing follows `{sort}:`")
    if sort == "drop":
        return Named(drop=rest)
    if sort == "drops":
        return Named(source={"drops": [one for part in rest.split(",") if (one := part.strip())]})
    if sort == "hub":
        return Named(source=_hub(asked, rest))
    return Named(source={sort: rest})


def _address(asked: str, bucket: str) -> Named:
    there, _, key = asked.removeprefix("s3://").partition("/")
    if there != bucket:
        raise _wrong(asked, f"it is not in the bucket {bucket}")
    if key.startswith(layout.DROPS):
        return Named(drop=key.removesuffix(layout.SUCCESS))
    if not key.strip("/"):
        raise _wrong(asked, "it names a whole bucket")
    return Named(source={"prefix": key})


def _hub(asked: str, rest: str) -> dict[str, Any]:
    name, _, query = rest.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=8) if query else []
    except ValueError:
        raise _wrong(asked, f"{query[:60]!r} is not `key=value&key=value`") from None
    found: dict[str, Any] = {"hub": name}
    for key, value in pairs:
        if key not in _HUB:
            raise _wrong(asked, f"`{key[:40]}` is none of {', '.join(_HUB)}")
        if key in found or not value:
            raise _wrong(asked, f"`{key}` is {'given twice' if key in found else 'empty'}")
        found[key] = value
    return found


def _wrong(asked: str, cause: str) -> DataError:
    return DataError(f"form field `data`, {asked[:80]!r}", cause, f"Write {SYNTAX}")
