"""The local cluster with real processes: jobs that succeed, fail, queue, are killed or orphaned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kubeflow_training.jobs.elastic import elastic
from kubeflow_training.jobs.errors import JobRefusedError, ManifestError
from kubeflow_training.jobs.local import processes
from kubeflow_training.jobs.observation import Phase, Reason

WAIT = "import time, sys; print('ready', flush=True); time.sleep(60)"


def pid_of(cluster, name="job", index=0):
    """The container's process."""
    pod = cluster.read(name).pods[index]["metadata"]["name"]
    return json.loads((cluster.home / "jobs/default" / name / "pods" / pod / "status.json").read_text())["session"]


def test_the_log_file_has_the_time_stamps_of_kubectl(cluster):
    cluster.submit("print('hello')")
    cluster.ended()
    line = (cluster.home / "jobs/default/job/pods/job-master-0/log").read_text()
    stamp, text = line.split(" ", 1)
    assert text == "hello\n"
    assert len(stamp) == len("2026-01-01T00:00:00.000000000Z")


def test_delete_gives_grace_then_kills_the_whole_tree(cluster, tmp_path):
    script = (
        "import signal, subprocess, sys, time, pathlib\n"
        f"out = pathlib.Path({str(tmp_path)!r})\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal,time; signal.signal(15, signal.SIG_IGN);"
        " time.sleep(60)'], start_new_session=True)\n"
        "def stop(*_): (out / 'asked').write_text('x')\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "(out / 'child').write_text(str(child.pid))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)"
    )
    cluster.submit(script, grace_seconds=1)
    cluster.wait(Phase.RUNNING)
    cluster.until(lambda: (tmp_path / "child").exists() and cluster.log() == ["ready"])
    child, main = int((tmp_path / "child").read_text()), pid_of(cluster)
    assert cluster.client.delete("job", "default", uid="another") is False
    began = time.monotonic()
    assert cluster.client.delete("job", "default") is True
    assert cluster.observe().phase in (Phase.CANCELLED, Phase.LOST)
    cluster.until(lambda: cluster.read() is None)
    assert time.monotonic() - began >= 1
    assert (tmp_path / "asked").exists()
    assert processes.start_time(child) is None
    assert processes.start_time(main) is None
    # The name is free again, and the new job is another one.
    cluster.submit("print(1)")
    assert cluster.ended().phase is Phase.SUCCEEDED


def test_what_the_command_left_running_dies_with_the_pod(cluster, tmp_path):
    script = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"open({str(tmp_path / 'left')!r}, 'w').write(str(p.pid))"
    )
    cluster.submit(script)
    assert cluster.ended().phase is Phase.SUCCEEDED
    assert processes.start_time(int((tmp_path / "left").read_text())) is None


def test_sigkill_of_the_supervisor_loses_nothing(cluster, tmp_path):
    go = tmp_path / "go"
    script = (
        "import os, sys, time\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
        "print('went on')\n"
        "if os.environ['RANK'] == '1': sys.exit(10)\n"
        "time.sleep(60 if os.environ['WORLD_SIZE'] == '2' else 0)"
    )
    cluster.submit(script, "good")
    cluster.submit(script, "bad", nodes=2)
    cluster.wait(Phase.RUNNING, name="good")
    cluster.wait(Phase.RUNNING, name="bad")
    before = pid_of(cluster, "good")
    cluster.kill()
    assert "supervisor" in cluster.read("good").events[-1]["message"]
    go.touch()
    cluster.until(lambda: processes.start_time(before) is None)
    cluster.start()
    assert cluster.ended("good").phase is Phase.SUCCEEDED
    bad = cluster.ended("bad")
    assert (bad.phase, bad.exit_code, bad.replica) == (Phase.FAILED, 10, "worker-0")
    assert cluster.log("good") == ["went on"]


