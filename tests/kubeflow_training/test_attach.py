"""Finding or starting a gang while the cluster is away, and after the job has become another kind."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowNotFoundException, AirflowTaskTimeout
from kubeflow_training.exceptions import JobNotReached
from kubeflow_training.gangs import attach as gangs
from kubeflow_training.gangs.attach import Gangs
from kubeflow_training.gangs.memory import STATE_KEY
from kubeflow_training.gangs.reattach import Action, Identity, identity
from kubeflow_training.hooks import PyTorchJobHook
from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.errors import (
    BackendUnauthorizedError,
    BackendUnavailableError,
    JobExistsError,
    JobForbiddenError,
    JobRefusedError,
)
from kubeflow_training.jobs.kinds import PYTORCH_JOB
from kubeflow_training.jobs.kubernetes.answers import NotFoundError, no_such_place
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.ownership import Owner
from kubeflow_training.operators import PyTorchJobOperator

MANIFEST = pytorch_job(name="job", image="x", command=["true"])
OWNER = Owner("dag", "run", "train")


class Place:
    """Jobs by name; calls fail as often as `troubles` says, before they do anything or after."""

    def __init__(self):
        self.jobs_there, self.deleted, self.calls, self.made = {}, [], [], 0
        self.troubles: list[tuple[str, str, Exception]] = []

    def _call(self, name, work):
        self.calls.append(name)
        trouble = next((item for item in self.troubles if item[0] == name), None)
        if trouble is not None:
            self.troubles.remove(trouble)
        if trouble is None or trouble[1] == "after":
            found = work()
        if trouble is not None:
            raise trouble[2]
        return found

    def create(self, manifest):
        def work():
            name = manifest["metadata"]["name"]
            if name in self.jobs_there:
                raise JobExistsError(name, "it exists", "Choose another")
            self.made += 1
            metadata = {**manifest["metadata"], "uid": f"{id(self)}-{self.made}"}
            self.jobs_there[name] = Snapshot({**manifest, "metadata": metadata})
            return self.jobs_there[name]

        return self._call("create", work)

    def read(self, name, namespace):
        return self._call("read", lambda: self.jobs_there.get(name))

    def jobs(self, namespace=None, *, labels=None):
        return self._call("jobs", lambda: list(self.jobs_there.values()))

    def delete(self, name, namespace, *, uid=None):
        def work():
            assert self.jobs_there.pop(name).uid == uid
            self.deleted.append(name)

        return self._call("delete", work)


class Memory:
    def __init__(self):
        self.job = None

    def result(self, uid):
        return None


def away(call, when="before", error=BackendUnavailableError):
    return call, when, error("the API", "it went away", "It is tried again")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(gangs, "_PAUSES", (0.01, 0.02))
    monkeypatch.setattr(gangs, "_NAP", 0.005)
    monkeypatch.setattr(gangs, "_OUTAGE", 0.3)


def found(cluster, memory, **more):
    more = {"still_wanted": lambda: None, "replaced": lambda job, seen: True} | more
    return Gangs(cluster, memory, OWNER, **more)


@pytest.mark.parametrize("call", ["jobs", "read", "create"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_outage_is_waited_out_and_doubles_nothing(quick, call, when):
    place = Place()
    place.troubles = [away(call), away(call), away(call, when)]
    attached = found(place, Memory()).attach(MANIFEST, "1.0")
    assert attached.identity.uid == place.jobs_there["job"].uid
    assert (place.made, place.troubles) == (1, [])


def test_an_outage_that_lasts_is_told(quick):
    place = Place()
    place.troubles = [away("create")] * 1000
    with pytest.raises(BackendUnavailableError):
        found(place, Memory()).attach(MANIFEST, "1.0")
    assert place.calls.count("create") > 5


def test_credentials_that_ran_out_are_told_at_once(quick):
    place = Place()
    place.troubles = [away("jobs", error=BackendUnauthorizedError)]
    with pytest.raises(BackendUnauthorizedError):
        found(place, Memory()).attach(MANIFEST, "1.0")
    assert place.calls == ["jobs"]


@pytest.mark.parametrize("call", ["read", "create", "delete"])
def test_rights_that_a_cluster_denies_for_a_moment_are_no_end_for_a_job_of_an_earlier_try(quick, call):
    place, memory = Place(), Memory()
    first = found(place, memory).attach(MANIFEST, "1.0").identity
    place.troubles = [away(call, error=JobForbiddenError)] * 3
    changed = {**MANIFEST, "spec": {**MANIFEST["spec"], "runPolicy": {"backoffLimit": 0, "suspend": True}}}
    again = found(place, memory, numbered=False).attach(changed, "1.0")
    assert (again.action, place.troubles) == (Action.REPLACE, [])
    assert place.jobs_there["job"].uid == again.identity.uid != first.uid


@pytest.mark.parametrize("call", ["jobs", "read", "create"])
def test_rights_that_a_cluster_denies_as_it_comes_back_are_no_end_for_a_first_try(quick, call):
    place = Place()
    place.troubles = [away("jobs"), *[away(call, error=JobForbiddenError)] * 3]
    attached = found(place, Memory()).attach(MANIFEST, "1.0")
    assert attached.identity.uid == place.jobs_there["job"].uid
    assert (place.made, place.troubles) == (1, [])


def test_a_right_that_was_taken_away_is_told_after_a_while(quick):
    place, memory = Place(), Memory()
    found(place, memory).attach(MANIFEST, "1.0")
    place.troubles = [away("read", error=JobForbiddenError)] * 1000
    with pytest.raises(JobForbiddenError):
        found(place, memory).attach(MANIFEST, "1.0")
    assert len(place.troubles) < 995


@pytest.mark.parametrize("call", ["jobs", "read", "create"])
def test_a_right_that_is_missing_from_the_first_is_told_at_once(quick, call):
    place = Place()
    place.troubles = [away(call, error=JobForbiddenError)]
    with pytest.raises(JobForbiddenError):
        found(place, Memory()).attach(MANIFEST, "1.0")
    assert place.calls[-1] == call


def test_what_admission_refuses_is_told_at_once(quick):
    place, memory = Place(), Memory()
    found(place, memory).attach(MANIFEST, "1.0")
    place.jobs_there.clear()
    place.last_words = lambda namespace, uid: []
    place.troubles = [away("create", error=JobRefusedError)]
    with pytest.raises(JobRefusedError):
        found(place, memory).attach(MANIFEST, "1.0")


def test_a_kill_is_noticed_during_an_outage(quick):
    place, asked = Place(), []

    def still_wanted():
        asked.append(place.calls[:])
        raise RuntimeError("killed")

    place.troubles = [away("jobs")] * 1000
    with pytest.raises(RuntimeError, match="killed"):
        found(place, Memory(), still_wanted=still_wanted).attach(MANIFEST, "1.0")
    assert asked == [["jobs"]]


@pytest.mark.parametrize("stored_before", ["with its uid", "without its uid", "by an earlier version"])
def test_a_job_that_became_another_kind_leaves_none_behind(quick, stored_before):
    old, new, memory, asked = Place(), Place(), Memory(), []
    first = found(old, memory, place="kubernetes").attach(MANIFEST, "1.0").identity
    values = first.to_dict()
    if stored_before == "without its uid":
        values.pop("uid")
    if stored_before == "by an earlier version":
        values.pop("backend")
    memory.job = Identity.from_dict(values)

    def elsewhere(job):
        asked.append((job.kind, job.backend))
        return old

    changed = {**MANIFEST, "kind": "TrainJob"}
    second = found(new, memory, place="kubernetes", elsewhere=elsewhere).attach(changed, "1.0")
    assert (old.jobs_there, old.deleted) == ({}, ["job"])
    assert (second.action, second.identity.kind, second.identity.gang) == (Action.CREATE, "TrainJob", 2)
    assert list(new.jobs_there) == [second.identity.name]
    assert asked == [("PyTorchJob", values.get("backend"))]
    # The next try has nothing to leave.
    again = found(new, memory, place="kubernetes", elsewhere=elsewhere).attach(changed, "1.0")
    assert (again.action, again.identity.uid, len(asked)) == (Action.ADOPT, second.identity.uid, 1)


def test_a_job_that_moved_to_another_backend_leaves_none_behind(quick):
    old, new, memory = Place(), Place(), Memory()
    found(old, memory, place="local").attach(MANIFEST, "1.0")
    moved = found(new, memory, place="kubernetes", elsewhere=lambda job: {"local": old}[job.backend])
    assert moved.attach(MANIFEST, "1.0").identity.backend == "kubernetes"
    assert (old.jobs_there, new.made) == ({}, 1)


def test_a_job_whose_connection_changed_between_tries_leaves_none_behind(quick):
    old, new, memory = Place(), Place(), Memory()
    found(old, memory, place="kubernetes:staging").attach(MANIFEST, "1.0")
    moved = found(
        new, memory, place="kubernetes:production", elsewhere=lambda job: {"kubernetes:staging": old}[job.backend]
    )
    moved.attach(MANIFEST, "1.0")
    assert (old.jobs_there, new.made) == ({}, 1)


@pytest.mark.parametrize("stored", [None, "kubernetes", "kubernetes:production"])
def test_what_an_earlier_version_stored_is_found_again(quick, stored):
    place, memory = Place(), Memory()
    first = found(place, memory, place=stored).attach(MANIFEST, "1.0").identity
    again = found(place, memory, place="kubernetes:production").attach(MANIFEST, "1.0")
    assert (again.action, again.identity.uid, place.made) == (Action.ADOPT, first.uid, 1)


@pytest.mark.parametrize(
    ("place", "backend", "connection", "home"),
    [
        (None, "kubernetes", "mine", None),
        ("kubernetes", "kubernetes", "mine", None),
        ("kubernetes:other", "kubernetes", "other", None),
        ("local:/a:b", "local", "mine", "/a:b"),
    ],
)
def test_the_hook_goes_to_the_place_that_was_stored(place, backend, connection, home):
    operator = PyTorchJobOperator(task_id="train", manifest=MANIFEST, kubernetes_conn_id="mine")
    hook = operator.hook("PyTorchJob", place)
    assert (hook.backend, hook.kubernetes_conn_id, hook.home) == (backend, connection, home)
    assert operator.place == "kubernetes:mine"


def test_the_place_names_the_home_of_the_environment(monkeypatch):
    monkeypatch.setenv("KUBEFLOW_TRAINING_HOME", "/from/env")
    places = [
        PyTorchJobOperator(task_id="t", manifest=MANIFEST, backend="local", home=home).place for home in (None, "/x")
    ]
    assert places == ["local:/from/env", "local:/x"]


@pytest.mark.parametrize("wrong", [{"log_limit": "lots"}, {"log_ranks": "rank0"}, {"on_finish": "never"}])
def test_a_misspelt_argument_is_refused_while_the_dag_is_parsed(wrong):
    with pytest.raises(ValueError, match=f"task t: .*{next(iter(wrong.values()))}"):
        PyTorchJobOperator(task_id="t", manifest=MANIFEST, **wrong)


def test_another_job_in_the_old_place_is_left_alone(quick):
    old, new, memory = Place(), Place(), Memory()
    found(old, memory, place="local").attach(MANIFEST, "1.0")
    job = old.jobs_there["job"].job
    notes = {**job["metadata"]["annotations"], gangs.TOKEN_ANNOTATION: "another"}
    old.jobs_there["job"] = Snapshot({**job, "metadata": {**job["metadata"], "uid": "another", "annotations": notes}})
    found(new, memory, place="kubernetes", elsewhere=lambda _: old).attach(MANIFEST, "1.0")
    assert (list(old.jobs_there), old.deleted) == (["job"], [])


class Removed(Place):
    """A cluster from which the kind's definition was removed, and its jobs with it."""

    def read(self, name, namespace):
        error = NotFoundError("404 page not found", "")
        raise no_such_place(f"job {namespace}/{name}", error, PYTORCH_JOB, namespace) from error


