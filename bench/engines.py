"""The two engines of curation on the same drop: seconds of each, and the same digest.

    python bench/engines.py [--rows 20000] [--workers 2] [--rounds 1] [--exact]

Every run has a process, a store and a work folder of its own, in the order A B B A. Spark's seconds are those of the
whole curation, the start and end of its session among them. With near duplicates by words, unless `--exact`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENGINES = ("embedded", "spark")


def generate(folder: Path, rows: int) -> int:
    """JSONL files of 120 words a row, a tenth of them copies with one word changed. Returns their bytes."""
    rng = random.Random(7)
    folder.mkdir(parents=True)
    words = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "bdfgklmnprst"]
    size = 0
    last = [""] * 120
    for part in range(8):
        lines = []
        for number in range(rows // 8):
            if number % 10 == 9:
                last[rng.randrange(len(last))] = "changed"
            else:
                last = [rng.choice(words) for _ in range(120)]
            lines.append(json.dumps({"text": " ".join(last)}))
        size += (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "_SUCCESS").touch()
    return size


def child(root: Path, engine: str, workers: int, exact: bool) -> None:
    from curation import curate
    from dropforge.drop import read_drop
    from dropforge.recipes import load_recipe
    from dropforge.store import FolderStore

    dedup: dict[str, dict[str, int]] = {} if exact else {"dedup": {}}
    recipe = load_recipe("tiny", {"curation": {"engine": engine, "workers": workers, **dedup}})
    store = FolderStore(root / "bucket")
    stages: dict[str, float] = {}
    start = time.perf_counter()

    def progress(stage: str, done: int, total: int, rows: int) -> None:
        stages[stage] = time.perf_counter() - start

    manifest = curate(store, read_drop(store, "fam", "d"), recipe, workdir=root / "work", progress=progress)
    print(json.dumps([time.perf_counter() - start, manifest.digest, manifest.counts, stages]))


def measured(data: Path, engine: str, workers: int, exact: bool) -> tuple[float, str, dict[str, int]]:
    with tempfile.TemporaryDirectory(prefix="engines-") as name:
        drops = Path(name, "bucket/drops/fam")
        shutil.copytree(data, drops / "d")
        done = subprocess.run(
            [sys.executable, "-P", __file__, "--child", engine, "--root", name, "--workers", str(workers)]
            + ["--exact"] * exact,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        )
    seconds, digest, counts, stages = json.loads(done.stdout.splitlines()[-1])
    shown = ", ".join(f"{stage} {at:.1f}" for stage, at in stages.items())
    print(f"{engine:10}{seconds:8.1f} s; done after seconds: {shown}", flush=True)
    return seconds, digest, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--exact", action="store_true", help="No near duplicates.")
    parser.add_argument("--child", choices=ENGINES)
    parser.add_argument("--root", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.root, arguments.child, arguments.workers, arguments.exact)
        return
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    found = set()
    with tempfile.TemporaryDirectory(prefix="engines-") as name:
        size = generate(Path(name, "data"), arguments.rows)
        print(f"{arguments.rows:,} rows, {size / 1e6:.1f} MB, {arguments.workers} workers")
        for number in range(arguments.rounds):
            for engine in ENGINES if number % 2 == 0 else reversed(ENGINES):
                seconds, digest, counts = measured(Path(name, "data"), engine, arguments.workers, arguments.exact)
                times[engine].append(seconds)
                found.add((digest, tuple(sorted(counts.items()))))
    assert len(found) == 1, f"other datasets: {found}"
    ours, theirs = (statistics.median(times[engine]) for engine in ENGINES)
    print(f"same digest; Spark took {theirs - ours:.1f} s more, {theirs / ours:.1f} times as long")


if __name__ == "__main__":
    main()
