"""The statements of near duplicates under a limit of memory: many buckets, and one crowded bucket.

    python bench/buckets.py [--documents 2000000] [--limit 128MB] [--crowd 200000]
        [--crowd-limit 512MB] [--rounds 1]

`join`: documents of 14 buckets each, a tenth of them planted in pairs that share one bucket and are verified to be
equal; peak memory is that beyond a process that has imported the same and read no row. `crowd`: rows that are all
equal and too short for a shingle, so that one bucket holds them all, at half the size and in full; twice the rows
should take twice the CPU seconds. Every run is a fresh process. 0 leaves a part out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from bench import tree

BAR = 256e6  # bytes beyond the parent
LINEAR = 2.5  # times the CPU seconds for twice the rows


def write(folder: Path, documents: int, crowd: bool) -> None:
    """Parquet files as workers leave them: `winners`, `rows`, `prints`, `bands`, `shingles`. Made by DuckDB."""
    import duckdb

    db = duckdb.connect(config={"memory_limit": "1GB", "threads": 1, "temp_directory": str(folder / "spill")})
    row = f"from range({documents}) t(i)"
    key = "unhex(md5(cast(i as varchar)))"
    place = "cast(0 as bigint) as file, cast(i as bigint) as position"
    # A document ending in 9 is a copy of the one before it: it has its first bucket and its two shingles.
    original = "case when i % 10 = 9 then i - 1 else i end"
    hashed = "cast(hash({}) >> 1 as bigint)"
    bucket = "cast(7 as bigint)" if crowd else hashed.format(f"case when b = 0 then {original} else i end, b")
    shingle = "cast(s as bigint)" if crowd else hashed.format(f"{original}, s + 100")
    each = 1 if crowd else 14
    made = {
        "winners": f"select {key} as key, {key} as rank, {place}, {key} as unit {row}",
        "rows": f"select {key} as key, {key} as rank, {place}, {key} as unit {row}",
        "prints": f"select {place}, cast(0 as bigint) as priority, cast(0 as bigint) as kind, cast(2 as bigint) as size"
        f" {row}",
        "bands": f"select {place}, {bucket} as bucket {row}, range({each}) u(b)",
        "shingles": f"select {place}, {shingle} as shingle {row}, range(2) v(s)",
    }
    for name, statement in made.items():
        db.execute(f"copy ({statement}) to '{folder / name}.parquet' (format parquet)")


def child(folder: Path, limit: str, idle: bool) -> None:
    from curation import conflicts, near
    from curation.engines.duck import DuckTables, Memory
    from curation.fingerprint import Near

    with tempfile.TemporaryDirectory(dir=folder) as spill, DuckTables(Path(spill), Memory(limit, 1)) as tables:
        if idle:
            return
        for name in ("winners", "rows", "prints", "bands", "shingles"):
            tables.view(name, [folder / f"{name}.parquet"])
        for statement in (*near.NOTHING.values(), conflicts.CONFLICTS["keep"]):
            tables.do(statement)
        near.settle(tables, Near("word", 5, 14, 8, 800_000))
        print(tables.one("select count(*) from near")[0])


def measured(folder: Path, limit: str, *more: str) -> tree.Cost:
    command = [sys.executable, "-m", "bench.buckets", "--child", str(folder), "--limit", limit, *more]
    return tree.run(command, {"PYTHONPATH": str(Path(__file__).parents[1])})


def join(documents: int, limit: str, rounds: int) -> bool:
    with tempfile.TemporaryDirectory(prefix="buckets-") as name:
        folder = Path(name)
        write(folder, documents, crowd=False)
        base = measured(folder, limit, "--idle").peak
        costs = [measured(folder, limit) for _ in range(rounds)]
    found = {int(cost.output) for cost in costs}
    assert found == {documents // 10}, f"{documents // 10} pairs were planted, {found} went"
    peak = max(cost.peak for cost in costs) - base
    wall, cpu = (statistics.median(getattr(cost, kind) for cost in costs) for kind in ("wall", "cpu"))
    print(f"join   {documents * 14:>12,} band rows, DuckDB {limit}: {wall:.1f} s, CPU {cpu:.1f} s,", end=" ")
    print(f"{peak / 1e6:.0f} MB beyond the parent's {base / 1e6:.0f} MB, all {documents // 10:,} pairs", flush=True)
    return peak < BAR


def crowd(rows: int, limit: str, rounds: int) -> bool:
    seconds: dict[int, list[float]] = {rows // 2: [], rows: []}
    peaks = dict.fromkeys(seconds, 0)
    with tempfile.TemporaryDirectory(prefix="buckets-") as name:
        for size in seconds:
            Path(name, str(size)).mkdir()
            write(Path(name, str(size)), size, crowd=True)
        base = measured(Path(name, str(rows)), limit, "--idle")
        for number in range(rounds):
            for size in seconds if number % 2 == 0 else reversed(seconds):
                cost = measured(Path(name, str(size)), limit)
                assert int(cost.output) == size - 1, f"of {size} equal rows {cost.output} went"
                seconds[size].append(cost.cpu - base.cpu)
                peaks[size] = max(peaks[size], cost.peak - base.peak)
    half, whole = (statistics.median(values) for values in seconds.values())
    for size, values in seconds.items():
        print(f"crowd  {size:>12,} equal rows: CPU {statistics.median(values):.1f} s, {peaks[size] / 1e6:.0f} MB")
    print(f"crowd  twice the rows: {whole / half:.2f} times the CPU, bar {LINEAR:g}", flush=True)
    return whole / half < LINEAR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--documents", type=int, default=2_000_000)
    parser.add_argument("--limit", default="128MB", help="What DuckDB may hold in the join.")
    parser.add_argument("--crowd-limit", default="512MB", help="And for the crowded bucket.")
    parser.add_argument("--crowd", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--child", type=Path)
    parser.add_argument("--idle", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.limit, arguments.idle)
        return
    well = not arguments.crowd or crowd(arguments.crowd, arguments.crowd_limit, arguments.rounds)
    well &= not arguments.documents or join(arguments.documents, arguments.limit, arguments.rounds)
    sys.exit(not well)


if __name__ == "__main__":
    main()