class Refusing(Place):
    def read(self, name, namespace):
        raise JobRefusedError("job", "the cluster refuses it (403)", "Give the account the rights this needs")


class Dead(Place):
    def read(self, name, namespace):
        raise BackendUnavailableError("job", "the cluster cannot be reached", "It is tried again")


def deleted_connection(_):
    raise AirflowNotFoundException("The conn_id `old` isn't defined")


def moved_from(memory, elsewhere):
    """The task's try after its connection was changed."""
    memory.job = replace(identity(MANIFEST, OWNER, "1.0"), uid="u", backend="kubernetes:old")
    return found(Place(), memory, place="kubernetes:new", elsewhere=elsewhere)


@pytest.mark.parametrize("generation", ["1.0", "2.0"])
def test_a_job_whose_kind_was_removed_is_gone(quick, generation, caplog):
    memory = Memory()
    attached = moved_from(memory, lambda _: Removed()).attach(MANIFEST, generation)
    assert (attached.action, attached.identity.gang) == (Action.CREATE, 2)
    assert "job default/job is gone with what held it" in caplog.text


UNREACHABLE = {
    "an outage": lambda _: Dead(),
    "a refusal": lambda _: Refusing(),
    "a deleted connection": deleted_connection,
}


@pytest.mark.parametrize("elsewhere", UNREACHABLE.values(), ids=UNREACHABLE)
def test_a_place_that_cannot_be_asked_is_left_after_a_clear_and_not_before(quick, elsewhere, caplog):
    memory = Memory()
    with pytest.raises(JobNotReached, match=r"may still run among the PyTorchJobs of kubernetes:old.* clear the task"):
        moved_from(memory, elsewhere).attach(MANIFEST, "1.0")
    assert memory.job.backend == "kubernetes:old"
    cleared = moved_from(memory, elsewhere)
    attached = cleared.attach(MANIFEST, "2.0")
    assert (attached.action, attached.identity.backend) == (Action.CREATE, "kubernetes:new")
    assert list(cleared.backend.jobs_there) == [attached.identity.name]
    assert "job default/job may still run among the PyTorchJobs of kubernetes:old" in caplog.text


def test_a_deferred_job_that_took_too_long_is_deleted_as_what_it_was(monkeypatch):
    """The trigger's event has no kind, and the task may be another kind by now, or elsewhere."""
    deleted = []

    class Cluster:
        def __init__(self, hook):
            self.hook = hook

        def delete(self, name, namespace, *, uid):
            deleted.append((self.hook.backend, self.hook.kind, name, uid))

    monkeypatch.setattr(PyTorchJobHook, "connect", lambda hook: Cluster(hook))
    job = replace(identity({**MANIFEST, "kind": "TrainJob"}, OWNER, "1.0"), uid="u", backend="kubernetes")
    event_job = {"name": "job", "namespace": "default", "uid": "u", "gang": 1}
    task = PyTorchJobOperator(task_id="train", manifest=MANIFEST, backend="local")
    context = {"task_state_store": {STATE_KEY: job.to_dict()}, "ti": SimpleNamespace(try_number=1)}
    with pytest.raises(AirflowTaskTimeout):
        task.resume(context, {"kind": "timeout", "job": event_job, "why": "it took too long"})
    assert deleted == [("kubernetes", "TrainJob", "job", "u")]
