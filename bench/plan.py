"""Packing a million documents: seconds, memory and filled share, beside a plain best-fit and TRL's packing.

    python -m bench.plan [--documents 1000000] [--size 4096] [--rounds 5] [--ranks 8]

Lengths are log-normal (median 245, mean about 400 tokens), as instruction data has them, cut at the size of a pack.
Each contender runs in a fresh process, contenders interleaved; what it imports and the lengths are there before the
clock starts. Memory is what the work adds to the peak of the process.

    ours    the plan, its packs, and the order of its first epoch
    plain   best-fit decreasing, document by document, with a sorted list of the rooms
    trl     `trl.pack_dataset`, strategy bfd, in memory: packs for all epochs; it moves the tokens too, a byte each, and
            packs each thousand rows by themselves. It gets a tenth of the documents

Besides: the first step of a resume in epoch 21 against that of a fresh start, and how even the work of the ranks is
(the most loaded one over the mean, the mean over 200 steps of 64 packs) against dealing packs in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import time
from bisect import bisect_left, insort
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.balance import costs, spread
from trainer.data.plan import Plan

ROWS, LATE, WIDTH = 64, 20.5, 2048
TENTH = 10


def lengths_of(count: int, size: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).lognormal(5.5, 1.0, count).clip(8, size).astype(np.int64)


def make_plan(lengths: NDArray[np.int64], size: int) -> Plan:
    return Plan(lengths, lengths, 0, size, ROWS, True, epochs=30.0, max_steps=None, linear=12.0 * WIDTH)


def ours(lengths: NDArray[np.int64], size: int) -> int:
    return len(make_plan(lengths, size).epoch(0))


def plain(lengths: NDArray[np.int64], size: int) -> int:
    rooms: list[int] = []  # sorted
    packs = 0
    for length in sorted(lengths.tolist(), reverse=True):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            packs += 1
            room = size
        else:
            room = rooms.pop(place)
        insort(rooms, room - length)
    return packs


def trl(lengths: NDArray[np.int64], size: int) -> int:
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars
    from trl.data_utils import pack_dataset

    disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = pa.LargeListArray.from_arrays(offsets, pa.array(np.zeros(int(offsets[-1]), np.int8)))
    dataset = Dataset(pa.table({"input_ids": ids}))
    return len(pack_dataset(dataset, size, "bfd", map_kwargs={"keep_in_memory": True}))


def first(lengths: NDArray[np.int64], size: int) -> int:
    return len(make_plan(lengths, size).step(0))


def late(lengths: NDArray[np.int64], size: int) -> int:
    made = make_plan(lengths, size)
    return len(made.step(int(LATE * made.packs_per_epoch / ROWS)))


WAYS = {one.__name__: one for one in (ours, plain, trl, first, late)}


def measure(way: str, file: Path, size: int) -> dict[str, Any]:
    """In this process."""
    lengths = np.load(file)[:: TENTH if way == "trl" else 1]
    WAYS[way](lengths[:1000], size)  # imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    packs = WAYS[way](lengths, size)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "documents": len(lengths),
        "seconds": seconds,
        "mib": (after - before) / 1024,
        "filled": float(lengths.sum()) / packs / size,
    }


def evenness(lengths: NDArray[np.int64], size: int, ranks: int) -> tuple[float, float]:
    """Mean over steps of the most loaded rank over the mean: ours, and in turn by length as it was before."""
    made = make_plan(lengths, size)
    found = []
    for step in range(min(200, made.steps)):
        packs = made.step(step)
        work = costs(packs, lengths, made.linear)
        by_length = sorted(range(len(packs)), key=lambda index: -int(lengths[packs[index]].sum()))
        ways = (spread(work, ranks), [by_length[rank::ranks] for rank in range(ranks)])
        found.append([max(sum(work[i] for i in part) for part in parts) * ranks / sum(work) for parts in ways])
    mine, turn = np.array(found).mean(0)
    return float(mine), float(turn)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one[0], Path(arguments.one[1]), arguments.size)))
        return 0
    ways = [way for way in WAYS if way != "trl" or importlib.util.find_spec("trl")]
    if "trl" not in ways:
        print("trl is not installed: pip install 'dropforge[bench]'")
    lengths = lengths_of(arguments.documents, arguments.size)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with TemporaryDirectory(prefix="dropforge-bench-") as folder:
        file = Path(folder) / "lengths.npy"
        np.save(file, lengths)
        for _ in range(arguments.rounds):
            for way in ways:
                command = [sys.executable, "-m", "bench.plan", "--size", str(arguments.size), "--one", way, str(file)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[way].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{len(lengths):,} documents, {int(lengths.sum()):,} tokens, packs of {arguments.size}")
    for way, values in found.items():
        seconds, mib = sorted(one["seconds"] for one in values), sorted(one["mib"] for one in values)
        told = f"  filled {values[0]['filled']:.3%}" if way in ("ours", "plain", "trl") else ""
        print(
            f"{way:6} {values[0]['documents']:9,} documents  median {statistics.median(seconds):6.2f} s"
            f"  min {seconds[0]:.2f}  max {seconds[-1]:.2f}"
            f"  memory {statistics.median(mib):5.0f} MiB{told}  n {len(values)}"
        )
    mine, turn = evenness(lengths, arguments.size, arguments.ranks)
    print(f"{arguments.ranks} ranks, most loaded over mean: ours {mine:.4f}, in turn {turn:.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
