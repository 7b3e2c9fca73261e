"""A single line of 300 MB between two rows: peak memory of the process tree of a whole curation.

    python -m bench.line [--megabytes 300]

The line is one JSON object whose string never ends within the limit of a row. It has to be quarantined, its neighbours
kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench import tree

BAR = 512e6  # bytes


def write(folder: Path, megabytes: int) -> None:
    folder.mkdir(parents=True)
    with (folder / "data.jsonl").open("wb") as file:
        file.write(b'{"text": "the row before"}\n{"text": "')
        for _ in range(megabytes):
            file.write(b"word " * 200_000)
        file.write(b'"}\n{"text": "the row after"}\n')
    (folder / "_SUCCESS").touch()


def child(root: Path) -> None:
    from curation import curate
    from dropforge.drop import read_drop
    from dropforge.recipes import load_recipe
    from dropforge.store import FolderStore

    recipe = load_recipe("tiny", {"curation": {"engine": "embedded", "workers": 2}})
    store = FolderStore(root / "bucket")
    counts = curate(store, read_drop(store, "fam", "d"), recipe, workdir=root / "work").counts
    assert counts["input"] == 3, counts
    assert counts["train"] + counts["eval"] == 2, counts
    print(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--child", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    with tempfile.TemporaryDirectory(prefix="line-") as name:
        write(Path(name, "bucket/drops/fam/d"), arguments.megabytes)
        command = [sys.executable, "-m", "bench.line", "--child", name]
        cost = tree.run(command, {"PYTHONPATH": str(Path(__file__).parents[1])})
    print(cost.output.strip())
    print(f"{arguments.megabytes} MB line: {cost.wall:.1f} s, CPU {cost.cpu:.1f} s, {cost.peak / 1e6:.0f} MB")
    sys.exit(cost.peak >= BAR)


if __name__ == "__main__":
    main()
