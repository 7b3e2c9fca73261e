"""What the tab shows of a run: from Airflow's database, a local cluster, a bucket and an MLflow that are all real."""

from __future__ import annotations

import gzip
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from dropforge_airflow.assets import FINETUNE_DAG
from dropforge_airflow.pages import lines, shown
from dropforge_airflow.pages.course import POINTS, Course
from dropforge_airflow.pages.folder import Folder
from dropforge_airflow.pages.task import Seen
from fastapi.responses import JSONResponse
from kubeflow_training.jobs.local import LocalCluster
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.ownership import Owner

from dropforge import aside, tracking
from dropforge.run import RunSpec
from dropforge.store import S3Store
from tests.dropforge_airflow.pages.conftest import Server

RUN = "fam-0123456789ab"
OPENED = {"run": RUN, "family": "fam", "mlflow_run": "0" * 32, "backend": "local"}


@pytest.fixture
def name() -> str:
    return f"manual__{uuid.uuid4().hex}"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalCluster:
    monkeypatch.setenv("KUBEFLOW_TRAINING_HOME", str(tmp_path / "cluster"))
    return LocalCluster(tmp_path / "cluster")


def put_run(store: S3Store, run: str = RUN, **recipe: Any) -> None:
    spec = RunSpec(run, "fam", 1, f"{store.uri}/runs/{run}", store.uri, "m", "d" * 64, recipe, "c")
    store.put(f"runs/{run}/run.json", spec.to_json())


def job_of(cluster: LocalCluster, owner: Owner, name: str = "job") -> dict[str, Any]:
    """A job that waits for ever, because nobody supervises this cluster, and where it is."""
    job = pytorch_job(name=name, image="local", command=["sleep", "1"], cpus=0.1, memory_gb=0.1)
    job["metadata"] |= {"labels": owner.labels("0.0", 1), "annotations": owner.annotations("0.0", 1)}
    made = cluster.create(job)
    return {"name": name, "namespace": "default", "uid": made.uid, "kind": "PyTorchJob", "backend": "local", "gang": 1}


def test_a_run_that_has_nothing_yet(server: Server, name: str) -> None:
    server.run(name, {"plan": "running", "train": ""})
    page = server.tab(name).json()
    assert [stage["name"] for stage in page["stages"]] == ["plan", "train"]
    assert (page["run"], page["job"], page["training"], page["checkpoints"], page["unseen"]) == (
        "",
        None,
        None,
        None,
        [],
    )
    assert server.tab(name, "no-such-task").status_code == 404
    # The tab on the run chooses a task by itself.
    assert server.tab(name, None).json()["task"] == "train"


def test_a_run_that_failed_opens_at_the_task_that_did_and_says_why(server: Server, name: str) -> None:
    states = {"plan": "failed", "train": "upstream_failed", "evaluate": "upstream_failed", "close_run": "failed"}
    server.run(name, states, state="failed", failed="plan", failure="recipe key `base`: it is missing. Name it")
    page = server.tab(name, None).json()
    assert (page["task"], page["live"]) == ("plan", False)
    assert page["failures"] == [{"stage": "plan", "text": "recipe key `base`: it is missing. Name it"}]


def test_services_that_are_away_are_named_and_the_rest_is_shown(server: Server, name: str) -> None:
    server.run(name, opened=OPENED)
    answer = server.tab(name)
    page = answer.json()
    assert {item["what"] for item in page["unseen"]} == {"MLflow", "S3"}
    assert page["stages"]
    assert page["tries"][0]["state"] == "running"
    assert page["log"]["unseen"]["what"] == "S3"
    # No address and no key of ours.
    assert "127.0.0.1" not in answer.text
    assert "s3cr3t" not in answer.text


def test_a_job_is_shown_to_the_task_that_owns_it_alone(server: Server, cluster: LocalCluster, name: str) -> None:
    own = job_of(cluster, Owner(FINETUNE_DAG, name, "train"))
    server.run(name, opened=OPENED, job=own)
    page = server.tab(name).json()
    assert page["job"]["phase"] == "queued"
    assert page["job"]["moments"]
    # Another run, whose published values point to that job: somebody has changed them.
    other = server.run(f"{name}-other", opened=OPENED, job=own)
    page = server.tab(other).json()
    assert page["job"]["gone"] is True
    assert page["job"].get("moments") is None
    for bad in ({"name": "../job"}, {"namespace": ".."}, {"backend": "nonsense"}, {"kind": "Nonsense"}, {"uid": 7}):
        hostile = server.run(f"manual__{uuid.uuid4().hex}", opened=OPENED, job=own | bad)
        answer = server.tab(hostile)
        assert answer.status_code == 200, bad
        assert not (answer.json()["job"] or {}).get("replicas")


