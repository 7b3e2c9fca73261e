"""Whose job is it: every branch of the decision between starting, going on and replacing."""

from __future__ import annotations

from dataclasses import replace

from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.reattach import Action, Identity, decide, identity

MANIFEST = pytorch_job(name="job", image="x", command=["true"])
WANTED = identity(MANIFEST, "dag/run/train/-1", "3.0")


def job(who=WANTED, phase="Running", uid="u1", **metadata):
    manifest = who.written_on(MANIFEST) if who else MANIFEST
    conditions = [{"type": phase, "status": "True", "message": "exit"}]
    found = {**manifest, "status": {"conditions": conditions}}
    found["metadata"] = {**manifest["metadata"], "uid": uid, **metadata}
    return found


def verdict(stored, snapshot, wanted=WANTED):
    found = decide(stored, wanted, snapshot)
    return found.action, found.identity.gang, found.identity.uid


def failed(code):
    """A job whose master ended with the code."""
    terminated = {"exitCode": code, "finishedAt": "2026-01-01T00:00:00Z"}
    status = {"phase": "Failed", "containerStatuses": [{"name": "pytorch", "state": {"terminated": terminated}}]}
    labels = {"training.kubeflow.org/replica-type": "master", "training.kubeflow.org/replica-index": "0"}
    return Snapshot(job(phase="Failed"), [{"metadata": {"name": "job-master-0", "labels": labels}, "status": status}])


def test_the_first_try_creates():
    assert verdict(None, None) == (Action.CREATE, 1, None)


def test_a_try_that_died_before_the_create_is_made_up_for():
    assert verdict(WANTED, None) == (Action.CREATE, 1, None)


def test_a_retry_goes_on_with_what_runs():
    assert verdict(replace(WANTED, uid="u1"), Snapshot(job())) == (Action.ADOPT, 1, "u1")


def test_a_try_that_died_between_create_and_store_finds_its_job_by_its_annotations():
    assert verdict(WANTED, Snapshot(job())) == (Action.ADOPT, 1, "u1")
    assert verdict(None, Snapshot(job())) == (Action.ADOPT, 1, "u1")


def test_a_success_of_the_same_chain_is_told():
    assert verdict(replace(WANTED, uid="u1"), Snapshot(job(phase="Succeeded"))) == (Action.ADOPT, 1, "u1")


def test_a_success_of_another_chain_is_never_told():
    for chain in ("4.1", "3.1"):
        assert verdict(replace(WANTED, uid="u1"), Snapshot(job(phase="Succeeded")), replace(WANTED, chain=chain)) == (
            Action.REPLACE,
            2,
            None,
        )


def test_a_failed_gang_is_replaced_whole_and_numbered():
    assert verdict(replace(WANTED, uid="u1", gang=4), failed(137)) == (Action.REPLACE, 5, None)


def test_attempts_are_counted_within_a_chain_and_gangs_within_the_task():
    stored = replace(WANTED, uid="u1", gang=4, attempt=3)
    assert decide(stored, WANTED, failed(137)).identity.attempt == 4
    assert decide(stored, WANTED, None).identity.attempt == 4
    assert decide(stored, WANTED, Snapshot(job())).identity.attempt == 3
    cleared = decide(stored, replace(WANTED, chain="9.1"), failed(137)).identity
    assert (cleared.gang, cleared.attempt) == (5, 1)


def test_a_failure_for_good_that_nobody_told_yet_is_told():
    assert verdict(replace(WANTED, uid="u1"), failed(10)) == (Action.ADOPT, 1, "u1")


def test_a_gang_that_is_gone_or_going_is_replaced():
    assert verdict(replace(WANTED, uid="u1"), None) == (Action.CREATE, 2, None)
    assert verdict(replace(WANTED, uid="u1"), Snapshot(job(deletionTimestamp="x"))) == (Action.REPLACE, 2, None)
    assert verdict(replace(WANTED, uid="u0"), Snapshot(job())) == (Action.REPLACE, 2, None)


def test_a_changed_spec_replaces_what_runs():
    assert verdict(replace(WANTED, uid="u1"), Snapshot(job()), replace(WANTED, fingerprint="f")) == (
        Action.REPLACE,
        2,
        None,
    )


def test_the_job_of_another_is_left_alone_while_it_runs():
    other = replace(WANTED, owner="dag/other/train/-1")
    assert verdict(None, Snapshot(job(other)))[0] is Action.REFUSE
    assert verdict(None, Snapshot(job(None)))[0] is Action.REFUSE
    assert verdict(None, Snapshot(job(None, phase="Succeeded")))[0] is Action.REFUSE
    assert verdict(None, Snapshot(job(other, phase="Succeeded")))[0] is Action.REPLACE


def test_the_store_may_hold_anything():
    assert Identity.from_dict(WANTED.to_dict()) == WANTED
    for stored in (None, "x", {}, {"name": "x", "new": 1}, []):
        assert Identity.from_dict(stored) is None
