"""What a byte of a drop costs: CPU seconds of a curation, by what the recipe asks for.

    python -m bench.seconds [--rows 20000] [--rounds 3] [--ways plain near]

JSONL of 120 words a row, not compressed. Each run is a process of its own with one worker; the ways take turns. `rows`
is what workers share (fetching and the kernel), `rest` what they do not (settling, writing and publishing), both in
seconds for 100 MB: the figures of `curation.engines.estimate`.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.engines import generate

WAYS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "near": {"dedup": {}},
    "pii": {"pii": {}},
    "gopher": {"quality": {"gopher": {"min_stop_words": 0}}},
    "repetition": {"quality": {"gopher_repetition": {}}},
    "c4": {"quality": {"c4": {}}},
    "repair": {"unicode": "repair"},
    "language": {"language": {"keep": ["en"]}},
}


def child(root: Path, way: str) -> None:
    from curation import curate
    from dropforge.drop import read_drop
    from dropforge.errors import DataError
    from dropforge.recipes import load_recipe
    from dropforge.store import FolderStore

    recipe = load_recipe("tiny", {"curation": {"workers": 1, **WAYS[way]}})
    store = FolderStore(root / "bucket")
    drop = read_drop(store, "fam", "d")
    began: dict[str, float] = {}

    def progress(stage: str, _done: int, _total: int, _rows: int) -> None:
        began.setdefault(stage, _cpu())

    work = root / f"work-{way}"
    start = _cpu()
    try:
        curate(store, drop, recipe, workdir=work, progress=progress)
    except DataError as error:  # made-up words are in no language
        print(error.cause, file=sys.stderr)
    shutil.rmtree(work, ignore_errors=True)
    settle = began.get("settle", _cpu())
    print(json.dumps({"rows": settle - start, "rest": _cpu() - settle}))


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--child", nargs=2, metavar=("ROOT", "WAY"))
    asked = parser.parse_args()
    if asked.child:
        child(Path(asked.child[0]), asked.child[1])
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in asked.ways}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        size = generate(Path(folder) / "bucket/drops/fam/d", asked.rows)
        for _ in range(asked.rounds):
            for way in asked.ways:
                command = [sys.executable, "-m", "bench.seconds", "--child", folder, way]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found[way].append(json.loads(done.stdout.splitlines()[-1]))
                shutil.rmtree(Path(folder) / "bucket/datasets", ignore_errors=True)
    print(f"{size / 1e6:.1f} MB")
    for way, runs in found.items():
        told = []
        for part in ("rows", "rest"):
            seconds = sorted(run[part] * 1e8 / size for run in runs)
            told.append(f"{part} {statistics.median(seconds):5.1f} ({seconds[0]:.1f} to {seconds[-1]:.1f})")
        print(f"{way:10} {'   '.join(told)}")


if __name__ == "__main__":
    main()