def test_a_published_run_that_is_none_is_not_followed(server: Server, bucket: S3Store, name: str) -> None:
    bucket.put("secret/run.json", b"{}")
    for number, run in enumerate(("../secret", "a/b", "", 7, {"x": 1}, "x" * 300)):
        server.run(f"{name}-{number}", opened={**OPENED, "run": run})
        page = server.tab(f"{name}-{number}").json()
        assert (page["run"], page["checkpoints"]) == ("", None)


def test_the_newest_complete_checkpoint_is_what_a_new_attempt_resumes(
    server: Server, bucket: S3Store, name: str
) -> None:
    put_run(bucket)
    for step in (5, 10, 20, 15):
        bucket.put(f"runs/{RUN}/checkpoints/step-{step}/rank-0.safetensors", b"x" * 1000)
    for step in (5, 10, 15):  # the manifest comes last: 20 is half-written
        manifest = json.dumps({"check": f"c{step}", "eval_loss": None}).encode()
        bucket.put(f"runs/{RUN}/checkpoints/step-{step}/manifest.json", manifest)
    # `dropforge resume --from step-10` has set the newer one aside.
    bucket.put(f"runs/{RUN}/{aside.KEY}", json.dumps({"from": 10, "aside": {"c15": 15}}).encode())
    bucket.put(f"runs/{RUN}/attempts/1.json", json.dumps({"attempt": 1, "resumed_from": None, "ranks": 2}).encode())
    bucket.put(f"runs/{RUN}/attempts/2.json", json.dumps({"attempt": 2, "resumed_from": 5, "ranks": 2}).encode())
    bucket.put(f"runs/{RUN}/attempts/3.json", b"no JSON")
    server.run(name, opened=OPENED)
    page = server.tab(name).json()
    assert page["checkpoints"]["resumes"] == 10
    rows = [(row["step"], row["complete"], row["aside"]) for row in page["checkpoints"]["rows"]]
    assert rows == [(20, False, False), (15, True, True), (10, True, False), (5, True, False)]
    assert [item["resumed_from"] for item in page["attempts"]] == [None, 5, None]
    assert {item["what"] for item in page["unseen"]} == {"MLflow"}


def test_candidate_and_champion_side_by_side(server: Server, bucket: S3Store, name: str) -> None:
    put_run(bucket)
    evaluation = {
        "candidate": {"eval/loss": 2.0, "eval/perplexity": 7.39, "gen/exact_match": 0.5, "odd": 1},
        "champion": {"eval/loss": 2.5, "eval/perplexity": 12.2},
        "champion_version": "3",
        "rows": 40,
    }
    check = {"name": "better than champion", "candidate": 2.0, "reference": 2.5, "passed": True, "reason": "by 20%"}
    bucket.put(f"runs/{RUN}/evaluation.json", json.dumps(evaluation).encode())
    bucket.put(f"runs/{RUN}/verdict.json", json.dumps({"promote": True, "reason": "ok", "checks": [check]}).encode())
    server.run(name, opened=OPENED)
    found = server.tab(name).json()["champion"]
    assert (found["version"], found["promote"], found["reason"], found["rows"]) == ("3", True, "ok", 40)
    assert found["checks"] == [check]
    assert {item["name"]: (item["candidate"], item["champion"], item["better"]) for item in found["figures"]} == {
        "eval/loss": (2.0, 2.5, "lower"),
        "eval/perplexity": (7.39, 12.2, "lower"),
        "gen/exact_match": (0.5, None, "higher"),
    }


