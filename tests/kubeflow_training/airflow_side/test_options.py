"""What the operator's options do, in a real Airflow with the local cluster."""

from __future__ import annotations

import pytest
from kubeflow_training.jobs.manifest.ownership import Owner

both = pytest.mark.parametrize("mode", ["deferred", "sync"])


@both
def test_every_string_of_a_spec_is_a_template_and_no_argument_is_a_file(new_run, mode):
    run = new_run(f"{mode}_spec", "pass")
    script = "import os, sys; print('argv', sys.argv[1:], os.environ['RUN'])"
    run.airflow.ask("set_conf", dag=run.dag, run=run.run, conf={"image": "x:1", "script": script})
    run.airflow.mark()
    assert run.attempt() == {"state": "success", "error": None, "kind": None}
    assert f"[worker-0] argv ['config.yaml', '{run.run}.json'] {run.run}" in run.airflow.log()
    result = run.look()["xcoms"]["return_value"]
    assert result["name"].startswith(f"{mode}-spec-train-")
    job = run.airflow.cluster.read(result["name"], "default")
    assert Owner.of(job.job) == Owner(f"{mode}_spec", run.run, "train", -1)
    assert len(job.pods) == 2
    assert run.airflow.ask("links", dag=run.dag, run=run.run) == {
        "Job": f"http://jobs/default/{result['name']}",
        "Pod logs": f"http://logs/{result['name']}?uid={result['uid']}",
        "MLflow run": f"http://mlflow/#/runs/run-of-{run.run}",
    }


@both
def test_a_template_file_is_a_manifest(new_run, mode):
    run = new_run(f"{mode}_file", "pass")
    assert run.attempt() == {"state": "success", "error": None, "kind": None}
    assert f"[master-0] hello from {run.run}" in run.airflow.log()
    assert run.look()["xcoms"]["return_value"]["name"].startswith("from-a-file-")


@both
def test_a_success_is_deleted_and_told_once_more_without_its_job(new_run, mode):
    run = new_run(f"{mode}_tidy", "print('done')")
    assert run.attempt()["state"] == "success"
    run.until(lambda: run.job() is None)
    xcoms = run.look()["xcoms"]
    assert "return_value" not in xcoms
    assert "pytorch_job" not in xcoms
    assert run.airflow.ask("links", dag=run.dag, run=run.run)["Job"] == f"http://jobs/default/{run.name}"
    # As if the worker had died after the deletion: the retry tells the success, and no second gang trains.
    run.airflow.mark()
    assert run.attempt()["state"] == "success"
    assert "has succeeded, and its job is removed since" in run.airflow.log()
    assert run.job() is None


@both
def test_a_local_gang_is_never_held_as_the_machine_has_one_release_file(new_run, mode):
    run = new_run(f"{mode}_held", "print('never')", nodes=2)
    end = run.attempt()
    assert (end["state"], end["kind"]) == ("failed", "JobFailedForGood")
    assert "Hold it on Kubernetes" in end["error"]
    assert run.job() is None


@both
def test_a_failed_gang_is_kept_beside_the_next_one(new_run, mode, tmp_path):
    script = (
        f"import os, sys\npath = {str(tmp_path / 'tried')!r}\n"
        "if not os.path.exists(path):\n    open(path, 'w').close(); sys.exit(9)\n"
    )
    run = new_run(f"{mode}_kept", script)
    assert run.attempt()["state"] == "up_for_retry"
    assert run.attempt()["state"] == "success"
    assert [job.job["metadata"]["name"] for job in run.jobs()] == [run.name, f"{run.name}-g2"]
    assert run.look()["xcoms"]["return_value"]["gang"] == 2
