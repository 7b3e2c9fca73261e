"""`down` in the middle of a training: the rank's last acts still reach the store and MLflow, which end after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.local import LocalCluster
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.observation import Phase, Reason, observe

from dropforge.run import ExitCode
from dropforge.stack import control
from dropforge.stack.state import BUCKET
from tests.stack.supervised import supervised
from tests.stack.test_supervisor import until

# In MLflow's place, which takes ten times as long to start: it answers, and ends at once when it is told to.
TRACKER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    do_POST = do_GET
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

# The stack's own definitions, without Airflow.
CHOSEN = """[
    wanted["objects"],
    wanted["cluster"],
    replace(wanted["mlflow"], module="tracker", env={**wanted["mlflow"].env, "PYTHONPATH": str(folder)}),
]"""

# A checkpoint takes its time; whatever is gone meanwhile makes the rank end with another code.
RANK = f"""
import os, signal, sys, time, urllib.request, boto3
def told(*_):
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        store.put_object(Bucket={BUCKET!r}, Key="checkpoint", Body=b"whole")
        urllib.request.urlopen(os.environ["MLFLOW_TRACKING_URI"], data=b"metrics").close()
        time.sleep(0.05)
    sys.exit({ExitCode.PREEMPTED:d})
store = boto3.client("s3")
signal.signal(signal.SIGTERM, told)
print("training", flush=True)
while True: signal.pause()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The state folder of a running stack."""
    found = tmp_path / "state"
    found.mkdir(mode=0o700)
    (found / "tracker.py").write_text(TRACKER)
    with supervised(found, CHOSEN):
        yield found


def test_training_ends_before_what_it_writes_to(folder: Path) -> None:
    cluster = LocalCluster(folder / "cluster")
    command = ["python", "-c", RANK]
    cluster.create(pytorch_job(name="job", image="none", command=command, cpus=0.5, memory_gb=0.1, grace_seconds=10))

    def job() -> Snapshot:
        found = cluster.read("job", "default")
        assert found is not None
        return found

    until(lambda: any("training" in cluster.logs(pod).lines[-1:] for pod in job().pods))
    assert control.stop(folder)
    ended = observe(job().job, job().pods, job().events)
    told = [line for pod in job().pods for line in cluster.logs(pod).lines]
    assert ended.exit_code == ExitCode.PREEMPTED, told
    assert (ended.phase, ended.reason) == (Phase.FAILED, Reason.PREEMPTED)
    reasons = {condition["type"]: condition["reason"] for condition in job().job["status"]["conditions"]}
    assert reasons["Failed"] == "NodeShutdown"