def test_mlflow_tells_the_course_of_this_run_and_of_no_other(
    server: Server, mlflow_server: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.entities import Metric

    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    mlflow = tracking.client(mlflow_server)
    experiment = mlflow.create_experiment(f"fam-{uuid.uuid4().hex[:6]}")
    run = mlflow.create_run(experiment, tags={tracking.TAG_DAG_RUN: name, tracking.TAG_STEPS: "1000"}).info.run_id
    points = [Metric("train/loss", 3.0 - step / 1000, 1, step) for step in range(1, 1000)]
    mlflow.log_batch(run, metrics=[*points[:500], Metric("train/tokens_per_second", float("nan"), 1, 1)])
    mlflow.log_batch(run, metrics=points[500:])
    server.run(name, opened={**OPENED, "mlflow_run": run})
    training = server.tab(name).json()["training"]
    (loss,) = [curve["points"] for curve in training["curves"] if curve["name"] == "train/loss"]
    assert 2 < len(loss) <= POINTS + 2
    assert (loss[0], loss[-1]) == ([1, 2.999], [999, pytest.approx(2.001)])
    assert (training["step"], training["steps"]) == (999, 1000)
    assert training["tokens_per_second"] == "nan"
    assert training["url"] == f"{mlflow_server}/#/experiments/{experiment}/runs/{run}"

    other = server.run(f"{name}-other", opened={**OPENED, "mlflow_run": run})
    page = server.tab(other).json()
    assert page["training"] is None
    assert "belongs to another run" in next(item["why"] for item in page["unseen"] if item["what"] == "MLflow")


def test_the_kept_log_is_shown_where_no_pod_is_left(server: Server, bucket: S3Store, name: str) -> None:
    put_run(bucket)
    text = "".join(
        f"2026-11-24T10:00:0{n % 10}.000Z [rank {n % 2}] line {n} <b>&\x1b[31mred\x1b[0m\n" for n in range(80)
    )
    bucket.put(f"runs/{RUN}/logs/p-master-0/20261124T100000.000000Z-000001.log.gz", gzip.compress(b"old\n"))
    bucket.put(f"runs/{RUN}/logs/p-master-0/20261124T100000.000000Z-000002.log.gz", gzip.compress(text.encode()))
    bucket.put(f"runs/{RUN}/logs/p-worker-0/20261124T100000.000000Z-000001.log.gz", b"no gzip")
    bomb = gzip.compress(b"a" * (64 << 20))
    bucket.put(f"runs/{RUN}/logs/p-worker-1/20261124T100000.000000Z-000001.log.gz", bomb)
    server.run(name, opened=OPENED)
    answer = server.tab(name)
    log = answer.json()["log"]
    assert log["source"] == "kept"
    ranks = {(item["pod"], item["rank"]): item["lines"] for item in log["ranks"]}
    assert set(ranks) == {("p-master-0", 0), ("p-master-0", 1), ("p-worker-1", None)}
    assert ranks["p-master-0", 0][-1] == "line 78 <b>&red"
    assert len(ranks["p-master-0", 1]) == lines.EACH
    assert len(ranks["p-worker-1", None][0]) <= lines.WIDTH
    assert len(answer.content) < 100_000


def test_what_pods_write_makes_no_endless_and_no_broken_answer() -> None:
    seen = Seen("d", "r", "success", "train", -1, (), ())
    long, half = "v" * 1_000_000, "\ud800"
    attempts = tuple({"attempt": number, "host": long, "ranks": {"a": [long]}, "at": half} for number in range(20))
    measured = {"candidate": {"eval/loss": 1.0, f"eval/{half}": 1}, "champion": {"problem": half}, "rows": [long]}
    checks = [{"name": half, "candidate": long, "reference": {"a": [1]}, "passed": True}]
    found = Folder(
        "s3://b/runs/x",
        attempts=attempts,
        evaluation={**measured, "champion_version": long},
        verdict={"checks": checks},
    )
    page = shown.task_page(seen, None, None, found, "http://127.0.0.1")
    assert len(JSONResponse(page).body) < 20_000
    assert [item["attempt"] for item in page["attempts"]] == list(range(19, -1, -1))


@pytest.mark.parametrize("told", ["\u00b2", "9" * 40, "x", ""])
def test_a_tag_that_is_no_number_breaks_no_tab(told: str) -> None:
    seen = Seen("d", "r", "success", "train", -1, (), ())
    course = Course("1", "1", "FINISHED", {tracking.TAG_STEPS: told}, {"train.max_steps": "12"})
    assert shown.task_page(seen, None, course, None, "http://127.0.0.1")["training"]["steps"] == 12


def test_lines_find_their_ranks() -> None:
    found = lines.by_rank(
        {"a": ["10:00:00Z [rank 3] x", "plain", '[rank 3] @progress {"step": 1}', "[rank 99999999] y", "[pod a] z"]}
    )
    assert [(item.rank, item.lines) for item in found] == [(3, ("x",)), (None, ("plain", "[rank 99999999] y", "z"))]
    many = lines.by_rank({f"p{n}": [f"[rank {n}] {'w' * 10_000}\u202e"] for n in range(500)})
    assert len(many) == lines.MOST_RANKS
    assert max(len(item.lines[0]) for item in many) == lines.WIDTH
