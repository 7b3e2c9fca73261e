"""A dataset version: the manifest that curation writes last and the trainer checks first.

Standard library only, because the trainer's image has no pydantic.

The digest covers what the data *is* (sorted row keys per split, integer counts, rules), never shard bytes,
layout, floats, time or place: one worker or many, embedded or Spark, give the same digest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Final

from dropforge.errors import DataError
from dropforge.json_objects import MOST_LISTED, find_object, parse_object
from dropforge.store import Store, TooLargeError, read_bounded

SCHEMA: Final = 1
SPLITS: Final = ("train", "eval")
_ID: Final = re.compile(r"[\w-]{1,200}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
#: Labels of a classifier, and characters of all of them: its head has a row for each, and its config names them all.
MOST_LABELS: Final = 10_000
MOST_LABEL_CHARS: Final = 1_000_000

# Columns of every shard. A row has either `messages` or `text`; `key` is the 16-byte content key. Shards have a column
# `chat` too, if they were not made before it: what conversations say beside their messages' roles and contents.
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
class Step:
    """One of the drops that a version of a whole family was made of, in their order.

    :param drop: its id; `name` is what people call it. :param prefix: of its files' object keys.
    :param digest: of the version that it made. :param counts: the ends of its own rows.
    :param inputs: names of its files below `prefix`, in the order of their numbers.
    :param files: object keys of its own ledger, quarantine and card.
    :param state: SHA-256 of the files, by table, that later drops are compared with.
    """

    drop: str
    name: str
    prefix: str
    digest: str
    counts: Mapping[str, int]
    inputs: tuple[str, ...]
    files: Mapping[str, str]
    state: Mapping[str, tuple[str, ...]]

    @property
    def keys(self) -> tuple[str, ...]:
        """Object keys of its files."""
        return tuple(self.prefix + name for name in self.inputs)


@dataclass(frozen=True)
class Manifest:
    """Everything a reader of the dataset needs to know.

    :param counts: the ledger's totals: `input`, `train`, `eval` and one per reason; `input` is the sum of the others.
    :param rules: the curation settings that shaped the rows.
    :param inputs: the objects read: key, size, etag, version id, rows. Provenance, not part of the digest.
    :param columns: of the input's formats, how many rows have which column with which JSON type; no part of the digest.
    :param files: object keys of `ledger`, `quarantine`, `card_html`, `card_json`, `croissant`.
    :param parent: digest of the version that this one adds a drop to.
    :param steps: with `curation.scope: family` all its drops; `inputs` and `files` are then those of the last one.
    :param measured: what the gate looks at besides the counts: `words` of the rows that were kept, and `drift` against
        the version before (`curation.drift.measured`). Integers and names; not part of the digest.
    """

    family: str
    digest: str
    counts: Mapping[str, int]
    rules: Mapping[str, Any]
    shards: tuple[Shard, ...]
    inputs: tuple[Mapping[str, Any], ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    schema: int = SCHEMA
    parent: str | None = None
    steps: tuple[Step, ...] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)

    def rows(self, split: str) -> int:
        return sum(shard.rows for shard in self.shards if shard.split == split)

    def to_json(self) -> bytes:
        values = asdict(self)
        for name in [name for name in ("parent", "steps") if not values[name]]:
            del values[name]  # a version of one drop is written as it always was
        return json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """:raises DataError: if the text is not a manifest of this schema."""
        try:
            values = parse_object(data, "dataset manifest")
            if type(values["schema"]) is not int or values["schema"] != SCHEMA:
                raise DataError(
                    "dataset manifest",
                    f"it has schema {values['schema']}, this version reads {SCHEMA}",
                    "Curate the drop again",
                )
            if not isinstance(values["digest"], str) or not isinstance(values["family"], str):
                raise ValueError("its digest or family is no text")
            _check(values)
            values["shards"] = tuple(Shard(**shard) for shard in values["shards"])
            values["inputs"] = tuple(values["inputs"])
            steps = values.get("steps", ())
            values["steps"] = tuple(_step(step) for step in steps)
            return cls(**values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError("dataset manifest", f"it cannot be read ({error!r})", "Curate the drop again") from error


def read_manifest(store: Store, key: str) -> Manifest:
    """The manifest that lies at a key.

    :raises MissingObjectError: if there is none. :raises DataError: if it is not a manifest of this schema, or larger
        than one is.
    """
    try:
        return Manifest.from_json(read_bounded(store, key, MOST_LISTED))
    except (TooLargeError, DataError) as error:
        raise DataError(f"dataset manifest {store.uri}/{key}", error.cause, "Curate the drop again") from error


def read_card(store: Store, manifest: Manifest) -> dict[str, Any]:
    """The figures on a version's card; empty where it has none, or they cannot be read."""
    key = manifest.files.get("card_json")
    return find_object(store, key, most=MOST_LISTED) if isinstance(key, str) else {}


def _check(values: Mapping[str, Any]) -> None:
    """:raises ValueError: if what a manifest, or one of its drops, has is of another shape than was written."""
    measured = values.get("measured", {})
    parts = {name: values.get(name, {}) for name in ("counts", "files", "rules")} | {"measured": measured}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise ValueError(f"its {name} are no object")
    counted = {"counts": values["counts"]} | {name: measured[name] for name in _COUNTED if name in measured}
    for name, counts in counted.items():
        if not isinstance(counts, dict) or not all(type(count) is int for count in counts.values()):
            raise ValueError(f"its {name} are no numbers by name")
    named = {"files": [*parts["files"].values()], "evaluated_labels": measured.get("evaluated_labels", [])}
    groups = measured.get("known_groups", {})
    if not isinstance(groups, dict) or not all(isinstance(hashes, list) for hashes in groups.values()):
        raise ValueError("its known_groups are no lists by name")
    named["known_groups"] = [*chain(*groups.values())]
    for name, texts in named.items():
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"its {name} are no texts")
    if type(measured.get("words", 0)) is not int:
        raise ValueError("its words are no number")


#: Numbers by name among what a manifest has `measured`.
_COUNTED: Final = ("truths", "known_labels", "groups_otherwise", "unknown_keys")


def _step(values: dict[str, Any]) -> Step:
    state = {name: tuple(digests) for name, digests in values["state"].items()}
    # They name files of a work folder too, and who may write below `datasets/` is no part of the installation.
    if not _ID.fullmatch(values["drop"]) or not all(map(_SHA256.fullmatch, chain(*state.values()))):
        raise ValueError("a drop's id or a file's SHA-256 is none")
    _check(values)
    if not {"ledger", "card_json"} <= values["files"].keys() or "colours" not in state:
        raise ValueError("a drop has no ledger, card or sides")
    return Step(**{**values, "inputs": tuple(values["inputs"]), "state": state})


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
