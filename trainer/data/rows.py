"""Rows of a dataset version, checked: the manifest first, each shard's SHA-256 when it is opened."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from dropforge.dataset import COLUMNS, SPLITS, Manifest, Shard, digest, read_manifest
from dropforge.errors import DataError, DropforgeError
from dropforge.run import RunSpec
from dropforge.store import MissingObjectError, Store, open_store, split_uri

_ROWS: Final = 256  # that are Python objects at a time
_PIECE: Final = 1 << 20


@dataclass(frozen=True)
class Row:
    """A conversation (pairs of role and content) or a plain text, with its 16-byte content key.

    :param beside: what each message says beside these, as `tool_calls` and `reasoning_content`, where one does; `train`
        is false for an answer that is not to be learned. :param tools: that the conversation may call.
    :param source: what the row says of where it comes from, else the file it came in.
    :param label: what a classifier is to say of it.
    :param extras: columns that are only kept, as JSON text; empty unless they were asked for.
    """

    key: bytes
    messages: tuple[tuple[str, str], ...] | None
    text: str | None
    source: str = ""
    label: str | None = None
    extras: str = ""
    beside: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()

    @property
    def said(self) -> list[dict[str, Any]]:
        """The messages with all that they say, `train` included."""
        messages = self.messages or ()
        pairs = zip(messages, self.beside or ({},) * len(messages), strict=True)
        return [{"role": role, "content": content, **more} for (role, content), more in pairs]

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them."""
        return [{key: value for key, value in message.items() if key != "train"} for message in self.said]

    @property
    def silent(self) -> frozenset[int]:
        """Answers that are not to be learned."""
        told = enumerate(zip(self.messages or (), self.beside, strict=False))
        return frozenset(turn for turn, ((role, _), more) in told if role == "assistant" and more.get("train") is False)

    @property
    def calls(self) -> bool:
        """Whether it has tools, or calls some."""
        return bool(self.tools) or any("tool_calls" in more for more in self.beside)

    def until(self, turn: int) -> Row:
        """The conversation before a message."""
        assert self.messages is not None
        return replace(self, messages=self.messages[:turn], beside=self.beside[:turn])


def load_manifest(spec: RunSpec) -> Manifest:
    """The manifest that `run.json` names.

    :raises DataError: if it is missing or of another dataset.
    """
    root, key = split_uri(spec.dataset)
    try:
        manifest = read_manifest(open_store(root), key)
    except MissingObjectError as error:
        raise DataError(spec.dataset, "the dataset's manifest is not there", "Curate the drop again") from error
    if manifest.digest != spec.dataset_digest or manifest.family != spec.family:
        raise DataError(
            spec.dataset,
            f"it is dataset {manifest.family}/{manifest.digest[:12]}, "
            f"the run was planned for {spec.family}/{spec.dataset_digest[:12]}",
            "Start a new run for this dataset",
        )
    return manifest


def read_rows(
    store: Store,
    manifest: Manifest,
    split: str,
    change: Callable[[Row], Row] | None = None,
    extras: bool = False,
) -> Iterator[Row]:
    """Rows of one split in the order of the shards, checked as they come. A few hundred are in memory at a time.

    :param change: what the user's own code makes of each; its key stays.
    :param extras: whether to read what is only kept, too.
    :raises DataError: naming the shard and what is wrong with it.
    """
    for shard in manifest.shards:
        if shard.split == split:
            found = _read_shard(store, shard, extras)
            yield from found if change is None else map(change, found)


def highest_key(
    store: Store, manifest: Manifest, split: str, most: int | None, check: Callable[[], None] = lambda: None
) -> bytes | None:
    """The content key up to which a split's first rows by key go; None if those are all of them, or its first shards'.

    Rows are in that order within a drop. :param most: of them, None for all. :param check: called now and then.
    """
    if most is None or not manifest.steps or manifest.rows(split) <= most:
        return None
    keys = bytearray()
    for row in read_rows(store, manifest, split):
        keys += row.key
        if len(keys) % (512 * 16) == 0:
            check()
    at = 0
    for piece in _sorted(np.frombuffer(keys, dtype="V16")):
        if (most - 1 - at) * 16 < len(piece):
            return piece[(most - 1 - at) * 16 :][:16]
        at += len(piece) // 16
    return None


