"""A local cluster whose clients are in other containers: they share its folder and see none of its processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kubeflow_training.jobs.local import lock

LOOK = """
import sys
from kubeflow_training.jobs.local import LocalCluster
print(LocalCluster(sys.argv[1]).supervisor())
"""


def elsewhere(home: Path) -> str:
    """What a client with process ids of its own says of the supervisor."""
    unshare = shutil.which("unshare")
    command = [unshare or "", "--pid", "--fork", "--mount-proc", sys.executable, "-c", LOOK, str(home)]
    if unshare is None or os.geteuid() or subprocess.run([*command[:4], "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make namespaces")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_supervisor_is_seen_from_another_container_and_its_end_too(cluster):
    assert f"'pid': {cluster.process.pid}" in elsewhere(cluster.home)
    cluster.kill()
    assert (cluster.home / "supervisor.json").exists()
    assert elsewhere(cluster.home) == "None"
    assert cluster.client.supervisor() is None


def test_a_lock_is_looked_at_without_being_touched(tmp_path):
    path = tmp_path / "lock"
    assert not lock.held(path)
    handle = lock.take(path)
    assert handle is not None
    assert lock.held(path)
    assert lock.take(path) is None
    os.close(handle)
    assert not lock.held(path)
    # Who looks has it not even for a moment.
    again = lock.take(path)
    assert again is not None
    os.close(again)
