"""Gopher's rules per core: ours beside datatrove's two Gopher filters, each in its own environment and process.

    python bench/quality.py --peer ENVIRONMENT/bin/python [--megabytes 4] [--rounds 3]

The same rows for both, windows of Python's own documentation of 60 to 1,000 words, through all rules of quality and
repetition with the published thresholds. Every round runs in fresh processes pinned to one core, in the order A B ...
B A; CPU seconds without imports and the first row, medians. C4's rules, repair and language of ours are timed apart.
Without `--peer` ours runs alone. The peer's environment needs `pip install datatrove nltk spacy regex orjson`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

BAR = 10.0  # times the peer
OURS = ("gopher", "c4", "repair", "language")


def texts(megabytes: int) -> list[str]:
    """Windows of the prose in Python's own documentation, in lines of 12 words: nearly all pass, so that nobody is
    spared a rule."""
    from pydoc_data.topics import topics

    rng = random.Random(7)
    words = re.findall(r"(?<!\S)[A-Za-z]+[.,]?(?!\S)", "\n".join(topics[name] for name in sorted(topics)))
    made, size = [], 0
    while size < megabytes << 20:
        start = rng.randrange(len(words) - 1000)
        part = words[start : start + rng.randint(60, 1000)]
        made.append("\n".join([" ".join(part[at : at + 12]) for at in range(0, len(part), 12)]))
        size += len(made[-1])
    return made


def ours(rows: list[str], what: str) -> None:
    import pyarrow as pa

    from curation.c4 import C4
    from curation.columns import integers, strings
    from curation.gopher import Gopher, Repetition
    from curation.quality import Quality, make_quality
    from curation.stage import PASSAGES, Stage

    stage: Stage
    if what == "language":
        from curation.language import Language, identifier, make_language

        stage = make_language(Language(("en",), "all", 20, "keep", identifier()))
    elif what == "repair":
        from curation.repair import make_repair, repair_rules

        stage = make_repair(repair_rules())
    else:
        gopher = Quality(Gopher(), Repetition()) if what == "gopher" else Quality(c4=C4())
        stage = make_quality(gopher)

    def batch(part: list[str]) -> pa.RecordBatch:
        arrays = [integers(range(len(part))), strings([None] * len(part)), strings(part)]
        return pa.RecordBatch.from_arrays(arrays, schema=PASSAGES)

    stage(batch(rows[:1]))
    gone = 0
    start = time.process_time()
    for first in range(0, len(rows), 1000):
        gone += stage(batch(rows[first : first + 1000])).refused.num_rows
    print(json.dumps([time.process_time() - start, gone]))


def datatrove(rows: list[str]) -> None:
    from datatrove.data import Document  # type: ignore[import-not-found, unused-ignore]
    from datatrove.pipeline.filters import (  # type: ignore[import-not-found, unused-ignore]
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    filters = (GopherQualityFilter(), GopherRepetitionFilter())
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(rows)]
    for one in filters:
        one.filter(documents[0])
    gone = 0
    start = time.process_time()
    for document in documents:
        gone += any(one.filter(document) is not True for one in filters)
    print(json.dumps([time.process_time() - start, gone]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", type=Path, help="Python of an environment with datatrove.")
    parser.add_argument("--child", choices=[*OURS, "datatrove"])
    arguments = parser.parse_args()
    if arguments.child:
        rows = texts(arguments.megabytes)
        datatrove(rows) if arguments.child == "datatrove" else ours(rows, arguments.child)
        return
    pythons = dict.fromkeys(OURS, sys.executable) | ({"datatrove": str(arguments.peer)} if arguments.peer else {})
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in pythons}
    core = min(os.sched_getaffinity(0))
    path = os.pathsep.join([str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    for number in range(arguments.rounds):
        for name in list(pythons) if number % 2 == 0 else list(reversed(pythons)):
            done = subprocess.run(
                # -P: this folder's names must not hide packages.
                [pythons[name], "-P", __file__, "--child", name, "--megabytes", str(arguments.megabytes)],
                stdout=subprocess.PIPE,
                check=True,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"} | ({} if name == "datatrove" else {"PYTHONPATH": path}),
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
            found[name].append(tuple(json.loads(done.stdout.splitlines()[-1])))
    rows = texts(arguments.megabytes)
    size = sum(map(len, rows)) / 1e6
    medians = {}
    for name, values in found.items():
        seconds = [value for value, _ in values]
        medians[name] = statistics.median(seconds)
        spread = f"{len(rows) / max(seconds):,.0f} to {len(rows) / min(seconds):,.0f}"
        print(
            f"{name:12}{len(rows) / medians[name]:9,.0f} rows/s ({spread}), {size / medians[name]:.1f} MB/s,"
            f" {values[0][1]:,} of {len(rows):,} rows gone"
        )
    if "datatrove" in medians:
        ratio = medians["datatrove"] / medians["gopher"]
        print(f"ours to datatrove {ratio:.1f}, bar {BAR:g}")
        sys.exit(ratio < BAR)
    print("LEFT OUT: datatrove, because --peer names no Python")


if __name__ == "__main__":
    main()
