"""The whole way as a team has it: the trainer's and the curation's image from their Dockerfiles, Kueue, a namespace
that takes restricted pods alone, and the rights that `dropforge manifests` prints.

One drop's content four times: nobody disturbs the first run, the others lose a container, a pod and the node. All end
in the same model. Runs alone: the node goes for everybody.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dropforge import layout, tracking
from dropforge.gangs import failed
from tests.cluster.node_machine import kill_container, switched_off
from tests.cluster.queue_yard import Looks
from tests.cluster.team_place import ACCOUNT, NO_IMAGE, QUEUE, Course, Place, place, rank, serving
from tests.e2e.harness import typed, wait

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.outage,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(NO_IMAGE), reason=NO_IMAGE),
]

SAVED_EVERY = 20
LOST = 5  # steps, at least, after the newest checkpoint
COURSE = {"max_steps": 60, "checkpoint_every": SAVED_EVERY, "log_every": 1, "tokens_per_step": 4096}


@pytest.fixture(scope="module")
def team(machine_node: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(machine_node, tmp_path_factory.mktemp("team"), {"train": COURSE}, curation=True) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(team: Place, sample: dict[str, Path]) -> Course:
    """The run that the others are held to, while it trains."""
    return team.drop("undisturbed", sample)


def test_a_drop_becomes_a_model_by_the_image_the_queue_and_the_least_rights(
    undisturbed: Course, team: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    pods = wait("its gang", lambda: len(found := undisturbed.pods()) == 2 and found)
    for pod in pods:
        (trainer,) = pod.spec.containers
        assert trainer.image == team.image
        assert (pod.spec.service_account_name, pod.spec.automount_service_account_token) == (ACCOUNT, False)
        assert not [one for one in trainer.volume_mounts if "serviceaccount" in one.mount_path]
    job = undisturbed.job()
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == QUEUE
    assert job["metadata"]["name"] in Looks(team.namespace.name).admitted()
    undisturbed.end()
    marks = undisturbed.marks()
    with capsys.disabled():
        print(f"\ndrop to model {marks.ended - marks.dropped:.0f} s: {marks}; image built in {team.built:.0f} s")


def test_pods_of_the_curation_image_make_the_dataset_of_the_same_model(
    undisturbed: Course, team: Place, sample: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROPFORGE_PRESETS", str(team.presets))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("extends: team\ncuration: {engine: spark}\n")
    done = typed(team.stack, "family", "set", "by-spark", "--recipe", str(recipe))
    assert done.returncode == 0, done.stderr
    found = team.drop("by-spark", sample)
    seen: dict[str, Any] = {}

    def executor() -> bool:
        label = "dropforge/purpose=curate"
        pods = team.namespace.core.list_namespaced_pod(team.namespace.name, label_selector=label).items
        seen.update({pod.metadata.name: pod for pod in pods})
        return any(pod.metadata.labels.get("spark-role") == "executor" for pod in pods)

    wait("Spark's executor", executor, 300)
    for pod in seen.values():
        (container,) = pod.spec.containers
        assert "dropforge-curation" in container.image
        claims = {one.persistent_volume_claim.claim_name for one in pod.spec.volumes if one.persistent_volume_claim}
        assert claims == {"work"}  # and nothing of this machine
    found.end()
    assert found.weights() == undisturbed.weights()


def worker(found: Course) -> Any:
    return next(pod for pod in found.pods() if rank(pod) == 1)


def delete(found: Course) -> None:
    """As `kubectl delete pod` does."""
    found.namespace.core.delete_namespaced_pod(worker(found).metadata.name, found.namespace.name)


def in_the_middle(found: Course) -> bool:
    """Whether some steps were done after a checkpoint that is sealed, and after any that is being sealed."""
    assert found.stack.state(found.dag_run) not in {"success", "failed"}, found.stack.log(found.dag_run, "train")
    step = found.step()
    return step % SAVED_EVERY >= LOST and SAVED_EVERY <= found.sealed() <= step - LOST


@pytest.fixture(scope="module")
def disturbed(team: Place, undisturbed: Course, sample: dict[str, Path]) -> dict[str, Course]:
    """Two more runs that take turns in the queue, each disturbed in its middle."""
    disturb: dict[str, Callable[[Course], Any]] = {
        "container-killed": lambda found: kill_container(worker(found)),
        "pod-deleted": delete,
    }
    made = {family: team.drop(family, sample) for family in disturb}

    def all_disturbed() -> bool:
        for family in [family for family in disturb if in_the_middle(made[family])]:
            disturb.pop(family)(made[family])
        return not disturb

    wait("the middles of both runs", all_disturbed, 400)
    return made


def kept_logs(found: Course) -> set[str]:
    """Names of the pods whose logs the run has."""
    prefix = layout.logs_prefix(found.run)
    return {key.removeprefix(prefix).partition("/")[0] for key in found.stack.connection.store.sizes(prefix)}


def held_to(found: Course, undisturbed: Course, *causes: str, lost: int = 0) -> None:
    """It ended in the same model, resumed, with everything told.

    :param causes: any of which may be its cause. :param lost: so many steps, at least, were done in vain.
    """
    tracked = found.end()
    assert found.weights() == undisturbed.weights()
    tags = tracked.data.tags
    assert tags[tracking.TAG_ATTEMPT] == "2", tags
    assert int(tags[tracking.TAG_RESUMED]) >= SAVED_EVERY
    assert tags[tracking.TAG_CAUSES] in causes, tags
    assert tags[tracking.TAG_LOST].isdigit(), tags
    assert int(tags[tracking.TAG_LOST]) >= lost
    assert f"attempt 1: {tags[tracking.TAG_CAUSES]}" in tags[tracking.TAG_FAILURE]
    (gone,) = failed(found.gangs(), "train")
    for gang in found.gangs():
        own = [name for name in kept_logs(found) if name.startswith(f"{gang.job}-")]
        told = [typed(found.stack, "logs", found.run, "--pod", name).stdout for name in own]
        for number in (0, 1):
            assert any(f"[rank {number}]" in one for one in told), f"rank {number} of {gang.job}: {own}"
    assert gone.step is not None
    assert f"- Trainings that failed: {tags[tracking.TAG_CAUSES]}" in found.stack.log(found.dag_run, "report")


def test_mlflow_s_image_serves_the_model(undisturbed: Course, team: Place) -> None:
    undisturbed.end()
    rows = [{"prompt": "How do I get a refund?"}, {"prompt": "Where is my order?"}]
    with serving(team, f"{undisturbed.family}@champion") as address:
        found = httpx.post(f"{address}/invocations", json={"dataframe_records": rows}, timeout=120)
    assert found.status_code == 200, found.text
    look = "import json, sys; from dropforge import Client; model = Client(sys.argv[1]).model(sys.argv[2]).load()"
    look += "; print(json.dumps(model.predict(json.loads(sys.argv[3])).to_dict('records')))"
    words = (str(team.stack.folder), f"{undisturbed.family}@champion", json.dumps(rows))
    here = subprocess.run([sys.executable, "-c", look, *words], capture_output=True, text=True, check=True)
    assert found.json()["predictions"] == json.loads(here.stdout.splitlines()[-1])


def test_a_killed_container(undisturbed: Course, disturbed: dict[str, Course]) -> None:
    held_to(disturbed["container-killed"], undisturbed, "killed", "collective timeout", lost=1)


def test_a_deleted_pod(undisturbed: Course, disturbed: dict[str, Course]) -> None:
    held_to(disturbed["pod-deleted"], undisturbed, "preempted", "evicted")


def test_a_node_that_is_not_ready(undisturbed: Course, team: Place, sample: dict[str, Path], machine_node: Any) -> None:
    found = team.drop("node-lost", sample)
    wait("its middle", lambda: in_the_middle(found))
    pods = found.pods()
    gone = {pod.metadata.uid for pod in pods}
    with switched_off(team.namespace.core, machine_node.metadata.name, pods):
        wait("the pods to go", lambda: not gone & {pod.metadata.uid for pod in found.pods()}, 90)
    held_to(found, undisturbed, "node lost", lost=1)
