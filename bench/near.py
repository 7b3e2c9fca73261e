"""Signatures of near duplicates per core: ours beside datasketch, each in its own environment and process.

    python bench/near.py --peer ENVIRONMENT/bin/python [--megabytes 8] [--rounds 5]

Made of the same texts: five-word shingles and 112 minima of each. Ours also makes the 14 buckets and the distinct
shingles, which the verification needs. Every round runs in fresh processes pinned to one core, in the order A B ... B
A; CPU seconds without imports, medians. Without `--peer` ours runs alone. The peer's environment needs
`pip install datasketch`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

BAR = 3.0  # times the peer


def texts(megabytes: int) -> list[str]:
    """Windows of Python's own documentation, of 40 to 400 words."""
    from pydoc_data.topics import topics

    rng = random.Random(7)
    words = " ".join(topics[name] for name in sorted(topics)).split()
    made, size = [], 0
    while size < megabytes << 20:
        start = rng.randrange(len(words) - 400)
        made.append(" ".join(words[start : start + rng.randint(40, 400)]))
        size += len(made[-1])
    return made


def ours(rows: list[str]) -> int:
    import pyarrow as pa

    from curation.columns import integers, strings
    from curation.fingerprint import TEXTS, Near, fingerprints

    near = Near("word", 5, 14, 8, 800_000)
    made = 0
    start = time.process_time()
    for first in range(0, len(rows), 2000):
        part = rows[first : first + 2000]
        zeros = integers([0] * len(part))
        batch = pa.RecordBatch.from_arrays([*[zeros] * 4, strings(part)], schema=TEXTS)
        made += fingerprints(batch, near).bands.num_rows // 14
    print(json.dumps([time.process_time() - start, made]))
    return made


def datasketch(rows: list[str]) -> int:
    import re

    from datasketch import MinHash  # type: ignore[import-not-found, unused-ignore]

    made = 0
    start = time.process_time()
    for text in rows:
        words = re.findall(r"\w+", text.lower())
        shingles = {" ".join(words[at : at + 5]).encode() for at in range(len(words) - 4)}
        signature = MinHash(num_perm=112)
        signature.update_batch(shingles)
        made += bool(signature.hashvalues.size)
    print(json.dumps([time.process_time() - start, made]))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", type=Path, help="Python of an environment with datasketch.")
    parser.add_argument("--child", choices=["ours", "datasketch"])
    arguments = parser.parse_args()
    if arguments.child:
        (ours if arguments.child == "ours" else datasketch)(texts(arguments.megabytes))
        return
    pythons = {"ours": sys.executable} | ({"datasketch": str(arguments.peer)} if arguments.peer else {})
    times: dict[str, list[float]] = {name: [] for name in pythons}
    core = min(os.sched_getaffinity(0))
    for number in range(arguments.rounds):
        for name in list(pythons) if number % 2 == 0 else list(reversed(pythons)):
            done = subprocess.run(
                # -P: this folder's names must not hide packages.
                [pythons[name], "-P", __file__, "--child", name, "--megabytes", str(arguments.megabytes)],
                capture_output=True,
                check=True,
                text=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
            times[name].append(json.loads(done.stdout)[0])
    size = sum(map(len, texts(arguments.megabytes))) / 1e6
    speeds = {name: [size / value for value in values] for name, values in times.items()}
    for name, values in speeds.items():
        print(f"{name:12}{statistics.median(values):8.1f} MB/s ({min(values):.1f} to {max(values):.1f})")
    if "datasketch" in speeds:
        ratio = statistics.median(speeds["ours"]) / statistics.median(speeds["datasketch"])
        print(f"ours to datasketch {ratio:.1f}, bar {BAR:g}")
        sys.exit(ratio < BAR)
    print("LEFT OUT: datasketch, because --peer names no Python")


if __name__ == "__main__":
    main()
