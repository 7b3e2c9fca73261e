"""The kernel of near duplicates: rows in, their fingerprints as integers out. It knows no engine.

MinHash with banding (Broder, 1997, https://doi.org/10.1109/SEQUEN.1997.666900; Leskovec, Rajaraman and Ullman, Mining
of Massive Datasets, section 3.4): two rows share a bucket if all minima of one band agree, which those of Jaccard
similarity s do with probability 1 - (1 - s^rows)^bands. Buckets only propose; the shingles decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from curation.columns import from_numbers, numbers
from curation.words import PROFILE, Hashes, Offsets, characters, mixed, normal, shingles, words

#: A row's place, the order of its source, what else must be equal for one row to remove another, and its text.
TEXTS: Final = pa.schema(
    [(name, pa.int64()) for name in ("file", "position", "priority", "kind")] + [("text", pa.string())]
)
PRINTS: Final = pa.schema([(name, pa.int64()) for name in ("file", "position", "priority", "kind", "size")])
BANDS: Final = pa.schema([("file", pa.int64()), ("position", pa.int64()), ("bucket", pa.int64())])
SHINGLES: Final = pa.schema([("file", pa.int64()), ("position", pa.int64()), ("shingle", pa.int64())])

_BLOCK: Final = 1 << 16  # what stays in a core's second cache
_FOLD: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Near:
    """What counts as nearly the same. Integers and text only: it is part of the digest.

    :param shingle: `word` or `character`. :param size: of a shingle, in those.
    :param bands: of MinHash, each of `rows` minima.
    :param per_million: Jaccard similarity from which on rows are nearly the same, in millionths.
    :param profile: the normalisation that the shingles are made of.
    """

    shingle: str
    size: int
    bands: int
    rows: int
    per_million: int
    profile: str = PROFILE


class Fingerprints(NamedTuple):
    """Of the same rows: how many shingles each has, its buckets, its distinct shingles as mixed 64-bit hashes.

    :param short: rows too short for a shingle, which are compared whole.
    """

    prints: pa.RecordBatch
    bands: pa.RecordBatch
    shingles: pa.RecordBatch
    short: int


def fingerprints(batch: pa.RecordBatch, near: Near) -> Fingerprints:
    """Sizes, buckets and shingles of rows (`TEXTS` to `PRINTS`, `BANDS` and `SHINGLES`).

    A row too short for a shingle has the two halves of its normal form's 128-bit hash for shingles and one bucket, so
    that it is nearly the same as its equals and nothing else.
    """
    texts: list[str] = batch.column("text").to_pylist()
    cut = words if near.shingle == "word" else characters
    values, offsets = shingles(*cut(texts), near.size)
    counts = np.diff(offsets)
    short, long = np.flatnonzero(counts == 0), np.flatnonzero(counts)
    whole = _whole([texts[index] for index in short])
    buckets = _buckets(values, offsets[np.append(long, counts.size)], near)
    sizes = np.where(counts == 0, 2, counts)
    places = numbers(batch.column("file")), numbers(batch.column("position"))

    def table(schema: pa.Schema, rows: npt.NDArray[np.intp], column: npt.NDArray[np.int64]) -> pa.RecordBatch:
        arrays = [from_numbers(place[rows]) for place in places]
        return pa.RecordBatch.from_arrays([*arrays, from_numbers(column)], schema=schema)

    everyone = np.arange(counts.size)
    head = [batch.column(name) for name in PRINTS.names[:-1]]
    return Fingerprints(
        pa.RecordBatch.from_arrays([*head, from_numbers(sizes)], schema=PRINTS),
        table(
            BANDS,
            np.concatenate([np.repeat(long, near.bands), short]),
            np.concatenate([buckets.ravel(), whole[:, 0]]).view(np.int64),
        ),
        table(
            SHINGLES,
            np.concatenate([np.repeat(everyone, counts), np.repeat(short, 2)]),
            np.concatenate([values, whole.ravel()]).view(np.int64),
        ),
        short.size,
    )


def minima(values: Hashes, offsets: Offsets, count: int) -> npt.NDArray[np.uint32]:
    """The MinHash signatures of sets that are not empty (rows x count).

    Each hash function is a product with an odd number modulo 2^32, a bijection, of values that are mixed already.

    :param values: the sets' members, one set after another. :param offsets: where each begins, and the end.
    """
    result = np.full((count, offsets.size - 1), 0xFFFFFFFF, np.uint32)
    factors = _factors(count)
    for start in range(0, values.size, _BLOCK):
        part = (values[start : start + _BLOCK] >> np.uint64(32)).astype(np.uint32)
        first = int(np.searchsorted(offsets, start, "right")) - 1
        last = int(np.searchsorted(offsets, start + part.size, "left"))
        begins = np.maximum(offsets[first:last] - start, 0)
        product = np.empty_like(part)
        for place in range(count):
            np.multiply(part, factors[place], out=product)
            held = result[place, first:last]
            np.minimum(held, np.minimum.reduceat(product, begins), out=held)
    return result.T


@lru_cache(4)
def _factors(count: int) -> npt.NDArray[np.uint32]:
    """Odd numbers, the first ones the same for every count."""
    seeds = np.arange(1, count + 1, dtype=np.uint64) * _FOLD
    return (mixed(seeds) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


def _buckets(values: Hashes, offsets: Offsets, near: Near) -> Hashes:
    """The bucket of each set in each band (rows x bands)."""
    signatures = minima(values, offsets, near.bands * near.rows).reshape(-1, near.bands, near.rows)
    state = np.broadcast_to(np.arange(near.bands, dtype=np.uint64), signatures.shape[:2])
    for place in range(near.rows):
        state = mixed((state ^ signatures[:, :, place]) * _FOLD)
    return state


def _whole(texts: Sequence[str]) -> Hashes:
    """128 bits of each text's normal form, punctuation included (rows x 2)."""
    digests = b"".join([blake2b(normal(text).encode(), digest_size=16).digest() for text in texts])
    return np.frombuffer(digests, "<u8").astype(np.uint64).reshape(-1, 2)
