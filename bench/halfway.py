"""A curation that is killed at half and started again: its seconds in all beside an undisturbed one's.

    python -m bench.halfway [--documents 360000] [--rounds 3] [--at 0.5]

The documents of `bench.fuzzy`, near duplicates with two workers. `undisturbed` runs through in a folder of its own;
`killed` gets SIGKILL, with all its workers, after that part of the undisturbed run's seconds, and a fresh process goes
on in the same folder. Both make the same digest. Told are wall seconds, the start of each process among them, and how
far each had come when; the two take turns, and what one wrote is on the disk and removed before the next begins.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.fuzzy import write

BAR = 1.1  # times an undisturbed run


def child(root: Path, work: Path) -> None:
    from curation import curate
    from dropforge.drop import read_drop
    from dropforge.recipes import load_recipe
    from dropforge.store import FolderStore

    recipe = load_recipe("tiny", {"curation": {"engine": "embedded", "workers": 2, "dedup": {}}})
    store = FolderStore(work / "bucket")
    (work / "bucket/drops").mkdir(parents=True, exist_ok=True)
    if not (work / "bucket/drops/fam").exists():
        (work / "bucket/drops/fam").symlink_to(root / "fam")
    start = time.perf_counter()
    stages: dict[str, str] = {}

    def progress(stage: str, done: int, total: int, rows: int) -> None:
        stages[stage] = f"{stage} {time.perf_counter() - start:.1f}"

    digest = curate(store, read_drop(store, "fam", "d"), recipe, workdir=work / "work", progress=progress).digest
    print("done after seconds:", ", ".join(stages.values()), file=sys.stderr)
    print(digest)


def run(root: Path, work: Path, kill_after: float | None = None) -> tuple[float, str]:
    """Seconds and the digest, which is empty if the run was killed."""
    work.mkdir(exist_ok=True)
    os.sync()
    command = [sys.executable, "-m", "bench.halfway", "--child", str(work), "--root", str(root)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            said, _ = process.communicate(timeout=kill_after)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return time.perf_counter() - start, ""
    if process.returncode:
        raise RuntimeError(f"the curation ended with {process.returncode}")
    return time.perf_counter() - start, said.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--documents", type=int, default=360_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at", type=float, default=0.5, help="Part of the undisturbed run after which to kill.")
    parser.add_argument("--child", type=Path)
    parser.add_argument("--root", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.root, arguments.child)
        return
    ratios: list[float] = []
    with tempfile.TemporaryDirectory(prefix="halfway-") as name:
        root = Path(name)
        (root / "fam/d").mkdir(parents=True)
        write(root / "fam/d/data.jsonl", arguments.documents)
        (root / "fam/d/_SUCCESS").touch()
        for _ in range(arguments.rounds):
            work = root / "undisturbed"
            whole, digest = run(root, work)
            shutil.rmtree(work)
            work = root / "killed"
            first, nothing = run(root, work, whole * arguments.at)
            rest, again = run(root, work)
            shutil.rmtree(work)
            assert not nothing, "the run ended before it was killed"
            assert again == digest, "the digests differ"
            ratios.append((first + rest) / whole)
            print(
                f"undisturbed {whole:.1f} s; killed after {first:.1f} s, then {rest:.1f} s: {ratios[-1]:.2f}",
                flush=True,
            )
    middle = statistics.median(ratios)
    print(f"killed to undisturbed {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), bar {BAR:g}")
    sys.exit(middle > BAR)


if __name__ == "__main__":
    main()
