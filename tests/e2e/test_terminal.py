"""One run in the hands of somebody at a terminal: submitted, stopped, resumed, taken back to an older checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dropforge import aside, layout, tracking
from dropforge.errors import DropforgeError
from dropforge.store import open_store
from tests.e2e.harness import Stack, typed, wait
from tests.e2e.test_kills import rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

FAMILY = "terminal"
STEPS = 100_000  # it ends when it is told to
RECIPE = f"""\
extends: tiny
train: {{max_steps: {STEPS}, checkpoint_every: 20, keep_checkpoints: 100}}
evaluate: {{max_rows: 40}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "mine.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def dag_run(stack: Stack, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run that trains."""
    stack.drop(FAMILY, "one", rows(tmp_path_factory.mktemp("rows")), "extends: tiny\ntrain: {max_steps: 2}\n")
    done = typed(
        stack, "submit", str(recipe), "-f", FAMILY, "--drop", "one", "--again", "--set", "train.seed=7", "--json"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["page"].endswith(told["dag_run"].replace(":", "%3A").replace("+", "%2B"))
    wait("training", lambda: stack.checkpoints(told["dag_run"]) and stack.ranks())
    return str(told["dag_run"])


def test_what_it_does_is_shown(stack: Stack, dag_run: str) -> None:
    name = stack.tracked(dag_run)[0].data.tags[tracking.TAG_RUN]

    def busy() -> dict[str, Any] | None:
        found: dict[str, Any] = json.loads(typed(stack, "top", name, "--json").stdout)
        return found if found["step"] and found["ranks"] and found["ranks"][0]["cpu_percent"] else None

    found = wait("the rank's use", busy)
    assert (found["run"], found["dag_run"], found["state"], found["stage"]) == (name, dag_run, "running", "train")
    assert (found["steps"], found["job"]["phase"], found["job"]["purpose"]) == (STEPS, "running", "train")
    (rank,) = found["ranks"]
    assert (rank["rank"], rank["of"], rank["phase"]) == (0, "process", "Running")
    assert rank["memory_bytes"] > 10**8
    assert rank["seen_seconds"] is not None
    done = typed(stack, "shell", name, "--", "sh", "-c", "echo rank $RANK in $PWD; exit 3")
    assert (done.returncode, done.stdout.startswith("rank 0 in ")) == (3, True), done.stderr


def test_the_next_run_waits_and_is_held_back(stack: Stack, dag_run: str, recipe: Path) -> None:
    cpus = json.loads((Path(os.environ["KUBEFLOW_TRAINING_HOME"]) / "supervisor.json").read_text())["cpus"]
    words = ["submit", str(recipe), "-f", FAMILY, "--drop", "one", "--again", "--set", f"compute.cpus={cpus}", "--json"]
    second = str(json.loads(typed(stack, *words).stdout)["dag_run"])

    def listed() -> dict[str, Any] | None:
        waits = json.loads(typed(stack, "queue", "--json").stdout)
        return next((wait for wait in waits if (wait["dag_run"], wait["place"]) == (second, "machine")), None)

    found = wait("the second run in the queue", listed)
    assert (found["stage"], found["position"], found["held"]) == ("train", 1, False)
    assert "waiting for" in found["reason"]
    assert found["eta"] is None or found["eta"] > 0
    assert typed(stack, "queue", "hold", found["run"]).returncode == 0
    assert typed(stack, "queue", "priority", found["run"], "7").returncode == 0
    found = listed()
    assert found is not None
    assert (found["position"], found["held"], found["priority"]) == (None, True, 7)
    done = typed(stack, "stop", second, "--yes")
    assert (done.returncode, listed()) == (0, None), done.stderr
    assert len(stack.ranks()) == 1  # the first one's


def test_it_is_stopped_and_taken_back_and_goes_on(stack: Stack, dag_run: str) -> None:
    (tracked,) = stack.tracked(dag_run)
    name = tracked.data.tags[tracking.TAG_RUN]
    store = open_store(f"{stack.connection.settings.root}/{layout.run_prefix(name)}".rstrip("/"))
    assert tracked.data.params["train.seed"] == "7"
    done = typed(stack, "resume", name)
    assert (done.returncode, "it is running, so there is nothing to resume" in done.stderr) == (2, True)
    assert typed(stack, "stop", name).returncode == 1  # nobody says yes
    assert stack.state(dag_run) == "running"

    done = typed(stack, "stop", name, "--yes")
    assert done.returncode == 0, done.stderr
    assert "at train (deferred)" in done.stdout
    assert "nothing of it runs any more" in done.stdout
    assert stack.ranks() == []
    assert stack.tracked(dag_run)[0].info.status == "KILLED"
    before = aside.sealed(store)
    assert len(before) > 1
    done = typed(stack, "stop", name)
    assert (done.returncode, "is over: failed" in done.stdout) == (0, True)
    log = typed(stack, "logs", name, "--rank", "0", "-n", "5").stdout.splitlines()
    assert [line.split(" ", 1)[1][:8] for line in log] == ["[rank 0]"] * 5

    def attempt(number: int) -> int:
        """From which step it goes on."""

        def begun() -> bool:
            return stack.tracked(dag_run)[0].data.tags.get(tracking.TAG_ATTEMPT) == str(number)

        wait(f"attempt {number}", begun)
        return int(stack.tracked(dag_run)[0].data.tags[tracking.TAG_RESUMED])

    first = before[0].step
    done = typed(stack, "resume", name, "--from", f"step-{first}")
    assert done.returncode == 0, done.stderr
    assert f"from checkpoint step-{first}; step-{before[1].step}" in done.stdout
    assert attempt(2) == first
    wait("a checkpoint of its own", lambda: aside.newest(aside.sealed(store), aside.known(store)) != before[0])
    assert typed(stack, "stop", name, "-y").returncode == 0
    newest = aside.newest(aside.sealed(store), aside.known(store))
    assert newest is not None
    assert newest not in before
    assert typed(stack, "resume", name).returncode == 0
    assert attempt(3) == newest.step
    assert stack.tracked(dag_run)[0].info.status == "RUNNING"
    assert typed(stack, "stop", name, "-y").returncode == 0


def test_a_run_that_is_stopped_before_it_is_opened_has_failed_and_is_resumed(stack: Stack, tmp_path: Path) -> None:
    """Airflow skips what comes then, teardown and all, and would call that a success."""
    many = tmp_path / "many.jsonl"
    with many.open("w") as lines:  # whose curation takes long enough to be met
        lines.writelines(f'{{"text": "Row {n} of many, about lamp {n * 7919 % 100_003}."}}\n' for n in range(200_000))
    drop = stack.drop("early", "many", {many.name: many}, "extends: tiny\ntrain: {max_steps: 2}\n")
    (run,) = wait("its run", lambda: stack.dag_runs(drop))
    name = str(run["dag_run_id"])
    stack.see(name, "curate", "running")
    done = typed(stack, "stop", name, "--yes")
    assert done.returncode == 0, done.stderr
    assert stack.end(name) == "failed"
    states = {task: str(found["state"]) for task, found in stack.tasks(name).items()}
    assert (states["curate"], states["open_run"], states["close_run"]) == ("failed", "skipped", "skipped")
    assert states["watcher"] == "failed"
    assert typed(stack, "follow", name).returncode == 1
    done = typed(stack, "resume", name)
    assert (done.returncode, "resumes at curate" in done.stdout) == (0, True), done.stderr
    assert stack.end(name) == "success"
    assert {str(found["state"]) for found in stack.tasks(name).values()} == {"success"}


def test_a_dag_that_airflow_does_not_know_is_named(stack: Stack) -> None:
    with pytest.raises(DropforgeError, match="DAG dropforge_gone: Airflow knows no such DAG"):
        stack.connection.airflow.trigger("dropforge_gone", {})