def check_keys(manifest: Manifest, keys: Mapping[str, NDArray[np.void]]) -> None:
    """Compare the rows that were read with the dataset's digest.

    A version of several drops has the digest of its last drop's rows, over that of the version before: of the others
    the number is compared, and each shard is held to its SHA-256 as it is read.

    :param keys: for each split the 16-byte content keys of all its rows (dtype V16); of several drops in the order of
        the shards, else in any.
    :raises DataError: if rows are missing, added or changed.
    """
    last: dict[str, NDArray[np.void]] = {part: _of_last_drop(manifest, part, found) for part, found in keys.items()}
    parts: dict[str, Iterator[bytes]] = {split: _sorted(last[split]) for split in SPLITS if split in last}
    found = digest(parts, manifest.counts, manifest.rules)
    if found != manifest.digest:
        raise DataError(
            f"dataset {manifest.family}/{manifest.digest[:12]}",
            f"its rows have the digest {found[:12]}, so the manifest was changed or rows are missing",
            "Curate the drop again",
        )


def _of_last_drop(manifest: Manifest, split: str, keys: NDArray[np.void]) -> NDArray[np.void]:
    """Keys of the rows that the last drop added; all of them where a version is of one drop."""
    if not manifest.steps:
        return keys
    expected = manifest.counts.get(split, 0)
    if len(keys) != expected:
        raise DataError(
            f"dataset {manifest.family}/{manifest.digest[:12]}",
            f"it has {len(keys)} rows of {split}, its manifest records {expected}",
            "Curate the drop again",
        )
    return keys[len(keys) - manifest.steps[-1].counts.get(split, 0) :]


def _sorted(keys: NDArray[np.void]) -> Iterator[bytes]:
    """Keys in order, some in one piece: a digest sees no difference."""
    halves = np.frombuffer(keys.tobytes(), dtype=">u8").reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    for low in range(0, len(order), _PIECE):
        yield halves[order[low : low + _PIECE]].tobytes()


def _fetch(store: Store, shard: Shard, target: BinaryIO) -> str:
    """Copy a shard into a local file; its SHA-256."""
    state = hashlib.sha256()
    with store.open(shard.key) as source:
        while piece := source.read(_PIECE):
            state.update(piece)
            target.write(piece)
    target.flush()
    return state.hexdigest()


def _read_shard(store: Store, shard: Shard, extras: bool) -> Iterator[Row]:
    # A file without a name: whatever ends this process, nothing is left of it.
    with tempfile.TemporaryFile(prefix="dropforge-shard-") as file:
        yield from _rows_of(store, shard, file, extras)


def _rows_of(store: Store, shard: Shard, local: BinaryIO, extras: bool) -> Iterator[Row]:
    import pyarrow.parquet as pq

    name = f"shard {shard.key}"
    try:
        found = _fetch(store, shard, local)
    except MissingObjectError as error:
        raise DataError(name, "it is not there", "Curate the drop again") from error
    if found != shard.sha256:
        raise DataError(name, f"its SHA-256 is {found[:12]}, the manifest says {shard.sha256[:12]}", "Curate again")
    try:
        file = pq.ParquetFile(local, pre_buffer=False)
        missing = [column for column in COLUMNS if column not in file.schema_arrow.names]
        if missing:
            raise DataError(name, f"column {missing[0]!r} is missing", "Curate the drop with this version")
        rows = 0
        kept = ["extras"] if extras and "extras" in file.schema_arrow.names else []
        kept += ["chat"] if "chat" in file.schema_arrow.names else []  # shards of before have none
        columns = ["key", "messages", "text", "source", "label", *kept]
        for batch in file.iter_batches(batch_size=_ROWS, columns=columns):
            for values in batch.to_pylist():
                yield _row(values)
                rows += 1
    except DropforgeError:
        raise
    except Exception as error:  # pyarrow raises many kinds for broken files
        raise DataError(name, f"it cannot be read ({error})", "Curate the drop again") from error
    if rows != shard.rows:
        raise DataError(name, f"it has {rows} rows, the manifest says {shard.rows}", "Curate the drop again")


def _row(values: dict[str, Any]) -> Row:
    messages, text = values["messages"], values["text"]
    if (messages is None) == (text is None):
        raise DataError(f"row {values['key'].hex()}", "it needs exactly one of messages and text", "Curate again")
    pairs = None if messages is None else tuple((item["role"], item["content"]) for item in messages)
    row = Row(values["key"], pairs, text, values["source"] or "", values["label"], values.get("extras") or "")
    if not (chat := values.get("chat")):
        return row
    told = json.loads(chat)
    return replace(row, beside=tuple(told["messages"]), tools=tuple(told.get("tools", ())))


def texts(rows: Iterator[Row], limit: int, seen: Callable[[Row], None] = lambda _: None) -> Iterator[str]:
    """The texts in rows, at most about `limit` characters, for training a tokenizer."""
    total = 0
    for row in rows:
        seen(row)
        for text in [row.text] if row.text is not None else [content for _, content in row.messages or ()]:
            if total > limit:
                return
            total += len(text)
            yield text
