"""Ingest throughput: our readers against DuckDB's and pyarrow's, on the same file with 1 % bad rows.

    python bench/curation.py [--megabytes 32] [--rounds 5]

Every candidate runs in a fresh process, pinned to one core, in rounds A B C ... C B A; medians and ratios follow. Rows
accounted for: share of the input rows that came out either as a right row or as a named fault. Text that came out
wrong counts as lost.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

BAD = (
    b'{"prompt": "cut off',
    b'{"prompt": "bad \xff byte", "completion": "x"}',
    b'{"prompt": "a", "completion": NaN}',
    b'{"prompt": "a", "prompt": "b", "completion": "c"}',
    b'{"prompt": 17, "completion": ["list"]}',
    b"[1, 2, 3]",
)


def write(path: Path, megabytes: int) -> tuple[int, int]:
    """A file of questions and answers made of pydoc's topics; returns (rows, bad rows)."""
    from pydoc_data.topics import topics

    rng = random.Random(7)
    words = " ".join(topics[name] for name in sorted(topics)).split()
    rows = bad = 0
    with path.open("wb") as file:
        while file.tell() < megabytes << 20:
            rows += 1
            if rng.random() < 0.01:
                bad += 1
                file.write(rng.choice(BAD) + b"\n")
                continue
            start = rng.randrange(len(words) - 400)
            prompt = f"{rows} " + " ".join(words[start : start + rng.randint(5, 40)])
            completion = " ".join(words[start : start + rng.randint(20, 300)])
            file.write(json.dumps({"prompt": prompt, "completion": completion}, ensure_ascii=False).encode() + b"\n")
    return rows, bad


def ours(path: Path) -> tuple[int, int]:
    """Reader, canonical rows and their names: what a worker does before it writes."""
    from curation.formats import Format
    from curation.kernel import _curated
    from curation.records import Split
    from curation.task import Report, Rules, Task

    rules = Rules(50_000, "dropforge", "text", 8_000_000, "drop")
    report = Report(0)
    task = Task("bench", Split(path, Format("jsonl")), 0, path.name, rules, path.parent)
    for _ in _curated(task, report):
        pass
    return report.rows, report.faults


def ours_reader(path: Path) -> tuple[int, int]:
    """The reader alone: strict JSON with places and reasons, as far as the peers go."""
    from curation.formats import Format
    from curation.readers import read
    from curation.records import Found, Split

    good = bad = 0
    for record in read(Split(path, Format("jsonl")), max_row_bytes=8_000_000):
        if isinstance(record, Found) and isinstance(record.fields.get("prompt"), str):
            good += 1
        else:
            bad += 1
    return good, bad


def duckdb(path: Path) -> tuple[int, int]:
    """`read_json` with ignore_errors: rows that fail become all NULL, without a place or a reason."""
    import duckdb as engine

    db = engine.connect(config={"threads": 1})
    db.execute(
        "create table t as select prompt, completion from read_json(?, format='newline_delimited', ignore_errors=true,"
        " columns={'prompt': 'VARCHAR', 'completion': 'VARCHAR'})",
        [str(path)],
    )
    # A number or list cast to text is a wrong row, not a right one; a real prompt here begins with its number.
    row = db.execute("select count(*) from t where regexp_matches(prompt, '^[0-9]+ ')").fetchone()
    return int(row[0]) if row else 0, 0


def pyarrow(path: Path) -> tuple[int, int]:
    """`pyarrow.json` over the whole file: one bad row fails it."""
    from pyarrow import ArrowInvalid
    from pyarrow import json as reader

    try:
        return reader.read_json(path, reader.ReadOptions(use_threads=False)).num_rows, 0
    except ArrowInvalid:
        return 0, 0


def pyarrow_clean(path: Path) -> tuple[int, int]:
    """`pyarrow.json` on the same file without its bad rows: its speed where it works."""
    return pyarrow(path.with_suffix(".clean"))


CANDIDATES: dict[str, Callable[[Path], tuple[int, int]]] = {
    "curation, reader alone": ours_reader,
    "curation, to named rows": ours,
    "duckdb read_json": duckdb,
    "pyarrow.json": pyarrow,
    "pyarrow.json, clean file": pyarrow_clean,
}


def child(name: str, path: Path) -> None:
    """One measurement: the imports are not timed, the process is new."""
    function = CANDIDATES[name]
    module = {"curation": "curation.kernel", "duckdb": "duckdb"}.get(name.split()[0].rstrip(","), "pyarrow.json")
    importlib.import_module(module)
    start, cpu = time.perf_counter(), time.process_time()
    good, bad = function(path)
    print(json.dumps([time.perf_counter() - start, time.process_time() - cpu, good, bad]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child")
    parser.add_argument("--file", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.file)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mix.jsonl"
        rows, bad = write(path, arguments.megabytes)
        whole = path.read_bytes()
        known = set(BAD)
        path.with_suffix(".clean").write_bytes(b"\n".join(line for line in whole.split(b"\n") if line not in known))
        size = len(whole) / 1e6
        times: dict[str, list[float]] = {name: [] for name in CANDIDATES}
        accounted: dict[str, str] = {}
        core = min(os.sched_getaffinity(0))
        for number in range(arguments.rounds):
            names = list(CANDIDATES)
            for name in names if number % 2 == 0 else reversed(names):
                # -P: this file's own name must not hide the package.
                command = [sys.executable, "-P", __file__, "--child", name, "--file", str(path)]
                done = subprocess.run(
                    command,
                    capture_output=True,
                    check=True,
                    text=True,
                    env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                    preexec_fn=lambda: os.sched_setaffinity(0, {core}),
                )
                _, cpu, good, faults = json.loads(done.stdout)
                times[name].append(cpu)
                right = rows - bad
                total = right if name.endswith("clean file") else rows
                accounted[name] = f"{(min(good, right) + faults) / total:8.2%}"
        print(f"{rows:,} rows, {bad:,} of them bad, {size:.0f} MB; {arguments.rounds} rounds, one core, CPU seconds\n")
        print(f"{'':28}{'MB/s':>8}{'spread':>16}{'ratio':>8}{'accounted':>12}")
        first = statistics.median(times["curation, to named rows"])
        for name, values in times.items():
            middle = statistics.median(values)
            spread = f"{size / max(values):.0f} to {size / min(values):.0f}"
            print(f"{name:28}{size / middle:8.1f}{spread:>16}{first / middle:8.2f}{accounted[name]:>12}")


if __name__ == "__main__":
    main()