def test_pods_that_still_run_are_adopted(cluster, tmp_path):
    go = tmp_path / "go"
    cluster.submit(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\nprint('one')")
    cluster.wait(Phase.RUNNING)
    before = pid_of(cluster)
    cluster.kill()
    cluster.start()
    assert cluster.observe().phase is Phase.RUNNING
    assert pid_of(cluster) == before
    go.touch()
    assert cluster.ended().phase is Phase.SUCCEEDED
    assert cluster.log() == ["one"]


def test_a_lost_exit_status_is_told_as_a_lost_node(cluster, tmp_path):
    script = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"open({str(tmp_path / 'rank')!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    cluster.submit(script)
    cluster.wait(Phase.RUNNING)
    rank = int(cluster.until(lambda: (tmp_path / "rank").exists() and (tmp_path / "rank").read_text()))
    status = json.loads((cluster.home / "jobs/default/job/pods/job-master-0/status.json").read_text())
    os.kill(status["keeper"]["pid"], signal.SIGKILL)
    seen = cluster.ended()
    assert (seen.phase, seen.reason, seen.retryable) == (Phase.FAILED, Reason.NODE_LOST, True)
    cluster.until(lambda: processes.start_time(rank) is None and processes.start_time(status["session"]) is None)


def test_sigterm_of_the_supervisor_is_a_preemption(cluster):
    cluster.submit(WAIT, "running")
    cluster.wait(Phase.RUNNING, name="running")
    cluster.submit(WAIT, "waiting", cpus=4)
    cluster.until(lambda: "waiting for" in cluster.observe("waiting").message)
    pid = pid_of(cluster, "running")
    assert cluster.stop() == 0
    assert processes.start_time(pid) is None
    seen = cluster.observe("running")
    assert (seen.phase, seen.reason, seen.retryable) == (Phase.FAILED, Reason.PREEMPTED, True)
    # What waited still waits, and says for what.
    waiting = cluster.observe("waiting")
    assert waiting.phase is Phase.QUEUED
    assert "supervisor does not run" in waiting.message


def test_jobs_queue_for_cpus_in_order(stopped_cluster, tmp_path):
    cluster = stopped_cluster
    cluster.start(cpus=2)
    go = tmp_path / "go"
    cluster.submit(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)", "a", cpus=1)
    cluster.wait(Phase.RUNNING, name="a")
    cluster.submit("print(1)", "b", nodes=2)
    cluster.submit("print(1)", "c")
    b = cluster.until(lambda: found if "cpu" in (found := cluster.observe("b")).message else None)
    assert (b.phase, b.message) == (Phase.QUEUED, "waiting for 1 cpu")
    # c would fit, but b was first; and no half of b runs.
    c = cluster.until(lambda: found if "turn" in (found := cluster.observe("c")).message else None)
    assert (c.phase, "1 ahead" in c.message) == (Phase.QUEUED, True)
    assert all(pod["status"]["phase"] == "Pending" for pod in cluster.read("b").pods)
    go.touch()
    for name in "abc":
        assert cluster.ended(name).phase is Phase.SUCCEEDED


def test_a_job_that_never_fits_fails_at_once_with_the_mend(cluster):
    cluster.submit("print(1)", cpus=64)
    seen = cluster.ended()
    assert (seen.phase, seen.reason, seen.retryable) == (Phase.FAILED, Reason.QUOTA, False)
    assert "64 cpus" in seen.message
    assert "KUBEFLOW_TRAINING_CPUS" in seen.message


def test_a_burst_of_twenty_jobs_never_exceeds_the_machine(stopped_cluster, tmp_path):
    cluster = stopped_cluster
    script = (
        f"import os, time; d = {str(tmp_path)!r}; me = os.environ['POD_NAME']\n"
        "open(f'{d}/on-{me}', 'x').close()\n"
        "print(len([f for f in os.listdir(d) if f.startswith('on-')])); time.sleep(0.05)\n"
        "os.rename(f'{d}/on-{me}', f'{d}/off-{me}')"
    )
    for number in range(20):
        cluster.submit(script, f"job-{number}", cpus=1)
    cluster.start(cpus=3)
    counts = []
    for number in range(20):
        assert cluster.ended(f"job-{number}").phase is Phase.SUCCEEDED
        counts.append(int(cluster.log(f"job-{number}")[0]))
    assert max(counts) <= 3
    starts = [cluster.read(f"job-{number}").job["status"]["startTime"] for number in range(20)]
    assert starts == sorted(starts)


def test_a_line_without_end_does_not_fill_the_memory(cluster):
    cluster.submit("import sys; sys.stdout.write('x' * 200_000)")
    cluster.ended()
    assert [len(line) for line in cluster.log()] == [65536, 65536, 65536, 3392]


def test_what_only_kubernetes_can_do_is_refused(cluster):
    manifest = cluster.manifest("print(1)")
    manifest["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicy"] = "OnFailure"
    with pytest.raises(JobRefusedError, match="restartPolicy"):
        cluster.client.create(manifest)
    manifest["metadata"]["name"] = "../../etc"
    with pytest.raises(ManifestError, match="DNS-1035"):
        cluster.client.create(manifest)
    assert cluster.client.read("../job", "default") is None


def test_there_is_one_supervisor(cluster):
    second = subprocess.run(
        [sys.executable, "-m", "kubeflow_training.jobs.local", str(cluster.home)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert second.returncode == 1
    assert "another supervisor runs" in second.stderr


def test_a_broken_job_folder_stops_nobody(cluster):
    broken = Path(cluster.home / "jobs/default/broken")
    broken.mkdir(parents=True)
    (broken / "job.json").write_text("{")
    cluster.submit("print(1)")
    assert cluster.ended().phase is Phase.SUCCEEDED


def test_a_lost_pod_of_an_elastic_gang_comes_back_though_the_supervisor_was_killed_meanwhile(stopped_cluster, tmp_path):
    cluster = stopped_cluster
    cluster.start(gpus=2)
    go = tmp_path / "go"
    script = (
        "import os, time; me = os.environ['POD_NAME']; print('life', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
        "if me.endswith('-0'): open(os.environ['TERMINATION_LOG'], 'w').write('{\"exit_code\": 0, \"rank\": 0}')"
    )
    cluster.client.create(elastic(cluster.manifest(script, nodes=2, gpus=1), min_nodes=1))
    cluster.wait(Phase.RUNNING)
    cluster.until(lambda: cluster.log(index=1))
    position = cluster.client.logs(cluster.read().pods[1]).position
    victim = pid_of(cluster, index=1)
    cluster.kill()
    os.kill(victim, signal.SIGKILL)
    cluster.until(lambda: processes.start_time(victim) is None)
    cluster.start(gpus=2)

    def container():
        return cluster.read().pods[1]["status"]["containerStatuses"][0]

    cluster.until(lambda: container()["restartCount"] == 1 and "running" in container()["state"])
    assert container()["lastState"]["terminated"]["exitCode"] == 137
    first = cluster.log(index=0)
    again = cluster.until(lambda: cluster.client.logs(cluster.read().pods[1], position).lines)
    assert again == cluster.log(index=1)[:1] != first
    go.touch()
    assert cluster.ended().phase is Phase.SUCCEEDED


def test_a_keeper_that_was_killed_costs_an_elastic_gang_one_pod_for_a_while(cluster):
    cluster.client.create(elastic(cluster.manifest("import time; time.sleep(60)", nodes=2), min_nodes=1))
    cluster.wait(Phase.RUNNING)
    status = cluster.home / "jobs/default/job/pods/job-worker-1/status.json"
    cluster.until(status.exists)
    os.kill(json.loads(status.read_text())["keeper"]["pid"], signal.SIGKILL)
    cluster.until(lambda: cluster.read().pods[1]["status"]["containerStatuses"][0]["restartCount"] == 1)
    assert cluster.observe().phase is Phase.RUNNING
    assert cluster.client.delete("job", "default", grace_seconds=0)
    cluster.until(lambda: cluster.read() is None)


def test_a_job_folder_with_nulls_stops_nobody(stopped_cluster):
    snapshot = stopped_cluster.submit("print('done')")
    path = stopped_cluster.home / "jobs/default" / snapshot.job["metadata"]["name"] / "job.json"
    job = json.loads(path.read_text())
    job["manifest"]["spec"]["runPolicy"] = None
    path.write_text(json.dumps(job))
    stopped_cluster.start()
    assert stopped_cluster.ended().phase is Phase.SUCCEEDED
