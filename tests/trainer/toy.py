"""Small datasets and runs in a folder, made the way curation and the DAG make them."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dropforge.dataset import Manifest, Shard, digest
from dropforge.layout import dataset_prefix, run_prefix, shard_key
from dropforge.recipes.load import build_recipe, merge, read_yaml, resolve
from dropforge.run import RunSpec, Tracking
from dropforge.store import Store, open_store

REPOSITORY = Path(__file__).parents[2]

_SCHEMA = pa.schema(
    [
        ("key", pa.binary(16)),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("text", pa.string()),
        ("label", pa.string()),
        ("source", pa.string()),
        ("group", pa.string()),
    ]
)

_WORDS = (
    "red", "green", "blue", "cat", "dog", "bird", "sees", "likes", "follows", "the", "a", "small", "big",
    "old", "and", "under", "over", "house", "tree", "river",
)  # fmt: skip


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def sample_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Chats of varied length with something to learn: the answer repeats the question backwards."""
    generator = random.Random(seed)
    rows = []
    for _ in range(count):
        words = [generator.choice(_WORDS) for _ in range(generator.randint(2, 14))]
        rows.append(chat(" ".join(words), " ".join(reversed(words))))
    return rows


def write_dataset(store: Store, rows: Mapping[str, Sequence[Mapping[str, Any]]], family: str = "toy") -> str:
    """Write shards and manifest; the digest."""
    keys: dict[str, list[bytes]] = {}
    shards = []
    for split, found in rows.items():
        table = []
        for index, row in enumerate(found):
            key = hashlib.sha256(f"{split}{index}{row!r}".encode()).digest()[:16]
            table.append(
                {"key": key, "messages": None, "text": None, "label": None, "source": "t", "group": None, **row}
            )
        table.sort(key=lambda item: item["key"])
        keys[split] = [item["key"] for item in table]
        target = io.BytesIO()
        kept = [pa.field("extras", pa.string())] if any("extras" in row for row in table) else []
        schema = pa.schema([*_SCHEMA, *kept])
        pq.write_table(pa.Table.from_pylist(table, schema=schema), target, row_group_size=1000)  # as curation does
        data = target.getvalue()
        sha = hashlib.sha256(data).hexdigest()
        key_name = shard_key(family, sha)
        store.put(key_name, data)
        shards.append(Shard(split, key_name, sha, len(table), len(data)))
    counts = {"input": sum(map(len, rows.values())), **{split: len(found) for split, found in rows.items()}}
    rules = {"exact_duplicates": "drop"}
    name = digest(keys, counts, rules)
    manifest = Manifest(family, name, counts, rules, tuple(shards))
    store.put(f"{dataset_prefix(family, name)}manifest.json", manifest.to_json())
    return name


def recipe(**overrides: Any) -> dict[str, Any]:
    """The `tiny` preset with nested overrides, as plain values."""
    values = merge(resolve(read_yaml("extends: tiny")), _FAST)
    return build_recipe(merge(values, overrides)).plain()


_FAST = {
    "base": {"scratch": {"hidden_size": 32, "layers": 2, "heads": 2, "vocab_size": 320, "context": 64}},
    "train": {
        "sequence_length": 64,
        "tokens_per_step": 512,
        "micro_batch": 2,
        "max_steps": 12,
        "checkpoint_every": 4,
        "eval_every": 0,
        "learning_rate": 5e-3,
    },
    "evaluate": {"max_rows": 30},
    "compute": {"grace_seconds": 30},
}


@dataclass
class Toy:
    """A bucket with a dataset, and runs on it."""

    root: str
    digest: str

    @property
    def store(self) -> Store:
        return open_store(self.root)

    def run(self, name: str = "run", tracking: Tracking | None = None, date: str = "", **overrides: Any) -> str:
        """Write `run.json`; its address."""
        spec = RunSpec(
            run=name,
            family="toy",
            counter=1,
            root=f"{self.root}/{run_prefix(name)}".rstrip("/"),
            data_root=self.root,
            dataset=f"{self.root}/{dataset_prefix('toy', self.digest)}manifest.json",
            dataset_digest=self.digest,
            recipe=recipe(**overrides),
            code="test",
            tracking=tracking,
            date=date,
        )
        self.store.put(f"{run_prefix(name)}run.json", spec.to_json())
        return f"{self.root}/{run_prefix(name)}run.json"

    def files(self, name: str = "run") -> Store:
        """The run's folder."""
        return open_store(f"{self.root}/{run_prefix(name)}".rstrip("/"))
