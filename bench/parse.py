"""Seconds that all DAG files together add to a bare `import airflow.sdk`; medians over fresh processes.

python bench/parse.py [RUNS]

CPU time is told beside: it says more where the machine has other work.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

CODE = """
import runpy, sys, time
now = lambda: (time.perf_counter(), time.process_time())
start = now()
import airflow.sdk
bare = now()
for path in sys.argv[1:]:
    runpy.run_path(path)
end = now()
print(*(b - a for a, b in zip(start, bare)), *(b - a for a, b in zip(bare, end)))
"""


def main(runs: int = 7) -> None:
    files = [str(path) for path in sorted((ROOT / "dags").glob("*.py"))]
    with tempfile.TemporaryDirectory(prefix="dropforge-bench-") as home:
        env = {**os.environ, "AIRFLOW_HOME": home, "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins")}
        times = []
        for _ in range(runs + 1):
            done = subprocess.run(
                [sys.executable, "-c", CODE, *files], env=env, capture_output=True, text=True, check=True
            )
            times.append([float(part) for part in done.stdout.split()[-4:]])
    bare, bare_cpu, dags, dags_cpu = zip(*times[1:], strict=True)  # the first run fills the disk cache
    tell("import airflow.sdk", bare, bare_cpu)
    tell(f"{len(files)} DAG files, on top", dags, dags_cpu)


def tell(what: str, wall: tuple[float, ...], cpu: tuple[float, ...]) -> None:
    print(
        f"{what:24} {statistics.median(wall):6.3f} s (from {min(wall):.3f} to {max(wall):.3f}),"
        f" CPU {statistics.median(cpu):6.3f} s (from {min(cpu):.3f} to {max(cpu):.3f})"
    )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
