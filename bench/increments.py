"""Ten drops of a tenth each, one after the other: what a drop costs when nine have gone before.

    python bench/increments.py [--rows 4000] [--rounds 3] [--memory 512MB]

Each drop has new texts, and copies and near copies of rows of all drops before it; near duplicates are looked for. Told
are seconds by drop for the kernels (stage `read`) and for the exchanges (stage `settle`, with fetching what earlier
drops left), medians over the rounds. Each round runs in a process of its own. At the end the same drops are curated
again from the first one on: the digest must be the same, and no shard may have been written again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

DROPS = 10
BAR = 1.5  # exchanges of drop 10 to those of drop 2


def drops(rows: int) -> list[list[str]]:
    """Texts of each drop: windows of Python's own documentation, a tenth of them copies, a tenth nearly so."""
    from pydoc_data.topics import topics

    rng = random.Random(11)
    words = " ".join(topics[name] for name in sorted(topics)).split()
    made: list[list[str]] = []
    for number in range(DROPS):
        drop = []
        for row in range(rows):
            if made and row % 5 == 0:
                text = rng.choice(rng.choice(made))
                drop.append(text if row % 10 else f"{text} once more")
            else:
                start = rng.randrange(len(words) - 200)
                # Windows overlap; a few words of its own in each sentence keep a text from being nearly another.
                window = [
                    w if at % 4 else f"{w}{rng.randrange(1000)}" for at, w in enumerate(words[start : start + 80])
                ]
                drop.append(f"{number} {row} {' '.join(window)}")
        made.append(drop)
    return made


def child(rows: int, memory: str) -> None:
    from curation import curate
    from curation.forget import again
    from dropforge.drop import read_drop
    from dropforge.recipes import load_recipe
    from dropforge.store import FolderStore

    asked = {"scope": "family", "dedup": {}, "workers": 1, "memory": memory}
    recipe = load_recipe("tiny", {"task": "causal-lm", "curation": asked})
    told: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="increments-") as folder:
        root = Path(folder)
        store = FolderStore(root / "bucket")
        for number, texts in enumerate(drops(rows)):
            name = f"d{number}"
            store.put(f"drops/fam/{name}/a.jsonl", "".join(json.dumps({"text": t}) + "\n" for t in texts).encode())
            store.put(f"drops/fam/{name}/_SUCCESS", b"")
            began: dict[str, float] = {}

            def watch(stage: str, done: int, total: int, read: int, began: dict[str, float] = began) -> None:
                began.setdefault(stage, time.perf_counter())

            before = written(store)
            drop = read_drop(store, "fam", name)
            made = curate(store, drop, recipe, workdir=root / f"work{number}", progress=watch)
            seconds = {stage: began[then] - began[stage] for stage, then in pairwise(began)}
            after = written(store)
            again_written = [key for key, stamp in before.items() if after[key] != stamp and "head.json" not in key]
            assert not again_written, again_written
            told.append({**seconds, "kept": made.rows("train") + made.rows("eval")})
        before = written(store)
        assert again(store, "fam", workdir=root / "again", say=lambda _: None) == made
        assert {key: when for key, when in written(store).items() if "/state/" not in key} == {
            key: when for key, when in before.items() if "/state/" not in key
        }
    print(json.dumps(told))


def written(store: Any) -> dict[str, int]:
    """When each object of the datasets was written last (nanoseconds)."""
    return {info.key: (store.root / info.key).stat().st_mtime_ns for info in store.list("datasets/")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=4000, help="of a drop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="512MB")
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.rows, arguments.memory)
        return
    rounds = []
    for _ in range(arguments.rounds):
        done = subprocess.run(
            # -P: this folder's names must not hide packages.
            [sys.executable, "-P", __file__, "--child", "--rows", str(arguments.rows), "--memory", arguments.memory],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        )
        rounds.append(json.loads(done.stdout))
    middle = {
        stage: [statistics.median(made[number][stage] for made in rounds) for number in range(DROPS)]
        for stage in ("read", "settle", "write")
    }
    print(f"{'drop':>6}{'kernels':>10}{'exchanges':>11}{'writing':>9}{'rows of the version':>21}")
    for number in range(DROPS):
        seconds = (middle[stage][number] for stage in ("read", "settle", "write"))
        print("{:>6}{:>9.2f}s{:>10.2f}s{:>8.2f}s".format(number + 1, *seconds), f"{rounds[0][number]['kept']:>20,}")
    ratios = {stage: values[-1] / values[1] for stage, values in middle.items()}
    print(f"drop 10 to drop 2: kernels {ratios['read']:.2f}, exchanges {ratios['settle']:.2f}, bar {BAR:g}")
    print("No shard was written twice, and all drops again give the same digest.")
    sys.exit(ratios["settle"] > BAR)


if __name__ == "__main__":
    main()
