"""The exit code of the rank that failed first, from torchrun's own last words (recorded from a pod)."""

from __future__ import annotations

from kubeflow_training.jobs.observation import Reason, observe
from kubeflow_training.jobs.observation.torchrun import root_cause

TABLE = """    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_22:01:20
  host      : train-worker-0
  rank      : 2 (local_rank: 0)
  exitcode  : -15 (pid: 14)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 14
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_22:01:20
  host      : train-worker-0
  rank      : 3 (local_rank: 1)
  exitcode  : {code}
  error_file: <N/A>
  traceback : {traceback}
============================================================
"""
ASK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


def seen(message):
    labels = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "0"}
    terminated = {"exitCode": 1, "reason": "Error", "message": message}
    status = {"phase": "Failed", "containerStatuses": [{"name": "pytorch", "state": {"terminated": terminated}}]}
    pod = {"metadata": {"name": "train-worker-0", "labels": labels}, "status": status}
    replica = {"replicas": 1, "restartPolicy": "Never"}
    job = {"kind": "PyTorchJob", "spec": {"pytorchReplicaSpecs": {"Master": replica, "Worker": replica}}}
    return observe(job, [pod])


def test_the_ranks_own_exit_code_counts_and_not_torchruns():
    found = seen(TABLE.format(code="11 (pid: 15) ", traceback=ASK))
    assert (found.exit_code, found.failing_rank, found.reason) == (11, 3, Reason.BAD_DATA)
    assert "rank 3 ended with exit code 11" in found.message


def test_a_signal_is_the_shells_number():
    text = TABLE.format(code="-9 (pid: 15)  (SIGKILL)", traceback="Signal 9 (SIGKILL) received by PID 15")
    found = root_cause(text)
    assert (found["exit_code"], found["rank"]) == (137, 3)
    assert found["message"].endswith("Signal 9 (SIGKILL) received by PID 15")


def test_a_traceback_tells_its_last_line_and_the_reason():
    raised = "Traceback (most recent call last):\n    File x\n  torch.OutOfMemoryError: CUDA out of memory\n  "
    found = seen(TABLE.format(code="1 (pid: 15) ", traceback=raised))
    assert found.reason is Reason.OUT_OF_MEMORY
    assert found.message.endswith("torch.OutOfMemoryError: CUDA out of memory")


def test_other_last_words_tell_nothing():
    for text in ("", "Root Cause (first observed failure):", "exitcode  : 3 (pid: 1)", TABLE[:-300]):
        assert root_cause(text) == {}
