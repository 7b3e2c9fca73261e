"""All documents of a split in flat arrays, on disk, so that the ranks of a node share one copy of the memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dropforge.errors import DataError
from trainer.data.chat import Document

_HEADER: Final = 128  # bytes of an .npy file before its values; room for any length
_FACTS: Final = "facts.json"
LABELS: Final = "labels.npy"
_BUFFER: Final = 1 << 20  # bytes that a column holds before it writes them


@dataclass(frozen=True)
class Tokens:
    """Documents end to end.

    :param ids: token ids of all documents.
    :param trained: for each id, whether it is a target.
    :param offsets: document i is `ids[offsets[i]:offsets[i + 1]]`.
    :param rows: for each document, the index of its row.
    :param facts: counts, for the report.
    :param counts: target tokens of each document, where they were counted as it was written.
    :param labels: (D,) number of each document's label, its only target; None for text that is continued.
    :param spelled: (D,) bytes of text that each document's targets stand for; None of what was read from disk.
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]
    facts: dict[str, Any] = field(default_factory=dict)
    counts: NDArray[np.int64] | None = None
    labels: NDArray[np.int32] | None = None
    spelled: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per document."""
        return np.diff(self.offsets)

    @cached_property
    def targets(self) -> NDArray[np.int64]:
        """Target tokens per document, at least 1."""
        if self.counts is not None:
            return self.counts
        if not len(self):
            return np.zeros(0, np.int64)
        return np.add.reduceat(self.trained, self.offsets[:-1], dtype=np.int64)

    @property
    def paired(self) -> bool:
        """Whether each document is a source, the tokens before its first target, and a target, which is all others."""
        return "source_tokens" in self.facts

    def document(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.ids[part], self.trained[part]

    @classmethod
    def load(cls, folder: Path) -> Tokens:
        """Map what a `TokenWriter` wrote into memory. :raises OSError, ValueError: if it is not whole."""
        ids, trained, offsets, rows, counts = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "trained", "offsets", "rows", "targets")
        )
        path = folder / LABELS
        labels = np.load(path, mmap_mode="r") if path.exists() else None
        return cls(ids, trained, offsets, rows, json.loads((folder / _FACTS).read_text()), counts, labels)


class Column:
    """A one-dimensional array that grows on disk; an .npy file once it is closed."""

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.length = 0
        self._file: BinaryIO = path.open("wb", buffering=_BUFFER)
        self._file.write(bytes(_HEADER))

    def extend(self, values: NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).data)
        self.length += len(values)

    def append(self, value: int | bytes) -> None:
        self._file.write(value if isinstance(value, bytes) else self.dtype.type(value).tobytes())
        self.length += 1

    def close(self) -> None:
        """Write the header, without which the file is none."""
        if self._file.closed:
            return
        header = f"{{'descr': '{self.dtype.str}', 'fortran_order': False, 'shape': ({self.length},), }}".encode()
        self._file.seek(0)
        size = _HEADER - 10  # what remains behind the magic, the version and the length of the header
        self._file.write(b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + header.ljust(size - 1) + b"\n")
        self._file.close()


def write_tokens(documents: Iterable[Document], folder: Path, facts: dict[str, Any], *, labelled: bool = False) -> None:
    """Write documents as they come; none of them is kept in memory.

    :param facts: written last, as they are once the documents are read.
    :param labelled: whether each document has a label.
    :raises DataError: for a document without a target, or whose first token is one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:

        def column(name: str, dtype: DTypeLike) -> Column:
            made = Column(folder / f"{name}.npy", dtype)
            stack.callback(made.close)
            return made

        ids, trained, rows = column("ids", np.int32), column("trained", np.bool_), column("rows", np.int64)
        offsets, targets = column("offsets", np.int64), column("targets", np.int64)
        labels = column(LABELS.removesuffix(".npy"), np.int32) if labelled else None
        offsets.append(0)
        for document in documents:
            count = _targets(document)
            ids.extend(document.ids)
            trained.extend(document.trained)
            rows.append(document.row)
            offsets.append(ids.length)
            targets.append(count)
            if labels is not None:
                labels.append(_label(document))
    (folder / _FACTS).write_text(json.dumps(facts))


def collect(documents: Iterable[Document], facts: dict[str, Any], *, labelled: bool = False) -> Tokens:
    """Documents in memory, for a few of them; `facts` is kept as it is once the documents are read.

    :param labelled: whether each document has a label.

    :raises DataError: for a document without a target, or whose first token is one.
    """
    found = list(documents)
    counts = [_targets(item) for item in found]
    lengths = [len(item.ids) for item in found]
    return Tokens(
        ids=np.concatenate([item.ids for item in found]) if found else np.zeros(0, np.int32),
        trained=np.concatenate([item.trained for item in found]) if found else np.zeros(0, np.bool_),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        rows=np.array([item.row for item in found], dtype=np.int64),
        facts=facts,
        counts=np.array(counts, dtype=np.int64),
        labels=np.array([_label(item) for item in found], dtype=np.int32) if labelled else None,
        spelled=np.array([item.spelled for item in found], dtype=np.int64),
    )


def occurring(ids: NDArray[np.int32], wanted: Sequence[int]) -> set[int]:
    """Those of the wanted ids that are there; read piece by piece, for `ids` may be larger than the memory."""
    missing = set(wanted)
    for start in range(0, len(ids), _BUFFER):
        if not missing:
            break
        missing -= set(np.intersect1d(ids[start : start + _BUFFER], list(missing)).tolist())
    return set(wanted) - missing


def _label(document: Document) -> int:
    if document.label is None:
        raise DataError(f"document of row {document.row}", "it has no label", "Leave it out")
    return document.label


def _targets(document: Document) -> int:
    """Its target tokens. :raises DataError: if there is none, or the first token is one: no token leads to it."""
    name = f"document of row {document.row}"
    if document.label is not None and len(document.ids):
        return 1
    if len(document.ids) and document.trained[0]:
        raise DataError(name, "its first token is a target, and there is no token before it", "Begin with a context")
    count = int(document.trained.sum())
    if not count:
        raise DataError(name, "it has no target, so nothing is learned from it", "Leave it out")
    return count
