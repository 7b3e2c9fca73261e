"""A dataset version: the manifest that curation writes last and the trainer checks first.

Standard library only, because the trainer's image has no pydantic.

The digest covers what the data *is* (sorted row keys per split, integer counts, rules), never shard bytes,
layout, floats, time or place: one worker or many, embedded or Spark, give the same digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from dropforge.errors import DataError

SCHEMA: Final = 1
SPLITS: Final = ("train", "eval")

# Columns of every shard. A row has either `messages` or `text`; `key` is the 16-byte content key.
COLUMNS: Final = ("key", "messages", "text", "label", "source", "group")


@dataclass(frozen=True)
class Shard:
    """One Parquet file of rows; `key` is its object key in the bucket."""

    split: str
    key: str
    sha256: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """Everything a reader of the dataset needs to know.

    :param counts: the ledger's totals: `input`, `train`, `eval` and one per reason; `input` is the sum of the others.
    :param rules: the curation settings that shaped the rows.
    :param inputs: the objects read: key, size, etag, version id, rows. Provenance, not part of the digest.
    :param files: object keys of `ledger`, `quarantine`, `card_html`, `card_json`.
    """

    family: str
    digest: str
    counts: Mapping[str, int]
    rules: Mapping[str, Any]
    shards: tuple[Shard, ...]
    inputs: tuple[Mapping[str, Any], ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def rows(self, split: str) -> int:
        return sum(shard.rows for shard in self.shards if shard.split == split)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """:raises DataError: if the text is not a manifest of this schema."""
        try:
            values = json.loads(data)
            if values["schema"] != SCHEMA:
                raise DataError(
                    "dataset manifest",
                    f"it has schema {values['schema']}, this version reads {SCHEMA}",
                    "Curate the drop again",
                )
            values["shards"] = tuple(Shard(**shard) for shard in values["shards"])
            values["inputs"] = tuple(values["inputs"])
            return cls(**values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError("dataset manifest", f"it cannot be read ({error!r})", "Curate the drop again") from error


def digest(keys: Mapping[str, Iterable[bytes]], counts: Mapping[str, int], rules: Mapping[str, Any]) -> str:
    """The dataset's digest (64 hexadecimal digits).

    :param keys: for each split the rows' 16-byte content keys, sorted.
    """
    state = hashlib.sha256()
    head = {"schema": SCHEMA, "counts": dict(counts), "rules": rules}
    state.update(json.dumps(head, sort_keys=True, separators=(",", ":")).encode())
    for split in SPLITS:
        state.update(f"\0{split}\0".encode())
        for key in keys.get(split, ()):
            state.update(key)
    return state.hexdigest()
