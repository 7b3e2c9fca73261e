"""Class labels (`ClassLabel` of Hugging Face's datasets): columns of numbers whose names the schema's metadata has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from curation.records import Found

Classes = Mapping[str, Sequence[str]]
#: Characters of a class's name: it stands once in the file, and then in each row.
_LONGEST: Final = 1000


def class_names(schema: pa.Schema) -> dict[str, list[str]]:
    """The classes of columns that hold their numbers, or lists of these, as datasets writes them into the schema's
    metadata; what is written otherwise, or has a name of more than 1,000 characters, has none."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        labels = {
            column: one["names"]
            for column, feature in features.items()
            if isinstance(one := _element(feature), dict) and one.get("_type") == "ClassLabel"
        }
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return {
        column: names
        for column, names in labels.items()
        if isinstance(names, list) and all(isinstance(name, str) and len(name) <= _LONGEST for name in names)
    }


def _element(feature: Any) -> Any:
    """What a list's feature says of its elements; any other feature itself."""
    if isinstance(feature, list) and len(feature) == 1:  # as datasets wrote one before version 4
        return feature[0]
    if isinstance(feature, dict) and feature.get("_type") in {"Sequence", "List", "LargeList"}:
        return feature.get("feature")
    return feature


def named(record: Found, classes: Classes) -> Found:
    """The row with names for numbers; -1 is no class (datasets), and a number without a name stays one."""
    if not classes:
        return record
    fields = dict(record.fields)
    for column in classes.keys() & fields.keys():
        found, names = fields[column], classes[column]
        fields[column] = [_name(one, names) for one in found] if isinstance(found, list) else _name(found, names)
    return record._replace(fields=fields)


def _name(value: Any, names: Sequence[str]) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    return names[value] if 0 <= value < len(names) else None if value == -1 else value
