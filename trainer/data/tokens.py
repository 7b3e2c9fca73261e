"""All documents of a split in flat arrays, on disk, so that the ranks of a node share one copy of the memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.chat import Document


@dataclass(frozen=True)
class Tokens:
    """Documents end to end.

    :param ids: token ids of all documents.
    :param trained: for each id, whether it is a target.
    :param offsets: document i is `ids[offsets[i]:offsets[i + 1]]`.
    :param rows: for each document, the index of its row.
    :param facts: counts and digests, for the report.
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]
    facts: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per document."""
        return np.diff(self.offsets)

    @cached_property
    def targets(self) -> NDArray[np.int64]:
        """Target tokens per document, at least 1."""
        if not len(self):
            return np.zeros(0, np.int64)
        return np.add.reduceat(self.trained.astype(np.int64), self.offsets[:-1])

    def document(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.ids[part], self.trained[part]

    def digest(self) -> str:
        """SHA-256 of everything that shapes training."""
        state = hashlib.sha256()
        for array in (self.ids, self.trained, self.offsets):
            state.update(np.ascontiguousarray(array).data)
        return state.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the arrays; `facts.json` comes last."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("ids", "trained", "offsets", "rows"):
            np.save(folder / f"{name}.npy", getattr(self, name))
        (folder / "facts.json").write_text(json.dumps(self.facts))

    @classmethod
    def load(cls, folder: Path) -> Tokens:
        """Map saved arrays into memory."""
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "trained")}
        small = {name: np.load(folder / f"{name}.npy") for name in ("offsets", "rows")}
        return cls(**arrays, **small, facts=json.loads((folder / "facts.json").read_text()))


def collect(documents: Iterable[Document], facts: dict[str, Any]) -> Tokens:
    """Gather documents; `facts` is kept as it is once the documents are read."""
    found = list(documents)
    lengths = [len(item.ids) for item in found]
    return Tokens(
        ids=np.concatenate([item.ids for item in found]) if found else np.zeros(0, np.int32),
        trained=np.concatenate([item.trained for item in found]) if found else np.zeros(0, np.bool_),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        rows=np.array([item.row for item in found], dtype=np.int64),
        facts=facts,
    )
