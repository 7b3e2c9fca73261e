"""Which live jobs are reaped: only those of this Airflow whose tasks are over, and none when Airflow is silent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kubeflow_training import reap
from kubeflow_training.asking.states import FromRest
from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.errors import BackendUnavailableError, JobForbiddenError, JobRefusedError
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.ownership import Owner
from kubeflow_training.jobs.observation import observe
from kubeflow_training.jobs.reaping.orphans import GONE, INSTANCE_KEY, Task, marked
from kubeflow_training.jobs.reaping.reaper import AirflowSilentError, JobReaper

OWNER = Owner("dag", "manual__2026-01-01T00:00:00+00:00", "train", -1)
WAIT = "import time; time.sleep(300)"
GRACE = timedelta(seconds=60)


def manifest(name="job", owner=OWNER, instance="me", script=WAIT):
    """A job as the operator creates it."""
    made = pytorch_job(
        name=name, image="none", command=["python", "-c", script], cpus=1, memory_gb=0.2, grace_seconds=1
    )
    made["metadata"]["labels"] |= owner.labels("1.0", 1)
    made["metadata"]["annotations"] |= owner.annotations("1.0", 1)
    return marked(made, instance)


class Cluster:
    """A backend of a few jobs that are only looked at and deleted."""

    def __init__(self, *manifests, error=None):
        self.held = [self._snapshot(item) for item in manifests]
        self.deleted, self.said, self.error = [], [], error

    @staticmethod
    def _snapshot(item):
        return Snapshot({**item, "metadata": {**item["metadata"], "uid": f"uid-{item['metadata']['name']}"}})

    def jobs(self, namespace=None, *, labels=None):
        if self.error:
            raise self.error
        wanted = (labels or {}).items()
        return [item for item in self.held if wanted <= item.job["metadata"]["labels"].items()]

    def delete(self, name, namespace, *, uid=None, grace_seconds=None):
        assert uid == f"uid-{name}"
        self.deleted.append(name)
        return True

    def say(self, job, reason, message):
        self.said.append(message)


class Airflow:
    """Answers from a dictionary."""

    def __init__(self, tasks=None, name="me"):
        self.tasks, self.name = tasks or {}, name

    def instance(self):
        return self.name

    def task(self, owner):
        found = self.tasks.get(owner, GONE)
        if isinstance(found, Exception):
            raise found
        return found


def reaper(cluster, tasks=None, **more):
    return JobReaper(
        {"cluster": lambda: cluster}, more.pop("airflow", None) or Airflow(tasks), **({"grace": GRACE} | more)
    )


@pytest.mark.parametrize("state", ["success", "failed", "skipped", "removed", "upstream_failed", "gone"])
def test_a_live_job_whose_task_is_over_goes_after_the_grace(state, caplog):
    cluster = Cluster(manifest())
    one = reaper(cluster, {} if state == "gone" else {OWNER: Task(state)})
    first = one.visit(now=1000)
    assert ([item["job"] for item in first.waiting], cluster.deleted) == (["default/job"], [])
    assert one.visit(now=1059).deleted == []
    summary = one.visit(now=1060)
    assert cluster.deleted == ["job"]
    assert summary.deleted[0]["owner"] == "dag/manual__2026-01-01T00:00:00+00:00/train/-1"
    assert len(cluster.said) == 1
    assert "no task waits for it" in cluster.said[0]
    assert "job default/job (uid uid-job) is deleted because" in caplog.text
    assert json.loads(json.dumps(summary.to_dict())) == summary.to_dict()


@pytest.mark.parametrize(
    "state",
    [None, "scheduled", "queued", "running", "deferred", "restarting", "up_for_retry", "up_for_reschedule", "new one"],
)
def test_a_job_whose_task_goes_on_is_never_touched(state):
    cluster = Cluster(manifest())
    one = reaper(cluster, {OWNER: Task(state, ended=0.0)}, grace=timedelta(0))
    assert one.visit().kept == one.visit().kept == 1
    assert cluster.deleted == []


def test_a_task_that_is_cleared_during_the_grace_keeps_its_job():
    cluster, airflow = Cluster(manifest()), Airflow({OWNER: Task("failed")})
    one = reaper(cluster, airflow=airflow)
    one.visit(now=1000)
    airflow.tasks = {OWNER: Task("queued")}
    assert one.visit(now=1100).kept == 1
    # Over again: the grace begins anew.
    airflow.tasks = {OWNER: Task("failed")}
    assert len(one.visit(now=1200).waiting) == 1
    assert cluster.deleted == []


def test_where_airflow_tells_the_end_no_second_look_is_needed():
    cluster = Cluster(manifest())
    assert reaper(cluster, {OWNER: Task("failed", ended=1000.0)}).visit(now=1059).waiting
    assert cluster.deleted == []
    assert reaper(cluster, {OWNER: Task("failed", ended=1000.0)}).visit(now=1060).deleted
    assert cluster.deleted == ["job"]


def test_jobs_of_others_are_never_touched():
    bare = pytorch_job(name="bare", image="i", command=["c"])
    elsewhere = manifest("elsewhere", instance="another airflow")
    unmarked = marked(manifest("unmarked", instance=None), None)
    no_label = manifest("no-label")
    del no_label["metadata"]["labels"][INSTANCE_KEY]
    # Somebody took the labels of one job and the annotations of another.
    forged = manifest("forged")
    forged["metadata"]["annotations"] |= Owner("other", "run", "task").annotations("1.0", 1)
    half = manifest("half")
    del half["metadata"]["annotations"]["kubeflow-training/run"]
    cluster = Cluster(bare, elsewhere, unmarked, no_label, forged, half)
    summary = reaper(cluster, grace=timedelta(0)).visit()
    assert (cluster.deleted, summary.unclear, summary.deleted) == ([], 2, [])


@pytest.mark.parametrize(
    "status",
    [
        {"conditions": [{"type": "Succeeded", "status": "True"}], "completionTime": "2026-01-01T00:00:00Z"},
        {"conditions": [{"type": "Failed", "status": "True", "message": "x"}]},
        None,
    ],
)
def test_ended_jobs_stay_as_long_as_their_owner_wants(status):
    ended = manifest()
    if status is None:
        ended["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"  # on its way out already
    else:
        ended["status"] = status
    cluster = Cluster(ended)
    assert reaper(cluster, grace=timedelta(0)).visit().deleted == []


def test_when_airflow_is_silent_about_one_task_no_job_goes():
    silent = Owner("dag", "run", "silent")
    cluster = Cluster(manifest("a"), manifest("b", owner=silent))
    with pytest.raises(AirflowSilentError):
        reaper(cluster, {silent: AirflowSilentError("away")}, grace=timedelta(0)).visit()
    assert cluster.deleted == []


def test_an_airflow_without_a_name_has_no_jobs():
    cluster = Cluster(manifest(instance="x"))
    assert reaper(cluster, airflow=Airflow(name=None), grace=timedelta(0)).visit().deleted == []
    assert cluster.deleted == []


def test_a_dry_run_deletes_nothing_and_says_all():
    cluster = Cluster(manifest())
    summary = reaper(cluster, grace=timedelta(0), dry_run=True).visit()
    assert ([item["job"] for item in summary.deleted], cluster.deleted, cluster.said) == (["default/job"], [], [])


def test_one_cluster_that_is_away_does_not_hide_the_others():
    good = Cluster(manifest())
    away = Cluster(error=BackendUnavailableError("cluster", "it is away", "It is tried again"))
    refused = Cluster(error=JobRefusedError("the list", "forbidden", "Give rights"))
    one = JobReaper(
        {"away": lambda: away, "refused": lambda: refused, "good": lambda: good}, Airflow(), grace=timedelta(0)
    )
    summary = one.visit()
    assert (good.deleted, len(summary.problems)) == (["job"], 2)


def test_a_kind_that_the_cluster_does_not_have_is_no_problem_where_it_is_only_looked_at_too():
    refused = JobForbiddenError("the list of jobs", "403", "Give the account the rights this needs")
    backends = {"other": lambda: Cluster(error=refused), "mine": lambda: Cluster()}
    assert len(JobReaper(backends, Airflow()).visit().problems) == 1
    assert JobReaper(backends, Airflow(), optional=["other"]).visit().problems == []
    assert len(JobReaper(backends, Airflow(), optional=["other", "mine"]).visit().problems) == 0
    only = {"other": backends["other"]}
    assert "none of other" in JobReaper(only, Airflow(), optional=["other"]).visit().problems[0]
    away = {"other": lambda: Cluster(error=BackendUnavailableError("it", "is away", "Wait"))}
    assert len(JobReaper(away, Airflow(), optional=["other"]).visit().problems) == 1


def test_an_event_that_may_not_be_written_stops_nothing():
    cluster = Cluster(manifest())

    def refuse(job, reason, message):
        raise JobRefusedError("event", "forbidden", "Give rights")

    cluster.say = refuse
    assert reaper(cluster, grace=timedelta(0)).visit().deleted
    assert cluster.deleted == ["job"]


def test_every_mapped_task_has_its_own_job():
    mapped = [Owner("dag", "run", "train", n) for n in range(3)]
    cluster = Cluster(*[manifest(f"job-{n}", owner=owner) for n, owner in enumerate(mapped)])
    tasks = {mapped[0]: Task("running"), mapped[1]: Task("failed", ended=0.0), mapped[2]: Task("deferred")}
    reaper(cluster, tasks).visit()
    assert cluster.deleted == ["job-1"]


# Over the REST API


class Api(BaseHTTPRequestHandler):
    """What Airflow's API server answers, and what stands in its place when it is away."""

    answers: dict[str, tuple[int, object]]
    asked: list[tuple[str, str | None]]

    def do_GET(self):
        self.asked.append((self.path, self.headers.get("Authorization")))
        if self.headers.get("Authorization") != "Bearer good":
            return self._send(401, {"detail": "Not authenticated"})
        return self._send(*self.answers.get(self.path, (404, {"detail": "Not Found"})))

    def do_POST(self):
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ok = given == {"username": "u", "password": "p"}
        self._send(201 if ok else 401, {"access_token": "good"} if ok else {"detail": "no"})

    def _send(self, status, content):
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def api(monkeypatch) -> Iterator[type[Api]]:
    handler = type("OneApi", (Api,), {"answers": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AIRFLOW_API_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AIRFLOW_API_USERNAME", "u")
    monkeypatch.setenv("AIRFLOW_API_PASSWORD", "p")
    monkeypatch.delenv("AIRFLOW_API_TOKEN", raising=False)
    monkeypatch.delenv("KUBEFLOW_TRAINING_INSTANCE", raising=False)
    yield handler
    server.shutdown()
    server.server_close()


PATH = "/api/v2/dags/dag/dagRuns/manual__2026-01-01T00%3A00%3A00%2B00%3A00/taskInstances/train"
INSTANCE = "/api/v2/variables/kubeflow_training_instance"


def task(**more):
    return 200, {"dag_run_id": OWNER.run_id, "task_id": "train", "state": "failed", "end_date": None, **more}


def test_the_rest_api_tells_states_ends_and_what_is_gone(api):
    api.answers = {
        INSTANCE: (200, {"key": "k", "value": "me"}),
        PATH: task(end_date="2026-01-01T00:00:10+00:00"),
        f"{PATH}/3": task(state=None),
        PATH.replace("train", "gone"): (404, {"detail": "The Task Instance with dag_id: `dag` ... was not found"}),
    }
    states = FromRest.from_env()
    assert states.instance() == "me"
    assert states.task(OWNER) == Task("failed", ended=1767225610.0)
    assert states.task(Owner(OWNER.dag_id, OWNER.run_id, "train", 3)) == Task(None)
    assert states.task(Owner(OWNER.dag_id, OWNER.run_id, "gone")) == GONE
    assert [auth for _, auth in api.asked].count(None) == 1  # one login for all


@pytest.mark.parametrize(
    "answer",
    [
        (404, {"detail": "Not Found"}),  # another server, or a proxy's path
        (404, {"detail": "Task instance is mapped, add the map_index value to the URL"}),
        (403, {"detail": "Forbidden"}),
        (500, {"detail": "The database is away"}),
        (502, "<html>Bad gateway</html>"),
        (200, "<html>Please sign in</html>"),
        (200, {"hello": "world"}),
        (200, []),
        (200, "[" * 100_000),
    ],
)
def test_what_is_no_answer_of_airflow_is_silence(api, answer):
    api.answers = {PATH: answer}
    with pytest.raises(AirflowSilentError):
        FromRest.from_env().task(OWNER)


def test_the_command_needs_its_credentials_from_the_environment(monkeypatch, capsys):
    for name in ("URL", "TOKEN", "USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"AIRFLOW_API_{name}", raising=False)
    assert reap.main(["--backend", "local"]) == 2
    assert "AIRFLOW_API_URL" in capsys.readouterr().err


def test_the_command_reaps_a_real_job_of_the_local_cluster(api, cluster, capsys):
    other = Owner("dag", "run", "other")
    cluster.client.create(manifest("mine", instance="me"))
    cluster.client.create(manifest("running", owner=other))
    cluster.client.create(manifest("theirs", instance="another"))
    cluster.client.create(pytorch_job(name="bare", image="i", command=["python", "-c", WAIT], cpus=1, memory_gb=0.2))
    api.answers = {
        INSTANCE: (200, {"key": "k", "value": "me"}),
        PATH: task(),
        "/api/v2/dags/dag/dagRuns/run/taskInstances/other": task(dag_run_id="run", task_id="other", state="running"),
    }
    call = ["--backend", "local", "--home", str(cluster.home), "--grace", "0.5"]
    assert reap.main([*call, "--dry-run"]) == 0
    assert len(json.loads(capsys.readouterr().out)["waiting"]) == 1
    assert reap.main(call) == 0
    said = json.loads(capsys.readouterr().out)
    assert [item["job"] for item in said["deleted"]] == ["default/mine"]
    cluster.until(lambda: cluster.read("mine") is None)
    assert {item.job["metadata"]["name"] for item in cluster.client.jobs()} == {"running", "theirs", "bare"}
    # Airflow is away: nothing happens.
    api.answers[PATH] = (503, {"detail": "away"})
    cluster.client.create(manifest("mine", instance="me"))
    assert reap.main(call) == 2
    assert cluster.read("mine") is not None


def test_a_deadline_that_nobody_enforces_keeps_no_orphan_alive():
    late = manifest()
    late["spec"]["runPolicy"]["activeDeadlineSeconds"] = 60
    late["status"] = {"startTime": "2026-01-01T00:00:00Z"}
    assert observe(late).ended  # for its task; its pods run on
    assert len(reaper(Cluster(late), grace=timedelta(0)).visit().deleted) == 1
