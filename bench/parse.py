"""Seconds that all DAG files together add to a bare `import airflow.sdk`; medians over fresh processes.

python bench/parse.py [RUNS]
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
start = time.perf_counter()
import airflow.sdk
bare = time.perf_counter() - start
start = time.perf_counter()
for path in sys.argv[1:]:
    runpy.run_path(path)
print(bare, time.perf_counter() - start)
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
            times.append([float(part) for part in done.stdout.split()[-2:]])
    bare, dags = zip(*times[1:], strict=True)  # the first run fills the disk cache
    print(f"import airflow.sdk      {statistics.median(bare):6.3f} s")
    print(
        f"{len(files)} DAG files, on top   {statistics.median(dags):6.3f} s   (from {min(dags):.3f} to {max(dags):.3f})"
    )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
