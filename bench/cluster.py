"""What benches on a cluster share, above all a process of its own for each reader: its memory and CPU are its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def leave_out_without_cluster() -> None:
    """Ends the bench, in words, where there is no cluster to be had."""
    if not Path(os.environ.get("KUBECONFIG", "/none")).is_file():
        print("KUBECONFIG names no cluster: this bench is left out")
        raise SystemExit(0)


@contextmanager
def reader(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m MODULE --child ARGUMENTS`, with an empty Airflow home and a connection to the cluster of KUBECONFIG.

    It is killed at the end if it still runs.
    """
    with tempfile.TemporaryDirectory(prefix="dropforge-bench-") as home:
        cluster = {"conn_type": "kubernetes", "extra": {"kube_config_path": os.environ["KUBECONFIG"]}}
        clean = {key: value for key, value in os.environ.items() if not key.startswith("AIRFLOW")}
        airflow = {
            "AIRFLOW_HOME": home,
            "AIRFLOW__LOGGING__LOGGING_LEVEL": "WARNING",
            "AIRFLOW_CONN_KUBERNETES_DEFAULT": json.dumps(cluster),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--child", *arguments],
            env=clean | airflow,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
