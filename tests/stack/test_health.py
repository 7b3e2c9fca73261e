"""When a service counts as ready."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dropforge.stack import health
from tests.stack.test_supervisor import until


def test_the_cluster_is_ready_while_its_supervisor_lives(tmp_path: Path) -> None:
    assert not health.local_cluster(tmp_path)
    process = subprocess.Popen([sys.executable, "-m", "kubeflow_training.jobs.local", str(tmp_path)])
    try:
        until(lambda: health.local_cluster(tmp_path))
    finally:
        process.kill()
        # Dead, and not yet reaped: the signature that it left behind means nothing.
        until(lambda: not health.local_cluster(tmp_path))
        process.wait()
    assert (tmp_path / "supervisor.json").exists()
    assert not health.local_cluster(tmp_path)
