"""Whose job is it: every branch of the decision between starting, going on and replacing."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from kubeflow_training.gangs.reattach import Action, Identity, created_for, decide, identity
from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.ownership import Owner, label_value

MANIFEST = pytorch_job(name="job", image="x", command=["true"])
OWNER = Owner("dag", "run", "train")
WANTED = identity(MANIFEST, OWNER, "3.0")


OTHER = Owner("dag", "other", "train")
OWNERS = {str(OTHER): OTHER}


def job(who=WANTED, phase="Running", uid="u1", **metadata):
    manifest = who.written_on(MANIFEST, OWNERS.get(who.owner, OWNER)) if who else MANIFEST
    conditions = [{"type": phase, "status": "True", "message": "exit"}]
    found = {**manifest, "status": {"conditions": conditions}}
    found["metadata"] = {**manifest["metadata"], "uid": uid, **metadata}
    return found


def verdict(stored, snapshot, wanted=WANTED, **more):
    found = decide(stored, wanted, snapshot, **more)
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


def test_what_was_created_for_this_identity_is_told_by_its_token():
    assert created_for(WANTED, Snapshot(job()))
    assert not created_for(replace(WANTED, token="other"), Snapshot(job()))
    assert not created_for(WANTED, Snapshot(job(deletionTimestamp="x")))
    assert not created_for(WANTED, Snapshot(job(None)))
    assert not created_for(WANTED, None)


def test_an_end_that_nobody_waited_for_is_never_told():
    """A DAG run of the same name, deleted and made again: all is equal but the token."""
    for phase in ("Succeeded", "Failed"):
        assert verdict(None, Snapshot(job(phase=phase))) == (Action.REPLACE, 2, None)
        assert verdict(replace(WANTED, token="other"), Snapshot(job(phase=phase)))[0] is Action.REPLACE
    assert verdict(WANTED, Snapshot(job(phase="Succeeded"))) == (Action.ADOPT, 1, "u1")


def test_a_success_whose_job_is_removed_is_told_from_memory():
    stored = replace(WANTED, uid="u1")
    assert verdict(stored, None, succeeded=True) == (Action.TELL, 1, "u1")
    assert verdict(stored, None, replace(WANTED, generation="4.1"), succeeded=True) == (Action.CREATE, 2, None)


def test_a_job_that_is_being_deleted_is_waited_for_whosever_it_is():
    other = replace(WANTED, owner=str(OTHER))
    assert verdict(None, Snapshot(job(other, deletionTimestamp="x")))[0] is Action.REPLACE


def test_a_try_that_died_between_create_and_store_finds_its_job_by_its_annotations():
    assert verdict(WANTED, Snapshot(job())) == (Action.ADOPT, 1, "u1")
    assert verdict(None, Snapshot(job())) == (Action.ADOPT, 1, "u1")


def test_a_success_of_the_same_chain_is_told():
    assert verdict(replace(WANTED, uid="u1"), Snapshot(job(phase="Succeeded"))) == (Action.ADOPT, 1, "u1")


def test_only_a_gang_that_has_ended_needs_no_more_waiting():
    stored, over = replace(WANTED, uid="u1"), []
    for snapshot in (Snapshot(job()), Snapshot(job(phase="Succeeded")), failed(10)):
        found = decide(stored, WANTED, snapshot, lambda *_: False)
        assert found.action is Action.ADOPT
        over.append(found.over)
    assert over == [False, True, True]


def test_a_success_of_another_chain_is_never_told():
    for generation in ("4.1", "3.1"):
        wanted = replace(WANTED, generation=generation)
        assert verdict(replace(WANTED, uid="u1"), Snapshot(job(phase="Succeeded")), wanted) == (
            Action.REPLACE,
            2,
            None,
        )


def test_a_failed_gang_is_replaced_whole_and_numbered():
    assert verdict(replace(WANTED, uid="u1", gang=4), failed(137)) == (Action.REPLACE, 5, None)


def test_later_gangs_have_their_number_in_the_name_and_a_token_of_their_own():
    stored = replace(WANTED, uid="u1", gang=4, name="job-g4")
    found = decide(stored, WANTED, None, longest=54).identity
    assert (found.name, found.base, found.gang, found.uid) == ("job-g5", "job", 5, None)
    assert found.token not in (stored.token, "")
    assert decide(stored, WANTED, None).identity.name == "job"
    long = replace(WANTED, base="a" * 52, name="a" * 52)
    names = {decide(replace(long, gang=n), replace(long, gang=n), None, longest=54).identity.name for n in (1, 2)}
    assert names == {"a" * 52}  # not created yet: the same gang once more
    shortened = decide(replace(long, uid="u", gang=9), long, None, longest=54).identity.name
    assert len(shortened) == 54
    assert shortened.endswith("-g10")


def test_the_written_name_goes_everywhere_the_name_is():
    manifest = pytorch_job(name="job", image="x", command=["true"], nodes=3, spread="one_per_node")
    written = replace(identity(manifest, OWNER, "1"), name="job-g2").written_on(manifest, OWNER)
    assert written["metadata"]["name"] == "job-g2"
    assert '"training.kubeflow.org/job-name": "job-g2"' in json.dumps(written)
    assert '"training.kubeflow.org/job-name": "job"' not in json.dumps(written)
    assert Owner.of(written) == OWNER


def test_owners_are_labels_whatever_their_names_are():
    for text in ("plain", "manual__2026-01-01T00:00:00+00:00", "x" * 200, "ümläut", "", "-", "scheduled__a/b"):
        value = label_value(text)
        assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", value), (text, value)
        assert len(value) <= 63
    assert label_value("a b") != label_value("a_b") != label_value("a+b")


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
    other = replace(WANTED, owner=str(OTHER))
    assert verdict(None, Snapshot(job(other)))[0] is Action.REFUSE
    assert verdict(None, Snapshot(job(None)))[0] is Action.REFUSE
    assert verdict(None, Snapshot(job(None, phase="Succeeded")))[0] is Action.REFUSE
    assert verdict(None, Snapshot(job(other, phase="Succeeded")))[0] is Action.REPLACE


def test_the_store_may_hold_anything():
    assert Identity.from_dict(WANTED.to_dict()) == WANTED
    for stored in (None, "x", {}, {"name": "x", "new": 1}, []):
        assert Identity.from_dict(stored) is None
