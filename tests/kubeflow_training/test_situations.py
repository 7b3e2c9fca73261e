"""What real clusters tell and what `observe` makes of it: recorded objects of all, and the quick ones for real."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from kubeflow_training.jobs.kinds import KINDS, PYTORCH_JOB
from kubeflow_training.jobs.observation import Observation, Phase, observe

from tests.kubeflow_training.kueue_situations import KUEUE, preempted
from tests.kubeflow_training.record import FOLDER, look
from tests.kubeflow_training.rights import Rights, admin
from tests.kubeflow_training.situations import SITUATIONS, Stage

ALL = SITUATIONS | KUEUE


def observed(name: str) -> Observation:
    data = json.loads((FOLDER / f"{name}.json").read_text())
    return observe(data["job"], data["pods"], data["events"], now=datetime.fromisoformat(data["now"]))


@pytest.mark.parametrize("name", ALL)
def test_recorded(name: str) -> None:
    found = observed(name)
    assert ALL[name].fits(found), found
    assert Observation.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_every_recording_is_of_a_situation() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(ALL)


def test_recordings_name_no_machine() -> None:
    assert not [path.name for path in FOLDER.glob("*.json") if "/" + "work/" in path.read_text()]


@pytest.fixture(scope="module")
def place(rights: Rights) -> Any:
    """The session's namespace, the backends having the shipped rights only."""
    from kubernetes import config

    stage = Stage(admin(), rights.namespace, config.new_client_from_config(str(rights.kubeconfig)))
    yield stage
    stage.close()


@pytest.fixture
def stage(place: Stage) -> Any:
    yield place
    place.clear()


@pytest.mark.cluster
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.smoke] if name == "succeeded-trainjobs" else [])
        for name, item in ALL.items()
        if not item.slow
    ],
)
def test_on_the_cluster(stage: Stage, name: str) -> None:
    situation = ALL[name]
    job = situation.bring(stage)
    job.until(lambda _: situation.fits(look(job, situation)))


@pytest.mark.cluster
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.smoke] if kind is PYTORCH_JOB else []) for kind in KINDS],
    ids=lambda kind: kind.name,
)
def test_kueue_preempts_and_resumes(stage: Stage, kind: Any) -> None:
    victim = preempted(stage, kind)
    seen = victim.until(KUEUE["kueue-preempted"].fits)
    assert not seen.ended
    urgent_kind, urgent = stage.jobs[-1]
    assert stage.backends[urgent_kind.name].delete(urgent, stage.namespace, grace_seconds=0)
    # Its pods are made a second time, which is no sign of a broken gang.
    resumed = victim.until(lambda seen: seen.ended or seen.phase is Phase.RUNNING)
    assert (resumed.phase, resumed.pods_running) == (Phase.RUNNING, 2), resumed
