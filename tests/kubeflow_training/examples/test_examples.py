"""The example DAGs are parsed, known to the tests, and each does what the documentation says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kubeflow_training.examples.conftest import EXAMPLES, ON_KUBERNETES, ON_THIS_MACHINE, Results


def dag_ids() -> list[str]:
    """The DAGs that the files define, each by the name of its file."""
    return sorted(file.stem for file in EXAMPLES.glob("example_*.py"))


def test_every_example_has_a_test_that_runs_it():
    assert sorted([*ON_THIS_MACHINE, *ON_KUBERNETES]) == dag_ids()
    for name in dag_ids():
        tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
        texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert name in texts, f"{name}.py defines no DAG of its own name"


def test_all_examples_are_parsed(on_this_machine: Results):
    assert on_this_machine.parsed == {"errors": {}, "dags": dag_ids()}


def test_the_plugins_folder_executes_none_of_them():
    code = (
        "import sys; from airflow._shared.module_loading import find_path_from_directory as find;"
        "print(*find(sys.argv[1], '.airflowignore', 'glob'), sep='\\n')"
    )
    plugins = EXAMPLES.parent.parent
    done = subprocess.run([sys.executable, "-c", code, str(plugins)], capture_output=True, text=True, check=True)
    executed = [line for line in done.stdout.splitlines() if Path(line).suffix == ".py"]
    assert executed == [str(plugins / "dropforge_airflow/plugin.py")]


@pytest.mark.parametrize("dag", ON_THIS_MACHINE)
def test_it_runs_on_this_machine(on_this_machine: Results, dag: str):
    run = on_this_machine.runs[dag]
    assert run["state"] == "success", (run, on_this_machine.log[-3000:])


def test_the_quick_start_shows_both_ranks_and_hands_on_its_result(on_this_machine: Results):
    log = on_this_machine.log
    assert "[master-0] I am rank 0 of 2" in log
    assert "[worker-0] I am rank 1 of 2" in log
    result = on_this_machine.value("example_pytorch_job", "train")
    assert (result["phase"], result["progress"]) == ("succeeded", {"step": 3, "steps": 3, "loss": 0.25})
    assert on_this_machine.value("example_pytorch_job", "register") == "s3://models/7"


def test_templates_are_rendered_in_every_form_of_manifest(on_this_machine: Results):
    log = on_this_machine.log
    assert "[master-0] 3 epochs" in log
    assert "[master-0] run manual__" in log
    assert "[master-0] planned" in log
    names = {
        task: on_this_machine.value("example_pytorch_job_manifest", task, "pytorch_job") for task in ("file", "text")
    }
    assert names["file"]["name"].startswith("from-a-file-")
    assert names["text"]["name"] == "from-a-text"


def test_links_are_published(on_this_machine: Results):
    job = on_this_machine.value("example_pytorch_job_options", "linked", "pytorch_job")
    link = on_this_machine.value("example_pytorch_job_options", "linked", "pytorch_job_link")
    assert link == f"https://jobs.example.com/default/{job['name']}"


def test_the_hook_tells_the_end(on_this_machine: Results):
    assert on_this_machine.value("example_pytorch_job_hook", "sweep") == "succeeded: ['done']"


def test_the_broken_collective_is_tried_again(on_this_machine: Results):
    task = on_this_machine.runs["example_retry_by_cause"]["tasks"]["train"]
    assert (task["tries"], task["xcoms"]["return_value"]["gang"]) == (2, 2)
    assert "collective timeout: retry 1 of 3" in on_this_machine.log


def test_the_elastic_gang_reports(on_this_machine: Results):
    assert on_this_machine.value("example_elastic", "train")["message"]["rank"] == 0


@pytest.mark.cluster
@pytest.mark.parametrize("dag", ON_KUBERNETES)
def test_it_runs_on_kubernetes(on_kubernetes: Results, dag: str):
    run = on_kubernetes.runs[dag]
    assert run["state"] == "success", (run, on_kubernetes.log[-3000:])


@pytest.mark.cluster
def test_the_ranks_say_where_they_are(on_kubernetes: Results):
    log = on_kubernetes.log
    for rank, where in enumerate(("[master-0]", "[worker-0]")):
        assert f"{where} rank {rank} of 2, master " in log
    assert "[master-0] rank 1 is here" in log
    for node in (0, 1):
        assert f"[node-{node}] rank {node} of 2, master " in log  # the indexed Job
        assert f"[node-{node}] node {node} of 2" in log  # the TrainJob
    assert "[master-0] admitted" in log
    assert on_kubernetes.value("example_train_job", "train", "pytorch_job")["kind"] == "TrainJob"
    assert on_kubernetes.value("example_async_hook", "train")[-1] == "Succeeded"


@pytest.mark.cluster
def test_a_hold_prints_its_launch_line_and_ends_when_it_is_released(on_kubernetes: Results):
    job = on_kubernetes.value("example_pytorch_job_hold", "experiment", "pytorch_job")
    where = f"kubectl exec -n {job['namespace']} {job['name']}-master-0 -c pytorch -- "
    assert f"{where}sh -c 'echo training'" in on_kubernetes.log
    assert f"{where}touch /tmp/release" in on_kubernetes.log
